"""The server: a pool of sessions behind HTTP and a WebSocket."""
