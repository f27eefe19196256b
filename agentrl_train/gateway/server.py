"""The server of the APIs of OpenAI and Anthropic: sessions of agent programs, in front of one engine.

A session is one rollout. Its key is in the path, ``/s/KEY/v1``, which is a ``base_url`` for every client, or
it is the API key of ``/v1``. If any key can open a session, calls without a key share a session. The server
runs on the event loop of its owner.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from secrets import token_urlsafe
from typing import Annotated, Any

import uvicorn
from pydantic import BaseModel, Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agentrl_env.server.embedded import EmbeddedServer, until_disconnected
from agentrl_env.types import Message, ToolSpec
from agentrl_train.actor import MAX_TOKEN_CHARACTERS, NO_TOKENS, TIME_DIGITS
from agentrl_train.chat import ChatFormat
from agentrl_train.errors import ConfigError, ConstraintError, EngineError
from agentrl_train.gateway import chat_completions, responses
from agentrl_train.gateway import messages as anthropic
from agentrl_train.gateway.bodies import parse_body
from agentrl_train.gateway.chat_completions import ChatAnswer, ChatRequest, SamplingFields
from agentrl_train.gateway.constraints import constraints_of, unsupported
from agentrl_train.gateway.errors import (
    ContextTooLong,
    EngineUnavailable,
    GatewayError,
    InvalidRequest,
    SessionClosed,
    Unauthorized,
    UnknownSession,
    ignoring,
)
from agentrl_train.gateway.messages import MessageAnswer, MessagesRequest
from agentrl_train.gateway.recorder import Call, Recorder
from agentrl_train.gateway.responses import ResponseAnswer, ResponseRequest
from agentrl_train.tool_calls.grammars import Constraint
from agentrl_train.types import Sampler, Sampling

logger = logging.getLogger(__name__)

MAX_REWARD = 1e12
"""Largest magnitude of a reward or metric."""
RETRY_HEADER = "x-stainless-retry-count"
"""Header with the number of the retry, in every request of OpenAI's clients."""
NOTICE_S = 0.1
"""Time to detect a closed connection if a client gives up and repeats the request immediately."""
AGENT_HEADER = "x-agentrl-agent"
"""Header with the name of the calling agent, if a program has several."""
SHARED = "default"
"""Key of the session for calls without a key. It opens again after its end."""
_BEARER = re.compile(r"^bearer ", re.IGNORECASE)

_Number = Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD, allow_inf_nan=False)]


class Reward(BaseModel, extra="forbid"):
    """A reward, as a program posts, prints or returns it. A misspelt field is an error."""

    reward: _Number
    metrics: dict[str, _Number] = Field(default_factory=dict)


