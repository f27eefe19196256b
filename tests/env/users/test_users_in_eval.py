"""``agentrl-env eval`` and ``play`` with user and policy behind the same endpoint."""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl_env import Environment
from agentrl_env.evaluation import read_run
from agentrl_env.users import Dialogue, Endpoint, ModelUser
from tests.env.evaluation.chat_server import ChatServer, completion

TARGET = f"{Path(__file__)}:Parcels"
COUNT = itertools.count()


class Parcels(Environment):
    """Ask the customer for the number of the parcel, and repeat it."""

    max_turns = 4
    blocking = False

    @classmethod
    def samples(cls, split):
        return [{"name": name} for name in ("Ada", "Ben", "Clara")]

    async def reset(self, sample, rng):
        endpoint = Endpoint.from_variables("PARCELS_USER")
        user = ModelUser(f"You are {sample.data['name']}.", endpoint, seed=sample.seed)
        self.dialogue = Dialogue(user)
        return await self.dialogue.open()

    async def respond(self, text):
        return await self.dialogue.answer(text, grade=self.grade)

    def grade(self):
        (number,) = re.findall(r"W\d+", self.dialogue.lines[2].text)
        return float(number in self.dialogue.told[-1])


def is_user(body):
    return body["messages"][0]["role"] == "system"


def both(body):
    """Answer as the user, with a unique number, or as the policy."""
    texts = [message["content"] for message in body["messages"] if message["role"] == "user"]
    if not is_user(body):
        return completion(text="Which number?" if len(texts) == 1 else f"I have found {texts[-1]}")
    if "You are Ben." in body["messages"][0]["content"] and len(texts) == 3:
        return 400, {"text": "the user is refused"}
    said = ("Where is my parcel?", f"W{next(COUNT)}.", "Thanks. [END]")
    return completion(text=said[len(texts) - 1])


@pytest.fixture
def run(tmp_path):
    """Run ``agentrl-env`` with a user behind a URL. Return the finished process."""

    def run(*arguments, url, **options):
        variables = {"PARCELS_USER_URL": url, "PARCELS_USER_CACHE": str(tmp_path / "cache")}
        command = [sys.executable, "-m", "agentrl_env", *map(str, arguments)]
        environment = {**os.environ, **variables}
        return subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300, **options
        )

    return run


def spoken(folder):
    """Return the texts of both sides of each episode with a result."""
    return {
        episode.index: [
            *(message.content for message in episode.opening),
            *(text for t in episode.turns for text in (t.action.content, *(m.content for m in t.messages))),
        ]
        for episode in read_run(folder).counted
    }


def test_same_dialogue_is_played_by_eval_its_replay_and_play(run, tmp_path):
    with ChatServer(both) as server:
        policy = ("--base-url", server.url, "--model", "policy")
        first = run("eval", TARGET, *policy, "--retries", 0, "-o", "first", "--json", url=server.url)
        again = run("eval", TARGET, *policy, "--retries", 0, "-o", "second", url=server.url)
        replayed = run("eval", TARGET, "--replay", "first", "-o", "third", url=server.url)
        asked = [body for body in server.requests if is_user(body)]
        of_ben = [body for body in asked if "Ben" in body["messages"][0]["content"]]
    summary = json.loads(first.stdout)
    assert (summary["episodes"], summary["failed"], summary["success"]["value"]) == (2, 1, 1.0)
    assert "1 of 3 episodes failed and have no result" in first.stderr
    assert (again.returncode, replayed.returncode) == (1, 1)
    assert spoken(tmp_path / "first") == spoken(tmp_path / "second") == spoken(tmp_path / "third")
    assert len(asked) - len(of_ben) == 6, "the cache has answered the second and the third evaluation"

    ada = read_run(tmp_path / "first").episodes[0, 0]
    lines = "".join(f"say {turn.action.content}\n" for turn in ada.turns)
    seed = ("--split", "test", "--index", 0, "--seed", ada.seed)
    played = run("play", TARGET, *seed, url=server.url, input=lines)
    assert all(text in played.stdout for text in spoken(tmp_path / "first")[0][::2])


def test_failed_user_is_a_failed_episode_with_its_reason_and_the_report_has_the_user(run, tmp_path):
    with ChatServer(both) as server:
        policy = ("--base-url", server.url, "--model", "policy")
        run("eval", TARGET, *policy, "--retries", 0, "-o", "first", url=server.url)
    ada, ben = (read_run(tmp_path / "first").episodes[index, 0] for index in (0, 1))
    assert ben.failed == "environment"
    assert "the model that plays the user failed" in ben.error
    assert "the user is refused" in ben.error
    assert ada.metrics["user_requests"] == 3
    assert ada.metrics["user_tokens_out"] == 15
    assert ada.turns[0].info["user"]["instructions"] == "You are Ada."
    assert "You are Ada." in (tmp_path / "first" / "report.html").read_text()
