"""Step 2 of 9: TaskSample -> Session. A session is one episode of one sample."""

from agentrl_env.session.session import Session

__all__ = ["Session"]
