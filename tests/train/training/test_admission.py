import json
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_env.types import TaskSample
from agentrl_train.config import AlgorithmSection, RolloutSection
from agentrl_train.config.sections import RunSection
from agentrl_train.errors import ConfigError
from agentrl_train.placement.environments import Served
from agentrl_train.training import admission
from agentrl_train.training.admission import AdmittedGroup, Mixer, WorkWindow, sample_seed
from agentrl_train.types import EpisodeEnd, TaskSource, Trajectory, TrajectoryGroup

SOURCES = (TaskSource(task="house", num_samples=7), TaskSource(task="shop", weight=2.0))
SEEDS = st.integers(0, 2**32)
PLACES = st.tuples(st.integers(1, 5), st.integers(0, 4), st.integers(1, 25))


def staleness_bound(window: WorkWindow) -> int:
    """Return the most steps between a group's admission and its training: ``S + ceil((W - 1) / P)``."""
    return window._max_staleness + window._slack


def make_window(per_step: int, staleness: int, window: int, *, total_steps: int | None = None) -> WorkWindow:
    return WorkWindow(
        Mixer(SOURCES, seed=3),
        groups_per_step=per_step,
        max_staleness=staleness,
        window=window,
        total_steps=total_steps,
    )


def admit_all(window: WorkWindow) -> list[AdmittedGroup]:
    admitted = []
    while (group := window.admit(window.steps)) is not None:
        admitted.append(group)
    return admitted


@dataclass
class Simulation:
    """Simulates a whole run, one event at a time. ``choose(n)`` makes all random choices."""

    window: WorkWindow
    admitted: dict[int, AdmittedGroup] = field(default_factory=dict)
    trained: list[int] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    most_under_way: int = 0

    def run(self, choose, *, steps: int, drop_one_in: int = 0) -> None:
        while self.window.steps < steps:
            for group in admit_all(self.window):
                self.admitted[group.group_id] = group
            waiting = self.window.in_flight
            self.most_under_way = max(self.most_under_way, len(waiting) + len(self.window.finished))
            if waiting:
                group = waiting[choose(len(waiting))]
                if drop_one_in and choose(drop_one_in) == 0:
                    self.window.drop(group.group_id)
                else:
                    self.window.finish(group.group_id)
            taken = self.window.take()
            assert waiting or taken, "nothing can finish and nothing can be trained"
            if taken:
                self.ages += [self.window.steps - self.admitted[i].admitted_version for i in taken]
                self.trained += taken
                self.window.trained()


@settings(max_examples=150, deadline=None)
@given(place=PLACES, seed=SEEDS)
def test_staleness_bound_holds_in_any_order_of_finishing(place, seed):
    per_step, staleness, look = place
    simulation = Simulation(make_window(per_step, staleness, look, total_steps=12))
    simulation.run(random.Random(seed).randrange, steps=12, drop_one_in=4)
    assert max(simulation.ages) <= staleness_bound(simulation.window)
    assert len(simulation.trained) == len(set(simulation.trained)) == 12 * per_step
    assert simulation.most_under_way <= (staleness + 1) * per_step
    assert simulation.window.complete
    assert simulation.window.in_flight == simulation.window.finished == ()


@settings(max_examples=100, deadline=None)
@given(place=PLACES, slow=st.integers(0, 11))
def test_unfinished_group_blocks_trainer_only_when_due(place, slow):
    per_step, staleness, look = place
    window = make_window(per_step, staleness, look)
    for _ in range(200):
        admit_all(window)
        for group in window.in_flight:
            if group.group_id != slow:
                window.finish(group.group_id)
        if window.take() is None:
            break
        window.trained()
    else:
        raise AssertionError("a group was overtaken for good")
    allowed = min(look, staleness * per_step + 1) - 1
    assert slow // per_step <= window.steps <= slow // per_step + -(-allowed // per_step)
    window.finish(slow)
    taken = window.take()
    assert taken is not None
    assert slow in taken


@settings(max_examples=60, deadline=None)
@given(place=PLACES, seed=SEEDS)
def test_every_started_group_is_trained(place, seed):
    """There is no length bias: every admitted group is trained, not only short ones."""
    per_step, staleness, look = place
    simulation = Simulation(make_window(per_step, staleness, look, total_steps=10))
    chance = random.Random(seed)
    simulation.run(lambda n: min(chance.randrange(n), chance.randrange(n)), steps=10)
    assert sorted(simulation.trained) == list(range(10 * per_step))


