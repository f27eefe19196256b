"""AgentRL's protocol: its HTTP calls and its workers behind a controller."""