class Session:
    """The calls of one rollout.

    Args:
        key: its key.
        chat: chat format of the policy.
        sampler: samples the answers.
        stated: values that sampling parameters in requests must have; None allows any, without effect.
        ignored: parameters of requests that are not read.
    """

    def __init__(
        self,
        key: str,
        *,
        chat: ChatFormat,
        sampler: Sampler,
        stated: Sampling | None,
        ignored: Collection[str] = (),
    ) -> None:
        self.key = key
        self.chat = chat
        self.ignored = ignored
        self.recorder = Recorder(chat)
        self.rewarded = False
        """True if a reward was posted."""
        self.metrics: dict[str, float] = {}
        self.failure: EngineError | None = None
        """The last error of the engine, or None after it has answered again."""
        self.context_full = False
        """True if the context limit ended the last conversation: its answer was cut or its call rejected."""
        self.started = time.time()
        """Unix time of the start."""
        self.last_used = self._started_s = time.monotonic()
        self.closed = False
        self._sampler = sampler
        self._stated = stated
        self._compiling = asyncio.Lock()
        self._answers: dict[Call, asyncio.Task[None]] = {}
        self._waiting: dict[Call, int] = {}
        self._bodies: list[bytes] = []
        """Requests in progress."""
        self._conversations: dict[str, list[Message]] = {}

    @property
    def idle_s(self) -> float:
        """Seconds since the last call arrived or was answered, or 0 while one is in progress."""
        return 0.0 if self._bodies else time.monotonic() - self.last_used

    async def answer(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        *,
        limit: int | None,
        stop: tuple[str, ...],
        constraint: Constraint,
        request: Request,
        choice: int = 0,
        seed: int | None = None,
    ) -> Call:
        """Return the answered call of a request, or of one of its choices.

        Raises:
            GatewayError: there is no answer.
        """
        retried = request.headers.get(RETRY_HEADER, "0") not in ("", "0")
        options: Hashable = (limit, stop, constraint, choice, seed, request.url.path)
        body = await request.body()
        if not choice and body in self._bodies:
            await asyncio.sleep(NOTICE_S)
        agent = request.headers.get(AGENT_HEADER)
        self._raise_if_closed()
        self._check_size(messages)
        with _refusals():
            call, _ = self.recorder.begin(
                messages, tools, options=options, retried=retried, agent=agent, elapsed=self._elapsed()
            )
        for other, task in self._answers.items():
            if other not in other.conversation.calls:
                task.cancel()  # the conversation continued without its answer
        if call not in self._answers:
            sampling = self._sample(call, limit=limit, seed=seed, stop=stop, constraint=constraint)
            task = asyncio.create_task(sampling)
            # The error of a lost call is not read by any client.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._answers[call] = task
        self._bodies.append(body)
        try:
            await self._until_answered(call, request)
        finally:
            self._bodies.remove(body)
            self.last_used = time.monotonic()
        self._raise_if_closed()
        return call

    def count(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> int:
        """Return the number of tokens in front of an answer. Raises ``InvalidRequest``."""
        self._check_size(messages)
        with _refusals():
            return self.recorder.count(messages, tools)

    def reward(self, given: Reward) -> None:
        """Add a reward and metrics. Raises ``InvalidRequest`` before the first answer."""
        self._raise_if_closed()
        try:
            self.recorder.reward(given.reward)
        except ValueError as error:
            raise InvalidRequest(str(error), param="reward") from error
        self.rewarded = True
        self.metrics |= given.metrics

    def check_sampling(self, request: SamplingFields) -> None:
        """Raise ``InvalidRequest`` if a request sets other sampling parameters than the run's."""
        if self._stated is None:
            return
        for name, value in request.stated().items():
            if value != (own := getattr(self._stated, name)):
                raise InvalidRequest(
                    f"{name} = {value:g} differs from the run's, {own:g}, with which log-probabilities are "
                    f"recorded and trained: leave it out, set engine.{name} = {value:g}, or {ignoring(name)}",
                    param=name,
                )

    def earlier(self, response_id: str) -> list[Message]:
        """Return the conversation up to a response. Raises ``InvalidRequest`` if no response has this id."""
        if response_id not in self._conversations:
            raise InvalidRequest(
                f"there is no response {response_id!r} in this session", param="previous_response_id"
            )
        return self._conversations[response_id]

    def keep(self, response_id: str, messages: list[Message]) -> None:
        """Keep the conversation up to a response."""
        self._conversations[response_id] = messages

    async def finish(self) -> None:
        """Reject further calls, and return once the calls in progress are answered."""
        self.closed = True
        await asyncio.gather(*self._answers.values(), return_exceptions=True)

    async def close(self) -> None:
        """Stop answering calls. Idempotent."""
        self.closed = True
        tasks = list(self._answers.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _elapsed(self) -> float:
        return round(time.monotonic() - self._started_s, TIME_DIGITS)

    def _raise_if_closed(self) -> None:
        if self.closed:
            raise SessionClosed(f"the session {self.key!r} is closed: its episode is over")

    def _check_size(self, messages: Sequence[Message]) -> None:
        """Raise ``ContextTooLong`` for messages that no context can hold.

        Tokenizing them would block the event loop, and with it all other episodes.
        """
        texts = [str(one.content or "") for one in messages]
        texts += [call.function.arguments for one in messages for call in one.tool_calls or ()]
        size, most = sum(map(len, texts)), MAX_TOKEN_CHARACTERS * self._sampler.sampling.max_context
        if size > most:
            raise self._full(f"{size} characters > {most} maximum")

    def _full(self, length: str) -> ContextTooLong:
        """Note that the context is full, and return the error."""
        self.context_full = True
        # Clients recognize a full context by Anthropic's words, "prompt is too long".
        return ContextTooLong(
            f"prompt is too long: {length}: end the episode, shorten the messages, or raise "
            "engine.max_context",
            param="messages",
        )

    async def _sample(
        self, call: Call, *, limit: int | None, seed: int | None, stop: Sequence[str], constraint: Constraint
    ) -> None:
        most = self._sampler.sampling.max_context
        try:
            if len(call.context) >= most:
                raise self._full(f"{len(call.context)} tokens > {most} maximum")
            async with self._compiling:  # one after another, because the sampler draws seeds in this order
                grammar = await self._grammar(call, constraint) if constraint else ""
            segment = call.conversation.number
            try:
                completion = await self._sampler.complete(
                    call.context, max_new_tokens=limit, segment=segment, grammar=grammar, seed=seed
                )
                if not completion.token_ids:
                    raise EngineError(NO_TOKENS)
            except ConstraintError as error:
                raise unsupported(constraint, str(error)) from error
            except EngineError as error:
                self.failure = error
                raise EngineUnavailable(str(error)) from error
            self.failure = None
            call.text_only = constraint.calls == "none"
            self.recorder.finish(call, completion, stop=stop, elapsed=self._elapsed())
            self.context_full = call.cut and len(call.tokens) >= most
            if self.context_full:
                call.invalid_calls = 0  # the policy did not write the end
        except BaseException:
            self.recorder.fail(call)
            self._answers.pop(call, None)
            raise

    async def _grammar(self, call: Call, constraint: Constraint) -> str:
        """Return the grammar of an answer. Runs on a thread, because the first one reads the vocabulary."""
        compiler, tools = constraints_of(self.chat), call.conversation.tools
        return await asyncio.to_thread(compiler.grammar, constraint, tools, context=call.context)

    async def _until_answered(self, call: Call, request: Request) -> None:
        """Return once a call is answered. It is lost if the client no longer waits for the answer."""
        task = self._answers[call]
        self._waiting[call] = self._waiting.get(call, 0) + 1
        gone = asyncio.create_task(until_disconnected(request))
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise SessionClosed("the client disconnected")
            if task.cancelled():
                raise SessionClosed(f"the session {self.key!r} is closed: its episode is over")
            task.result()
        finally:
            self._waiting[call] -= 1
            call.lost = (gone.done() or not task.done()) and not self._waiting[call]
            gone.cancel()
            await asyncio.wait((gone,))


@contextmanager
def _refusals() -> Iterator[None]:
    """Convert any exception of a chat template to ``InvalidRequest``."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise InvalidRequest(
            f"the chat template of the policy cannot render the messages ({reason})", param="messages"
        ) from error


class Gateway:
    """The server, an asynchronous context manager. It serves inside the context.

    Args:
        host: address to bind.
        port: port to bind; 0 picks a free one.
        model: name of the model in its list.
        unknown: opens a session for an unknown key, and allows clients to end sessions. None answers 404.
        ended: called with every closed session.
        token: API key that all requests need; None requires only the session's key.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        model: str = "policy",
        unknown: Callable[[Gateway, str], Session] | None = None,
        ended: Callable[[Session], Awaitable[None]] | None = None,
        token: str | None = None,
    ) -> None:
        self.sessions: dict[str, Session] = {}
        self._model = model
        self._unknown = unknown
        self._ended = ended
        self._token = token
        self._ports = (host, port)
        self._created = int(time.time())
        self._closed: set[str] = set()
        self.url = ""

    async def __aenter__(self) -> Gateway:
        """Start to serve. Raises ``ConfigError`` if the address cannot be bound."""
        host, port = self._ports
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((host, port))
        except OSError as error:
            bound.close()
            raise ConfigError(f"the gateway cannot listen at {host}:{port}: {error}") from error
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{bound.getsockname()[1]}"
        config = uvicorn.Config(
            self._app(),
            log_config=None,
            log_level="critical",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        self._server = EmbeddedServer(config)
        await self._server.start(bound)
        return self

    async def __aexit__(self, *error: object) -> None:
        """Close all sessions and stop."""
        for session in list(self.sessions.values()):
            await self.close(session)
        await self._server.stop()

    def open(self, *, key: str | None = None, **options: Any) -> Session:
        """Open a session with the arguments of ``Session``. Without a key, draw a random key."""
        session = Session(key or token_urlsafe(16), **options)
        self.sessions[session.key] = session
        return session

    async def close(self, session: Session) -> None:
        """Close a session. Later calls are answered with 410. Idempotent."""
        if self.sessions.pop(session.key, None) is None:
            return
        if session.key != SHARED:
            self._closed.add(session.key)
        await session.close()
        if self._ended is not None:
            await self._ended(session)

    def base_url(self, session: Session) -> str:
        """Return the ``base_url`` for clients of a session."""
        return f"{self.url}/s/{session.key}/v1"

    def _app(self) -> Starlette:
        calls: Mapping[str, tuple[str, Callable[[Request, Session], Awaitable[Response]]]] = {
            "/chat/completions": ("POST", self._chat_completions),
            "/responses": ("POST", self._responses),
            "/messages": ("POST", self._messages),
            "/messages/count_tokens": ("POST", self._count_tokens),
            "/reward": ("POST", self._reward),
            "/end": ("POST", self._end),
        }
        routes = []
        # Anthropic's clients append /v1 even to a base_url that already has it.
        for prefix in ("/s/{key}/v1", "/v1", "/s/{key}/v1/v1", "/v1/v1"):
            for path, (method, answer) in calls.items():
                routes.append(Route(prefix + path, self._within_session(answer), methods=[method]))
            routes.append(Route(prefix + "/models", self._models))
            routes.append(Route(prefix + "/models/{model:path}", self._models))
        handlers: Any = {GatewayError: _error, HTTPException: _http_error, Exception: _bug}
        return Starlette(routes=routes, exception_handlers=handlers)

    def _within_session(
        self, answer: Callable[[Request, Session], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            session = self._session(request)
            session.last_used = time.monotonic()
            return await answer(request, session)

        return handle

    def _session(self, request: Request) -> Session:
        stated = request.headers.get("x-api-key") or request.headers.get("authorization", "")
        bearer = _BEARER.sub("", stated).strip()
        key = request.path_params.get("key")
        if self._token is not None and bearer != self._token:
            raise Unauthorized("the API key is not the token of this gateway: use it as the client's API key")
        key = key or (bearer if self._token is None else "") or (SHARED if self._unknown else "")
        if key in self._closed:
            advice = "; use another key for the next" if self._unknown else ""
            raise SessionClosed(f"the session {key!r} is closed: its episode is over{advice}")
        if key not in self.sessions:
            if self._unknown is None or not key:
                raise UnknownSession(
                    f"there is no session {key!r}: use the base_url that the program was given, /s/KEY/v1"
                )
            self._unknown(self, key)
        return self.sessions[key]

    async def _chat_completions(self, request: Request, session: Session) -> Response:
        asked = await parse_body(
            request, ChatRequest, fields=chat_completions.FIELDS, ignored=session.ignored
        )
        asked.check()
        session.check_sampling(asked)
        messages = asked.conversation
        calls = [
            session.answer(
                messages,
                asked.specs,
                limit=asked.limit,
                stop=asked.stops,
                constraint=asked.constraint,
                choice=choice,
                seed=None if asked.seed is None else asked.seed + choice,
                request=request,
            )
            for choice in range(asked.n or 1)
        ]
        answer = ChatAnswer(await _all(calls), request=asked, chat=session.chat, created=int(time.time()))
        if not asked.stream:
            return JSONResponse(answer.body())
        lines = (f"data: {json.dumps(chunk)}\n\n" for chunk in answer.chunks())
        return _stream([*lines, "data: [DONE]\n\n"])

    async def _responses(self, request: Request, session: Session) -> Response:
        asked = await parse_body(request, ResponseRequest, fields=responses.FIELDS, ignored=session.ignored)
        session.check_sampling(asked)
        previous = asked.previous_response_id
        earlier = session.earlier(previous) if previous else []
        messages = asked.messages(earlier)
        call = await session.answer(
            messages,
            asked.specs,
            limit=asked.max_output_tokens,
            stop=(),
            constraint=asked.constraint,
            request=request,
        )
        answer = ResponseAnswer(call, request=asked, created=int(time.time()))
        session.keep(answer.id, [*messages[bool(asked.instructions) :], call.message])
        if not asked.stream:
            return JSONResponse(answer.body())
        return _stream(_events(answer.events()))

    async def _messages(self, request: Request, session: Session) -> Response:
        asked = await parse_body(request, MessagesRequest, fields=anthropic.FIELDS, ignored=session.ignored)
        asked.check()
        session.check_sampling(asked)
        call = await session.answer(
            asked.conversation,
            asked.specs,
            limit=asked.max_tokens,
            stop=asked.stops,
            constraint=asked.constraint,
            request=request,
        )
        answer = MessageAnswer(call, request=asked, chat=session.chat)
        return _stream(_events(answer.events())) if asked.stream else JSONResponse(answer.body())

    async def _count_tokens(self, request: Request, session: Session) -> Response:
        asked = await parse_body(request, MessagesRequest, fields=anthropic.FIELDS, ignored=session.ignored)
        return JSONResponse({"input_tokens": session.count(asked.conversation, asked.specs)})

    async def _reward(self, request: Request, session: Session) -> Response:
        session.reward(await parse_body(request, Reward))
        return JSONResponse({"ok": True})

    async def _end(self, request: Request, session: Session) -> Response:
        if self._unknown is None:
            raise InvalidRequest("the run ends a session once its program has ended: remove this call")
        await self.close(session)
        return JSONResponse({"ok": True})

    async def _models(self, request: Request) -> Response:
        model = {"id": self._model, "object": "model", "created": self._created, "owned_by": "agentrl"}
        if name := request.path_params.get("model"):
            return JSONResponse(model | {"id": name})
        return JSONResponse({"object": "list", "data": [model]})


async def _all(calls: Sequence[Coroutine[Any, Any, Call]]) -> list[Call]:
    """Return the answers of all choices. If one fails, the others are lost."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _events(events: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield events as server-sent events with their names."""
    for one in events:
        yield f"event: {one['type']}\ndata: {json.dumps(one)}\n\n"


def _stream(lines: Iterator[str] | Sequence[str]) -> Response:
    async def content() -> AsyncIterator[str]:
        for line in lines:
            yield line

    return StreamingResponse(content(), media_type="text/event-stream")


def _error_response(request: Request, error: GatewayError, *, status: int | None = None) -> Response:
    status = status or error.status
    of_anthropic = "/messages" in request.url.path
    body = anthropic.error_body(error, status=status) if of_anthropic else error.body()
    return JSONResponse(body, status_code=status)


async def _error(request: Request, error: GatewayError) -> Response:
    return _error_response(request, error)


async def _http_error(request: Request, error: HTTPException) -> Response:
    message = f"{request.method} {request.url.path}: {error.detail}"
    if error.status_code == 404:
        message += "; below the base_url, /s/KEY/v1, are chat/completions, responses, messages and models"
    return _error_response(request, InvalidRequest(message), status=error.status_code)


async def _bug(request: Request, error: Exception) -> Response:
    logger.exception("a request of %s failed", request.url.path, exc_info=error)
    return _error_response(request, GatewayError(f"{type(error).__name__}: {error}"))