def test_zero_staleness_admits_after_previous_step():
    window = make_window(4, 0, 9)
    assert [group.group_id for group in admit_all(window)] == [0, 1, 2, 3]
    for group_id in (3, 1, 0):
        window.finish(group_id)
        assert window.take() is None
    window.finish(2)
    assert window.take() == (0, 1, 2, 3)
    assert window.admit(0) is None
    window.trained()
    assert [group.admitted_version for group in admit_all(window)] == [1, 1, 1, 1]


def test_strict_order_waits_for_oldest_group():
    window = make_window(2, 1, 1)
    admit_all(window)
    for group_id in (1, 2, 3):
        window.finish(group_id)
    assert window.take() is None
    window.finish(0)
    assert window.take() == (0, 1)


def test_window_lets_finished_groups_overtake():
    window = make_window(2, 1, 2)
    admit_all(window)
    window.finish(1)
    window.finish(2)
    assert window.take() == (1, 2)


def test_dropped_group_is_replaced_by_another_sample():
    window = make_window(2, 0, 1)
    first = admit_all(window)
    window.drop(first[0].group_id)
    (replacement,) = admit_all(window)
    assert replacement.group_id == 2
    assert window.dropped == 1
    window.finish(1)
    window.finish(2)
    assert window.take() == (1, 2)


def test_no_group_beyond_last_step_is_admitted():
    window = make_window(4, 3, 1, total_steps=2)
    assert len(admit_all(window)) == 8


def test_slots_are_freed_when_batch_is_trained():
    window = make_window(2, 0, 1)
    for group in admit_all(window):
        window.finish(group.group_id)
    window.take()
    assert window.admit(0) is None
    with pytest.raises(RuntimeError, match="in training"):
        window.take()
    window.trained()
    with pytest.raises(RuntimeError, match="take"):
        window.trained()
    assert window.admit(1) is not None


def test_finishing_unknown_group_is_an_error():
    window = make_window(2, 0, 1)
    with pytest.raises(KeyError):
        window.finish(0)


@settings(max_examples=120, deadline=None)
@given(place=PLACES, seed=SEEDS)
def test_resume_at_any_moment_trains_every_group_once(place, seed):
    """Write checkpoints every few steps and kill at a random time. The journal restores finished groups."""
    per_step, staleness, look = place
    chance = random.Random(seed)
    drops = chance.choice([0.0, 0.15])
    saved: dict[int, AdmittedGroup] = {}
    samples: dict[int, tuple[str, int, int]] = {}
    window = make_window(per_step, staleness, look, total_steps=9)
    state, trained_at_state = None, []
    trained: list[int] = []
    for _ in range(500):
        for group in admit_all(window):
            sample = (group.task, group.index, group.seed)
            assert samples.setdefault(group.group_id, sample) == sample, "an id has two samples"
            assert group.group_id not in saved, "a finished group was played again"
        if window.in_flight:
            group = chance.choice(window.in_flight)
            if chance.random() < drops:
                window.drop(group.group_id)
            else:
                window.finish(group.group_id)
                saved[group.group_id] = group
        if (taken := window.take()) is not None:
            age = max(window.steps - saved[i].admitted_version for i in taken)
            assert drops or age <= staleness_bound(window)
            trained += taken
            window.trained()
            if chance.random() < 0.4:
                state, trained_at_state = json.loads(json.dumps(window.state())), list(trained)
        if window.complete:
            break
        if chance.random() < 0.05:
            window = make_window(per_step, staleness, look, total_steps=9)
            window.restore(state, finished=saved)
            trained = list(trained_at_state)
            assert set(window.finished) == set(saved) - set(trained)
    else:
        raise AssertionError("the run never ended")
    assert len(trained) == len(set(trained)) == 9 * per_step


def test_groups_in_flight_are_readmitted_first_with_their_id():
    window = make_window(2, 1, 1)
    before = admit_all(window)
    window.finish(2)
    state = json.loads(json.dumps(window.state()))
    resumed = make_window(2, 1, 1)
    resumed.restore(state, finished=[2])
    again = admit_all(resumed)
    assert [group.group_id for group in again] == [0, 1, 3]
    assert [(g.task, g.index, g.seed) for g in again] == [
        (g.task, g.index, g.seed) for g in before if g.group_id != 2
    ]


