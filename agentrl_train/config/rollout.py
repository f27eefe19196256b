"""The section ``[rollout]``, and the tables of its methods."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from agentrl_train.config.functions import Choice, Function
from agentrl_train.config.paths import ModelPath
from agentrl_train.config.section import (
    Count,
    CountOrOff,
    Fraction,
    NonNegative,
    Positive,
    Section,
    Share,
    Table,
)
from agentrl_train.config.sections import SLACK_S, SLOWEST_TOKENS_PER_S


class SubAgentSection(Table):
    """A sub-agent that the policy can call as a tool (``[rollout.sub_agent]``, MATPO).

    The caller is the planner. Each call is played by a worker, which is the same policy in its own context.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$")] = "delegate"
    """Name of the tool, and of the agent in the recorded segments."""
    description: str = (
        "Give a task to another agent. It knows nothing but the text of the task, works on it by itself and "
        "returns a report."
    )
    """Description of the tool."""
    system_prompt: Annotated[str, Field(min_length=1)] = (
        "You work on a task for another agent. Use your tools; when you are done, answer with a short report "
        "of what you found, without calling a tool."
    )
    """System message of workers."""
    max_turns: Count = 8
    """Maximum turns of one call. The last turn is for the report, and its calls are not executed."""
    planner_tools: tuple[str, ...] | None = None
    """Tools of the environment that the planner sees. All by default."""
    worker_tools: tuple[str, ...] | None = None
    """Tools of the environment that workers see. All by default."""
    tasks: tuple[str, ...] = ()
    """Tasks that can call the sub-agent. All by default."""

    def serves(self, task: str) -> bool:
        """Return True if a task can call the sub-agent."""
        return not self.tasks or task in self.tasks

    def problems(self) -> list[str]:
        """Return violated constraints between the fields of this section, one sentence each."""
        found = []
        if self.planner_tools == () and self.worker_tools == ():
            found.append(
                "planner_tools and worker_tools are both empty, so no agent can act: leave one out, or list "
                "tools of the environment"
            )
        if self.max_turns == 1 and self.worker_tools:
            found.append(
                "max_turns = 1 leaves a worker one turn, which is for its report: raise it, or set "
                "worker_tools = []"
            )
        return found


class Stale(Table):
    """Cross-policy sampling (AgentRL)."""

    fraction: Fraction = 0.0
    """Probability that a turn is sampled by the stale policy. 0 disables it."""
    interval: Count = 10
    """Steps between two refreshes of the stale policy. The run writes a checkpoint at each refresh. A resumed
    run takes the weights of the stale policy from it."""
    model: ModelPath | None = None
    """A Hugging Face model folder, or a name on the hub, for the stale policy instead of older weights of the
    policy. It must have the architecture and the tokenizer of ``model.path``."""

    def problems(self) -> list[str]:
        """Return violated constraints between the fields of this table, one sentence each."""
        if self.model is not None and not self.fraction:
            return [
                "model samples nothing with fraction = 0: set fraction to its share of turns, such as 0.25"
            ]
        return []


def _stages(value: Any) -> Any:
    """Return the table of a horizon that is given as only its turn limits."""
    return {"turns": value} if isinstance(value, list | tuple) else value


class Horizon(Table):
    """Turn limits of training episodes that rise in stages (ScalingInter-RL)."""

    turns: Annotated[tuple[Count, ...], Field(min_length=1)]
    """Turn limit of each stage, in rising order. The last limit stays."""
    steps: Count = 100
    """Steps of one stage."""

    def problems(self) -> list[str]:
        """Return violated constraints between the fields of this table, one sentence each."""
        if (rising := sorted(self.turns)) != list(self.turns):
            return [f"turns must rise from stage to stage: give {rising} instead of {list(self.turns)}"]
        return []


class FixedMix(Function):
    """The weights of ``environments.tasks``."""

    name: Literal["fixed"] = "fixed"


class ProgressMix(Function):
    """Weights by learning progress, the change of success between halves of ``window`` (arXiv 1707.00183)."""

    name: Literal["progress"] = "progress"
    fixed_share: Share = 0.2
    """Share of the draws that keeps the fixed weights, so that no task disappears."""
    every: Count = 5
    """Steps between two changes of the mixture."""


