"""Parses, authorizes, limits, counts and answers the calls of the protocol.

Calls arrive over HTTP and the WebSocket. Calls over a controller's link are not authorized.
"""

from __future__ import annotations

import asyncio
from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json, to_json

from agentrl_env.errors import BodyTooLarge, Forbidden, InvalidRequest, NotSupported, WireError, explain
from agentrl_env.fast_wire import (
    UNREADABLE,
    FastBatch,
    FastStep,
    Step,
    decode_batch,
    decode_step,
    decode_step_body,
    encode_items,
)
from agentrl_env.server.auth import AgentTokens, Caller
from agentrl_env.server.limits import SMALL_BYTES, Limits
from agentrl_env.server.service import Service
from agentrl_env.server.telemetry.history import History
from agentrl_env.server.telemetry.metrics import Metrics
from agentrl_env.session.observer import as_wire_error
from agentrl_env.types import SessionInfo, StepResult
from agentrl_env.wire import (
    CALLS,
    CLOSE,
    FLEET,
    FORK,
    INFO,
    OPEN,
    OPEN_MANY,
    RENEW,
    REVOKE,
    STEP,
    STEP_MANY,
    AgentToken,
    Call,
    FleetQuery,
    ForkRequest,
    OpenBatch,
    OpenRequest,
    SessionRequest,
    StepBatch,
    StepBody,
    StepRequest,
    payload_digest,
    siblings,
)

M = TypeVar("M", bound=BaseModel)
Handler = Callable[[Any, Caller], Coroutine[Any, Any, bytes]]

_HIDDEN: dict[type[BaseModel], Any] = {
    StepResult: {"metrics": True, "info": True},
    SessionInfo: {
        "sample": {"data": True, "seed": True},
        "last": {"metrics": True, "info": True},
        "info": True,
    },
}
"""Fields that are omitted from answers to agent tokens, because they might reveal the solution."""
MAX_MALFORMED = 64
"""Maximum number of malformed steps in a batch. With more of them, no step is played."""


