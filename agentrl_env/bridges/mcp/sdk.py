"""Version of the MCP SDK that is installed, which other packages may have brought."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

INSTALL = "needs the MCP SDK; install the extra: pip install 'agentrl-kit[mcp]'"


def missing_sdk() -> str | None:
    """Return why the SDK of MCP cannot be used, as the end of a sentence; None if it can."""
    try:
        installed = version("mcp")
    except PackageNotFoundError:
        return INSTALL
    if installed.partition(".")[0] == "1":
        return None
    return (
        f"needs version 1 of the MCP SDK, and {installed} is installed; "
        "use an environment without the package that needs it: pip install 'agentrl-kit[mcp]'"
    )
