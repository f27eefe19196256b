"""Serve tasks over MCP, and use MCP servers as tasks."""
