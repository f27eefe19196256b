"""An MCP server and a reward function for the tests."""

import os

from mcp.types import TextContent, Tool


def reward(sample, calls, answer):
    """Reward any answer."""
    return 1.0


def main():
    from mcp.server.fastmcp import FastMCP

    server = FastMCP("Calc Server", instructions="Use the tools to compute.", log_level="ERROR")
    sums = []

    @server.tool()
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        sums.append(a + b)
        return a + b

    @server.tool()
    def divide(a: float, b: float = 2.0) -> float:
        """Divide; 13 ends the server."""
        if b == 13:
            os._exit(1)
        return a / b

    @server.tool()
    def count() -> int:
        """Return the number of sums so far."""
        return len(sums)

    list_tools, call_tool = server.list_tools, server.call_tool

    async def with_odd_name():
        schema = {"type": "object", "properties": {"from": {"type": "string"}}, "required": ["from"]}
        return [*await list_tools(), Tool(name="odd_name", description="Echo.", inputSchema=schema)]

    async def call(name, arguments):
        if name == "odd_name":
            return [TextContent(type="text", text=arguments["from"])]
        return await call_tool(name, arguments)

    server._mcp_server.list_tools()(with_odd_name)
    server._mcp_server.call_tool(validate_input=False)(call)
    server.run()


if __name__ == "__main__":
    main()
