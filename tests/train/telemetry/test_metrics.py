import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from agentrl_env.evaluation.statistics import wilson_interval
from agentrl_env.types import Message, TaskSample, ToolCall
from agentrl_train.errors import RunFolderError
from agentrl_train.telemetry.diagnosis import large_step_warning, no_signal_warning
from agentrl_train.telemetry.metrics import (
    MetricsLog,
    read_jsonl,
    readable,
)
from agentrl_train.telemetry.progress import Progress
from agentrl_train.telemetry.sinks import ScalarWriter
from agentrl_train.training.step_trainer import by_task
from agentrl_train.types import Completion, EpisodeEnd, Trajectory, TrajectoryGroup, Turn


def make_trajectory(
    task: str = "shop", *, index: int = 0, reward: float = 1.0, end: EpisodeEnd = EpisodeEnd.TERMINATED
) -> Trajectory:
    turn = Turn(
        prompt_ids=(1, 2),
        completion=Completion(
            token_ids=(5, 6, 7),
            logprobs=(-0.1, -0.2, -0.3),
            versions=(3, 3, 4),
            finish_reason="stop",
            policy="stale",
        ),
        message=Message.assistant("I buy it.", ToolCall.of("buy", item=2)),
        reply=(Message(role="tool", content="sold", tool_call_id="call_0"),),
        reward=reward,
        invalid_calls=0,
        times=(0.0, 0.25, 0.5),
    )
    return Trajectory(
        sample=TaskSample(task=task, split="test", index=index, seed=7),
        opening=(Message(role="user", content="buy a lamp"),),
        turns=(turn,),
        end=end,
        reward=reward,
        success=reward >= 1.0,
        seconds=0.5,
        started=1_800_000_000.123456,
    )


def make_group(group_id: int, task: str, rewards: tuple[float, ...] = (0.0, 1.0, 0.5)) -> TrajectoryGroup:
    return TrajectoryGroup(
        group_id=group_id,
        task=task,
        trajectories=tuple(make_trajectory(task, reward=reward) for reward in rewards),
        admitted_version=3,
    )


def log_steps(folder: Path, *steps: int, first_step: int = 0, **options) -> None:
    log = MetricsLog(folder, first_step=first_step, **options)
    for step in steps:
        log.log_step(
            step,
            policy_version=step,
            elapsed_s=2.0 * step,
            metrics={"loss": 0.5},
            tasks={"shop": {"success": 0.25}},
            groups=[make_group(1, "shop"), make_group(2, "sql")],
        )
    log.close()


# --- files ---


