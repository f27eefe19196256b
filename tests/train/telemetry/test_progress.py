"""Progress reports of evaluations and imitation."""

import io

from rich.console import Console

from agentrl_train.telemetry.progress import Counter, Progress, Tally


def counted(clock: list[float], *, terminal: bool = False) -> tuple[Counter, io.StringIO]:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=200)
    return Counter("episodes", console=console, clock=lambda: clock[0]), file


def test_time_left_excludes_earlier_work() -> None:
    clock = [0.0]
    counter, file = counted(clock)
    counter.show(90, 100)
    clock[0] = 60.0
    counter.show(92, 100, "success 50.0%")
    counter.close()
    assert file.getvalue().splitlines() == [
        "90/100 episodes, - left",
        "92/100 episodes, success 50.0%, 4:00 left",
    ]


def test_lines_are_infrequent_and_the_last_is_always_printed() -> None:
    clock = [0.0]
    counter, file = counted(clock)
    for second in range(41):
        clock[0] = 0.5 * second
        counter.show(second, 40)
    counter.close()
    assert [line.split("/")[0] for line in file.getvalue().splitlines()] == ["0", "20", "40"]


def test_terminal_shows_a_bar() -> None:
    clock = [0.0]
    counter, file = counted(clock, terminal=True)
    counter.show(0, 4)
    clock[0] = 2.0
    counter.show(1, 4, "success 100.0%")
    counter.close()
    assert "\u2501" in file.getvalue()
    assert "1/4 episodes, success 100.0%, 0:06 left" in file.getvalue()


def test_time_left_of_a_run_excludes_the_evaluation_before_it() -> None:
    file = io.StringIO()
    progress = Progress(total_steps=25, console=Console(file=file, width=200))
    progress.step(1, elapsed_s=730.0, metrics={"step_seconds": 30.0}, tasks={})
    assert file.getvalue().rstrip().endswith("left 12:00")


def test_long_evaluation_of_a_run_reports_its_progress() -> None:
    clock, file = [0.0], io.StringIO()
    console = Console(file=file, width=200)
    progress = Progress(total_steps=10, console=console, clock=lambda: clock[0])
    for second in range(31):
        clock[0] = float(second)
        tally = Tally(total=70, done=2 * second, sampled=second, successes=second // 2, failed=second // 10)
        progress.evaluating("before", tally)
    progress.evaluation("before", {"shop": 0.5})
    assert file.getvalue().splitlines() == [
        "21/70 held-out episodes, before, success 50.0%, 1 failed, 0:23 left",
        "42/70 held-out episodes, before, success 50.0%, 2 failed, 0:13 left",
        "63/70 held-out episodes, before, success 50.0%, 3 failed, 0:03 left",
        "held-out success, before: shop 50.0%",
    ]


def test_terminal_shows_an_evaluation_below_the_steps() -> None:
    file = io.StringIO()
    progress = Progress(total_steps=10, console=Console(file=file, force_terminal=True, width=200))
    progress.evaluating("before", Tally(total=60, done=6, sampled=4, successes=1))
    progress.close()
    assert "6/60 held-out episodes, before, success 25.0%" in file.getvalue()
