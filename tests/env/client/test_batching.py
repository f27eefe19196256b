import asyncio
import json

import pytest

from agentrl_env import Message, SessionStatus, StepResult
from agentrl_env.client import http
from agentrl_env.client.http import MAX_STEPS, MAX_UNDER_WAY, MIN_STEPS, Batcher
from agentrl_env.errors import BodyTooLarge, ServerUnreachable, StepPending, UnknownSession
from tests.env.tasks import Clock, until

HELLO = Message.assistant("hello")


class Server:
    """Records and answers batches. ``free`` delays answers."""

    def __init__(self):
        self.batches, self.alone = [], []
        self.errors = {}
        self.pending = set()
        self.final = set()
        self.free = asyncio.Event()
        self.free.set()
        self.most = self.under_way = 0
        self.clock = Clock()
        self.seconds_alone = 0.0

    async def send_batch(self, items):
        self.batches.append([item.session_id for item in items])
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await self.free.wait()
        self.under_way -= 1
        if "batch" in self.errors:
            raise self.errors["batch"]
        return [self.answer(item) for item in items]

    async def send_alone(self, item):
        self.alone.append(item.session_id)
        self.clock.now += self.seconds_alone
        answer = self.errors.get(item.session_id)
        if answer is not None:
            raise answer
        return self.result(item)

    def answer(self, item):
        if item.session_id in self.pending:
            return StepPending("wait")
        if item.session_id in self.errors:
            return self.errors[item.session_id]
        return self.result(item)

    def result(self, item):
        ended = item.session_id in self.final
        return StepResult(
            session_id=item.session_id,
            seq=json.loads(item.body)["seq"],
            status=SessionStatus.COMPLETED if ended else SessionStatus.RUNNING,
        )


@pytest.fixture
async def server():
    return Server()


@pytest.fixture
def batcher(server):
    return Batcher(server.send_batch, server.send_alone, clock=server.clock)


async def step_all(batcher, names):
    steps = (batcher.step(name, 1, HELLO) for name in names)
    return await asyncio.gather(*steps, return_exceptions=True)


async def test_steps_of_one_tick_share_a_batch(server, batcher):
    answers = await step_all(batcher, "abc")
    assert server.batches == [["a", "b", "c"]]
    assert [answer.session_id for answer in answers] == ["a", "b", "c"]


