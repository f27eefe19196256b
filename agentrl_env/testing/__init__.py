"""The conformance kit, used as ``check_environment(Guess)`` in a test suite or ``agentrl-env check``."""

from agentrl_env.testing.checker import check_environment, run_checks, run_quality
from agentrl_env.testing.quality import TaskQuality
from agentrl_env.testing.report import CheckResult, Report, Verdict

__all__ = [
    "CheckResult",
    "Report",
    "TaskQuality",
    "Verdict",
    "check_environment",
    "run_checks",
    "run_quality",
]
