"""The agent's shell: each script continues in the state that the script before it left.

A script runs in a new bash, which first restores the folder, variables, functions, aliases, options and
traps. A script that is killed therefore does not take the shell with it, and a session can be forked.
"""

from __future__ import annotations

from typing import Any

from agentrl_env.sandbox import ExecResult, Sandbox

STATE = "/dev/shm/.shell"
"""Where a script leaves the state. The next script deletes the file before its own code starts."""
MAX_STATE = 1 << 20
SU = """su() {
    local code
    case " $* " in *" -c"* | *" --command"* | *" --session-command"*) command su "$@"; return ;; esac
    [ /dev/stdin -ef /dev/null ] || { command su "$@"; return; }
    code=$(command su --enter "$@") && eval "$code"
}
"""
"""Lets ``su`` without a command last, as in one shell."""
COMMAND = ["/bin/bash", "-c", 'read -r -d ""; eval "$REPLY"']
RESTORE = (
    f"unset BASH_EXECUTION_STRING; shopt -s expand_aliases; rm -f {STATE}; read -r -d ''; "
    '{ eval "unset REPLY; $REPLY"; read -r -d ""; exec </dev/null; } 2>/dev/null; '
    'eval "unset REPLY; $REPLY"; '
)
"""Is one line, so that bash counts the lines of the agent's code from 1 in its messages."""
KEEP = (
    '{ set -- "$?"; printf \'cd -- %q\\n\' "$PWD"; declare -f; declare -p; alias -p; umask -p; trap -p; '
    f'shopt -p; set +o; trap - DEBUG ERR EXIT; exit "$1"; }} 2>/dev/null >{STATE}'
)


def run(machine: Sandbox, code: str, state: str, **options: Any) -> tuple[ExecResult, str | None]:
    """Run a script; return its result and the state of the shell, or None if the script ended the shell."""
    if "\0" in code:
        return machine.run(["/bin/bash", "-c", code], **options), state
    done = machine.run(COMMAND, stdin=f"{RESTORE}{KEEP}\0{state}\0{code}\0", **options)
    if done.killed_by not in (None, "signal") or not machine.alive:
        return done, state
    try:
        left = machine.read(STATE, MAX_STATE + 1)
    except PermissionError:  # a sandbox that hides the folder, or an agent that took the right
        return done, state
    except OSError:
        return done, None
    return done, left.decode("utf-8", "replace") if len(left) <= MAX_STATE else None