class Api:
    """Answers the calls of one application.

    Args:
        service: the sessions.
        metrics: counts calls and errors.
        limits: limits of one caller. None for a controller's link, whose calls are not authorized one by one.
        tokens: issues the agent tokens that are returned with opened sessions. None disables them.
        history: history of the process. None for a controller's link, which never requests it.
    """

    def __init__(
        self,
        service: Service,
        metrics: Metrics,
        limits: Limits | None = None,
        tokens: AgentTokens | None = None,
        history: History | None = None,
    ) -> None:
        self.service = service
        self.metrics = metrics
        self._history = history
        self._limits = limits
        self._tokens = tokens
        self._handlers: dict[str, Handler] = {name: partial(self._forward, name) for name in CALLS}
        """The function that answers each call after the caller is admitted."""
        self._handlers |= {
            STEP.name: self._step,
            STEP_MANY.name: self._step_batch,
            OPEN.name: self._open_or_siblings,
            OPEN_MANY.name: self._open_batch,
            FORK.name: self._fork,
            INFO.name: self._info,
            CLOSE.name: self._close,
            FLEET.name: self._fleet,
            RENEW.name: self._renew,
            REVOKE.name: self._revoke,
        }

    @property
    def secured(self) -> bool:
        """True if callers need a token."""
        return self._tokens is not None

    def answer(self, call: Call, request: Any, who: Caller) -> Coroutine[Any, Any, bytes]:
        """Make a call and return its answer as JSON. Raises WireError."""
        self._admit(call, who, getattr(request, "session_id", None))
        return self._handlers[call.name](request, who)

    async def answer_json(
        self, call: Call, text: bytes | str, who: Caller, session_id: str | None = None
    ) -> bytes:
        """Make a call with arguments in JSON text. Unknown fields are ignored. Raises WireError.

        Args:
            call: row of ``CALLS``.
            text: HTTP body.
            who: the caller.
            session_id: session in the HTTP path. None if the text contains it.
        """
        self.check_values(text, who)
        if isinstance(text, bytes):
            text = text.removeprefix(BOM_UTF8)
        return await self.answer_checked(call, text, who, session_id)

    async def answer_checked(
        self, call: Call, text: bytes | str, who: Caller, session_id: str | None = None
    ) -> bytes:
        """Make a call like ``answer_json``, with a text that has passed ``check_values``."""
        if call is STEP:
            return await self.answer(call, read_step(text, session_id), who)
        if call is STEP_MANY:
            return await self._answer_batch(text, who)
        if call is OPEN and (number := _batch_size(text)) is not None:
            self._check_openings(number)
            call = OPEN_MANY
        if session_id is None:
            return await self.answer(call, read(call.request, text), who)
        fields = dict(read(call.body, text)) if call.body is not None else {}
        return await self.answer(call, call.request.model_construct(**fields, session_id=session_id), who)

    def check_values(self, text: bytes | str, who: Caller) -> None:
        """Raise InvalidRequest if a call's JSON holds too many values to be parsed."""
        if self._limits is None:
            return
        try:
            self._limits.check_values(text, agent=who.session_id is not None)
        except InvalidRequest:
            self.metrics.refusals["max_values"] += 1
            raise

    @asynccontextmanager
    async def receiving(self, text: str, who: Caller) -> AsyncIterator[None]:
        """Check a WebSocket message of another protocol and charge it to its caller's budget.

        Raises BodyTooLarge, RateLimited, InvalidRequest.
        """
        if self._limits is not None:
            limit = self._limits.max_bytes(agent=who.session_id is not None)
            if len(text) > limit:
                raise BodyTooLarge(f"the message exceeds the limit of {limit} bytes")
        if who.budget is None or len(text) <= SMALL_BYTES:
            self.check_values(text, who)
            yield
            return
        async with who.budget.large(len(text)):
            self.check_values(text, who)
            yield

    def count(self, error: WireError) -> None:
        """Count an error that is returned to a caller."""
        self.metrics.errors[error.type] += 1

    async def _forward(self, name: str, request: BaseModel, who: Caller) -> bytes:
        return _to_json(await getattr(self.service, name)(request))

    async def _step(self, request: Step, who: Caller) -> bytes:
        if self._limits is not None:
            self._limits.check_message(request.message)
        return _seen_by(who, await self.service.step(request), StepResult)

    async def _step_batch(self, request: FastBatch | StepBatch, who: Caller) -> bytes:
        results = await self._step_many(request, who)
        if who.session_id is not None:
            results = [_item_seen_by(who, result) for result in results]
        return encode_items("results", results)

    async def _info(self, request: SessionRequest, who: Caller) -> bytes:
        return _seen_by(who, await self._forward(INFO.name, request, who), SessionInfo)

    async def _fleet(self, request: FleetQuery, who: Caller) -> bytes:
        fleet = await self.service.fleet(request)
        if request.since is not None and self._history is not None:
            fleet = fleet.model_copy(update={"history": self._history.since(request.since)})
        return _to_json(fleet)

    async def _close(self, request: SessionRequest, who: Caller) -> bytes:
        if self._tokens is not None:
            self._tokens.close(request.session_id)
        return await self._forward(CLOSE.name, request, who)

    async def _fork(self, request: ForkRequest, who: Caller) -> bytes:
        if self._limits is not None and request.n > self._limits.max_forks:
            raise InvalidRequest(f"n: {request.n} forks in one call; at most {self._limits.max_forks}")
        return self._with_tokens(await self._forward(FORK.name, request, who))

    async def _renew(self, request: SessionRequest, who: Caller) -> bytes:
        return _to_json(AgentToken(agent_token=await self._new_token(request)))

    async def _revoke(self, request: SessionRequest, who: Caller) -> bytes:
        await self._new_token(request)
        return _to_json(None)

    async def _answer_batch(self, text: bytes | str, who: Caller) -> bytes:
        """Step a batch. Malformed items get an error, the others are played."""
        try:
            batch = decode_batch(text)
        except UNREADABLE:
            return await self._answer_malformed_batch(_json(text), who)
        return await self.answer(STEP_MANY, batch, who)

    async def _answer_malformed_batch(self, raw: Any, who: Caller) -> bytes:
        items = raw.get("steps") if isinstance(raw, dict) else None
        if not isinstance(items, list):
            raise InvalidRequest('the body must be {"steps": [...]}')
        wait_s = validate(StepBatch, {**raw, "steps": []}).wait_s
        steps: list[StepRequest | WireError] = []
        malformed = 0
        for item in items:
            try:
                steps.append(validate(StepRequest, item))
            except InvalidRequest as error:
                steps.append(error)
                malformed += 1
                if malformed > MAX_MALFORMED:
                    raise InvalidRequest(f"over {MAX_MALFORMED} malformed steps: {error.message}") from error
        self._admit(STEP_MANY, who, None)
        good = StepBatch.model_construct(
            steps=[step for step in steps if not isinstance(step, WireError)], wait_s=wait_s
        )
        played = iter(await self._step_many(good, who))
        answers = [step if isinstance(step, WireError) else next(played) for step in steps]
        for step in steps:
            if isinstance(step, WireError):
                self.count(step)
        return encode_items("results", answers)

    async def _step_many(self, request: FastBatch | StepBatch, who: Caller) -> Sequence[bytes | WireError]:
        steps: Sequence[Step] = request.steps
        own = who.session_id
        if own is not None and any(step.session_id != own for step in steps):
            raise Forbidden("an agent token may step its own session only")
        limits = self._limits
        if limits is None:
            return await self.play_batch(request)
        if len(steps) > limits.max_batch_steps:
            raise InvalidRequest(f"{len(steps)} steps in a batch; at most {limits.max_batch_steps}")
        refused: dict[int, WireError] = {}
        for position, step in enumerate(steps):
            try:
                limits.check_message(step.message)
            except InvalidRequest as error:
                self.count(error)
                refused[position] = error
        if not refused:
            return await self.play_batch(request)
        good: list[Any] = [step for position, step in enumerate(steps) if position not in refused]
        played = iter(await self.play_batch(FastBatch(good, request.wait_s)))
        return [refused.get(position) or next(played) for position in range(len(steps))]

    async def play_batch(self, request: FastBatch | StepBatch) -> Sequence[bytes | WireError]:
        """Step a batch that is within the limits, and count the errors."""
        answers = await self.service.step_many(request)
        for answer in answers:
            if not isinstance(answer, bytes):
                self.count(answer)
        return answers

    def _bound(self, request: OpenRequest) -> OpenRequest:
        """Return the opening with the digest to which its ``request_id`` is bound."""
        if self._limits is None:  # the controller has already set the digest
            return request
        return request.model_copy(update={"digest": payload_digest(request)})

    async def _open_batch(self, request: OpenBatch, who: Caller) -> bytes:
        return encode_items("sessions", await self._open_many([*map(self._bound, request.sessions)], who))

    async def _open_or_siblings(self, request: OpenRequest, who: Caller) -> bytes:
        request = self._bound(request)
        if request.n is None:
            return await self._open(request, who)
        self._check_openings(request.n)
        return encode_items("sessions", await self._open_many(siblings(request, request.n), who))

    async def _open_many(self, requests: Sequence[OpenRequest], who: Caller) -> list[bytes | WireError]:
        self._check_openings(len(requests))
        openings = (self._open(request, who) for request in requests)
        answers: list[bytes | WireError] = []
        for outcome in await asyncio.gather(*openings, return_exceptions=True):
            if isinstance(outcome, Exception):
                outcome = as_wire_error(outcome)
                self.count(outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
            answers.append(outcome)
        return answers

    async def _open(self, request: OpenRequest, who: Caller) -> bytes:
        if self._limits is not None and request.sample is not None:
            self._limits.measure(request.sample, "sample")
        if not request.client:
            request = request.model_copy(update={"client": who.name})
        return self._with_tokens(_to_json(await self.service.open(request)))

    def _admit(self, call: Call, who: Caller, session_id: str | None) -> None:
        """Authorize and count a call. Raises Forbidden, RateLimited."""
        if self._limits is not None:
            who.admit(call, session_id)
        self.metrics.calls[call.name] += 1

    def _check_openings(self, number: int) -> None:
        if self._limits is not None and number > self._limits.max_batch_opens:
            raise InvalidRequest(f"{number} sessions in one call; at most {self._limits.max_batch_opens}")

    def _with_tokens(self, answer: bytes) -> bytes:
        """Add the agent token of each session to the answer of ``open`` or ``fork``."""
        if self._tokens is None:
            return answer
        fields: dict[str, Any] = from_json(answer)
        for info in fields.get("sessions", (fields,)):
            info["agent_token"] = self._tokens.issue(info["session_id"])
        return to_json(fields)

    async def _new_token(self, request: SessionRequest) -> str:
        """Revoke the agent tokens of a known session and return a new one."""
        if self._tokens is None:
            raise NotSupported("this server has no operator token, so it issues no agent tokens")
        await self.service.info(request)
        return await self._tokens.renew(request.session_id)


def _seen_by(who: Caller, answer: bytes, model: type[BaseModel]) -> bytes:
    """Return an answer as JSON. For an agent token, omit the fields that the model must not see."""
    if who.session_id is None:
        return answer
    return model.model_validate_json(answer).model_dump_json(exclude=_HIDDEN[model]).encode()


def _item_seen_by(who: Caller, item: bytes | WireError) -> bytes | WireError:
    """Return an item of a batch without hidden fields. A controller passes errors on as JSON."""
    if isinstance(item, WireError) or item.startswith(b'{"error":'):
        return item
    return _seen_by(who, item, StepResult)


def read(model: type[M], text: bytes | str) -> M:
    """Parse JSON text. Raises InvalidRequest."""
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        if text[:2] == _GZIP:
            raise InvalidRequest("the body is compressed with gzip; send plain JSON") from error
        raise InvalidRequest(explain(error)) from error


def validate(model: type[M], data: object) -> M:
    """Validate plain values. Raises InvalidRequest."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise InvalidRequest(explain(error)) from error


def call_named(name: str) -> Call:
    """Return the row of a call. Raises InvalidRequest."""
    call = CALLS.get(name)
    if call is None:
        raise InvalidRequest(f"call: unknown call {name!r}; calls: {', '.join(CALLS)}")
    return call


def read_step(text: bytes | str, session_id: str | None) -> Step:
    """Parse a step. If ``session_id`` is None, read it from the text. Raises InvalidRequest."""
    try:
        if session_id is None:
            return decode_step(text)
        body = decode_step_body(text)
    except UNREADABLE:
        if session_id is None:
            return read(StepRequest, text)
        slow = read(StepBody, text)
        return StepRequest.model_construct(session_id=session_id, seq=slow.seq, message=slow.message)
    return FastStep(session_id, body.seq, body.message)


_GZIP = b"\x1f\x8b"
"""First bytes of gzip data."""


class _Sessions(msgspec.Struct):
    sessions: list[msgspec.Raw] | msgspec.UnsetType = msgspec.UNSET


def _batch_size(text: bytes | str) -> int | None:
    """Return the number of sessions that a body opens, or None if it has no ``sessions``."""
    try:
        sessions = msgspec.json.decode(text, type=_Sessions).sessions
    except msgspec.ValidationError:  # not a list, which reading the body reports
        return 0
    except UNREADABLE:
        return None
    return None if isinstance(sessions, msgspec.UnsetType) else len(sessions)


def _json(text: bytes | str) -> Any:
    try:
        return from_json(text)
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error


def _to_json(answer: BaseModel | bytes | None) -> bytes:
    if isinstance(answer, bytes):
        return answer
    return b"null" if answer is None else answer.model_dump_json().encode()
