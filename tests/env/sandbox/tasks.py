"""Tasks with a shell, for tests of sandboxes behind a server."""

from agentrl_env import Environment, tool
from agentrl_env.sandbox import open_sandbox


class Shell(Environment):
    """Runs the commands that it is given."""

    max_turns = 1000
    tool_timeout = 120.0

    def reset(self, sample, rng):
        self.box = open_sandbox(
            memory="64m", disk="16m", pids=32, files={"mine.txt": f"seed {sample.seed}\n"}
        )
        return "Type a command."

    @tool
    def shell(self, command: str, timeout: float = 60.0):
        """Run a command.

        Args:
            command: What to run.
            timeout: Seconds until it is killed.
        """
        return self.box.run(command, timeout=timeout).text

    def close(self):
        self.box.close()


class BreaksInReset(Shell):
    """Opens a sandbox and fails."""

    name = "breaks"

    def reset(self, sample, rng):
        super().reset(sample, rng)
        raise RuntimeError("no luck today")
