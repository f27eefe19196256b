"""Codex, with the tools of a task's session instead of its own tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentrl_train.gateway.launchers.command import play_command
from agentrl_train.gateway.launchers.session import TaskSession, play_session
from agentrl_train.gateway.launchers.tool_server import NAME

OWN = ("CODEX_", "OPENAI_")
"""Prefixes of variables with which users configure their own Codex."""
DISABLED = (
    *("shell_tool", "unified_exec", "view_image", "apply_patch_freeform", "image_generation"),
    *("apps", "plugins", "hooks", "goals", "multi_agent", "tool_suggest", "skill_search"),
)
"""Features with tools that would work on the files of the trainer, or need an account."""
UNLIMITED = 10**7
"""Token limit of the model in the settings. The gateway has the real limit and reports a full context."""
DAY_S = 86_400
"""Limit of a call. The task has its own limits."""


def play(session: TaskSession, base_url: str) -> str:
    """Run the agent until it ends or reaches a limit of the task. It answers with its tools."""

    def start(home: Path, url: str) -> tuple[list[str], dict[str, str]]:
        options = [word for line in settings(base_url, url) for word in ("--config", line)]
        command = ["codex", "exec", "--ephemeral", "--skip-git-repo-check", *options, "--", session.task]
        return command, {"CODEX_HOME": str(home)}

    play_command(session, start, own=OWN)
    return ""


def settings(base_url: str, url: str) -> list[str]:
    """Return the settings of the agent, as lines of TOML.

    Args:
        base_url: address of the gateway.
        url: address of the tools of the task.
    """
    values: dict[str, Any] = {
        "model": "policy",
        "model_provider": "gateway",
        "model_context_window": UNLIMITED,
        "model_auto_compact_token_limit": UNLIMITED,
        "model_providers.gateway.name": "gateway",
        "model_providers.gateway.base_url": base_url,
        "model_providers.gateway.wire_api": "responses",
        "model_providers.gateway.request_max_retries": 0,  # the run retries failed episodes
        "model_providers.gateway.stream_max_retries": 0,
        "model_providers.gateway.stream_idle_timeout_ms": DAY_S * 1000,
        f"mcp_servers.{NAME}.url": url,
        f"mcp_servers.{NAME}.required": True,
        f"mcp_servers.{NAME}.tool_timeout_sec": DAY_S,
        f"mcp_servers.{NAME}.default_tools_approval_mode": "approve",
        "approval_policy": "never",
        "sandbox_mode": "read-only",
        "web_search": "disabled",
        "analytics.enabled": False,
        **{f"features.{name}": False for name in DISABLED},
    }
    return [f"{name}={json.dumps(value)}" for name, value in values.items()]


if __name__ == "__main__":
    play_session(play)
