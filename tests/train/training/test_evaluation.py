"""Held-out evaluation: sampled episodes, greedy ones beside them, and episodes kept on disk."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from agentrl_env import Message
from agentrl_env.evaluation import EvaluationError, read_run, summarize
from agentrl_train.cli.commands import summary_table
from agentrl_train.cli.evaluating import evaluation_table
from agentrl_train.training.evaluation import EvaluationJournal, Tally, evaluate, recorded, restored
from tests.train.fakes import CHAT, DOWN, Countdown, ScriptedEngine, always, make_actor

TASK = "countdown"


def printed(table):
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


async def test_greedy_episodes_are_evaluated_beside_sampled_ones():
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


def test_summary_table_shows_greedy_success_where_it_was_measured():
    row = {"before": 0.25, "after": 0.5, "before_greedy": None, "after_greedy": None, "episodes": 4}
    summary = {"tasks": {"shop": row}, "seconds": 1.0}
    assert "greedy" not in printed(summary_table(summary))
    summary["tasks"] = {"shop": row | {"before_greedy": 0.125, "after_greedy": 0.75}, "sql": row}
    text = printed(summary_table(summary))
    assert "greedy before" in text
    assert "+62.5" in text
    assert "-" in text.splitlines()[-2]


class Interrupted(Exception):
    """Ends an evaluation in the middle."""


async def played(engine, folder: Path, *, attempts: int = 2, greedy: bool = False, show=lambda tally: None):
    async with Countdown.local() as client:
        with EvaluationJournal(folder, model="policy", show=show) as journal:
            return await evaluate(
                make_actor(engine, client, environment_retries=0),
                samples={TASK: [0, 1, 2]},
                split={TASK: "train"},
                seed=0,
                attempts=attempts,
                greedy=make_actor(engine, client, temperature=0.0) if greedy else None,
                journal=journal,
            )


async def test_interrupted_evaluation_plays_only_the_episodes_that_it_lacks(tmp_path: Path):
    def interrupt(tally: Tally) -> None:
        if tally.done == 2:
            raise Interrupted

    first, second = (ScriptedEngine(CHAT, always(DOWN)) for _ in range(2))
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


async def test_greedy_episodes_have_a_file_of_their_own_and_are_not_in_the_success_shown(tmp_path: Path):
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


async def test_recorded_episodes_are_those_of_agentrl_env_eval(tmp_path: Path):
    results = await played(ScriptedEngine(CHAT, always(DOWN)), tmp_path)
    run = read_run(tmp_path / TASK)
    summary = summarize(run)
    assert (summary.episodes, summary.success.value, summary.model_latency) == (6, 1.0, None)
    assert summary.tokens.output == sum(
        len(turn.completion.token_ids) for one in results[TASK].trajectories for turn in one.turns
    )
    for record in run.counted:
        episode = restored(record, task=TASK, split="train")
        again = recorded(episode, index=record.index, attempt=record.attempt)
        plain = [t.model_copy(update={"usage": again.turns[0].usage}) for t in record.turns]
        assert again == record.model_copy(update={"started": again.started, "turns": tuple(plain)})
