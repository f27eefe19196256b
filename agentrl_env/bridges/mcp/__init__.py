"""MCP: tasks as MCP servers, and MCP servers as tasks."""