def test_unfinished_groups_of_a_task_that_the_resumed_run_does_not_have_are_replaced():
    window = make_window(2, 1, 1)
    groups = admit_all(window)
    (lost,) = {group.task for group in groups[1:]} - {groups[0].task} or {groups[0].task}
    kept = [source for source in SOURCES if source.task != lost]
    resumed = WorkWindow(Mixer(kept, seed=1), groups_per_step=2, max_staleness=1)
    resumed.restore(window.state())
    again = admit_all(resumed)
    assert len(again) == len(groups)
    assert {group.task for group in again} == {source.task for source in kept}
    assert resumed.dropped == sum(group.task == lost for group in groups)


@pytest.mark.parametrize("fewer", [{"num_samples": 10}, {"num_samples": 100, "split": "renamed"}])
def test_unfinished_groups_of_samples_that_the_task_no_longer_has_are_replaced(fewer):
    def window(**split) -> WorkWindow:
        mixer = Mixer([TaskSource(task="house", **split)], seed=3)
        return WorkWindow(mixer, groups_per_step=8, max_staleness=0)

    before = window(num_samples=100)
    groups = admit_all(before)
    gone = [g for g in groups if "split" in fewer or g.index >= fewer["num_samples"]]
    assert gone
    resumed = window(**fewer)
    resumed.restore(before.state())
    again = admit_all(resumed)
    assert len(again) == len(groups)
    assert all(g.index < fewer["num_samples"] and g.split == fewer.get("split", g.split) for g in again)
    assert {g.group_id for g in gone}.isdisjoint(g.group_id for g in again)
    assert resumed.dropped == len(gone)


def test_batch_in_training_at_snapshot_counts_as_untrained():
    window = make_window(1, 0, 1)
    admit_all(window)
    window.finish(0)
    window.take()
    resumed = make_window(1, 0, 1)
    resumed.restore(window.state(), finished=[0])
    assert resumed.take() == (0,)


def test_finished_group_without_episodes_is_an_error():
    window = make_window(1, 0, 1)
    admit_all(window)
    window.finish(0)
    with pytest.raises(ValueError, match=r"groups \[0\]"):
        make_window(1, 0, 1).restore(window.state())


def test_finished_groups_without_a_greedy_episode_do_not_fit_the_greedy_baseline():
    restored = partial(
        admission.make_window,
        RunSection(name="run", steps=9),
        RolloutSection(groups_per_step=1),
        algorithm=AlgorithmSection.model_validate({"baseline": "greedy"}),
        served=Served(clients={}, sources=SOURCES, held_out={}),
        changes=(),
        checkpoint=None,
    )
    group = TrajectoryGroup(group_id=0, task="house", trajectories=(), admitted_version=0)
    with pytest.raises(ConfigError, match=r"cannot be resumed: .* restore algorithm\.baseline"):
        restored(saved={0: group})
    greedy = Trajectory(
        sample=TaskSample(task="house", index=0),
        opening=(),
        turns=(),
        end=EpisodeEnd.TERMINATED,
        reward=0.0,
        success=False,
    )
    assert restored(saved={0: replace(group, greedy=greedy)}).finished == (0,)


@pytest.mark.parametrize("place", [(0, 0, 1), (1, -1, 1), (1, 0, 0)])
def test_invalid_window_is_rejected(place):
    with pytest.raises(ValueError, match="at least 1"):
        make_window(*place)


# --- the mixture ---


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.floats(0.1, 10), min_size=1),
    st.integers(1, 300),
)
def test_tasks_have_their_share_at_any_time(weights: dict[str, float], draws: int):
    mixer = Mixer([TaskSource(task=task, weight=weight) for task, weight in weights.items()], seed=0)
    counts = Counter(mixer.draw().task for _ in range(draws))
    for task, weight in weights.items():
        share = draws * weight / sum(weights.values())
        assert abs(counts[task] - share) <= len(weights)


