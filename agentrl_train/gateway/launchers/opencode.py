"""opencode, with the tools of a task's session instead of its own tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentrl_train.gateway.launchers.command import play_command
from agentrl_train.gateway.launchers.session import TaskSession, play_session
from agentrl_train.gateway.launchers.tool_server import NAME

SETTINGS = {
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
}
OWN = ("OPENCODE", "XDG_")
"""Prefixes of variables with which users configure their own opencode."""
MODEL = "gateway/policy"
UNLIMITED = 10**7
"""Token limit of the model in the settings. The gateway has the real limit and reports a full context."""
TOOL_TIMEOUT_MS = 86_400_000
"""Limit of a call. The task has its own limits."""


def play(session: TaskSession, base_url: str) -> str:
    """Run the agent until it ends or reaches a limit of the task. It answers with its tools."""

    def start(home: Path, url: str) -> tuple[list[str], dict[str, str]]:
        content = json.dumps(settings(base_url, url, max_calls=session.max_calls))
        # Without a title, the agent would call the policy for one.
        command = ["opencode", "run", "--pure", "--model", MODEL, "--title", "episode", "--", session.task]
        return command, SETTINGS | {"OPENCODE_CONFIG_CONTENT": content}

    play_command(session, start, own=OWN)
    return ""


def settings(base_url: str, url: str, *, max_calls: int) -> dict[str, Any]:
    """Return the settings of the agent.

    Args:
        base_url: address of the gateway.
        url: address of the tools of the task.
        max_calls: step limit of the agent.
    """
    limit = {"context": UNLIMITED, "output": UNLIMITED}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": base_url, "apiKey": "none", "timeout": False},
        "models": {"policy": {"tool_call": True, "limit": limit}},
    }
    return {
        "model": MODEL,
        "small_model": MODEL,
        "enabled_providers": ["gateway"],
        "provider": {"gateway": provider},
        "mcp": {NAME: {"type": "remote", "url": url, "oauth": False, "timeout": TOOL_TIMEOUT_MS}},
        "tools": {"*": False, f"{NAME}_*": True},
        "permission": {"*": "deny", f"{NAME}_*": "allow"},
        "agent": {"build": {"steps": max_calls}},
        "compaction": {"auto": False, "prune": False},
        "snapshot": False,
        "share": "disabled",
        "autoupdate": False,
    }


if __name__ == "__main__":
    play_session(play)