async def test_many_steps_are_sent_as_two_halves(server, batcher):
    await step_all(batcher, [str(n) for n in range(3 * MIN_STEPS)])
    assert [len(names) for names in server.batches] == [3 * MIN_STEPS // 2] * 2
    await step_all(batcher, [str(n) for n in range(MIN_STEPS)])
    assert len(server.batches) == 3


async def test_batch_size_and_concurrent_batches_are_limited(server, batcher):
    names = [str(n) for n in range(MAX_STEPS * (MAX_UNDER_WAY + 3))]
    server.free.clear()
    stepping = asyncio.create_task(step_all(batcher, names))
    await until(lambda: server.under_way == MAX_UNDER_WAY)
    server.free.set()
    answers = await stepping
    assert [answer.session_id for answer in answers] == names
    assert max(map(len, server.batches)) == MAX_STEPS
    assert server.most == MAX_UNDER_WAY


async def test_large_steps_are_sent_in_smaller_batches(server, batcher):
    big = Message.assistant("x" * (http.MAX_BYTES // 2))
    await asyncio.gather(*(batcher.step(name, 1, big) for name in "abcdef"))
    assert server.batches == [["a", "b"], ["c", "d"], ["e", "f"]]


async def test_single_step_is_sent_without_a_batch(server, batcher):
    assert (await batcher.step("a", 1, HELLO)).session_id == "a"
    assert (server.batches, server.alone) == ([], ["a"])


async def test_single_steps_count_as_pending_until_they_are_late(server, batcher, monkeypatch):
    monkeypatch.setattr(http, "EARLY_ANSWER_S", 0.15)
    answer = asyncio.Event()
    send_alone = batcher._send_alone

    async def slowly(item):
        await answer.wait()
        return await send_alone(item)

    batcher._send_alone = slowly
    late = []
    for name in "abcd":
        late.append(asyncio.create_task(batcher.step(name, 1, HELLO)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    rest = asyncio.create_task(step_all(batcher, "xyz"))
    await asyncio.sleep(0)
    assert server.batches == []  # four steps are pending
    await rest
    assert server.batches == [["x", "y", "z"]]
    assert not any(task.done() for task in late)
    answer.set()
    assert [(await task).session_id for task in late] == list("abcd")
    assert batcher._under_way == 0


async def test_items_of_a_batch_fail_independently(server, batcher):
    server.errors["b"] = UnknownSession("gone")
    a, b, c = await step_all(batcher, "abc")
    assert isinstance(b, UnknownSession)
    assert (a.session_id, c.session_id) == ("a", "c")


async def test_failed_request_fails_all_its_items_and_no_later_ones(server, batcher):
    server.errors["batch"] = ServerUnreachable("away")
    assert all(isinstance(answer, ServerUnreachable) for answer in await step_all(batcher, "ab"))
    del server.errors["batch"]
    assert (await batcher.step("a", 1, HELLO)).session_id == "a"


async def test_pending_step_is_repeated_in_its_own_request(server, batcher):
    server.pending = {"b"}
    answers = await step_all(batcher, "ab")
    assert [answer.session_id for answer in answers] == ["a", "b"]
    assert server.alone == ["b"]


async def test_steps_of_a_slow_session_are_sent_separately_until_it_is_fast_again(server, batcher):
    server.pending, server.seconds_alone = {"slow"}, 3.0
    await step_all(batcher, ["slow", "a", "b"])
    await batcher.step("slow", 2, HELLO)
    assert (server.batches, server.alone) == ([["slow", "a", "b"]], ["slow"] * 2)
    server.pending, server.seconds_alone = set(), 0.01
    await batcher.step("slow", 3, HELLO)
    await step_all(batcher, ["slow", "a"])
    assert server.batches[1:] == [["slow", "a"]]
    assert server.alone == ["slow"] * 3


async def test_no_session_is_marked_slow_if_most_are_late(server, batcher):
    server.pending = {"a", "b"}
    for _ in range(2):
        await step_all(batcher, "abc")
    assert server.batches == [["a", "b", "c"]] * 2
    assert server.alone == ["a", "b"] * 2


async def test_ended_session_is_no_longer_marked_slow(server, batcher):
    server.pending, server.seconds_alone = {"slow"}, 3.0
    await step_all(batcher, ["slow", "a", "b"])
    server.final = {"slow"}
    await batcher.step("slow", 2, HELLO)
    await step_all(batcher, ["slow", "a"])
    assert server.batches[1:] == [["slow", "a"]]


async def test_error_of_a_single_step_is_raised(server, batcher):
    server.pending, server.errors = {"b"}, {"b": UnknownSession("gone")}
    _, b = await step_all(batcher, "ab")
    assert isinstance(b, UnknownSession)


async def test_cancelled_step_does_not_affect_its_batch(server, batcher):
    waiting = asyncio.create_task(batcher.step("gone", 1, HELLO))
    staying = asyncio.create_task(batcher.step("here", 1, HELLO))
    await asyncio.sleep(0)
    waiting.cancel()
    assert (await staying).session_id == "here"
    await asyncio.wait((waiting,))
    assert waiting.cancelled()


async def test_any_session_id_is_encoded_as_json(server, batcher):
    assert (await batcher.step('a"\\\n☃', 1, HELLO)).session_id == 'a"\\\n☃'


async def test_only_the_oversized_step_of_a_too_large_batch_fails(server, batcher):
    server.errors |= {"batch": BodyTooLarge("too large"), "s1": BodyTooLarge("too large")}
    answers = await asyncio.gather(
        *(batcher.step(f"s{n}", 1, HELLO) for n in range(3)), return_exceptions=True
    )
    assert server.batches == [["s0", "s1", "s2"]]
    assert sorted(server.alone) == ["s0", "s1", "s2"]
    assert [type(answer) for answer in answers] == [StepResult, BodyTooLarge, StepResult]
