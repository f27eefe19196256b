"""Held-out evaluation with sampled and greedy episodes, and episodes kept on disk."""

import asyncio
import io
import os
import threading
from pathlib import Path

import pytest
from rich.console import Console

from agentrl_env import Message, TaskSample
from agentrl_env.evaluation import EvaluationError, read_run, summarize
from agentrl_train.cli.commands import summary_table
from agentrl_train.cli.evaluating import evaluation_table
from agentrl_train.config import AlgorithmSection, TrainSection
from agentrl_train.telemetry.diagnosis import Diagnosis
from agentrl_train.telemetry.metrics import success_interval
from agentrl_train.training.evaluation import (
    Evaluation,
    EvaluationJournal,
    Tally,
    evaluate,
    from_record,
    held_out_samples,
    to_record,
)
from agentrl_train.types import EpisodeEnd, Step, TaskSource, Trajectory, TrajectoryGroup
from tests.train.fakes import CHAT, DOWN, Countdown, ScriptedEngine, always, make_actor

TASK = "countdown"


def printed(table):
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


async def test_greedy_episodes_are_evaluated_in_addition_to_sampled_ones():
    good = ScriptedEngine(CHAT, always(DOWN))
    bad = ScriptedEngine(CHAT, always(Message(role="assistant", content="I stop here.")))
    async with Countdown.local() as client:
        results = await evaluate(
            make_actor(good, client),
            samples={TASK: [0, 1, 2]},
            split={TASK: "train"},
            seed=0,
            attempts=2,
            greedy=make_actor(bad, client, temperature=0.0),
        )
    (result,) = results.values()
    assert (len(result.trajectories), len(result.greedy)) == (6, 3)
    assert (result.success, result.greedy_success) == (1.0, 0.0)
    assert {call[2].temperature for call in good.calls} == {1.0}
    assert {call[2].temperature for call in bad.calls} == {0.0}
    assert "greedy" in printed(evaluation_table(results))


def test_summary_table_shows_greedy_success_if_it_was_measured():
    row = {"before": 0.25, "after": 0.5, "before_greedy": None, "after_greedy": None, "episodes": 4}
    summary = {"tasks": {"shop": row}, "seconds": 1.0}
    assert "greedy" not in printed(summary_table(summary))
    summary["tasks"] = {"shop": row | {"before_greedy": 0.125, "after_greedy": 0.75}, "sql": row}
    text = printed(summary_table(summary))
    (row,) = [line for line in text.splitlines() if "12.5%" in line]
    assert "greedy" in row
    assert "+62.5" in row
    assert "-" in text.splitlines()[-2]


def test_summary_table_fits_a_terminal_of_80_columns():
    row = {"before": 0.295, "after": 0.885, "before_greedy": 0.255, "after_greedy": 0.885, "episodes": 200}
    low, high = [0.24, 0.36], [0.84, 0.92]
    intervals = dict.fromkeys(["before_interval", "before_greedy_interval"], low)
    intervals |= dict.fromkeys(["after_interval", "after_greedy_interval"], high)
    tasks = dict.fromkeys(["os_interaction", "knowledgegraph"], row | intervals)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(summary_table({"tasks": tasks, "seconds": 379.0}))
    text = console.export_text()
    assert text.count("+59.0 [+51, +66]") == 2
    assert "os_interaction" in text


def test_summary_table_shows_the_interval_of_a_change():
    row = {"before": 0.2, "after": 0.3, "episodes": 50, "before_greedy": None, "after_greedy": None}
    intervals = {"before_interval": [0.11, 0.33], "after_interval": [0.19, 0.44]}
    summary = {"tasks": {"shop": row | intervals}, "seconds": 1.0}
    assert "+10.0 [-7, +27]" in printed(summary_table(summary))


def test_attempts_at_a_sample_do_not_narrow_the_interval_if_they_agree():
    once = [succeeding(index, index % 2 == 0) for index in range(20)]
    low, high = success_interval(once)
    assert success_interval(once * 4) == pytest.approx((low, high))
    mixed = [succeeding(index, (index + attempt) % 2 == 0) for index in range(20) for attempt in range(4)]
    assert success_interval(mixed)[0] > low


def succeeding(index: int, success: bool) -> Trajectory:
    sample = TaskSample(task=TASK, index=index)
    reward = float(success)
    return Trajectory(
        sample=sample, opening=(), turns=(), end=EpisodeEnd.TERMINATED, reward=reward, success=success
    )


def evaluated(successes: int, episodes: int = 100) -> tuple[float, float, float]:
    played = [succeeding(index, index < successes) for index in range(episodes)]
    result = Evaluation(task=TASK, trajectories=played, attempts=1)
    return result.success, *result.interval


def test_success_in_training_far_above_held_out_success_gives_one_warning(caplog):
    diagnosis = Diagnosis(CHAT, algorithm=AlgorithmSection(), train=TrainSection())
    diagnosis.compare({TASK: evaluated(22)})  # nothing was trained yet
    for step in range(20):
        played = [succeeding(index, index > 0) for index in range(6)]
        group = TrajectoryGroup(group_id=step, task=TASK, trajectories=played, admitted_version=0)
        diagnosis.examine(Step(groups=[group], trained_version=step), {"loss_tokens": 1.0})
    diagnosis.compare({TASK: evaluated(80)})
    assert "held-out" not in caplog.text
    diagnosis.compare({TASK: evaluated(22)})
    assert "countdown succeeds in 83% of the last training episodes and in 22% of the held-out" in caplog.text
    assert "61 points less (95 % interval" in caplog.text


