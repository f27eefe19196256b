import json
import math
import random
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from agentrl_env.types import Message, TaskSample, ToolCall
from agentrl_train.errors import RunFolderError
from agentrl_train.report.charts import (
    Series,
    line_chart,
    moving_average,
    nice_ticks,
    number_label,
    percent_label,
    thin,
)
from agentrl_train.report.page import write_report
from agentrl_train.telemetry.metrics import MetricsLog
from agentrl_train.types import Completion, EpisodeEnd, Trajectory, TrajectoryGroup, Turn

TASKS = ("household", "shop", "sql")
QUESTIONS = {
    "household": "You are in a kitchen. Put the blue mug on the shelf. Places: table, sink, shelf, drawer.",
    "shop": "Buy a green lamp for at most 30 coins. Use search, view and buy.",
    "sql": "How many orders did the customer Ada Byron place in 2021? Answer with answer().",
}
CALLS = {
    "household": [
        ("look", {"place": "table"}, "On the table: a plate, a blue mug."),
        ("take", {"item": "blue mug"}, "You take the blue mug."),
        ("put", {"place": "shelf"}, "You put the blue mug on the shelf. Done."),
    ],
    "shop": [
        ("search", {"text": "green lamp"}, "1: lamp, green, 28\n2: lamp, red, 12\n3: lamp, green, 45"),
        ("view", {"item": 1}, "A green lamp of glass. 28 coins. In stock."),
        ("buy", {"item": 1}, "Bought for 28 coins."),
    ],
    "sql": [
        ("tables", {}, "customers(id, name)\norders(id, customer_id, placed_on)"),
        (
            "query",
            {
                "sql": "SELECT count(*) FROM orders o JOIN customers c ON c.id = o.customer_id "
                "WHERE c.name = 'Ada Byron' AND o.placed_on LIKE '2021-%'"
            },
            "count(*)\n17",
        ),
        ("answer", {"value": 17}, "Correct."),
    ],
}


def make_trajectory(
    task: str, index: int, *, version: int, success: bool, split: str = "train"
) -> Trajectory:
    turns = []
    for number, (name, arguments, result) in enumerate(CALLS[task]):
        last = number == len(CALLS[task]) - 1
        broken = not success and number == 1
        turns.append(
            Turn(
                prompt_ids=(1, 2, 3),
                completion=Completion(
                    token_ids=tuple(range(24 + 5 * number)),
                    logprobs=(-0.2,) * (24 + 5 * number),
                    versions=(version,) * (20 + number) + (version + 1,) * (4 + 4 * number),
                    finish_reason="stop",
                    policy="stale" if number == 1 and index % 3 == 0 else "current",
                ),
                message=Message.assistant(
                    "I look around first." if number == 0 else None,
                    ToolCall.of("tkae" if broken else name, **arguments),
                ),
                reply=(
                    Message(
                        role="tool",
                        tool_call_id="call_0",
                        content="There is no tool 'tkae'. Tools: look, take, put." if broken else result,
                    ),
                ),
                reward=1.0 if last and success else 0.0,
                invalid_calls=int(broken),
            )
        )
    return Trajectory(
        sample=TaskSample(task=task, split=split, index=index, seed=4711 + index),
        opening=(
            Message(role="system", content="You act by calling tools. One call a turn."),
            Message(role="user", content=QUESTIONS[task]),
        ),
        turns=tuple(turns),
        end=EpisodeEnd.TERMINATED if success else EpisodeEnd.TRUNCATED_TURNS,
        reward=1.0 if success else 0.0,
        success=success,
        metrics={"success": float(success)},
        seconds=1.25,
    )


def evaluation(
    chance: random.Random, shares: dict[str, float], *, version: int
) -> dict[str, list[Trajectory]]:
    return {
        task: [
            make_trajectory(task, i, version=version, success=chance.random() < share, split="test")
            for i in range(200)
        ]
        for task, share in shares.items()
    }


