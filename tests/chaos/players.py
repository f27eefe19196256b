"""Clients that play one session after another and record every requested step."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol, TypeVar

import httpx

from agentrl_env import EnvClient, ToolCall
from agentrl_env.client.client import ClientSession
from agentrl_env.errors import AgentRLError, CallTimeout, ServerUnreachable, StateUnavailable, from_wire
from agentrl_env.types import SessionStatus, StepResult
from tests.chaos.account import Step

T = TypeVar("T")
TASKS = ("ledger", "slow_ledger", "thread_ledger")
TIMEOUT_S = 20.0
"""Timeout of a call."""
SLACK_S = 8.0
"""Tolerance beyond the timeout on a busy machine. A longer call counts as hung."""
QUEUE_S = 5.0
REQUEST_S = 6.0
"""Timeout of one request of the raw client."""
UNSURE = (CallTimeout, ServerUnreachable, StateUnavailable)
"""Errors after which the call can safely be repeated."""


class Book:
    """Records of all clients."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.hangs: list[str] = []
        self.opened = 0
        self.contradictions: list[str] = []
        self.errors: Counter[str] = Counter()
        """Calls that failed, by name and reason."""
        self.slowest: Counter[str] = Counter()
        self._last_answer = time.monotonic()
        self.longest_silence_s = 0.0

    def begin(self, session_id: str, seq: int) -> Step:
        """Add and return the record of a step before its request."""
        step = Step(nonce=secrets.token_hex(8), session_id=session_id, seq=seq)
        self.steps.append(step)
        return step

    def answered(self, step: Step, text: str) -> None:
        """Record an answer."""
        step.outcome, step.text = "answered", text
        now = time.monotonic()
        self.longest_silence_s = max(self.longest_silence_s, now - self._last_answer)
        self._last_answer = now

    async def timed(self, what: str, call: Awaitable[T], limit_s: float) -> T:
        """Await a call, and record a hang if it exceeds its time limit."""
        begin = time.monotonic()
        try:
            async with asyncio.timeout(limit_s + SLACK_S):
                return await call
        except TimeoutError:
            self.hangs.append(f"{what} was not back after {limit_s + SLACK_S:g} s")
            raise CallTimeout(f"{what} hung") from None
        except AgentRLError as error:
            self.errors[f"{what}: {type(error).__name__}"] += 1
            raise
        finally:
            self.slowest[what] = max(self.slowest[what], round(time.monotonic() - begin))


class Player(Protocol):
    """Plays one episode at a time."""

    async def episode(self) -> None:
        """Open a session, step it, and finish, close or abandon it."""


async def play_on(player: Player, until: asyncio.Event) -> None:
    """Play episodes until ``until`` is set, and complete the last episode."""
    while not until.is_set():
        try:
            await player.episode()
        except AgentRLError:
            await asyncio.sleep(0.2)


class SessionPlayer:
    """Plays through an ``EnvClient``.

    Args:
        name: Name of the client in the records.
        client: Several players can share a client. Their steps are then sent in batches.
        rng: Source of all random choices.
        book: Records to write to.
        think_s: Maximum delay between steps.
    """

    def __init__(self, name: str, client: EnvClient, rng: random.Random, book: Book, think_s: float) -> None:
        self._name = name
        self._client, self._rng, self._book, self._think_s = client, rng, book, think_s

    async def episode(self) -> None:
        """Open a session, step it, and finish, close or abandon it."""
        opening = self._client.open(
            self._rng.choice(TASKS), sample={"opening": secrets.token_hex(8)}, wait=QUEUE_S
        )
        session = await self._book.timed(f"{self._name} open", opening, TIMEOUT_S + QUEUE_S)
        self._book.opened += 1
        for _ in range(self._rng.randint(1, 25)):
            await asyncio.sleep(self._rng.uniform(0, self._think_s))
            if not await self._step(session, "add"):
                return
            if self._rng.random() < 0.02:
                await self._fork(session)
        await self._end(session)

    async def _end(self, session: ClientSession) -> None:
        way = self._rng.random()
        if way < 0.5:
            await self._step(session, "finish")
        elif way < 0.95:
            await self._book.timed(f"{self._name} close", session.close(), TIMEOUT_S)
        # otherwise the session is abandoned and expires

    async def _fork(self, session: ClientSession) -> None:
        forks = await self._book.timed(f"{self._name} fork", session.fork(2), TIMEOUT_S)
        self._book.opened += len(forks)
        for fork in forks:
            if await self._step(fork, "add") and await self._step(fork, "add"):
                await self._book.timed(f"{self._name} close", fork.close(), TIMEOUT_S)

    async def _step(self, session: ClientSession, tool: str) -> bool:
        """Take a step. Return True if the session continues."""
        record = self._book.begin(session.session_id, session.turn + 1)
        arguments: dict[str, Any] = {"nonce": record.nonce}
        if session.info.task == "slow_ledger" and tool == "add":
            arguments["seconds"] = self._rng.choice([0.01, 0.1, 0.5, 2.0])
        move = ToolCall.of(tool, **arguments)
        for _ in range(3):
            try:
                result = await self._book.timed(f"{self._name} step", session.step(move), TIMEOUT_S)
            except UNSURE as error:
                record.outcome = type(error).__name__
            except AgentRLError as error:
                record.outcome = type(error).__name__
                await self._poke(session, record, move)
                return False
            else:
                _enter(self._book, record, result)
                return not result.final
        return False

    async def _poke(self, session: ClientSession, record: Step, move: ToolCall) -> None:
        """Repeat a step that was reported lost, to verify that the session has ended."""
        await asyncio.sleep(self._rng.uniform(0, 3))
        try:
            result = await self._book.timed(f"{self._name} step", session.step(move), TIMEOUT_S)
        except AgentRLError:
            return
        record.after_loss = True
        _enter(self._book, record, result)


