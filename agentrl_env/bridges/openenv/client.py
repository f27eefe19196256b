"""An OpenEnv server as a task: ``agentrl-env serve openenv+http://host:8000``.

Each session has its own WebSocket with one request at a time, because OpenEnv's protocol has no request ids.
After a timeout, the socket is closed and the session fails, so a late answer never reaches a later step. At
startup, two episodes with the same seed are compared. A server that ignores seeds is reported in the log and
by the metric ``seed_ignored`` of every episode.

An episode that ends without truncation fails if the server gave no reward in any step, unless
``missing_reward`` is set.

Options follow the address: ``openenv+http://host:8000#name=chess&max_turns=40``. Instead of an address,
``openenv+docker:IMAGE`` names an image. Its server runs in a container that ends with the task.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import re
from contextlib import suppress
from typing import Annotated, Any, ClassVar
from urllib.parse import parse_qsl, urldefrag

import httpx
from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from agentrl_env.bridges.foreign_tools import ForeignTool, tools_of
from agentrl_env.client.loop_thread import LoopThread
from agentrl_env.environment import Environment
from agentrl_env.errors import ServerFull, TargetError, ToolError
from agentrl_env.launch.docker import ContainerLimits, DockerService
from agentrl_env.tools import Done, Reply
from agentrl_env.types import TaskSample

logger = logging.getLogger("agentrl_env")

TOOL_ACTIONS = {"Action", "CallToolAction", "ListToolsAction"}
"""Titles of action schemas if actions are tool calls."""
LOAD_S, CONNECT_S = 30.0, 10.0
START_S = 300.0
"""Seconds for the server of an image to start."""
MAX_BYTES = 100 * 1024 * 1024
RETRY_S = (0.1, 2.0)
"""Shortest and longest pause before retrying a full server."""
ENVELOPE = {"done", "reward", "metadata"}
"""Fields of an observation that the model does not see."""


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


OPTIONS = {"name": str, "max_turns": int, "tool_timeout": float, "missing_reward": _finite}
"""Options of a target. They set attributes of the class."""
IMAGE = "docker:"
IMAGE_OPTIONS = {"memory": str, "cpus": float}
"""Additional options of an image: the limits of its container."""


def load(address: str) -> type[OpenEnvTask]:
    """Return the class of the environment at an address or in an image. Raises TargetError, LaunchError."""
    url, fragment = urldefrag(address)
    known: dict[str, Any] = {**OPTIONS, **(IMAGE_OPTIONS if url.startswith(IMAGE) else {})}
    options: dict[str, Any] = {}
    for name, text in parse_qsl(fragment):
        if name not in known:
            raise TargetError(f"openenv: there is no option {name!r}; there are {', '.join(known)}")
        try:
            options[name] = known[name](text)
        except ValueError as error:
            raise TargetError(f"openenv: option {name}: {error}") from error
    if not url.startswith(IMAGE):
        return openenv_task(url, **options)
    given = {name: options.pop(name) for name in IMAGE_OPTIONS if name in options}
    try:
        limits = ContainerLimits(**given)
    except ValueError as error:
        raise TargetError(f"openenv: {error}") from error
    service = DockerService(url.removeprefix(IMAGE), limits=limits, start_timeout=START_S)
    options["reset_timeout"] = START_S + LOAD_S  # ``startup`` might start it again
    try:
        return openenv_task(service.start().url, service=service, **options)
    except BaseException:
        service.stop()
        raise


def openenv_task(url: str, **attributes: Any) -> type[OpenEnvTask]:
    """Return a class whose sessions are episodes of an OpenEnv server.

    Args:
        url: address of the server.
        attributes: attributes of the class, such as ``name``, ``max_turns`` or ``headers``.

    Raises TargetError if no OpenEnv server answers.
    """
    url = url.rstrip("/")
    loop = LoopThread()
    try:
        return loop.run(_describe(url, attributes), LOAD_S)
    except (httpx.HTTPError, OSError, WebSocketException, TimeoutError, ToolError) as error:
        reason = str(error) or type(error).__name__
        raise TargetError(f"{url}: cannot reach an OpenEnv server: {reason}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise TargetError(f"{url}: does not describe itself like an OpenEnv server: {reason}") from error
    finally:
        loop.close()


async def _describe(url: str, attributes: dict[str, Any]) -> type[OpenEnvTask]:
    headers = attributes.get("headers", {})
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=CONNECT_S) as http:
        action = (await _get(http, "/schema"))["action"]
        about = await _get(http, "/metadata")
        splits = await _splits(http)
    if action.get("title") in TOOL_ACTIONS:
        socket = OpenEnvSocket(url, headers)
        try:
            listed = await socket.ask("step", {"type": "list_tools"})
        finally:
            await socket.close()
        tools = [
            ForeignTool(
                name=tool["name"],
                description=tool.get("description") or "",
                schema=tool.get("input_schema", tool.get("inputSchema")) or {},
            )
            for tool in listed.observation["tools"]
        ]
    else:
        shown = {key: value for key, value in action.get("properties", {}).items() if key != "metadata"}
        about_step = action.get("description") or "Take a step."
        tools = [ForeignTool(name="step", description=about_step, schema={**action, "properties": shown})]
    name = re.sub(r"\W+", "_", str(about.get("name") or "openenv")).strip("_").lower()
    fields = {
        "__doc__": about.get("description") or "",
        "name": name or "openenv",
        "url": url,
        "direct": action.get("title") not in TOOL_ACTIONS,
        "unknown": set(),
        **({"splits": tuple(splits), "sizes": splits} if splits else {}),
        **tools_of(url, tools, OpenEnvTask.play),
        **attributes,
    }
    return type("OpenEnvServer", (OpenEnvTask,), fields)


async def _get(http: httpx.AsyncClient, path: str) -> Any:
    answer = await http.get(path)
    return answer.raise_for_status().json()


async def _splits(http: httpx.AsyncClient) -> dict[str, int]:
    """Return the sizes of the splits of a server with OpenEnv's task API, or nothing without this API."""
    names = await http.get("/list_environments")
    if not names.is_success or not names.json():
        return {}
    name, sizes = names.json()[0], {}
    splits = await http.get(f"/{name}/splits")
    for split in splits.json() if splits.is_success else ():
        counted = await http.post(f"/{name}/num_tasks", json={"split": split["name"]})
        if counted.is_success:
            sizes[split["name"]] = int(counted.json()["num_tasks"])
    return sizes


