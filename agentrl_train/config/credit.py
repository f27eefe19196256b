"""Functions of ``algorithm.credit``, which credit turns by comparison with siblings or with a critic."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from agentrl_train.config.functions import Choice, Function, Own
from agentrl_train.config.paths import ModelPath
from agentrl_train.config.section import Count, CountOrOff, Fraction, NonNegative, Positive, Share


class Trajectory(Function):
    """Return of the whole trajectory."""

    name: Literal["trajectory"] = "trajectory"


class Turn(Function):
    """Rewards from the turn on, compared with the siblings' turns with the same number."""

    name: Literal["turn"] = "turn"
    gamma: Fraction = 1.0
    """Discount per turn."""


class State(Function):
    """Return of the trajectory plus a comparison of turns that follow the same observation (GiGPO)."""

    name: Literal["state"] = "state"
    gamma: Fraction = 1.0
    """Discount per turn."""
    weight: NonNegative = 1.0
    """Weight of the comparison at equal states."""


class CriticCredit(Function):
    """Credit by a critic, which is trained on the same episodes."""

    model: ModelPath | None = None
    """Model folder, or name on the hub, of the critic; by default the policy's."""
    learning_rate: Positive = 1e-5
    """Learning rate of AdamW, constant."""
    warmup_steps: CountOrOff = 0
    """Number of first steps that train only the critic."""
    passes: Count = 1
    """Passes over the episodes of each step."""


class GaeCredit(CriticCredit):
    """Generalized advantage estimation."""

    lam: Fraction = 1.0
    """Weight of longer returns. 0 uses only the critic."""
    clip: NonNegative = 0.2
    """Largest change of a value in an update. 0 means no bound."""

    @property
    def parameters(self) -> dict[str, Any]:
        """Return the keyword arguments of the estimator, without the settings of the critic's training."""
        training = {*CriticCredit.model_fields, "clip"}
        return {key: value for key, value in super().parameters.items() if key not in training}


class GaeToken(GaeCredit):
    """Generalized advantage estimation by token (PPO)."""

    name: Literal["gae_token"] = "gae_token"
    token_gamma: Fraction = 1.0
    """Discount per token."""


class GaeTurn(GaeCredit):
    """Generalized advantage estimation by turn."""

    name: Literal["gae_turn"] = "gae_turn"
    gamma: Fraction = 1.0
    """Discount per turn."""


class GaeBiLevel(GaeCredit):
    """Generalized advantage estimation by turn, then by token within the turns (RAGEN)."""

    name: Literal["gae_bi_level"] = "gae_bi_level"
    gamma: Fraction = 1.0
    """Discount per turn."""
    token_gamma: Fraction = 1.0
    """Discount per token within a turn."""


class Archer(CriticCredit):
    """Difference of twin critics of turns (ArCHer)."""

    name: Literal["archer"] = "archer"
    gamma: Fraction = 1.0
    """Discount per turn."""
    replay: CountOrOff = 0
    """Number of groups of earlier steps to train on again. 0 disables it."""
    target_rate: Share = 0.1
    """Share of the difference by which target networks move in each update."""


class Sweet(CriticCredit):
    """Log-ratio of a critic with privileged information (SWEET-RL)."""

    name: Literal["sweet"] = "sweet"
    beta: Positive = 0.1
    """Steepness of preferences."""
    pairs: CountOrOff = 0
    """Pairs of completions of each turn from which the policy learns by DPO. 0 disables it."""
    likelihood: NonNegative = 0.01
    """Weight of the log-likelihood of the better completion of a pair, by token."""


Credit = Annotated[
    Trajectory | Turn | State | GaeToken | GaeTurn | GaeBiLevel | Archer | Sweet | Own, Choice("trajectory")
]
