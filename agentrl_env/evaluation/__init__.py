"""Evaluation of models: ``agentrl-env eval`` in a shell, or ``evaluate`` in a program."""

from agentrl_env.evaluation.chat_model import ChatModel, Completion, ModelFailed, Usage
from agentrl_env.evaluation.record import (
    EpisodeRecord,
    EvaluationError,
    EvaluationRun,
    EvaluationSettings,
    RunFile,
    TurnRecord,
    read_run,
)
from agentrl_env.evaluation.report import write_report
from agentrl_env.evaluation.runner import choose_indices, evaluate, model_policy, replay_policy
from agentrl_env.evaluation.summary import Comparison, Summary, compare, summarize

__all__ = [
    "ChatModel",
    "Comparison",
    "Completion",
    "EpisodeRecord",
    "EvaluationError",
    "EvaluationRun",
    "EvaluationSettings",
    "ModelFailed",
    "RunFile",
    "Summary",
    "TurnRecord",
    "Usage",
    "choose_indices",
    "compare",
    "evaluate",
    "model_policy",
    "read_run",
    "replay_policy",
    "summarize",
    "write_report",
]