def test_finite_split_is_permuted_each_epoch():
    mixer = Mixer([TaskSource(task="house", num_samples=40)], seed=1)
    first, second = ([mixer.draw().index for _ in range(40)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(40))
    assert first != second


def test_unlimited_split_is_enumerated():
    mixer = Mixer([TaskSource(task="shop")], seed=1)
    assert [mixer.draw().index for _ in range(5)] == [0, 1, 2, 3, 4]


def test_mixture_is_determined_by_seed():
    def draws(seed: int) -> list[object]:
        mixer = Mixer(SOURCES, seed=seed)
        return [mixer.draw() for _ in range(50)]

    assert draws(5) == draws(5) != draws(6)


@given(st.integers(0, 60))
def test_mixture_resumes_from_state(draws: int):
    mixer, resumed = Mixer(SOURCES, seed=9), Mixer(SOURCES, seed=9)
    for _ in range(draws):
        mixer.draw()
    resumed.restore(json.loads(json.dumps(mixer.state())))
    assert [mixer.draw() for _ in range(30)] == [resumed.draw() for _ in range(30)]


def share_of_tokens(mixer: Mixer, tokens: dict[str, int], *, draws: int) -> float:
    """Draw and count groups. Return the first task's share of the tokens."""
    totals: Counter[str] = Counter()
    for _ in range(draws):
        task = mixer.draw().task
        totals[task] += tokens[task]
        mixer.count(task, tokens[task])
    return totals["house"] / max(1, totals.total())


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_rebalanced_tasks_share_tokens_by_weight(weight: float):
    mixer = Mixer([TaskSource(task="house", weight=weight), TaskSource(task="shop")], seed=0, by_tokens=True)
    tokens = {"house": 1800, "shop": 300}
    before = 6 * weight / (6 * weight + 1)
    assert share_of_tokens(mixer, tokens, draws=240) == pytest.approx(before, abs=0.01)
    mixer.rebalance(after=0)
    wanted = weight / (weight + 1)
    assert share_of_tokens(mixer, tokens, draws=240) == pytest.approx(wanted, abs=0.03)
    mixer.rebalance(after=0)
    tokens = {"house": 200, "shop": 900}  # the policy became shorter
    share_of_tokens(mixer, tokens, draws=100)
    mixer.rebalance(after=0)
    assert share_of_tokens(mixer, tokens, draws=240) == pytest.approx(wanted, abs=0.03)


def test_untrained_task_keeps_its_share():
    mixer = Mixer([TaskSource(task="house"), TaskSource(task="shop")], seed=0, by_tokens=True)
    mixer.count("house", 500)
    mixer.rebalance(after=0)
    assert Counter(mixer.draw().task for _ in range(10)) == {"house": 5, "shop": 5}


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 40))
def test_draws_are_reproduced_across_rebalancing(before: int, after: int, later: int):
    mixer, resumed = Mixer(SOURCES, seed=9, by_tokens=True), Mixer(SOURCES, seed=9, by_tokens=True)
    share_of_tokens(mixer, {"house": 70, "shop": 900}, draws=before)
    mixer.rebalance(after=after)
    state = json.loads(json.dumps(mixer.state()))
    draws = [mixer.draw() for _ in range(later)]
    resumed.restore(state)
    assert draws == [resumed.draw() for _ in range(later)]
    for one in (mixer, resumed):
        one.count("shop", 50)
        one.rebalance(after=3)
    assert [mixer.draw() for _ in range(20)] == [resumed.draw() for _ in range(20)]


def test_new_task_starts_with_its_first_sample():
    mixer = Mixer(SOURCES[:1], seed=9, by_tokens=True)
    mixer.draw()
    wider = Mixer(SOURCES, seed=9, by_tokens=True)
    wider.restore(mixer.state())
    assert 0 in [draw.index for draw in (wider.draw() for _ in range(3)) if draw.task == "shop"]


@pytest.mark.parametrize(
    ("sources", "reason"),
    [
        ([], "no task"),
        ([TaskSource(task="a"), TaskSource(task="a")], "twice"),
        ([TaskSource(task="a", weight=0.0)], "weight"),
        ([TaskSource(task="a", num_samples=0)], "no samples"),
    ],
)
def test_invalid_mixture_is_rejected(sources, reason):
    with pytest.raises(ValueError, match=reason):
        Mixer(sources, seed=0, by_tokens=True)


def test_seeds_of_samples_equal_those_of_earlier_runs():
    assert sample_seed(1, "house", "train", 0) == 23590873601962
    assert sample_seed(1, "a") != sample_seed(1, "b")
    assert sample_seed(0) < 2**53
