"""agentrl_env: environments for language-model agents that call tools over many turns.

A task is one class whose ``@tool`` methods are what the model can do; everything else (schema,
validation, sessions, seeds, limits, server, clients) follows from it.
"""

from agentrl_env.client.backend import SessionBackend
from agentrl_env.client.client import ClientSession, EnvClient
from agentrl_env.environment import Environment
from agentrl_env.errors import AgentRLError, ToolError, WireError
from agentrl_env.gym.env import GymEnv
from agentrl_env.gym.vector import GymVectorEnv
from agentrl_env.session import Session
from agentrl_env.tools import Done, Reply, tool
from agentrl_env.types import (
    FunctionCall,
    FunctionSpec,
    Message,
    SessionInfo,
    SessionStatus,
    SplitInfo,
    StepResult,
    TaskInfo,
    TaskSample,
    ToolCall,
    ToolSpec,
)

__version__ = "0.1.0"

__all__ = [
    "AgentRLError",
    "ClientSession",
    "Done",
    "EnvClient",
    "Environment",
    "FunctionCall",
    "FunctionSpec",
    "GymEnv",
    "GymVectorEnv",
    "Message",
    "Reply",
    "Session",
    "SessionBackend",
    "SessionInfo",
    "SessionStatus",
    "SplitInfo",
    "StepResult",
    "TaskInfo",
    "TaskSample",
    "ToolCall",
    "ToolError",
    "ToolSpec",
    "WireError",
    "__version__",
    "tool",
]
