"""A reward with different values for the episodes of a random policy."""

from agentrl_train.reward import answer, reward


@reward
def vowels(trajectory):  # type: ignore[no-untyped-def]
    text = answer(trajectory)
    return sum(letter in "aeiouAEIOU" for letter in text) / max(1, len(text))