class OpenEnvTask(Environment):
    """The episodes of an OpenEnv server. ``openenv_task`` creates a class for each server."""

    max_turns = 100
    url: ClassVar[str] = ""
    headers: ClassVar[dict[str, str]] = {}
    """Headers of every request, such as ``Authorization``."""
    direct: ClassVar[bool] = False
    """True if the task has a single tool, with an action's fields as arguments."""
    sizes: ClassVar[dict[str, int]] = {}
    """Number of tasks of each split. Empty if the server has no task API."""
    service: ClassVar[DockerService | None] = None
    """Container of the server. None if the server runs elsewhere."""
    users: ClassVar[int] = 0
    """Number of pools that use the container."""
    seed_ignored: ClassVar[bool] = False
    """True if two episodes with the same seed started differently."""
    missing_reward: ClassVar[float | None] = None
    """Reward of an episode that ends without a reward in any step. None if such an episode fails."""
    unknown: ClassVar[set[str]] = set()
    """Fields of answers that are not OpenEnv's. They are logged once and ignored."""

    @classmethod
    def samples(cls, split: str) -> Any:
        """Return a sample for each task of the server, or endless samples if it does not list tasks."""
        return [{} for _ in range(cls.sizes[split])] if cls.sizes else super().samples(split)

    @classmethod
    async def startup(cls) -> None:
        """Start the container, and report a server that ignores the seed of two equal episodes."""
        cls.users += 1
        if cls.service is not None:
            cls.url = (await asyncio.to_thread(cls.service.start)).url
        first, second = [await cls._opening(seed=20) for _ in range(2)]
        cls.seed_ignored = first != second
        if cls.seed_ignored:
            words = "two episodes with the same seed began differently; runs with it do not repeat"
            logger.warning("task %s: %s ignores seeds: %s", cls.name, cls.url, words)

    @classmethod
    async def shutdown(cls) -> None:
        """Remove the container when its last pool shuts down."""
        cls.users -= 1
        if cls.service is not None and not cls.users:
            await asyncio.to_thread(cls.service.stop)

    @classmethod
    async def _opening(cls, seed: int) -> Any:
        socket = OpenEnvSocket(cls.url, cls.headers)
        try:
            return _without_envelope((await socket.ask("reset", {"seed": seed})).observation)
        finally:
            await socket.close()

    async def reset(self, sample: TaskSample, rng: Any) -> str:
        """Start an episode, with the sample's seed and data as arguments."""
        self.socket = OpenEnvSocket(self.url, self.headers)
        self.rewarded = False
        choice: dict[str, Any] = {"seed": sample.seed % 2**31, **sample.data}
        if self.sizes:
            choice |= {"split": sample.split, "index": sample.index}
        return self.render((await self.socket.ask("reset", choice)).observation)

    async def play(self, name: str, arguments: dict[str, Any]) -> Reply:
        """Play one action."""
        call = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        answer = await self.socket.ask("step", arguments if self.direct else call)
        observation = answer.observation
        self._report_unknown(answer)
        if error := observation.get("error"):
            raise ToolError(str(error.get("message", error) if isinstance(error, dict) else error))
        metadata = answer.metadata or observation.get("metadata")
        truncated = isinstance(metadata, dict) and metadata.get("truncated")
        self.rewarded |= answer.reward is not None
        reward = answer.reward or 0.0
        if answer.done and not self.rewarded and not truncated:
            if self.missing_reward is None:
                raise RuntimeError(
                    "the OpenEnv server ended the episode without a reward in any step; "
                    "if this means 0, add #missing_reward=0 to the target"
                )
            reward = self.missing_reward
        kind = Done if answer.done else Reply
        metrics = {"truncated": 1.0} if truncated else {}
        return kind(self.render(observation), reward=float(reward), metrics=metrics)

    def _report_unknown(self, answer: Answer) -> None:
        new = (answer.model_extra or {}).keys() - self.unknown
        if new:
            self.unknown.update(new)
            words = "answers with fields that OpenEnv does not have, which are ignored"
            logger.warning("task %s: %s %s: %s", self.name, self.url, words, ", ".join(sorted(new)))

    def render(self, observation: dict[str, Any]) -> str:
        """Return an observation as text for the model."""
        result = observation.get("result")
        if isinstance(result, dict) and "data" in result:
            return _text(result["data"])
        shown = _without_envelope(observation)
        return _text(next(iter(shown.values())) if len(shown) == 1 else shown)

    def score(self) -> dict[str, float]:
        """Return the metric ``seed_ignored``."""
        return {"seed_ignored": 1.0} if self.seed_ignored else {}

    async def close(self) -> None:
        """End the episode and its socket."""
        if hasattr(self, "socket"):
            await self.socket.close()


