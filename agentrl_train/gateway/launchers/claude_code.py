"""Claude Code, with the tools of a task's session instead of its own tools."""

from __future__ import annotations

import json
import os
from pathlib import Path

from agentrl_train.gateway.launchers.command import AgentFailed, play_command
from agentrl_train.gateway.launchers.session import TaskSession, play_session
from agentrl_train.gateway.launchers.tool_server import NAME

SETTINGS = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",  # no updates, telemetry or error reports
    "CLAUDE_CODE_MAX_RETRIES": "1",  # the run retries failed episodes
    "DISABLE_COMPACT": "1",  # a conversation that is too long for the policy is also too long to summarize
    "MCP_CONNECTION_NONBLOCKING": "0",  # the first request has the tools of the task
    "MCP_TIMEOUT": "60000",
    "MCP_TOOL_TIMEOUT": "86400000",  # in ms, as above; the task has its own limits
}
OWN = ("ANTHROPIC_", "CLAUDE_")
"""Prefixes of variables with which users configure their own Claude Code."""
LIMIT_REACHED = "error_max_turns"
"""Result of an agent that reaches its turn limit."""


def play(session: TaskSession, base_url: str) -> str:
    """Run the agent until it ends or reaches a limit of the task. It answers with its tools."""

    def start(home: Path, url: str) -> tuple[list[str], dict[str, str]]:
        command = [
            *("claude", "--print", session.task, "--model", "policy", "--output-format", "json"),
            *("--tools", "", "--allowedTools", f"mcp__{NAME}", "--strict-mcp-config"),
            *("--mcp-config", json.dumps({"mcpServers": {NAME: {"type": "http", "url": url}}})),
            *("--max-turns", str(session.max_calls)),
        ]
        gateway = {name: os.environ[name] for name in ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY")}
        return command, SETTINGS | gateway | {"CLAUDE_CONFIG_DIR": str(home)}

    try:
        play_command(session, start, own=OWN)
    except AgentFailed as error:
        if LIMIT_REACHED not in str(error):
            raise
    return ""


if __name__ == "__main__":
    play_session(play)
