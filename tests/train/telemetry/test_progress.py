"""Progress of evaluations and imitation."""

import io

from rich.console import Console

from agentrl_train.telemetry.progress import Counter


def counted(clock: list[float], *, terminal: bool = False) -> tuple[Counter, io.StringIO]:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=200)
    return Counter("episodes", console=console, clock=lambda: clock[0]), file


def test_time_left_does_not_count_what_was_done_before() -> None:
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


def test_lines_are_seldom_and_the_last_is_always_printed() -> None:
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