def test_more_held_out_samples_than_the_split_has_are_reported(caplog):
    sources = {
        TASK: TaskSource(task=TASK, split="test", num_samples=3),
        "endless": TaskSource(task="endless"),
    }
    assert held_out_samples(sources, 3) == {TASK: [0, 1, 2], "endless": [0, 1, 2]}
    assert caplog.text == ""
    assert held_out_samples(sources, 5)[TASK] == [0, 1, 2]
    assert "5 held-out samples of countdown are configured" in caplog.text
    assert "its split 'test' has 3" in caplog.text


class Interrupted(Exception):
    """Interrupts an evaluation halfway."""


async def played(engine, folder: Path, *, attempts: int = 2, greedy: bool = False, **options):
    async with Countdown.local() as client:
        with EvaluationJournal(folder, model="policy", **options) as journal:
            return await evaluate(
                make_actor(engine, client, environment_retries=0),
                samples={TASK: [0, 1, 2]},
                split={TASK: "train"},
                seed=0,
                attempts=attempts,
                greedy=make_actor(engine, client, temperature=0.0) if greedy else None,
                journal=journal,
            )


class StuckEngine(ScriptedEngine):
    """Answers the first four episodes and no other."""

    async def generate(self, token_ids, *, session_key, **options):
        if len({call[0] for call in self.calls} | {session_key}) > 4:
            await asyncio.Event().wait()
        return await super().generate(token_ids, session_key=session_key, **options)


async def test_interrupted_evaluation_plays_only_missing_episodes(tmp_path: Path):
    def interrupt(tally: Tally) -> None:
        if tally.done == 2:
            raise Interrupted

    first, second = (kind(CHAT, always(DOWN)) for kind in (StuckEngine, ScriptedEngine))
    with pytest.raises(Interrupted):
        await played(first, tmp_path, show=interrupt)
    before = read_run(tmp_path / TASK)
    assert len(before.counted) >= 2
    tallies: list[Tally] = []
    results = await played(second, tmp_path, show=tallies.append)
    done = len(before.counted) + 1
    assert tallies[0] == Tally(total=6, done=done, sampled=done, successes=done)
    assert tallies[-1] == Tally(total=6, done=6, sampled=6, successes=6)
    turns = sum(len(one.turns) for one in results[TASK].trajectories)
    assert len(second.calls) == turns - sum(len(one.turns) for one in before.counted)
    assert len(second.calls) > 0
    whole = await played(ScriptedEngine(CHAT, always(DOWN)), tmp_path / "whole")
    figures = [(r.success, r.mean_turns, r.valid_calls, r.pass_at(2)) for r in (results[TASK], whole[TASK])]
    assert figures[0] == figures[1]


async def test_event_loop_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch):
    threads = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: threads.append(threading.current_thread()))
    await played(ScriptedEngine(CHAT, always(DOWN)), tmp_path)
    assert len(threads) == 7, "the settings and six episodes"
    assert threading.main_thread() not in threads[1:]


async def test_failed_episodes_are_played_again(tmp_path: Path):
    engine = ScriptedEngine(CHAT, always(DOWN))
    engine.failures = 1
    tallies: list[Tally] = []
    await played(engine, tmp_path, show=tallies.append)
    assert (tallies[-1].done, tallies[-1].failed) == (5, 1)
    (failed,) = [one for one in read_run(tmp_path / TASK).episodes.values() if one.failed]
    assert (failed.failed, failed.error) == ("model", "the scripted engine fails")
    again = ScriptedEngine(CHAT, always(DOWN))
    results = await played(again, tmp_path)
    assert len(results[TASK].counted) == 6
    assert {call[0] for call in again.calls} == {again.calls[0][0]}


async def test_greedy_episodes_have_their_own_file_and_do_not_count_in_the_success(tmp_path: Path):
    tallies: list[Tally] = []
    engine = ScriptedEngine(CHAT, always(DOWN))
    await played(engine, tmp_path, attempts=1, greedy=True, show=tallies.append)
    assert tallies[-1] == Tally(total=6, done=6, sampled=3, successes=3)
    files = [read_run(tmp_path / name) for name in (TASK, f"{TASK}-greedy")]
    assert [run.settings.temperature for run in files] == [1.0, 0.0]
    assert [len(run.counted) for run in files] == [3, 3]


async def test_other_settings_do_not_continue_an_evaluation(tmp_path: Path):
    await played(ScriptedEngine(CHAT, always(DOWN)), tmp_path, attempts=1)
    with pytest.raises(EvaluationError, match=r"other settings \(attempts\)"):
        await played(ScriptedEngine(CHAT, always(DOWN)), tmp_path, attempts=2)
    engine = ScriptedEngine(CHAT, always(DOWN))
    results = await played(engine, tmp_path, attempts=2, replace=True)
    assert len(read_run(tmp_path / TASK).counted) == 6
    assert len(engine.calls) == sum(len(one.turns) for one in results[TASK].trajectories)


async def test_recorded_episodes_match_agentrl_env_eval(tmp_path: Path):
    results = await played(ScriptedEngine(CHAT, always(DOWN)), tmp_path)
    run = read_run(tmp_path / TASK)
    summary = summarize(run)
    assert (summary.episodes, summary.success.value, summary.model_latency) == (6, 1.0, None)
    assert summary.tokens.output == sum(
        len(turn.completion.token_ids) for one in results[TASK].trajectories for turn in one.turns
    )
    for record in run.counted:
        episode = from_record(record, task=TASK, split="train")
        again = to_record(episode, index=record.index, attempt=record.attempt)
        plain = [t.model_copy(update={"usage": again.turns[0].usage}) for t in record.turns]
        assert again == record.model_copy(update={"started": again.started, "turns": tuple(plain)})
