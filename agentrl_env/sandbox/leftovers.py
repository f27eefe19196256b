"""Names of what a sandbox makes on its machine: they tell what was left behind."""

from __future__ import annotations

import re
import secrets

from agentrl_env.launch.orphans import owner, owner_is_dead

PREFIX = "agentrl-sandbox-"
_NAME = re.compile(re.escape(PREFIX) + r"([0-9a-f]+-\d+-\d+)-[0-9a-f]+")


def new_name() -> str:
    """Return a name for something of this process: unique, and saying so."""
    return f"{PREFIX}{owner() or 'anybody'}-{secrets.token_hex(8)}"


def abandoned(name: str) -> bool:
    """Return whether ``name`` is one of ``new_name`` of a process that is gone, as far as can be told."""
    match = _NAME.fullmatch(name)
    return match is not None and owner_is_dead(match[1]) is True