def make_run(folder: Path, *, steps: int = 60, finished: bool = True) -> Path:
    """Write a run folder with made-up numbers."""
    chance = random.Random(7)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(
        '[run]\nname = "quickstart"\nsteps = 60\n\n[train]\nlearning_rate = 0.0005\n'
    )
    log = MetricsLog(folder, trajectories=6)
    before = {"household": 0.35, "shop": 0.28, "sql": 0.41}
    log.log_evaluation("before", policy_version=0, results=evaluation(chance, before, version=0))
    for step in range(1, steps + 1):
        gone = step / 60
        tasks = {
            task: {
                "success": min(
                    1.0, max(0.0, before[task] + 0.48 * (1 - math.exp(-3 * gone)) + chance.gauss(0, 0.07))
                ),
                "reward": before[task] + 0.45 * gone + chance.gauss(0, 0.05),
                "turns": 6.2 - 2 * gone + chance.gauss(0, 0.2),
                "tokens": 20_000 / 3,
                "token_share": 1 / 3,
                "valid_calls": min(1.0, 0.96 + 0.03 * gone + chance.gauss(0, 0.008)),
            }
            for task in TASKS
        }
        group = TrajectoryGroup(
            group_id=step,
            task=TASKS[step % 3],
            trajectories=tuple(
                make_trajectory(TASKS[step % 3], step, version=step, success=bool(i)) for i in range(2)
            ),
            admitted_version=step - 1,
        )
        log.log_step(
            step,
            policy_version=step,
            elapsed_s=step * 6.8,
            metrics={
                "loss": chance.gauss(0, 0.02),
                "loss_tokens": 20_000.0,
                "staleness_mean": 1.2 + chance.gauss(0, 0.1),
                "staleness_max": float(chance.choice([1, 2, 2])),
                "trained_tokens_per_s": 5200 + chance.gauss(0, 300),
                "sampled_tokens_per_s": 5600 + chance.gauss(0, 400),
                "trained_tokens_per_s_ceiling": 6500.0,
                "sampled_tokens": 22_000.0,
                "prefilled_tokens": 30_000.0,
                "reprefilled_tokens": 3_000.0,
                "discarded_tokens": 550.0,
                "tokens_of_age_0": 4_000.0,
                "tokens_of_age_1": 15_000.0,
                "tokens_of_age_10": 1_000.0,
                "logprob_drift": 2e-6,
                "trainer_idle": 0.12 + 0.03 * chance.random(),
                "engine_idle": 0.05 + 0.02 * chance.random(),
                "entropy": 0.6 * math.exp(-gone) + chance.gauss(0, 0.01),
                "kl": 4e-4 + abs(chance.gauss(0, 2e-4)),
                "clip_fraction": 0.008 + abs(chance.gauss(0, 0.003)),
                "grad_norm": 0.4 + abs(chance.gauss(0, 0.15)),
                "learning_rate": 5e-4 * min(step / 5, 1.0) * (1 - 0.9 * gone),
            },
            tasks=tasks,
            groups=[group],
        )
    if finished:
        after = {"household": 0.81, "shop": 0.77, "sql": 0.86}
        log.log_evaluation(
            "after",
            policy_version=steps,
            results=evaluation(chance, after, version=steps),
            greedy=evaluation(chance, {"shop": 1.0}, version=steps),
        )
        log.write_summary(seconds=412.3, trained_tokens=1_234_567, policy_version=steps, seed=0)
    log.close()
    return folder


class Checker(HTMLParser):
    """Collects everything that a browser would fetch or run, and checks that every tag is closed."""

    VOID = ("meta", "line", "circle", "polyline", "br")

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset")]
        if tag in ("script", "link", "iframe", "img"):
            self.fetched.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        return

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read_page(folder: Path) -> tuple[str, Checker]:
    page = write_report(folder).read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    return page, checker


