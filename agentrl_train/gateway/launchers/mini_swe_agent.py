"""mini-swe-agent, with its own agent, prompts and model, in the shell of a task's session."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from agentrl_train.gateway.launchers.shell import TaskShell, play_session

MARKER = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""First line of the output of the command with which mini-swe-agent submits."""
ATTEMPTS = "3"
"""Requests of one turn: the policy is on this machine, and a failed episode is retried by the run."""


def main() -> None:
    """Play one episode."""
    # Both packages read these on import: no settings of the user's own agent, and no look-ups on the web.
    os.environ["MSWEA_GLOBAL_CONFIG_DIR"] = str(Path(os.environ["AGENTRL_SAMPLE"]).parent)
    os.environ["MSWEA_SILENT_STARTUP"] = "1"
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    os.environ.setdefault("MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT", ATTEMPTS)
    play_session(play)


def play(shell: TaskShell, base_url: str) -> str:
    """Let the agent work until it submits or reaches a limit; return its submission."""
    import litellm
    import yaml
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.config import builtin_config_dir
    from minisweagent.models.litellm_model import LitellmModel

    litellm.suppress_debug_info = True
    settings = yaml.safe_load((builtin_config_dir / "mini.yaml").read_text(encoding="utf-8"))
    gateway = {"api_base": base_url, "api_key": os.environ["OPENAI_API_KEY"]}
    model = LitellmModel(
        model_name="openai/policy",
        cost_tracking="ignore_errors",
        **settings["model"] | {"model_kwargs": settings["model"]["model_kwargs"] | gateway},
    )
    agent = DefaultAgent(
        model, SessionEnvironment(shell), **settings["agent"] | {"step_limit": shell.max_commands}
    )
    try:
        return str(agent.run(instructions(shell)).get("submission", ""))
    except litellm.exceptions.ContextWindowExceededError:
        return ""  # the run truncates the episode


def instructions(shell: TaskShell) -> str:
    """Return the task, and how the agent's only tool takes the place of the task's other tools."""
    note = f"You have only the tool bash. Its command `echo {MARKER}` submits your work and ends the task."
    if shell.takes_answer:
        note += f" If an answer is asked for, print it after it: `echo {MARKER}; echo ANSWER`."
    return f"{shell.task}\n\n{note}"


class SessionEnvironment:
    """The environment of mini-swe-agent: its commands run in the session of a task."""

    def __init__(self, shell: TaskShell) -> None:
        self._shell = shell
        self.config: dict[str, Any] = {}

    def execute(self, action: dict[str, Any], cwd: str = "") -> dict[str, Any]:
        """Run a command. Raises the exceptions with which the agent submits or reaches its limit."""
        from minisweagent.exceptions import LimitsExceeded, Submitted

        output = self._shell.run(action.get("command", ""))
        first, _, rest = output.text.lstrip().partition("\n")
        if first.strip() == MARKER and output.code == 0:
            raise Submitted(_exit("Submitted", rest))
        if self._shell.exhausted:
            raise LimitsExceeded(_exit("LimitsExceeded"))
        return {"output": output.text, "returncode": output.code, "exception_info": ""}

    def get_template_vars(self) -> dict[str, Any]:
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