class CurriculumSection(Table):
    """Difficulty and mixture of the tasks by the success of their training episodes."""

    levels: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Splits of a task from easy to hard, instead of ``environments.split``."""
    raise_at: Share = 0.8
    """Success rate over ``window`` groups of a level that starts the next level."""
    window: Annotated[int, Field(ge=2)] = 16
    """Number of trained groups of a task over which its success is averaged."""
    mix: Annotated[FixedMix | ProgressMix, Choice("progress")] = FixedMix()
    """Weights of the tasks: fixed, or by learning progress."""

    def problems(self) -> list[str]:
        """Return violated constraints between the fields of this table, one sentence each."""
        found = []
        for task, splits in self.levels.items():
            if not splits or len(set(splits)) < len(splits):
                found.append(f"levels.{task} = {list(splits)} must list different splits, from easy to hard")
        return found


class RolloutSection(Section):
    """Number of episodes, and their maximum staleness."""

    groups_per_step: Count = 8
    """Groups in one optimizer batch, P."""
    group_size: Count = 8
    """Sibling episodes of one sample."""
    balance: Literal["tokens", "groups"] = "tokens"
    """Unit of task weights: trained tokens, counted until each checkpoint, or groups."""
    max_staleness: CountOrOff = 1
    """S: (S + 1) P groups can be in flight. 0 means synchronous training. If episodes have very different
    lengths, also raise ``window``."""
    window: Count = 1
    """W: look-ahead of the trainer beyond strict FIFO order, in groups. 1 is strict order, in which each step
    waits for its slowest group."""
    episode_timeout_s: Positive | None = None
    """Time limit of one episode, without the wait for a free session. The turn in progress ends, and then the
    episode is truncated: it keeps its turns and its reward and is trained on. The default is a minute more
    than ``engine.max_context`` tokens take at 5 tokens/s, for each of a turn's completions."""
    environment_timeout_s: Positive = 120.0
    """Deadline of one answer of an environment, after which the episode counts as failed."""
    environment_retries: CountOrOff = 2
    """Retries of an episode in fresh sessions after infrastructure failures."""
    environment_wait_timeout_s: NonNegative = 60.0
    """Seconds that an environment can be unreachable before it counts as an infrastructure failure."""
    stale: Stale = Stale()
    """Cross-policy sampling by a stale policy."""
    max_turns: dict[str, Count] = Field(default_factory=dict)
    """Turn limits by task, which can lower the limits of the environments."""
    horizon: Annotated[Horizon | None, BeforeValidator(_stages)] = None
    """Turn limits that rise in stages. Off by default."""
    curriculum: CurriculumSection = CurriculumSection()
    """Levels and weights of the tasks, depending on their success."""
    sub_agent: SubAgentSection | None = None
    """A sub-agent as a tool. Off by default."""
    alternatives: CountOrOff = 0
    """Additional completions of each turn of a training episode, for the pairs of credit "sweet". They are
    not played."""

    def episode_limit_s(self, *, max_context: int) -> float:
        """Return ``episode_timeout_s``, or its default for a context of this length."""
        tokens = (1 + self.alternatives) * max_context
        return self.episode_timeout_s or SLACK_S + tokens / SLOWEST_TOKENS_PER_S

    @property
    def staleness_bound(self) -> int:
        """Largest number of steps between a group's admission and its training: ``S + ceil((W - 1) / P)``."""
        window = min(self.window, self.max_staleness * self.groups_per_step + 1)
        return self.max_staleness + math.ceil((window - 1) / self.groups_per_step)

    def problems(self) -> list[str]:
        """Return violated constraints between the fields of this section, one sentence each."""
        most = self.max_staleness * self.groups_per_step + 1
        if self.max_staleness > 0 and self.window > most:
            return [
                f"window ({self.window}) can be at most max_staleness * groups_per_step + 1 = "
                f"{most}, the number of groups in flight"
            ]
        return []
