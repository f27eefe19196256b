"""A judge behind a real HTTP server for chat completions."""

import asyncio
import threading
from pathlib import Path

import pytest

from agentrl_env.evaluation import ModelFailed
from agentrl_env.types import Message
from agentrl_train.errors import RewardUnavailable
from agentrl_train.reward import Judge, Rewards, answer, close_judges
from agentrl_train.reward.judge import fill_prompt
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


@pytest.mark.parametrize(
    ("text", "high", "score"),
    [
        ("Score: 1/2", 1.0, 0.5),
        ("Score: 1 / 2", 10.0, 0.5),
        ("Score: 0,5", 1.0, 0.5),
        ("Score: 7/10", 10.0, 0.7),
        ("**Score:** 7 out of 10.", 1.0, 0.7),
        ("Score: .5", 10.0, 0.05),
        ("Score: 5e-1", 1.0, 0.5),
        ("Score: 1%", 1.0, 0.01),
        ("Score: 70 %", 100.0, 0.7),
        ("Score (0-10): 7", 10.0, 0.7),
        ("Score (out of 10): 7/10", 10.0, 0.7),
        ("Score (7)", 10.0, 0.7),
        ("Score: 7, because it is polite.", 10.0, 0.7),
        ("Score: 7.", 10.0, 0.7),
        ("Score: 3/2", 1.0, None),
        ("Score: 1/0", 1.0, None),
        ("Score: 0-10", 10.0, None),
        ("Score: 1 to 5", 10.0, None),
        ("Score: 1.2.3", 10.0, None),
        ("Score: \u22123", 10.0, None),
        ("Score (0-10): good", 10.0, None),
    ],
)
def test_score_is_parsed_in_its_written_form(text: str, high: float, score: float | None) -> None:
    found = Judge("http://x", "m", prompt=PROMPT, high=high)._score(text)
    assert found == (None if score is None else pytest.approx(score))


@pytest.mark.parametrize(
    ("pattern", "score"), [(r"\[\[(.*?)\]\]", 0.5), (r"(\d+)/(\d+)", None), (r"\d+/\d+", 0.5)]
)
def test_group_of_a_custom_pattern_is_the_score(pattern: str, score: float | None) -> None:
    found = Judge("http://x", "m", prompt=PROMPT, pattern=pattern)._score("I think [[1/2]]")
    assert found == (1.0 if score is None else score)


def test_fraction_of_a_range_that_does_not_start_at_zero_is_not_a_score() -> None:
    judge = Judge("http://x", "m", prompt=PROMPT, low=1.0, high=5.0)
    assert (judge._score("Score: 4/5"), judge._score("Score: 1/2")) == (0.75, None)


def refusing_temperature(body):
    if "temperature" in body:
        return 400, {"text": "Unsupported value: 'temperature' does not support 0.0 with this model."}
    return completion(text="Score: 5")


def test_request_is_repeated_without_a_temperature_if_the_model_rejects_it() -> None:
    with ChatServer(refusing_temperature) as server:
        assert score_of(server, "a") == [0.5]
        assert ["temperature" in body for body in server.requests] == [True, False]
        assert score_of(server, "a", "b", body={"temperature": None}) == [0.5, 0.5]
        assert ["temperature" in body for body in server.requests[2:]] == [False, False]
        with pytest.raises(ModelFailed, match="does not support"):
            score_of(server, "a", body={"temperature": 0.7})


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ('Answer {"score": N}. {text}', 'Answer {"score": N}. hi {x}'),
        ('Answer {"a": {"score": 1}}. {text}', 'Answer {"a": {"score": 1}}. hi {x}'),
        ("Use {} or {0}, {score: N}, { and {text}", "Use {} or {0}, {score: N}, { and hi {x}"),
        ('Answer {{"score": N}}. {text}', 'Answer {"score": N}. hi {x}'),
        ("{number:.1f} {text!r:>9}", "2.0  'hi {x}'"),
        ("{ {number:.1f}", "{ 2.0"),
    ],
)
def test_other_braces_stay_in_the_prompt(prompt: str, text: str) -> None:
    assert fill_prompt(prompt, {"text": "hi {x}", "number": 2}) == text


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("{txet}", r"the field \{txet\}; given are: text"),
        ('{"score": N} {txet}', r"the field \{txet\}; given are: text"),
        ("{text:.1f}", "cannot format {text:.1f}"),
    ],
)
def test_missing_field_is_an_error_with_a_sentence(prompt: str, reason: str) -> None:
    with pytest.raises(RewardUnavailable, match=reason):
        fill_prompt(prompt, {"text": "hello"})


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


def test_request_to_a_busy_endpoint_is_retried() -> None:
    answers = iter([(429, {"retry-after": "0"}), (503, {}), completion(text="Score: 10")])
    with ChatServer(lambda body: next(answers)) as server:
        assert score_of(server, "x") == [1.0]
        assert len(server.requests) == 3


def test_request_is_repeated_after_an_answer_without_a_score_and_then_fails(tmp_path: Path) -> None:
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


def test_concurrent_requests_are_limited() -> None:
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


async def test_rejection_by_the_endpoint_fails_the_episode() -> None:
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
