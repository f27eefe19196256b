"""An OpenAI-compatible server in front of an engine, and the agent programs that play episodes through it."""
