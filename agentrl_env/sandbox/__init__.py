"""Sandboxes: isolated environments for the commands of agents that use a shell or write code.

box = open_sandbox(memory="256m", files={"notes.txt": "buy milk"})
print(box.run("cat notes.txt | wc -w", timeout=5).text)
box.close()
"""

from agentrl_env.errors import SandboxFailed, SandboxUnavailable
from agentrl_env.sandbox.factory import ALLOW_UNSAFE, SANDBOX_LIMITS, open_sandbox
from agentrl_env.sandbox.sandbox import HOME, ExecResult, Sandbox, SandboxLimits

__all__ = [
    "ALLOW_UNSAFE",
    "HOME",
    "SANDBOX_LIMITS",
    "ExecResult",
    "Sandbox",
    "SandboxFailed",
    "SandboxLimits",
    "SandboxUnavailable",
    "open_sandbox",
]