class Answer(BaseModel):
    """The answer to ``reset`` or ``step``."""

    model_config = ConfigDict(frozen=True, extra="allow")

    observation: dict[str, Any]
    reward: StrictBool | Annotated[float, Field(strict=True, allow_inf_nan=False)] | None = None
    done: StrictBool = False
    metadata: dict[str, Any] | None = None


class OpenEnvSocket:
    """A WebSocket of an OpenEnv server. Each WebSocket is one session.

    Args:
        url: address of the server.
        headers: headers of the handshake.
    """

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        self._url = f"{re.sub('^http', 'ws', url)}/ws"
        self._headers = headers
        self._socket: ClientConnection | None = None
        self._closed = False

    async def ask(self, kind: str, data: dict[str, Any]) -> Answer:
        """Send a request and return the answer.

        Any failure closes the socket permanently, because the answer might still arrive. The first request is
        retried while the server is full.

        Raises ConnectionError if the server sends an error or an invalid answer, or is gone.
        """
        pause = RETRY_S[0]
        while True:
            begun = self._socket is not None
            try:
                return await self._ask_once(kind, data)
            except ServerFull:
                await self._drop()
                if begun:
                    raise
                await asyncio.sleep(pause * random.SystemRandom().uniform(0.5, 1.0))
                pause = min(2 * pause, RETRY_S[1])
            except _Refused as error:  # the session continues
                raise ToolError(str(error)) from error
            except BaseException:
                self._closed = True
                await self._drop()
                raise

    async def _ask_once(self, kind: str, data: dict[str, Any]) -> Answer:
        if self._closed:
            raise ConnectionError("the connection to the OpenEnv server was closed after a lost answer")
        if self._socket is None:
            self._socket = await connect(
                self._url,
                additional_headers=self._headers,
                open_timeout=CONNECT_S,
                close_timeout=1.0,
                max_size=MAX_BYTES,
                ping_interval=None,  # tunnels drop pings, and pings stay unanswered during a long step
            )
        with suppress(WebSocketException):  # a full server sends the reason and closes the socket
            await self._socket.send(json.dumps({"type": kind, "data": data}))
        frame = _parse(await self._socket.recv())
        answer = frame.get("data") or {}
        if frame.get("type") != "error":
            try:
                return Answer.model_validate(answer)
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                where = first["loc"][0] if first["loc"] else "data"
                raise ConnectionError(
                    f"the OpenEnv server's answer is invalid: {where}: {first['msg']}"
                ) from error
        if not isinstance(answer, dict):
            raise ConnectionError(f"the OpenEnv server answered with an error: {answer}")
        code, message = answer.get("code"), answer.get("message", "no reason given")
        if code == "CAPACITY_REACHED":
            raise ServerFull(str(message))
        if code == "VALIDATION_ERROR" and kind == "step":
            raise _Refused(message)
        raise ConnectionError(f"the OpenEnv server answered {code}: {message}")

    async def close(self) -> None:
        """Close the socket. Idempotent."""
        self._closed = True
        await self._drop()

    async def _drop(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            await asyncio.shield(asyncio.create_task(socket.close()))


class _Refused(Exception):
    """Raised if the server rejects an action."""


def _parse(frame: str | bytes) -> dict[str, Any]:
    """Return a message as an object. Raises ConnectionError."""
    try:
        message = json.loads(frame)
    except (ValueError, RecursionError) as error:
        raise ConnectionError(f"the OpenEnv server sent no JSON: {frame[:100]!r}") from error
    if not isinstance(message, dict):
        raise ConnectionError(f"the OpenEnv server sent no JSON object: {frame[:100]!r}")
    return message


def _without_envelope(observation: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in observation.items() if key not in ENVELOPE}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
