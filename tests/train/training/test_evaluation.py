"""Held-out evaluation: sampled episodes, and greedy ones beside them."""

import io

from rich.console import Console

from agentrl_env import Message
from agentrl_train.cli.commands import evaluation_table, summary_table
from agentrl_train.training.evaluation import evaluate
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
