"""What a run says where it goes on and comes to nothing."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl_train.types import EpisodeEnd, TrajectoryGroup


def nothing_learned(groups: Sequence[TrajectoryGroup], *, steps: int) -> str:
    """Return why nothing was trained in some steps in a row, as far as the groups of the last one tell."""
    episodes = [episode for group in groups for episode in group.trajectories]
    rewards = {round(episode.reward, 6) for episode in episodes}
    what = f"all are {min(rewards):g}" if len(rewards) == 1 else f"they are {len(rewards)} different ones"
    when = "this step" if steps == 1 else f"{steps} steps in a row"
    sentences = [
        f"nothing was trained in {when}: within each group all episodes have the same reward ({what})",
    ]
    full = sum(episode.end is EpisodeEnd.TRUNCATED_LENGTH for episode in episodes) / max(1, len(episodes))
    if full:
        sentences.append(f"{full:.0%} of the episodes ended because engine.max_context was full: raise it")
    sentences.append(
        "what helps: easier or harder samples, a larger rollout.group_size, a policy that "
        "`agentrl-train sft` has warmed up"
    )
    return "; ".join(sentences)