def test_page_is_self_contained(tmp_path: Path):
    page, checker = read_page(make_run(tmp_path / "quickstart", steps=12))
    assert checker.fetched == []
    assert "url(" not in page
    assert "@import" not in page
    assert "default-src 'none'" in page
    assert "prefers-color-scheme: dark" in page


def test_report_of_a_finished_run_shows_results_curves_and_examples(tmp_path: Path):
    page, checker = read_page(make_run(tmp_path / "quickstart", steps=12))
    text = " ".join(checker.text)
    for words in (
        "finished",
        "Held-out success",
        "points",
        "mean",
        "Staleness",
        "Entropy",
        "Gradient norm",
        "Age of tokens",
        "The same problem, before and after",
        "Training episodes",
        "config.toml",
        "stale policy",
        "1 invalid call",
        "reward +1",
        "out of turns",
        "greedy 100.0%",
    ):
        assert words in text, words
    assert page.count('<svg class="chart"') == 17
    assert page.count('<svg class="interval"') == 1 + len(TASKS)


def test_efficiency_shows_ceilings_and_tokens_by_use_age_and_task(tmp_path: Path):
    page = write_report(make_run(tmp_path / "run", steps=4)).read_text()
    rows = re.findall(r"<tr><td>([^<]*)(?:<div[^>]*>[^<]*</div>)?</td><td>([^<]*)</td><td>([^<]*)</td>", page)
    table = {title: (value, share) for title, value, share in rows}
    value, share = table["trained tokens/s"]
    assert re.fullmatch(r"5\.\d+k of 6\.5k", value)
    assert 75 < float(share.removesuffix("%")) < 85
    assert "sampled tokens/s" not in table  # its ceiling is unknown
    assert table["sampled"] == ("88k", "")
    assert table["trained on"] == ("80k", "90.9%")
    assert table["discarded: failed episodes, dropped groups, aborted completions"] == ("2.2k", "2.5%")
    assert table["prefilled again: new weights or an evicted cache row"] == ("12k", "10%")
    ages = [(title, *table[title]) for title in table if title.endswith((" step", " steps"))]
    assert ages == [("0 steps", "16k", "20%"), ("1 step", "60k", "75%"), ("10 steps", "4k", "5%")]
    assert [table[task] for task in TASKS] == [("26.7k", "33.3%")] * 3


def test_before_column_matches_summary(tmp_path: Path):
    folder = make_run(tmp_path / "run", steps=3)
    before = json.loads((folder / "summary.json").read_text())["tasks"]["shop"]["before"]
    assert f"{100 * before:.1f}%" in write_report(folder).read_text()


def test_crashed_run_has_report(tmp_path: Path):
    folder = make_run(tmp_path / "run", steps=5, finished=False)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "policy_ver')
    page, checker = read_page(folder)
    assert "not finished" in page
    assert "5 steps" in " ".join(checker.text)


@pytest.mark.parametrize(
    "missing", ["metrics.jsonl", "evaluations.jsonl", "trajectories", "config.toml", "summary.json"]
)
def test_any_part_can_be_missing(tmp_path: Path, missing: str):
    folder = make_run(tmp_path / "run", steps=3)
    path = folder / missing
    for file in [*path.glob("*")] if path.is_dir() else [path]:
        file.unlink()
    read_page(folder)


def test_run_without_a_step_has_report(tmp_path: Path):
    (tmp_path / "config.toml").touch()
    _, checker = read_page(tmp_path)
    assert "no step was trained" in " ".join(checker.text)


def test_missing_folder_is_reported(tmp_path: Path):
    with pytest.raises(RunFolderError, match="give the path of a run folder"):
        write_report(tmp_path / "none")


