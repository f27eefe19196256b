"""Users: participants of an episode that answer the policy's text."""

from agentrl_env.users.dialogue import (
    Dialogue,
    OwnTools,
    User,
    UserCall,
    UserFailed,
    Utterance,
    visible_text,
)
from agentrl_env.users.endpoint import Endpoint
from agentrl_env.users.model_user import ModelUser
from agentrl_env.users.scripted import FunctionUser, ScriptedUser

__all__ = [
    "Dialogue",
    "Endpoint",
    "FunctionUser",
    "ModelUser",
    "OwnTools",
    "ScriptedUser",
    "User",
    "UserCall",
    "UserFailed",
    "Utterance",
    "visible_text",
]
