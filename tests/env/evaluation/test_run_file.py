"""The file of an evaluation while the event loop is running."""

import asyncio
import os
import threading

import pytest

from agentrl_env import EnvClient, Message, ToolCall
from agentrl_env.evaluation import Completion, EvaluationSettings, RunFile, evaluate, read_run
from agentrl_env.evaluation.record import EpisodeRecord
from tests.env.tasks import Guess


@pytest.fixture
def file(tmp_path):
    settings = EvaluationSettings(task="guess", split="train", model="m", indices=tuple(range(4)))
    with RunFile(tmp_path, settings) as file:
        yield file


def episode(index):
    return EpisodeRecord(index=index, attempt=0, end="completed", seconds=1.0, started="2026-01-01T00:00:00Z")


async def test_event_loop_runs_while_an_episode_is_written(file, monkeypatch):
    async def policy(messages, tools):
        return Completion(message=Message.assistant(None, ToolCall.of("guess", n=1)))

    loop, turned = asyncio.get_running_loop(), []

    def fsync(descriptor):
        turn = threading.Event()
        loop.call_soon_threadsafe(turn.set)
        turned.append(turn.wait(10))

    monkeypatch.setattr(os, "fsync", fsync)
    async with EnvClient.local(Guess) as client:
        await evaluate(client, lambda index, attempt: policy, file)
    assert turned == [True] * 4


async def test_episodes_of_a_cancelled_evaluation_are_written_before_the_file_is_closed(file, monkeypatch):
    resumed = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda descriptor: resumed.wait(10))
    tasks = [asyncio.create_task(file.append_async(episode(index))) for index in range(4)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert all(task.cancelled() for task in tasks)
    resumed.set()
    file.close()
    assert [episode.index for episode in read_run(file.path.parent).counted] == [0, 1, 2, 3]