def test_report_is_not_written_into_another_folder(tmp_path: Path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(RunFolderError, match=r"has none of config\.toml, .*; give the path of a run folder"):
        write_report(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_malformed_lines_are_skipped(tmp_path: Path):
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "metrics.jsonl").write_text(
        '[]\n{}\n{"step": "x"}\n{"step": 1, "kl": null, "entropy": "high", "tasks": 3}\n'
        '{"step": 2, "tasks": {"shop": {"success": true}}}\nnull\n'
    )
    (tmp_path / "evaluations.jsonl").write_text('{"name": "before"}\n{"name": "after", "task": "shop"}\n')
    (tmp_path / "trajectories" / "step_000001.jsonl").write_text(
        '{"messages": [3, {"role": "assistant", "tool_calls": '
        '[1, {"function": {"name": "f", "arguments": "{"}}]}]}\n'
    )
    (tmp_path / "trajectories" / "step_x.jsonl").write_text("{}\n")
    (tmp_path / "summary.json").write_text("[1")
    read_page(tmp_path)


def test_model_output_is_escaped(tmp_path: Path):
    (tmp_path / "trajectories").mkdir()
    evil = '</div><script>alert("x")</script>'
    message = {"role": "assistant", "content": evil, "tool_calls": [ToolCall.of(evil, key=evil).model_dump()]}
    (tmp_path / "trajectories" / "held_out_before.jsonl").write_text(
        json.dumps({"task": evil, "index": evil, "end": evil, "error": evil, "messages": [message]}) + "\n"
    )
    (tmp_path / "evaluations.jsonl").write_text(
        json.dumps({"name": "before", "task": evil, "success": 0.5, "policy_version": 0}) + "\n"
    )
    page, checker = read_page(tmp_path)
    assert "<script" not in page
    assert checker.fetched == []


def test_long_text_is_truncated(tmp_path: Path):
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories" / "step_000001.jsonl").write_text(
        json.dumps({"messages": [{"role": "tool", "content": "x" * 5000}]}) + "\n"
    )
    assert "1,000 more characters" in write_report(tmp_path).read_text()


# --- charts ---


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.25, 0.5, 0.75, 1.0]),
        (0.0, 5800.0, [0.0, 2000.0, 4000.0, 6000.0]),
        (3.0, 3.0, None),
        (0.0, 0.0, None),
        (-0.02, 0.03, None),
        (0.0, 3e-5, None),
    ],
)
def test_ticks_are_round_and_enclose_values(low: float, high: float, expected: list[float] | None):
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low <= high <= ticks[-1]
    assert 2 <= len(ticks) <= 7
    if expected is not None:
        assert ticks == expected


def test_labels_are_short():
    assert [number_label(value) for value in (0, 12_345, 1.2e6, 0.25, 3e-5)] == [
        "0",
        "12.3k",
        "1.2M",
        "0.25",
        "3e-5",
    ]
    assert percent_label(0.4) == "40%"


def test_moving_average_starts_at_first_value_and_keeps_constant():
    constant = [(1.0, 2.0), (2.0, 2.0), (3.0, 2.0)]
    assert [y for _, y in moving_average(constant, 0.8)] == pytest.approx([2.0, 2.0, 2.0])
    assert moving_average([(1, 1.0), (2, 0.0)], 0.5)[0] == (1, 1.0)


def test_long_line_is_averaged():
    points = [(float(i), float(i % 2)) for i in range(1000)]
    thinned = thin(points, 100)
    assert len(thinned) == 100
    assert thinned[-1][0] == 999
    assert all(y == 0.5 for _, y in thinned)


def test_chart_stays_inside_frame():
    points = [(float(i), math.sin(i)) for i in range(50)]
    chart = line_chart([Series(name="s", points=points, colour=0)], label=number_label)
    places = [tuple(map(float, place.split(","))) for place in re.findall(r"[\d.]+,[\d.]+", chart)]
    assert all(0 <= x <= 460 and 0 <= y <= 210 for x, y in places)


def test_chart_can_have_one_or_no_point():
    assert line_chart([], label=number_label) == ""
    assert "circle" in line_chart([Series(name="s", points=[(1, 1)], colour=0)], label=number_label)


