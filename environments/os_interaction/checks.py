"""Check scripts of AgentBench's problems: runs them and detects crashes."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl_env.sandbox import ExecResult, Sandbox

from .problems import COMMANDS, Script

TIMEOUT = 60.0
"""Seconds that a check can take."""
ENVIRONMENT = {
    "HOME": "/root",
    "USER": "root",
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin",
    "PYTHONNOUSERSITE": "1",
}
"""The machine's programs and modules take precedence over files that the agent could have written."""
CRASHED = 121
DEFECTIVE = 122
"""Exit statuses of a Python check: an exception ended it, or an exception that does not depend on its
arguments."""
PYTHON = f"""import site, sys
site.setquit()
site.setcopyright()
site.sethelper()
sys.path += [*site.getsitepackages(), ""]
try:
    exec(compile(sys.argv.pop(1), "<string>", "exec"), {{"__name__": "__main__"}})
except Exception as error:
    __import__("traceback").print_exc()
    sys.exit({DEFECTIVE} if isinstance(error, (NameError, ImportError, SyntaxError)) else {CRASHED})
"""
"""Runs a check like ``python3 -c``, including the builtins of ``site``.

Python itself starts with -I and -S, so that it does not run a ``sitecustomize`` or a ``.pth`` file of the
agent. The standard library takes precedence over the agent's modules.
"""


def run(machine: Sandbox, check: Script, arguments: Sequence[str]) -> ExecResult:
    """Run a check with arguments, as in AgentBench."""
    language, code = check
    start = ["-I", "-S", "-c", PYTHON, code] if language == "python" else ["-c", code, "--"]
    return machine.run(
        [*COMMANDS[language], *start, *arguments], cwd="/root", env=ENVIRONMENT, timeout=TIMEOUT
    )


def crashed(check: Script, done: ExecResult) -> bool:
    """Return True if a check was killed or crashed, so that its exit status is not a verdict."""
    if done.killed_by or done.code is None:
        return True
    return done.code in (CRASHED, DEFECTIVE) if check[0] == "python" else done.code in (2, 126, 127)


def defective(check: Script, done: ExecResult) -> bool:
    """Return True if a crashed check would also crash on a machine in the right state."""
    if check[0] == "python":
        return done.killed_by is not None or done.code == DEFECTIVE
    return done.killed_by is not None or (done.code == 2 and "syntax error" in done.stderr)
