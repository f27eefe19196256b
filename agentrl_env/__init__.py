"""Environments for language-model agents that call tools over many turns.

A task is one class whose ``@tool`` methods are the model's tools. The SDK derives everything else from
it: schemas, argument validation, sessions, seeding, limits, server and clients.

The names in ``__all__`` are imported on first use, so ``import agentrl_env`` stays cheap: it loads
neither a web framework nor an HTTP client nor Gymnasium.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from agentrl_env.gym import register_env

__version__ = "0.1.0"

_MODULES = {
    "AgentRLError": "agentrl_env.errors",
    "ClientSession": "agentrl_env.client.client",
    "Done": "agentrl_env.tools",
    "EnvClient": "agentrl_env.client.client",
    "Environment": "agentrl_env.environment",
    "FunctionCall": "agentrl_env.types",
    "FunctionSpec": "agentrl_env.types",
    "GymEnv": "agentrl_env.gym.env",
    "GymVectorEnv": "agentrl_env.gym.vector",
    "Message": "agentrl_env.types",
    "Reply": "agentrl_env.tools",
    "Session": "agentrl_env.session",
    "SessionBackend": "agentrl_env.client.client",
    "SessionInfo": "agentrl_env.types",
    "SessionStatus": "agentrl_env.types",
    "SplitInfo": "agentrl_env.types",
    "StepResult": "agentrl_env.types",
    "SyncClientSession": "agentrl_env.client.sync",
    "SyncEnvClient": "agentrl_env.client.sync",
    "TaskInfo": "agentrl_env.types",
    "TaskSample": "agentrl_env.types",
    "ToolCall": "agentrl_env.types",
    "ToolError": "agentrl_env.errors",
    "ToolSpec": "agentrl_env.types",
    "WireError": "agentrl_env.errors",
    "Wording": "agentrl_env.wording",
    "read_jsonl": "agentrl_env.dataset",
    "tool": "agentrl_env.tools",
}
"""The module of each public name."""

__all__ = sorted([*_MODULES, "__version__"])

if TYPE_CHECKING:
    from agentrl_env.client.client import ClientSession as ClientSession
    from agentrl_env.client.client import EnvClient as EnvClient
    from agentrl_env.client.client import SessionBackend as SessionBackend
    from agentrl_env.client.sync import SyncClientSession as SyncClientSession
    from agentrl_env.client.sync import SyncEnvClient as SyncEnvClient
    from agentrl_env.dataset import read_jsonl as read_jsonl
    from agentrl_env.environment import Environment as Environment
    from agentrl_env.errors import AgentRLError as AgentRLError
    from agentrl_env.errors import ToolError as ToolError
    from agentrl_env.errors import WireError as WireError
    from agentrl_env.gym.env import GymEnv as GymEnv
    from agentrl_env.gym.vector import GymVectorEnv as GymVectorEnv
    from agentrl_env.session import Session as Session
    from agentrl_env.tools import Done as Done
    from agentrl_env.tools import Reply as Reply
    from agentrl_env.tools import tool as tool
    from agentrl_env.types import FunctionCall as FunctionCall
    from agentrl_env.types import FunctionSpec as FunctionSpec
    from agentrl_env.types import Message as Message
    from agentrl_env.types import SessionInfo as SessionInfo
    from agentrl_env.types import SessionStatus as SessionStatus
    from agentrl_env.types import SplitInfo as SplitInfo
    from agentrl_env.types import StepResult as StepResult
    from agentrl_env.types import TaskInfo as TaskInfo
    from agentrl_env.types import TaskSample as TaskSample
    from agentrl_env.types import ToolCall as ToolCall
    from agentrl_env.types import ToolSpec as ToolSpec
    from agentrl_env.wording import Wording as Wording
else:

    def __getattr__(name: str) -> object:
        """Import a public name on first use (PEP 562)."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_MODULES[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_env()
