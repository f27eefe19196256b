"""The agent's shell: each script continues in the state of the previous script.

A script runs in a new bash, which first restores the folder, variables, functions, aliases, options and
traps. Killing a script therefore does not end the shell, and a session can be forked.
"""

from __future__ import annotations

from typing import Any

from agentrl_env.sandbox import ExecResult, Sandbox

STATE = "/dev/shm/.shell"
"""File with the state after a script. The next script deletes it before its own code starts."""
MAX_STATE = 1 << 20
SU = """su() {
    local code
    case " $* " in *" -c"* | *" --command"* | *" --session-command"*) command su "$@"; return ;; esac
    [ /dev/stdin -ef /dev/null ] || { command su "$@"; return; }
    code=$(command su --enter "$@") && eval "$code"
}
"""
"""Makes ``su`` without a command persistent, as in a single shell."""
COMMAND = ["/bin/bash", "-c", 'read -r -d ""; eval "$REPLY"']
RESTORE = (
    f"unset BASH_EXECUTION_STRING; shopt -s expand_aliases; rm -f {STATE}; read -r -d ''; "
    '{ eval "unset REPLY; $REPLY"; read -r -d ""; exec </dev/null; } 2>/dev/null; '
    'eval "unset REPLY; $REPLY"; '
)
"""A single line, so that line numbers in bash's messages match the agent's code."""
KEEP = (
    '{ set -- "$?"; printf \'cd -- %q\\n\' "$PWD"; declare -f; declare -p; alias -p; umask -p; trap -p; '
    f'shopt -p; set +o; trap - DEBUG ERR EXIT; exit "$1"; }} 2>/dev/null >{STATE}'
)


def run(machine: Sandbox, code: str, state: str, **options: Any) -> tuple[ExecResult, str | None]:
    """Run a script. Return its result and the state of the shell, or None if the script ended the shell."""
    if "\0" in code:
        return machine.run(["/bin/bash", "-c", code], **options), state
    done = machine.run(COMMAND, stdin=f"{RESTORE}{KEEP}\0{state}\0{code}\0", **options)
    if done.killed_by not in (None, "signal") or not machine.alive:
        return done, state
    try:
        left = machine.read(STATE, MAX_STATE + 1)
    except PermissionError:  # the sandbox hides the folder, or the agent removed the permission
        return done, state
    except OSError:
        return done, None
    return done, left.decode("utf-8", "replace") if len(left) <= MAX_STATE else None
