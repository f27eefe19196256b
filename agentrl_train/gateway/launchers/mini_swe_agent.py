"""mini-swe-agent, with its own agent, prompts and model, in the session of a task."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import httpx

from agentrl_train.gateway.launchers.session import TaskSession, play_session

MARKER = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""First line of the output of the command that mini-swe-agent submits with."""


def main() -> None:
    """Play one episode."""
    # The package reads these on import. The folder replaces the user's settings.
    os.environ["MSWEA_GLOBAL_CONFIG_DIR"] = str(Path(os.environ["AGENTRL_SAMPLE"]).parent)
    os.environ["MSWEA_SILENT_STARTUP"] = "1"
    play_session(play)


def play(session: TaskSession, base_url: str) -> str:
    """Run the agent until it submits or reaches a limit. Return its submission."""
    import yaml
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.config import builtin_config_dir

    settings = yaml.safe_load((builtin_config_dir / "mini.yaml").read_text(encoding="utf-8"))
    model = policy_model(base_url, settings["model"])
    limits = {"step_limit": session.max_calls}
    agent = DefaultAgent(model, SessionEnvironment(session), **settings["agent"] | limits)
    return str(agent.run(instructions(session)).get("submission", ""))


def policy_model(base_url: str, settings: dict[str, Any]) -> Any:
    """Return a model for mini-swe-agent that uses the chat API at the address of the gateway.

    It has the same requests and answers as ``LitellmModel``. Importing that would take seven seconds of
    processor time in every episode.
    """
    from minisweagent.models.openrouter_model import OpenRouterModel
    from minisweagent.models.utils.actions_toolcall import BASH_TOOL

    def query(messages: list[dict[str, Any]], **options: Any) -> Any:
        body = {"model": "policy", "messages": messages, "tools": [BASH_TOOL]}
        answer = httpx.post(f"{base_url}/chat/completions", json=body, timeout=None, trust_env=False)
        if answer.is_error:
            raise RuntimeError(f"the gateway answered {answer.status_code}: {answer.text}")
        return answer.json()

    templates = {name: value for name, value in settings.items() if name != "model_kwargs"}
    model: Any = OpenRouterModel(model_name="policy", cost_tracking="ignore_errors", **templates)
    model._query = query
    model.abort_exceptions = [Exception]  # no retries: the run retries failed episodes
    return model


def instructions(session: TaskSession) -> str:
    """Return the task, and how the agent's only tool replaces the task's other tools."""
    note = f"You have only the tool bash. Its command `echo {MARKER}` submits your work and ends the task."
    if session.takes_answer:
        note += f" If an answer is asked for, print it after it: `echo {MARKER}; echo ANSWER`."
    return f"{session.task}\n\n{note}"


class SessionEnvironment:
    """The environment of mini-swe-agent: its commands run in the session of a task."""

    def __init__(self, session: TaskSession) -> None:
        self._session = session
        self.config: dict[str, Any] = {}

    def execute(self, action: dict[str, Any], cwd: str = "") -> dict[str, Any]:
        """Run a command. Raises the exceptions with which the agent submits or reaches its limit."""
        from minisweagent.exceptions import LimitsExceeded, Submitted

        output = self._session.run(action.get("command", ""))
        first, _, rest = output.text.lstrip().partition("\n")
        if first.strip() == MARKER and output.code == 0:
            raise Submitted(_exit("Submitted", rest))
        if self._session.exhausted:
            raise LimitsExceeded(_exit("LimitsExceeded"))
        return {"output": output.text, "returncode": output.code, "exception_info": ""}

    def get_template_vars(self, **variables: Any) -> dict[str, Any]:
        """Return the variables of the agent's prompt: the system that runs the commands."""
        return platform.uname()._asdict()

    def serialize(self) -> dict[str, Any]:
        """Return nothing: the run records the episode."""
        return {}


def _exit(status: str, submission: str = "") -> dict[str, Any]:
    """Return the message that ends the agent's loop."""
    content = submission or status
    return {"role": "exit", "content": content, "extra": {"exit_status": status, "submission": submission}}


if __name__ == "__main__":
    main()
