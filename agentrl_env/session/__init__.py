"""Step 2 of 9: TaskSample -> Session. One sample, one environment instance, one episode."""

from agentrl_env.session.session import Session

__all__ = ["Session"]