def test_step_is_one_line(tmp_path: Path):
    log_steps(tmp_path, 1, 2)
    lines = read_jsonl(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["loss"] == 0.5
    assert lines[0]["tasks"] == {"shop": {"success": 0.25}}
    assert lines[1]["elapsed_s"] == 4.0


def test_resumed_run_drops_lost_steps(tmp_path: Path):
    log_steps(tmp_path, 1, 2, 3, 4)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "lo')
    log_steps(tmp_path, 3, first_step=2)
    assert [line["step"] for line in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_non_finite_number_is_written_as_null(tmp_path: Path):
    log = MetricsLog(tmp_path)
    log.log_step(
        1,
        policy_version=1,
        elapsed_s=1.0,
        metrics={"kl": math.nan, "loss": math.inf},
        tasks={"shop": {"success": math.nan}},
    )
    log.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    line = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert line["kl"] is line["loss"] is line["tasks"]["shop"]["success"] is None


def test_some_episodes_of_each_task_are_written(tmp_path: Path):
    log_steps(tmp_path, 1, trajectories=3)
    episodes = read_jsonl(tmp_path / "trajectories" / "step_000001.jsonl")
    assert [(one["task"], one["reward"]) for one in episodes] == [("shop", 1.0), ("sql", 1.0), ("shop", 0.0)]


def test_text_that_utf8_cannot_hold_ends_no_run(tmp_path: Path):
    failed = replace(make_trajectory(), error="the program raised ValueError: \ud83d")
    group = replace(make_group(1, "shop"), trajectories=(failed,))
    log = MetricsLog(tmp_path)
    log.log_step(1, policy_version=1, elapsed_s=1.0, metrics={}, tasks={}, groups=[group])
    log.close()
    (episode,) = read_jsonl(tmp_path / "trajectories" / "step_000001.jsonl")
    assert episode["error"] == "the program raised ValueError: ?"


def test_zero_trajectories_writes_no_file(tmp_path: Path):
    log_steps(tmp_path, 1, trajectories=0)
    assert list((tmp_path / "trajectories").iterdir()) == []


def test_readable_episode_has_policy_and_reward_of_each_turn():
    episode = readable(make_trajectory(), make_group(4, "shop"))
    assert (episode["group_id"], episode["admitted_version"], episode["end"]) == (4, 3, "terminated")
    assert (episode["started"], episode["seconds"]) == (1_800_000_000.123, 0.5)
    user, assistant, tool = episode["messages"]
    assert user["content"] == "buy a lamp"
    assert assistant["tool_calls"][0]["function"] == {"name": "buy", "arguments": '{"item": 2}'}
    assert assistant["turn"] == {
        "number": 0,
        "context": 2,
        "tokens": 3,
        "versions": [3, 4],
        "policy": "stale",
        "finish_reason": "stop",
        "reward": 1.0,
        "invalid_calls": 0,
        "times": [0.0, 0.25, 0.5],
    }
    assert tool["content"] == "sold"
    json.dumps(episode)


def test_summary_has_before_and_after_of_every_task(tmp_path: Path):
    log = MetricsLog(tmp_path)
    for name, rewards in (
        ("before", (1.0, 0.0, 0.0, 0.0)),
        ("step 10", (1.0,) * 4),
        ("after", (1.0, 1.0, 1.0, 0.0)),
    ):
        episodes = [make_trajectory(index=i, reward=reward) for i, reward in enumerate(rewards)]
        log.log_evaluation(name, policy_version=0, results={"shop": episodes}, greedy={"shop": episodes[1:]})
    summary = log.write_summary(seconds=12.34567, trained_tokens=99, policy_version=10, seed=3)
    log.close()
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    shop = summary["tasks"]["shop"]
    assert (shop["before"], shop["after"], shop["episodes"]) == (0.25, 0.75, 4)
    assert (shop["before_greedy"], shop["after_greedy"]) == (0.0, pytest.approx(2 / 3))
    assert shop["after_interval"] == pytest.approx(wilson_interval(3, 4))
    assert {key: summary[key] for key in ("seconds", "trained_tokens", "policy_version", "seed")} == {
        "seconds": 12.346,
        "trained_tokens": 99,
        "policy_version": 10,
        "seed": 3,
    }


def test_missing_evaluation_is_null_in_summary(tmp_path: Path):
    log = MetricsLog(tmp_path)
    log.log_evaluation("before", policy_version=0, results={"shop": [make_trajectory()]})
    summary = log.write_summary(seconds=1, trained_tokens=0, policy_version=0, seed=0)
    log.close()
    assert summary["tasks"]["shop"]["after"] is None
    assert summary["tasks"]["shop"]["before_greedy"] is None


def test_failed_episode_is_counted_separately(tmp_path: Path):
    log = MetricsLog(tmp_path)
    episodes = [make_trajectory(), make_trajectory(reward=0.0, end=EpisodeEnd.FAILED_ENVIRONMENT)]
    log.log_evaluation("before", policy_version=0, results={"shop": episodes, "sql": episodes[1:]})
    log.close()
    shop, sql = read_jsonl(tmp_path / "evaluations.jsonl")
    assert (shop["success"], shop["episodes"], shop["failed"]) == (1.0, 1, 1)
    assert (sql["success"], sql["episodes"], sql["failed"]) == (None, 0, 1)


def test_tensorboard_gets_finite_numbers(tmp_path: Path):
    log = MetricsLog(tmp_path, sinks=[ScalarWriter(tmp_path / "tensorboard")])
    log.log_step(
        1,
        policy_version=1,
        elapsed_s=1.0,
        metrics={"loss": 0.5, "kl": math.nan},
        tasks={"shop": {"success": 1.0}},
    )
    log.close()
    log.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    content = events.read_bytes()
    assert b"train/loss" in content
    assert b"success/shop" in content
    assert b"kl" not in content


def test_unwritable_folder_is_reported(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match="cannot be written"):
        MetricsLog(tmp_path / "file")


def test_truncated_line_and_missing_file_are_skipped(tmp_path: Path):
    (tmp_path / "some.jsonl").write_text('{"a": 1}\n[2]\n{"a": ')
    assert read_jsonl(tmp_path / "some.jsonl") == [{"a": 1}]
    assert read_jsonl(tmp_path / "none.jsonl") == []


# --- the terminal ---


def shown(*, terminal: bool, steps: int = 3) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=110, color_system=None)
    progress = Progress(total_steps=10, console=console)
    progress.evaluation("before", {"shop": 0.25, "sql": None})
    for step in range(1, steps + 1):
        progress.step(
            step,
            elapsed_s=30.0 * step,
            metrics={
                "loss": -0.01234,
                "kl": 0.0035,
                "trained_tokens_per_s": 12_345.6,
                "staleness_mean": 1.25,
                "staleness_max": 2.0,
                "trainer_idle": 0.125,
            },
            tasks={"shop": {"success": 0.5, "reward": 0.4, "turns": 3.0, "valid_calls": 1.0}},
        )
    progress.close()
    progress.close()
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_steps_are_plain_lines_without_terminal():
    lines = shown(terminal=False).splitlines()
    assert lines[0] == "held-out success, before: shop 25.0%, sql -"
    assert lines[3] == (
        "step 3/10  success (smoothed) shop 50.0%, sql -  reward 0.40  loss -0.012  KL 0.0035"
        "  tok/s 12,346  left 3:30"
    )
    assert len(lines[3]) < 120
    assert "\x1b" not in "".join(lines)


def test_terminal_shows_one_live_table():
    text = shown(terminal=True)
    for words in ("held-out before", "25.0%", "50.0%", "12,346", "1:30 elapsed, 3:30 left"):
        assert words in text
    assert text.count("\x1b[?25l") == 1


def test_success_is_a_moving_average():
    console = Console(file=io.StringIO(), width=200, color_system=None)
    progress = Progress(total_steps=2, console=console)
    for step, success in ((1, 1.0), (2, 0.0)):
        progress.step(step, elapsed_s=step, metrics={}, tasks={"shop": {"success": success}})
    assert isinstance(console.file, io.StringIO)
    assert "shop 80.0%" in console.file.getvalue().splitlines()[-1]


def test_time_left_uses_only_the_steps_of_this_process():
    progress = Progress(total_steps=20, console=Console(file=io.StringIO()), first_step=10, elapsed_s=500.0)
    progress.step(11, elapsed_s=504.0, metrics={}, tasks={})
    assert progress.seconds_left == pytest.approx(36.0)


def test_unicode_line_separators_in_text_do_not_split_lines(tmp_path: Path) -> None:
    path, said = tmp_path / "episodes.jsonl", "one\u2028two\x85three\x1cfour"
    path.write_text(json.dumps({"text": said}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_jsonl(path) == [{"text": said}]


def warning_for(*rewards: float, end: EpisodeEnd = EpisodeEnd.TERMINATED, steps: int = 1) -> str:
    episodes = [make_trajectory(reward=reward, end=end) for reward in rewards for _ in range(2)]
    groups = [
        TrajectoryGroup(group_id=n, task="shop", trajectories=episodes[n : n + 2], admitted_version=0)
        for n in range(0, len(episodes), 2)
    ]
    return no_signal_warning(groups, steps=steps)


def test_step_without_signal_has_warning_with_causes() -> None:
    same = "within each group all episodes have the same reward (all are 0); try easier"
    assert warning_for(0.0, 0.0).startswith(f"no learning signal in this step: {same}")
    assert "in 4 consecutive steps" in warning_for(0.0, 1.0, steps=4)
    assert "(2 different values)" in warning_for(0.0, 1.0)
    full = warning_for(0.0, end=EpisodeEnd.TRUNCATED_LENGTH)
    assert "100% of the episodes were cut off by engine.max_context: raise it" in full


def test_step_whose_episodes_are_all_omitted_has_warning_with_the_settings_that_omit_them() -> None:
    episodes = [make_trajectory(reward=reward) for reward in (0.0, 1.0)]
    group = TrajectoryGroup(group_id=0, task="shop", trajectories=episodes, admitted_version=0)
    warning = no_signal_warning([group], steps=2)
    assert warning.startswith("no learning signal in 2 consecutive steps, although rewards differ")
    assert "algorithm.leave_out" in warning


def test_warning_about_a_run_without_progress_names_valid_calls() -> None:
    one = make_trajectory(reward=0.0)
    broken = replace(one, turns=[replace(one.turns[0], invalid_calls=1)])
    group = TrajectoryGroup(group_id=0, task="shop", trajectories=[broken, broken], admitted_version=0)
    warning = no_signal_warning([group], steps=1)
    assert "valid_calls is 0, the share of turns whose calls the environment accepted" in warning
    assert "valid_calls" not in warning_for(0.0, 0.0)


def test_step_far_from_the_sampling_policy_has_warning_with_settings() -> None:
    assert large_step_warning({}) is None
    assert large_step_warning({"kl": 0.1}) is None
    warning = large_step_warning({"kl": 0.3456})
    assert warning is not None
    assert warning.startswith("the policy is 0.35 nats per token from the one that sampled")
    assert "lower train.learning_rate, or raise train.warmup_steps" in warning


# --- metrics of score() ---


def measured(**metrics: float) -> Trajectory:
    return replace(make_trajectory(), metrics=metrics)


CAREFUL = [
    measured(success=1.0, invalid_calls=2.0, lookups=3.0, careful=1.0),
    measured(success=0.0, lookups=1.0),
    measured(),
]


def test_metrics_of_a_task_are_averaged_over_the_episodes_that_have_them():
    group = TrajectoryGroup(group_id=1, task="shop", trajectories=CAREFUL, admitted_version=0)
    found = by_task([group])["shop"]
    named = {name: value for name, value in found.items() if name.startswith("metric.")}
    assert named == {"metric.careful": 1.0, "metric.lookups": 2.0}


def test_metrics_of_held_out_episodes_reach_the_record_and_the_sinks(tmp_path: Path):
    written: dict[str, float] = {}

    class Kept:
        def write(self, scalars, *, step):
            written.update(scalars)

        def close(self):
            return None

    failed = replace(measured(lookups=99.0), end=EpisodeEnd.FAILED_ENVIRONMENT)
    log = MetricsLog(tmp_path, sinks=[Kept()])
    log.log_evaluation("before", policy_version=0, results={"shop": [*CAREFUL, failed]})
    log.close()
    (line,) = read_jsonl(tmp_path / "evaluations.jsonl")
    assert line["metrics"] == {"careful": 1.0, "lookups": 2.0}
    assert written["held_out_metric.lookups/shop"] == 2.0


def test_notebook_shows_an_episode_and_no_reward_of_a_failed_episode() -> None:
    shown = make_trajectory()._repr_html_()
    assert "terminated, reward 1, 3 sampled tokens" in shown
    assert "I buy it." in shown
    assert "sold" in shown
    failed = replace(make_trajectory(end=EpisodeEnd.FAILED_ENVIRONMENT), error="<no room>")._repr_html_()
    assert "failed_environment, no reward" in failed
    assert "&lt;no room&gt;" in failed
