"""Errors and figures of language models on the first level of the tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl_env.evaluation.record import EpisodeRecord, TurnRecord
from agentrl_env.types import Message, ToolCall
from tests.benchmarks import first_level
from tests.benchmarks.first_level import END_ERRORS, TASKS, episode_error, summary, turn_error

TOOLS = ("look", "take")
ENVIRONMENTS = Path(__file__).parents[3] / "environments"


def turn(*calls: ToolCall, text: str = "", invalid: int = 0, finish: str = "stop") -> TurnRecord:
    return TurnRecord(action=Message.assistant(text, *calls), invalid_calls=invalid, finish_reason=finish)


def episode(*turns: TurnRecord, end: str = "truncated_turns", success: bool = False) -> EpisodeRecord:
    return EpisodeRecord(
        index=0, attempt=0, turns=turns, end=end, success=success, seconds=1.0, started="2026-01-01T00:00:00Z"
    )


LOOK = ToolCall.of("look", place="shelf")
VALID = turn(LOOK)
SILENT = turn(text="I will look.", invalid=1)


@pytest.mark.parametrize(
    ("played", "error"),
    [
        (VALID, None),
        (turn(text="Anything else?"), None),
        (SILENT, "no call"),
        (turn(text="I will", invalid=1, finish="length"), "turn cut at the token limit"),
        (turn(ToolCall.of(""), invalid=1), "call cannot be parsed"),
        (turn(ToolCall.of(""), invalid=1, finish="length"), "turn cut at the token limit"),
        (turn(ToolCall.of("open"), invalid=1), "unknown tool"),
        (turn(ToolCall.of("look"), invalid=1), "invalid arguments"),
        (turn(ToolCall.of("look"), invalid=1, finish="length"), "invalid arguments"),
    ],
)
def test_error_of_a_turn_names_the_first_obstacle_of_its_call(played: TurnRecord, error: str | None) -> None:
    assert turn_error(played, TOOLS) == error


def test_successful_episode_has_no_error() -> None:
    assert episode_error(episode(SILENT, VALID, end="terminated", success=True), TOOLS) is None


def test_episode_that_the_task_ended_has_a_wrong_result() -> None:
    assert episode_error(episode(SILENT, SILENT, VALID, end="terminated"), TOOLS) == "wrong result"


def test_error_in_half_of_the_turns_is_the_error_of_the_episode() -> None:
    cut = turn(text="I", invalid=1, finish="length")
    assert episode_error(episode(SILENT, cut, SILENT, VALID), TOOLS) == "no call"
    assert episode_error(episode(SILENT, VALID, turn(ToolCall.of("take"))), TOOLS) == "turn limit"


def test_episode_of_equal_calls_repeats_a_call() -> None:
    assert episode_error(episode(VALID, VALID, VALID), TOOLS) == "repeats a call"


@pytest.mark.parametrize(
    ("end", "error"), [(end, error) for end, error in END_ERRORS.items() if end != "terminated"]
)
def test_episode_of_valid_calls_has_the_limit_at_which_it_ended(end: str, error: str) -> None:
    assert episode_error(episode(VALID, end=end), TOOLS) == error


def test_episode_without_a_turn_has_the_limit_at_which_it_ended() -> None:
    assert episode_error(episode(end="truncated_length"), TOOLS) == "context full"


def test_summary_counts_episodes_turns_and_errors() -> None:
    won = episode(VALID, VALID, end="terminated", success=True)
    found = summary([won, episode(SILENT, SILENT, VALID, VALID), episode(VALID, end="terminated")], TOOLS)
    assert (found["episodes"], found["successes"], found["turns"]) == (3, 1, 2.33)
    assert found["valid_turns"] == pytest.approx(5 / 7, abs=1e-4)
    assert found["interval"] == pytest.approx([0.0615, 0.7923], abs=1e-4)
    assert found["errors"] == {"no call": 1, "wrong result": 1}


def test_every_task_of_the_folder_is_evaluated() -> None:
    assert sorted(path.parent.name for path in ENVIRONMENTS.rglob("environment.py")) == sorted(TASKS)


def test_results_are_kept_in_the_order_of_the_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_level, "EVIDENCE", tmp_path)
    for task in ("sql", "household", "shop", "sql"):
        first_level.write_result("small", task, {"episodes": len(task)})
    stored = first_level.read_results(tmp_path / "small.json")
    assert list(stored) == ["household", "shop", "sql"]
    assert first_level.read_results(tmp_path / "other.json") == {}


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("smollm2-135m", "download it with agentrl-train fetch smollm2-135m"),
        ("smollm2-136m", "did you mean smollm2-135m?"),
    ],
)
def test_model_that_is_not_fetched_stops_the_command_and_writes_no_figures(
    model: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path / "cache"))
    for name in ("EVIDENCE", "RUNS"):
        monkeypatch.setattr(first_level, name, tmp_path / name)
    monkeypatch.setattr("sys.argv", ["first_level", model, "household"])
    with pytest.raises(SystemExit):
        first_level.main()
    assert reason in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "cache/models/smollm2-135m").mkdir(parents=True)
    fetched = ("smollm2-135m", "package:weights", "Qwen/Qwen3-0.6B", "/models/qwen")
    assert [first_level.missing(name) for name in fetched] == [""] * 4
