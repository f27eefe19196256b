"""A judge behind a real HTTP server of the chat completions protocol."""

import asyncio
import threading
from pathlib import Path

import pytest

from agentrl_env.evaluation import ModelFailed
from agentrl_env.types import Message
from agentrl_train.errors import RewardUnavailable
from agentrl_train.reward import Judge, Rewards, answer, close_judges
from agentrl_train.types import EpisodeEnd
from tests.env.evaluation.chat_server import ChatServer, completion
from tests.train.reward.test_pieces import episode

PROMPT = "Rate this answer from 0 to 10 as 'Score: N'.\n{text}"


def score_of(server: ChatServer, *texts: str, **options) -> list[float]:
    judge = Judge(server.url, "judge", prompt=PROMPT, high=10.0, **options)

    async def ask() -> list[float]:
        try:
            return await asyncio.gather(*(judge(text=text) for text in texts))
        finally:
            await judge.close()

    return asyncio.run(ask())


def test_last_score_of_the_answer_is_scaled_to_its_range() -> None:
    with ChatServer(lambda body: completion(text="First a score: 2, no: **Score**: 7.5")) as server:
        assert score_of(server, "hello") == [0.75]
        assert server.requests[0]["messages"][0]["content"].endswith("\nhello")
        assert server.requests[0]["temperature"] == 0.0


def test_negative_score_keeps_its_sign() -> None:
    with ChatServer(lambda body: completion(text="Score: -3")) as server:
        assert score_of(server, "hello", low=-10.0) == [0.35]


def test_equal_requests_are_answered_once_and_from_disk_afterwards(tmp_path: Path) -> None:
    with ChatServer(lambda body: completion(text="Score: 4")) as server:
        assert score_of(server, "a", "a", "b", cache=tmp_path) == [0.4, 0.4, 0.4]
        assert len(server.requests) == 2
        assert score_of(server, "a", "b", cache=tmp_path) == [0.4, 0.4]
        assert len(server.requests) == 2
        (file, *_) = sorted(tmp_path.rglob("*.json"))
        file.write_text("{broken")
        assert score_of(server, "a", "b", cache=tmp_path) == [0.4, 0.4]
        assert len(server.requests) == 3
        score_of(server, "a", cache=tmp_path, body={"temperature": 0.5})
        assert len(server.requests) == 4, "another request is another content"


def test_busy_endpoint_is_asked_again() -> None:
    answers = iter([(429, {"retry-after": "0"}), (503, {}), completion(text="Score: 10")])
    with ChatServer(lambda body: next(answers)) as server:
        assert score_of(server, "x") == [1.0]
        assert len(server.requests) == 3


def test_answer_without_a_score_is_asked_for_again_and_then_missing(tmp_path: Path) -> None:
    answers = iter(["no idea", "Score: 99", "Score: 5"])
    with ChatServer(lambda body: completion(text=next(answers, "Good."))) as server:
        assert score_of(server, "x", cache=tmp_path) == [0.5]
        with pytest.raises(RewardUnavailable, match=r"no score from 0 to 10 .* 'Good\.'"):
            score_of(server, "y", cache=tmp_path)
        assert len(list(tmp_path.rglob("*.json"))) == 1, "only answers with a score are kept"


def test_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with ChatServer(lambda body: completion(text="Score: 1")) as server:
        with pytest.raises(RewardUnavailable, match="set the variable JUDGE_KEY"):
            score_of(server, "x", key_env="JUDGE_KEY")
        monkeypatch.setenv("JUDGE_KEY", "secret")
        assert score_of(server, "x", key_env="JUDGE_KEY") == [0.1]
        assert server.keys == ["Bearer secret"]


def test_requests_at_a_time_are_limited() -> None:
    lock, at_once, most, arrived = threading.Lock(), 0, 0, threading.Event()

    def reply(body):
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
            if at_once == 2:
                arrived.set()
        assert arrived.wait(60)
        with lock:
            at_once -= 1
        return completion(text="Score: 3")

    with ChatServer(reply) as server:
        assert score_of(server, *"abcdef", concurrency=2) == [0.3] * 6
    assert most == 2


async def test_endpoint_that_refuses_fails_the_episode() -> None:
    with ChatServer(lambda body: (401, {"text": "wrong key"})) as server:
        judge = Judge(server.url, "judge", prompt=PROMPT, high=10.0)
        made = Rewards(
            {"polite": lambda one: judge(text=answer(one))}, weights={}, fade_steps={}, timeout_s=60.0
        )
        found = await made.score(episode(Message.assistant("x"), reward=1.0))
        assert found.end is EpisodeEnd.FAILED_REWARD
        assert "401" in str(found.error)
        with pytest.raises(ModelFailed):
            await judge(text="x")
        await close_judges()


def test_range_must_not_be_empty() -> None:
    with pytest.raises(ValueError, match="must be below high"):
        Judge("http://x", "m", prompt=PROMPT, low=1.0, high=1.0)
