"""Token limits by the turns of experts."""

from agentrl_train.planning.defaults import limits_of


def test_limits_have_a_margin_over_the_longest_turn_and_episode_of_the_experts() -> None:
    limits = limits_of([28, 20], [163, 300], max_context=8192, opening=60)
    assert limits.max_new_tokens == 48
    assert limits.max_context == 640


def test_context_holds_the_opening_and_several_turns() -> None:
    assert limits_of([30], [100], max_context=8192, opening=1000).max_context >= 1000 + 4 * 45


def test_limits_stay_within_the_context_of_the_model() -> None:
    assert limits_of([30], [5000], max_context=2048).max_context == 2048


def test_limits_without_an_expert_are_the_configuration_defaults() -> None:
    limits = limits_of([], [], max_context=8192, opening=100)
    assert (limits.max_new_tokens, limits.max_context) == (256, 2048)