def test_scores_of_custom_rewards_have_curves_and_are_shown_with_episodes(tmp_path: Path):
    log = MetricsLog(tmp_path)
    for step in (1, 2, 3):
        one = make_trajectory("shop", step, version=0, success=True)
        scored = replace(one, scores={"environment": 1.0, "polite.tone": 0.125 * step})
        group = TrajectoryGroup(group_id=step, task="shop", trajectories=[scored], admitted_version=0)
        log.log_step(
            step,
            policy_version=step,
            elapsed_s=float(step),
            metrics={},
            tasks={"shop": {"score.environment": 1.0, "score.polite.tone": 0.125 * step}},
            groups=[group],
        )
    log.close()
    page, checker = read_page(tmp_path)
    assert "mean score of an episode" in page
    assert "polite.tone" in checker.text
    assert any("polite.tone 0.375" in text for text in checker.text)


def test_metrics_of_tasks_have_curves_and_are_compared(tmp_path: Path):
    log = MetricsLog(tmp_path)
    for name, lookups in (("before", 1.5), ("after", 4.25)):
        one = replace(make_trajectory("shop", 1, version=0, success=True), metrics={"lookups": lookups})
        log.log_evaluation(name, policy_version=0, results={"shop": [one]})
    for step in (1, 2):
        tasks = {"shop": {"metric.lookups": 2.0 + step}}
        log.log_step(step, policy_version=step, elapsed_s=float(step), metrics={}, tasks=tasks)
    log.close()
    page, _ = read_page(tmp_path)
    assert "mean metric of an episode" in page
    assert "<tr><td>shop</td><td>lookups</td><td>1.5</td><td>4.25</td></tr>" in page


def report_of(folder: Path, *, before: int, after: int, trained: float) -> str:
    """Return the report of a run with these numbers of successes in 50 held-out episodes."""
    log = MetricsLog(folder)
    for name, wins in (("before", before), ("after", after)):
        played = [make_trajectory("shop", i, version=0, success=i < wins) for i in range(50)]
        log.log_evaluation(name, policy_version=0, results={"shop": played})
    tasks = {"shop": {"success": trained}}
    log.log_step(1, policy_version=1, elapsed_s=1.0, metrics={}, tasks=tasks)
    log.close()
    return read_page(folder)[0]


@pytest.mark.parametrize(
    ("before", "after", "kind"), [(10, 15, "dim"), (10, 40, "up"), (40, 10, "down"), (15, 10, "dim")]
)
def test_change_has_an_interval_and_is_grey_if_it_includes_zero(
    tmp_path: Path, before: int, after: int, kind: str
):
    page = report_of(tmp_path, before=before, after=after, trained=0.5)
    points = 2 * (after - before)
    change = re.escape(f'<span class="{kind}">{points:+.1f} points</span> ')
    found = re.search(rf"{change}[^\[]*\[(.*?), (.*?)\]", page)
    assert found is not None
    low, high = map(float, found.groups())
    assert low < points < high
    assert (low <= 0 <= high) == (kind == "dim")


@pytest.mark.parametrize(("trained", "kind"), [(0.82, "down"), (0.4, "")])
def test_success_in_training_far_above_held_out_success_is_marked(tmp_path: Path, trained: float, kind: str):
    page = report_of(tmp_path, before=10, after=11, trained=trained)
    assert f'<td class="{kind}">{100 * trained:.1f}%</td>' in page


def test_many_evaluations_leave_the_line_visible():
    marks = [(float(step), 0.5) for step in range(0, 10_001, 50)]
    chart = line_chart([Series(name="shop", points=marks, colour=0, marks=marks)], label=percent_label)
    assert chart.count('class="ring"') == 23
    assert "held-out after 10000:" in chart
    assert chart.count('class="hover"') == 67


def test_numbers_of_the_axis_do_not_touch_its_end():
    chart = line_chart(
        [Series(name="shop", points=[(0.0, 0.0), (10_001.0, 1.0)], colour=0)], label=percent_label
    )
    assert ">step 10001<" in chart
    assert ">6000<" in chart
    assert ">8000<" not in chart
