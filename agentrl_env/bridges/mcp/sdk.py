"""The same functions for versions 1 and 2 of the MCP SDK, whichever is installed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

Answer = Callable[[Any], Awaitable[dict[str, Any]]]
"""Takes the parameters of a request and returns its JSON result."""
Request = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]
"""Sends a method with parameters and returns the result. Raises ``error_type()``."""
_MODELS = {
    "tools/list": ("ListTools", "PaginatedRequestParams"),
    "tools/call": ("CallTool", "CallToolRequestParams"),
    "prompts/list": ("ListPrompts", "PaginatedRequestParams"),
    "prompts/get": ("GetPrompt", "GetPromptRequestParams"),
}
"""For each method, the common prefix of its request and result models, and the model of its parameters."""


def missing_sdk() -> str | None:
    """Return the reason why the MCP SDK cannot be used, as the end of a sentence, or None if it can."""
    try:
        installed = version("mcp")
    except PackageNotFoundError:
        return "needs the MCP SDK; install the extra: pip install 'agentrl-kit[mcp]'"
    if installed.partition(".")[0] in ("1", "2"):
        return None
    return (
        f"needs version 1 or 2 of the MCP SDK, and {installed} is installed; "
        "use an environment without the package that needs it: pip install 'agentrl-kit[mcp]'"
    )


@cache
def is_second() -> bool:
    """Return True if version 2 of the SDK is installed."""
    return version("mcp").startswith("2.")


def make_server(name: str, *, version: str, instructions: str | None, answers: Mapping[str, Answer]) -> Any:
    """Return an MCP server.

    Args:
        name: shown to clients.
        version: shown to clients.
        instructions: shown to clients.
        answers: a function for each supported method.
    """
    from mcp import types
    from mcp.server.lowlevel import Server

    server: Any = Server(name, version=version, instructions=instructions)
    for method, answer in answers.items():
        stem, parameters = _MODELS[method]
        if is_second():
            server.add_request_handler(method, getattr(types, parameters), _second(answer))
        else:
            request = getattr(types, f"{stem}Request")
            server.request_handlers[request] = _first(answer, getattr(types, f"{stem}Result"))
    return server


def _first(answer: Answer, result: Any) -> Callable[[Any], Awaitable[Any]]:
    async def handle(request: Any) -> Any:
        from mcp import types

        return types.ServerResult(result.model_validate(await answer(request.params)))

    return handle


def _second(answer: Answer) -> Callable[[Any, Any], Awaitable[dict[str, Any]]]:
    async def handle(context: Any, parameters: Any) -> dict[str, Any]:
        return await answer(parameters)

    return handle


def error_type() -> Any:
    """Return the SDK's exception class for protocol errors."""
    import mcp

    return getattr(mcp, "MCPError" if is_second() else "McpError")


def protocol_error(code: int, message: str, data: Any = None) -> Exception:
    """Return a protocol error, for an ``Answer`` to raise."""
    from mcp import types

    if is_second():
        return error_type()(code, message, data)  # type: ignore[no-any-return]
    return error_type()(types.ErrorData(code=code, message=message, data=data))  # type: ignore[no-any-return]


async def connected(streams: Sequence[Any], stack: AsyncExitStack) -> tuple[dict[str, Any], Request]:
    """Initialize a client connection. Return the result of ``initialize`` and a function that sends requests.

    Results bypass the SDK's models, because these reject all tools of a server if one tool is invalid.

    Args:
        streams: read and write streams of an SDK transport.
        stack: exit stack that keeps the connection open.
    """
    import mcp

    session_type: Any = mcp.ClientSession
    if not is_second():
        session = await stack.enter_async_context(session_type(*streams[:2]))
        return _wire(await session.initialize()), partial(_send_first, session)
    from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher

    dispatcher = JSONRPCDispatcher(*streams)
    session = await stack.enter_async_context(session_type(dispatcher=dispatcher))
    begun = _wire(await session.initialize())
    return begun, partial(_send_second, dispatcher, begun["protocolVersion"])


async def _send_first(session: Any, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
    from mcp import types

    stem, _ = _MODELS[method]
    request = getattr(types, f"{stem}Request").model_validate({"params": parameters})
    return _wire(await session.send_request(types.ClientRequest(request), types.Result))


async def _send_second(
    dispatcher: Any, version: str, method: str, parameters: dict[str, Any]
) -> dict[str, Any]:
    headers = {"mcp-protocol-version": version}
    result: dict[str, Any] = await dispatcher.send_raw_request(method, parameters, {"headers": headers})
    return result


def _wire(result: Any) -> dict[str, Any]:
    fields: dict[str, Any] = result.model_dump(by_alias=True, mode="json")
    return fields