class RawPlayer:
    """Plays with raw HTTP requests, some repeated, concurrent or aborted.

    Args:
        urls: Controllers of one fleet.
        token: Token of the fleet.
        rng: Source of all random choices.
        book: Records to write to.
        think_s: Maximum delay between steps.
    """

    def __init__(
        self, urls: Sequence[str], token: str, rng: random.Random, book: Book, think_s: float
    ) -> None:
        self._urls, self._rng, self._book, self._think_s = urls, rng, book, think_s
        headers = {"authorization": f"Bearer {token}"}
        self._http = httpx.AsyncClient(timeout=REQUEST_S, headers=headers, trust_env=False)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def episode(self) -> None:
        """Open a session, step it, and finish, close or abandon it."""
        name = secrets.token_hex(8)
        wanted = {"task": self._rng.choice(TASKS), "sample": {"opening": name}, "request_id": name}
        answers = await self._ask("open", "POST", "/v1/sessions", wanted)
        ids = {answer["session_id"] for answer in answers}
        if len(ids) != 1:
            self._book.contradictions.append(f"one opening, {len(ids)} sessions: {sorted(ids)}")
        self._book.opened += 1
        session_id = answers[0]["session_id"]
        for seq in range(1, self._rng.randint(2, 20)):
            await asyncio.sleep(self._rng.uniform(0, self._think_s))
            if not await self._step(session_id, seq):
                return
        await self._ask("close", "DELETE", f"/v1/sessions/{session_id}", None)

    async def _step(self, session_id: str, seq: int) -> bool:
        record = self._book.begin(session_id, seq)
        move = ToolCall.of("add", nonce=record.nonce).model_dump()
        message = {"role": "assistant", "content": None, "tool_calls": [move]}
        body = {"seq": seq, "message": message}
        try:
            answers = await self._ask("step", "POST", f"/v1/sessions/{session_id}/step", body)
        except AgentRLError as error:
            record.outcome = type(error).__name__
            return False
        results = [StepResult.model_validate(answer) for answer in answers]
        if any(result != results[0] for result in results):
            self._book.contradictions.append(f"one step, several answers: {results}")
        _enter(self._book, record, results[0])
        return not results[0].final

    async def _ask(self, what: str, method: str, path: str, body: Any) -> list[Any]:
        """Repeat a request until it is answered. Return all successful answers, or raise the error."""
        return await self._book.timed(f"raw {what}", self._keep_asking(method, path, body), 3 * REQUEST_S)

    async def _keep_asking(self, method: str, path: str, body: Any) -> list[Any]:
        end = time.monotonic() + 2 * REQUEST_S
        while time.monotonic() < end:
            if self._rng.random() < 0.1:
                await self._hang_up(method, path, body)
            copies = self._rng.choice([1, 1, 2, 3])
            asking = [self._request(method, path, body) for _ in range(copies)]
            answers = await asyncio.gather(*asking)
            good = [answer for answer in answers if not isinstance(answer, AgentRLError | None)]
            if good:
                return good
            for answer in answers:
                if isinstance(answer, AgentRLError) and not isinstance(answer, UNSURE):
                    raise answer
            await asyncio.sleep(0.2)
        raise CallTimeout("no controller answered")

    async def _hang_up(self, method: str, path: str, body: Any) -> None:
        """Send a request and disconnect before its answer."""
        asking = asyncio.create_task(self._request(method, path, body))
        await asyncio.sleep(self._rng.uniform(0, 0.03))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    async def _request(self, method: str, path: str, body: Any) -> Any:
        """Return the answer, the error in the answer, or None without an answer."""
        url = self._rng.choice(self._urls)
        try:
            response = await self._http.request(method, url + path, json=body)
            if response.status_code == 204:
                return {}
            answer = response.json()
        except (httpx.HTTPError, ValueError):
            return None
        return answer if response.is_success else from_wire(answer)


def _enter(book: Book, record: Step, result: StepResult) -> None:
    """Record a result."""
    if result.status is SessionStatus.FAILED_ENVIRONMENT:
        record.outcome, record.text = "FailedEnvironment", str(result.info)
    else:
        book.answered(record, str(result.messages[0].content) if result.messages else "")
