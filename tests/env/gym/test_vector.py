import asyncio
import contextlib
import json
import math
import pickle
import subprocess
import sys
import threading

import gymnasium
import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, ResetNeeded
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

from agentrl_env import Done, EnvClient, Environment, GymEnv, Reply, tool
from agentrl_env.client.http import HttpBackend
from agentrl_env.errors import (
    AgentRLError,
    EnvironmentFailed,
    ServerFull,
    ServerUnreachable,
    SessionExpired,
    UnknownSample,
    UnknownSession,
    UnknownTask,
)
from agentrl_env.gym.vector import GymVectorEnv, stack_infos
from agentrl_env.launch.process import ServerProcess
from tests.chaos.site import free_ports
from tests.env.intercepted_client import InterceptedClient, pool_of
from tests.env.tasks import expire_idle
from tests.env.thread_server import server_on_thread

ID = "agentrl_env:agentrl/Env-v0"
MODES = list(AutoresetMode)
BREAKS = 13


class Pick(Environment):
    """Pick the lucky number, 1 to 3; 13 breaks the environment."""

    max_turns = 3
    blocking = False

    def reset(self, sample, rng):
        self.lucky = int(rng.integers(1, 4))
        return sample.data.get("word", f"Pick. (My word for today: {rng.integers(1000)}.)")

    @tool
    def pick(self, n: int):
        """Pick a number."""
        if n == BREAKS:
            raise RuntimeError("unlucky")
        return Done("Yes!", reward=1.0) if n == self.lucky else "No."


class Pages(Pick):
    """Pick, with a data set."""

    @classmethod
    def samples(cls, split):
        return [{"word": f"{split}{i}"} for i in range(5)]


class Unopenable(Pick):
    """Pick, but reset() fails while ``willing`` is False."""

    willing = True

    def reset(self, sample, rng):
        if not Unopenable.willing:
            raise RuntimeError("not today")
        return super().reset(sample, rng)


class Offline(InterceptedClient):
    """A client whose server is unreachable while ``away`` is set."""

    away = False

    async def step(self, session, play, message):
        if self.away:
            raise ServerUnreachable("unreachable")
        return await play(message)

    async def open(self, *args, **kwargs):
        if self.away:
            raise ServerUnreachable("unreachable")
        return await super().open(*args, **kwargs)


def call(n):
    return {"name": "pick", "arguments": {"n": n}}


def assert_same(left, right):
    """Assert that two results are equal, including array types."""
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, tuple | list):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif isinstance(left, np.ndarray):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert_same(left.tolist(), right.tolist())
    else:
        assert left == right


@pytest.fixture(scope="module")
def server():
    with ServerProcess(f"{__file__}:Pick", f"{__file__}:Pages", token="s3cret") as server:
        yield server


@pytest.fixture
def make():
    """Return a factory of vector environments that are closed after the test."""
    made = []

    def make(num_envs=3, environment=Pick, **options):
        options = {"autoreset_mode": "Disabled", **options}
        options = options if {"url", "client"} & options.keys() else {**options, "client": environment.local}
        made.append(GymVectorEnv(num_envs, **options))
        return made[-1]

    yield make
    for env in made:
        env.close()


class Pairs:
    """For each number and mode, a GymVectorEnv and an equivalent SyncVectorEnv of GymEnvs."""

    def __init__(self, **where):
        self._where = where
        self._made = {}

    def get(self, num_envs, mode):
        if (num_envs, mode) not in self._made:
            singles = [lambda: GymEnv(**self._where)] * num_envs
            ours = GymVectorEnv(num_envs, autoreset_mode=mode, **self._where)
            self._made[num_envs, mode] = ours, SyncVectorEnv(singles, autoreset_mode=mode)
        return self._made[num_envs, mode]

    def close(self):
        for env in sum(self._made.values(), ()):
            env.close()


@pytest.fixture(scope="module")
def local_pairs():
    pairs = Pairs(client=Pick.local)
    yield pairs
    pairs.close()


@pytest.fixture(scope="module")
def remote_pairs(server):
    pairs = Pairs(url=server.url, token=server.token, task="pick")
    yield pairs
    pairs.close()


actions = st.one_of(st.integers(0, 4).map(call), st.sampled_from(["Let me think.", {"name": "fly"}, {}]))
SEEDS = st.integers(0, 2**40)


@st.composite
def runs(draw):
    num_envs = draw(st.integers(1, 3))
    each = st.lists(SEEDS | st.none(), min_size=num_envs, max_size=num_envs)
    turns = st.lists(
        st.tuples(st.tuples(*[actions] * num_envs), st.none() | SEEDS | each), min_size=1, max_size=9
    )
    return num_envs, draw(st.sampled_from(MODES)), draw(SEEDS), draw(turns)


def assert_runs_are_the_same(pairs, run):
    num_envs, mode, seed, turns = run
    ours, theirs = pairs.get(num_envs, mode)
    assert_same(ours.reset(seed=seed), theirs.reset(seed=seed))
    for each, next_seed in turns:
        left, right = ours.step(each), theirs.step(each)
        assert_same(left, right)
        over = left[2] | left[3]
        if mode is AutoresetMode.DISABLED and over.any():
            left, right = (
                env.reset(seed=next_seed, options={"reset_mask": over.copy()}) for env in (ours, theirs)
            )
            assert_same(left, right)
        assert ours.np_random_seed == theirs.np_random_seed


@settings(max_examples=60, deadline=None)
@given(runs())
def test_equals_gymnasiums_sync_vector_env(local_pairs, run):
    assert_runs_are_the_same(local_pairs, run)


@settings(max_examples=25, deadline=None)
@given(runs())
def test_equals_gymnasiums_sync_vector_env_over_http(remote_pairs, run):
    assert_runs_are_the_same(remote_pairs, run)


def test_local_and_remote_episodes_are_identical(server, make):
    local, remote = make(), make(url=server.url, token=server.token, task="pick")
    assert_same(local.reset(seed=4), remote.reset(seed=4))
    assert_same(local.step([call(0)] * 3), remote.step([call(0)] * 3))


@pytest.mark.parametrize("where", ["local", "remote"])
def test_256_sessions_run_concurrently(where, server, make):
    remote = {"url": server.url, "token": server.token, "task": "pick"}
    env = make(256, **(remote if where == "remote" else {}))
    conversations, infos = env.reset(seed=0)
    assert infos["seed"].tolist() == list(range(256))
    first = env.step([call(1)] * 256)
    assert conversations == env.reset(seed=0)[0]
    assert_same(first, env.step([call(1)] * 256))
    assert 0 < first[1].sum() < 256


def test_steps_of_one_call_are_concurrent(make):
    class Gathering(InterceptedClient):
        """A client whose steps wait until 100 have been called."""

        barrier = asyncio.Barrier(100)

        async def step(self, session, play, message):
            async with asyncio.timeout(60):
                await self.barrier.wait()
            return await play(message)

    env = make(100, client=lambda: Gathering.local(Pick))
    env.reset(seed=0)
    assert env.step([call(0)] * 100)[1].tolist() == [0.0] * 100


def test_results_have_the_types_of_gymnasium(make):
    env = make(2)
    assert isinstance(env, VectorEnv)
    conversations, _ = env.reset(seed=0)
    assert conversations in env.observation_space
    env.action_space.seed(0)
    conversations, rewards, terminated, truncated, infos = env.step(env.action_space.sample())
    assert conversations in env.observation_space
    assert isinstance(conversations, tuple)
    assert (rewards.dtype, terminated.dtype, truncated.dtype) == (np.float64, np.bool_, np.bool_)
    assert rewards.shape == terminated.shape == truncated.shape == (2,)
    assert infos["metrics"]["_invalid_calls"].tolist() == [True, True]


def test_single_spaces_equal_those_of_the_single_environment(make):
    env, single = make(2), Pick.gym()
    assert env.single_action_space == single.action_space
    assert env.single_observation_space == single.observation_space
    assert [space == single.action_space for space in env.action_space] == [True, True]
    env.action_space.seed(1)
    assert env.action_space.sample() in env.action_space
    single.close()


def test_returned_values_are_copies(make):
    env = make(1)
    conversations, _ = env.reset(seed=0)
    kept = json.dumps(conversations)
    _, rewards, terminated, *_ = env.step([call(0)])
    assert json.dumps(conversations) == kept
    conversations[0][0]["content"] = "changed"
    rewards[0], terminated[0] = 9.0, True
    conversations, rewards, terminated, *_ = env.step([call(0)])
    assert conversations[0][0]["content"] != "changed"
    assert (rewards[0], terminated[0]) == (0.0, False)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", [lambda mode: mode, lambda mode: mode.value])
def test_make_vec_uses_the_vector_entry_point(mode, form, server):
    env = gymnasium.make_vec(
        ID,
        num_envs=8,
        url=server.url,
        token=server.token,
        task="pick",
        autoreset_mode=form(mode),
        vectorization_mode="vector_entry_point",
    )
    assert isinstance(env, GymVectorEnv)
    assert env.metadata["autoreset_mode"] is mode
    assert len(env.reset(seed=1)[0]) == 8
    env.close()


def test_make_vec_resets_ended_episodes_by_default():
    env = gymnasium.make_vec(ID, num_envs=2, url="http://127.0.0.1:9", task="pick")
    assert isinstance(env, GymVectorEnv)
    assert env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    assert "http://127.0.0.1:9" in env.spec.to_json()
    if Version(gymnasium.__version__) >= Version("1.4"):  # older releases write to the metadata of the class
        assert "autoreset_mode" not in GymVectorEnv.metadata
    env.close()


def test_gym_vec_of_an_environment_class_is_a_vector_env():
    env = Pick.gym_vec(3, autoreset_mode="SameStep", split="test")
    assert isinstance(env, GymVectorEnv)
    assert (env.num_envs, env.autoreset_mode) == (3, AutoresetMode.SAME_STEP)
    assert env.reset(seed=1)[1]["split"].tolist() == ["test"] * 3
    env.close()


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_gymnasium_vector_wrappers_work(mode, make):
    env = RecordEpisodeStatistics(make(2, autoreset_mode=mode))
    env.reset(seed=0)
    for _ in range(3):
        infos = env.step([call(0)] * 2)[-1]
    assert infos["episode"]["l"].tolist() == [3, 3]


# Seeds


def words(conversations):
    return [conversation[0]["content"] for conversation in conversations]


def test_int_seed_gives_environment_i_seed_plus_i(make):
    env = make(3)
    first = words(env.reset(seed=7)[0])
    assert env.np_random_seed == (7, 8, 9)
    for i in range(3):
        assert words(make(1).reset(seed=7 + i)[0]) == [first[i]]


@pytest.mark.parametrize("form", [list, tuple, np.array])
def test_list_gives_each_environment_its_seed(form, make):
    env = make(3)
    assert env.reset(seed=form([5, 3, 5]))[1]["seed"].tolist() == [5, 3, 5]


def test_seed_none_continues_each_generator(make):
    def run(env):
        first = env.reset(seed=7)[1]["seed"].tolist()
        return [first] + [env.reset()[1]["seed"].tolist() for _ in range(2)]

    env = make(2)
    assert run(env) == run(env) == run(make(2))
    assert len({seed for seeds in run(env) for seed in seeds}) == 6


def test_none_in_a_list_of_seeds_continues_that_generator(make):
    env, other = make(2), make(2)
    env.reset(seed=[1, 2])
    other.reset(seed=[1, 9])
    assert env.reset(seed=[None, 5])[1]["seed"][0] == other.reset()[1]["seed"][0]
    assert env.np_random_seed == (1, 5)


def test_generators_are_independent(make):
    env, other = make(2), make(2)
    for vector in (env, other):
        vector.reset(seed=3)
    for _ in range(3):
        env.reset(options={"reset_mask": np.array([True, False])})
    only_second = {"reset_mask": np.array([False, True])}
    assert env.reset(options=only_second)[1]["seed"][1] == other.reset(options=only_second)[1]["seed"][1]


@pytest.mark.parametrize("seed", [[1, 2], [1, 2, 3, 4], [1, 2, "3"], 1.5, -1, [0, 0, -1]])
def test_invalid_seeds_are_rejected_without_effect(seed, make):
    env = make(3)
    before = env.reset(seed=1)
    with pytest.raises((ValueError, TypeError, gymnasium.error.Error)):
        env.reset(seed=seed)
    assert env.np_random_seed == (1, 2, 3)
    assert env.running.all()
    assert_same(env.reset(seed=1), before)


# Reset options


def test_reset_mask_resets_only_the_masked_environments(make):
    env = make(3)
    env.reset(seed=0)
    before, *_ = env.step([call(0)] * 3)
    after, infos = env.reset(seed=[None, 5, None], options={"reset_mask": np.array([False, True, False])})
    assert (after[0], after[2]) == (before[0], before[2])
    assert len(after[1]) == 1
    assert infos["_seed"].tolist() == [False, True, False]
    assert infos["seed"][1] == 5
    assert [len(conversation) for conversation in env.step([call(0)] * 3)[0]] == [5, 3, 5]


@pytest.mark.parametrize(
    ("mask", "error"),
    [
        ([True, False, False], TypeError),
        (np.array([1, 0, 0]), TypeError),
        (np.array([True, False]), ValueError),
        (np.array([[True, False, False]]), ValueError),
        (np.zeros(3, dtype=bool), ValueError),
    ],
)
def test_invalid_reset_mask_is_rejected(mask, error, make):
    env = make(3)
    env.reset(seed=0)
    with pytest.raises(error, match="reset_mask"):
        env.reset(options={"reset_mask": mask})
    assert env.running.all()


def test_options_apply_to_all_or_to_each(make):
    env = make(3, Pages, split="test")
    assert words(env.reset(options={"index": 2})[0]) == ["test2"] * 3
    assert words(env.reset(options={"index": [0, 0, 4]})[0]) == ["test0", "test0", "test4"]
    assert words(env.reset(options={"index": np.array([1, 2, 3])})[0]) == ["test1", "test2", "test3"]
    assert words(env.reset(options={"index": 1, "split": ["train", "test", None]})[0]) == [
        "train1",
        "test1",
        "test1",
    ]
    assert words(env.reset(options={"sample": {"word": "own"}})[0]) == ["own"] * 3
    mine = [{"word": "a"}, None, {"word": "c"}]
    first, chosen, third = words(env.reset(seed=1, options={"sample": mine})[0])
    assert (first, third) == ("a", "c")
    assert chosen.startswith("test")
    mask = np.array([False, False, True])
    options = {"reset_mask": mask, "index": [0, 0, 4]}
    assert words(env.reset(options=options)[0]) == [first, chosen, "test4"]
    assert options == {"reset_mask": mask, "index": [0, 0, 4]}, "the caller's options were changed"


def test_same_index_gives_the_same_problem(make):
    env = make(4)
    first, second, third, fourth = words(env.reset(options={"index": [1, 1, 2, 2]})[0])
    assert first == second != third == fourth


@pytest.mark.parametrize("options", [{"indx": 3}, {"index": [0, 1]}, {"index": np.zeros(4, dtype=int)}])
def test_invalid_options_are_rejected(options, make):
    env = make(3, Pages)
    env.reset(seed=0)
    with pytest.raises(ValueError, match="option"):
        env.reset(options=options)
    assert env.running.all()


def test_failed_reset_names_the_environment_and_leaves_the_others_running(make):
    env = make(3, Pages)
    with pytest.raises(UnknownSample) as raised:
        env.reset(options={"index": [0, 9, 1]})
    assert raised.value.__notes__ == ["This is environment 1 of 3."]
    assert env.running.tolist() == [True, False, True]
    with pytest.raises(ResetNeeded, match=r"\[1\]"):
        env.step([call(0)] * 3)
    conversations, _ = env.reset(options={"reset_mask": ~env.running, "index": 2})
    assert words(conversations) == ["train0", "train2", "train1"]
    env.step([call(0)] * 3)


# Autoreset


def test_loop_of_gymnasium_plays_episode_after_episode():
    with contextlib.closing(GymVectorEnv(2, client=Pick.local)) as env:
        env.reset(seed=0)
        turns = [env.step([call(0)] * 2)[0] for _ in range(6)]
    assert [len(conversations[0]) for conversations in turns] == [3, 5, 7, 1, 3, 5]


def test_disabled_autoreset_requires_a_reset(make):
    env = make(2)
    env.reset(seed=0)
    for _ in range(3):
        *_, truncated, _ = env.step([call(0)] * 2)
    assert truncated.all()
    env.reset(options={"reset_mask": np.array([True, False])})
    with pytest.raises(ResetNeeded, match=r"\[1\]: reset all, .* autoreset_mode='NextStep' or"):
        env.step([call(0)] * 2)
    conversations, _ = env.reset(options={"reset_mask": ~env.running})
    assert [len(conversation) for conversation in conversations] == [1, 1]


@pytest.mark.parametrize("mode", MODES)
def test_step_before_reset_raises(mode, make):
    env = make(2, autoreset_mode=mode)
    with pytest.raises(ResetNeeded, match=r"\[0, 1\]"):
        env.step([call(0)] * 2)


@pytest.mark.parametrize("given", [[], [call(0)], [call(0)] * 3, call(0), "ab", b"ab"])
def test_wrong_number_of_actions_is_rejected(given, make):
    env = make(2)
    env.reset(seed=0)
    with pytest.raises(ValueError, match="one action for each of 2"):
        env.step(given)
    assert env.running.all()
    assert len(env.step([call(0)] * 2)[0][0]) == 3


# Failures


def assert_failed(results, i, kind):
    _, rewards, terminated, truncated, infos = results
    assert math.isnan(rewards[i])
    assert (terminated[i], truncated[i]) == (False, True)
    assert infos["failed"][i]
    assert isinstance(infos["error"][i], kind)


def test_action_of_another_type_raises_type_error_and_steps_no_environment(make):
    env = make(2)
    before, _ = env.reset(seed=0)
    for wrong in (None, 5, ("pick", {"n": 0})):
        with pytest.raises(TypeError, match="an action is a tool call"):
            env.step([call(0), wrong])
    assert env.running.all()
    assert [len(c) for c in env.step([call(0)] * 2)[0]] == [len(c) + 2 for c in before]


@pytest.mark.parametrize("where", ["local", "remote"])
def test_failed_episode_does_not_affect_the_others(where, server, make):
    remote = {"url": server.url, "token": server.token, "task": "pick"}
    env = make(3, **(remote if where == "remote" else {}))
    before, _ = env.reset(seed=0)
    results = env.step([call(0), call(BREAKS), call(0)])
    assert_failed(results, 1, EnvironmentFailed)
    conversations, rewards, terminated, truncated, infos = results
    assert conversations[1] == before[1]
    assert rewards[[0, 2]].tolist() == [0.0, 0.0]
    assert not terminated.any()
    assert truncated.tolist() == infos["failed"].tolist() == infos["_error"].tolist() == [False, True, False]
    assert infos["status"].tolist() == ["running", "failed_environment", "running"]
    assert infos["metrics"]["_invalid_calls"].tolist() == [True, False, True]
    assert "unlucky" in str(infos["error"][1])
    with pytest.raises(ResetNeeded, match=r"\[1\]"):
        env.step([call(0)] * 3)
    env.reset(options={"reset_mask": truncated})
    assert "failed" not in env.step([call(0)] * 3)[-1]


def test_failure_of_all_episodes_does_not_raise(make):
    env = make(2)
    env.reset(seed=0)
    results = env.step([call(BREAKS)] * 2)
    for i in range(2):
        assert_failed(results, i, EnvironmentFailed)


def test_next_step_resets_after_a_failed_episode(make):
    env = make(2, autoreset_mode="NextStep")
    env.reset(seed=0)
    assert_failed(env.step([call(BREAKS), call(0)]), 0, EnvironmentFailed)
    conversations, rewards, terminated, truncated, infos = env.step([call(0)] * 2)
    assert [len(conversation) for conversation in conversations] == [1, 5]
    assert rewards.tolist() == [0.0, 0.0]
    assert not (terminated | truncated).any()
    assert infos["_seed"].tolist() == [True, False]


def test_same_step_resets_after_a_failed_episode(make):
    env = make(2, autoreset_mode="SameStep")
    before, _ = env.reset(seed=0)
    conversations, rewards, _, truncated, infos = env.step([call(BREAKS), call(0)])
    assert [len(conversation) for conversation in conversations] == [1, 3]
    assert np.isnan(rewards).tolist() == truncated.tolist() == [True, False]
    assert infos["final_obs"][0] == before[0]
    assert infos["final_info"]["failed"].tolist() == [True, False]
    assert isinstance(infos["final_info"]["error"][0], EnvironmentFailed)
    assert "failed" not in infos
    env.step([call(0)] * 2)


@pytest.fixture
def unopenable():
    yield Unopenable
    Unopenable.willing = True


def test_next_step_retries_a_failed_reset(unopenable, make):
    env = make(2, unopenable, autoreset_mode="NextStep")
    env.reset(seed=0)
    env.step([call(BREAKS), call(0)])
    unopenable.willing = False
    for _ in range(2):
        results = env.step([call(0)] * 2)
        assert_failed(results, 0, EnvironmentFailed)
        assert results[0][0] == ()
    unopenable.willing = True
    conversations, rewards, *_, infos = env.step([call(0)] * 2)
    assert len(conversations[0]) == 1
    assert rewards[0] == 0.0
    assert infos["_seed"].tolist() == [True, True]


def test_same_step_keeps_the_outcome_if_the_next_episode_cannot_be_opened(unopenable, make):
    env = make(2, unopenable, autoreset_mode="SameStep")
    env.reset(seed=0)
    for _ in range(2):
        env.step([call(0)] * 2)
    unopenable.willing = False
    conversations, rewards, _, truncated, infos = env.step([call(0)] * 2)
    assert rewards.tolist() == [0.0, 0.0]
    assert truncated.all()
    assert infos["final_info"]["status"].tolist() == ["truncated_turns"] * 2
    assert conversations == ((), ())
    assert infos["failed"].all()
    unopenable.willing = True
    conversations, rewards, _, truncated, infos = env.step([call(0)] * 2)
    assert np.isnan(rewards).all()
    assert truncated.all()
    assert all(isinstance(error, EnvironmentFailed) for error in infos["final_info"]["error"])
    assert [len(conversation) for conversation in conversations] == [1, 1]
    assert not np.isnan(env.step([call(0)] * 2)[1]).any()


def test_expired_session_fails_its_episode():
    now = [0.0]
    client = Pick.local(lease_s=5.0, clock=lambda: now[0])
    env = GymVectorEnv(2, client=client)
    env.reset(seed=0)
    now[0] = 60.0
    env._client.run(expire_idle(pool_of(client)))
    results = env.step([call(0)] * 2)
    for i in range(2):
        assert_failed(results, i, SessionExpired)
    assert results[-1]["status"].tolist() == ["expired", "expired"]
    env.close()


@pytest.mark.parametrize("mode", MODES)
def test_unreachable_server_raises(mode, make):
    client = Offline.local(Pick)
    env = make(2, client=client, autoreset_mode=mode)
    first = env.reset(seed=0)
    client.away = True
    with pytest.raises(ServerUnreachable):
        env.step([call(0)] * 2)
    assert not env.running.any()
    with pytest.raises(ResetNeeded):
        env.step([call(0)] * 2)
    with pytest.raises(ServerUnreachable):
        env.reset(seed=0)
    client.away = False
    assert_same(env.reset(seed=0), first)


def test_lost_answer_ends_the_episode():
    class Forgetful(InterceptedClient):
        """A client that loses its second answer."""

        answers = 0

        async def step(self, session, play, message):
            result = await play(message)
            self.answers += 1
            if self.answers == 2:
                raise ServerUnreachable("the connection broke")
            return result

    env = GymVectorEnv(2, client=lambda: Forgetful.local(Pick))
    env.reset(seed=0)
    assert_failed(env.step([call(0)] * 2), 1, ServerUnreachable)
    assert env.running.tolist() == [True, False]
    env.close()


def test_close_ignores_an_unreachable_server(make):
    class Gone(InterceptedClient):
        async def close_session(self, session, close):
            raise ServerUnreachable("unreachable")

    env = make(2, client=lambda: Gone.local(Pick))
    env.reset(seed=0)
    env.close()
    assert not env.running.any()


def test_reset_works_after_a_server_restart():
    (port,) = free_ports(1)
    with server_on_thread(Pick, port=port) as url:
        env = GymVectorEnv(2, client=lambda: EnvClient(HttpBackend(url, patience=0.1)))
        first = env.reset(seed=0)
    with pytest.raises(ServerUnreachable):
        env.step([call(0)] * 2)
    with server_on_thread(Pick, port=port):
        assert_same(env.reset(seed=0), first)
    with server_on_thread(Pick, port=port):
        results = env.step([call(0)] * 2)
        for i in range(2):
            assert_failed(results, i, UnknownSession)
        assert_same(env.reset(seed=0), first)
        env.close()


def test_server_with_exactly_enough_sessions_suffices(make):
    env = make(4, client=lambda: Pick.local(max_sessions=4))
    for _ in range(3):
        env.reset(seed=0)
        env.step([call(0)] * 4)
    assert env.running.any()


def test_server_with_too_few_sessions_raises(make):
    env = make(4, client=lambda: Pick.local(max_sessions=3), wait=0.0)
    with pytest.raises(ServerFull):
        env.reset(seed=0)
    assert env.running.sum() == 3


# Lifecycle


def test_environments_share_one_client_and_one_task_request(make):
    made, asked = [], []

    class Asked(EnvClient):
        async def __aenter__(self):
            await asyncio.sleep(0)
            return self

        async def tasks(self):
            asked.append(self)
            await asyncio.sleep(0)
            return await super().tasks()

    def client():
        made.append(Asked.local(Pick))
        return made[-1]

    env = make(8, client=client)
    env.reset(seed=0)
    env.reset()
    assert (len(made), len(asked)) == (1, 1)


def test_connection_is_made_on_first_use():
    env = GymVectorEnv(2, "http://127.0.0.1:9", "pick")
    assert env.render() is None
    env.close()


def test_close_is_idempotent_and_reset_reconnects(make):
    env = make(2)
    env.close()
    first = env.reset(seed=1)
    assert not env.closed
    env.close()
    env.close()
    assert env.closed
    with pytest.raises(ResetNeeded):
        env.step([call(0)] * 2)
    assert_same(env.reset(seed=1), first)


def test_close_closes_the_sessions(server):
    async def open_sessions():
        client = Pick.local()
        pool, env = pool_of(client), GymVectorEnv(4, client=client)
        await env.areset(seed=0)
        before = pool.open_sessions
        await env.areset(seed=0)
        again = pool.open_sessions
        await env.aclose()
        return before, again, pool.open_sessions

    assert asyncio.run(open_sessions()) == (4, 4, 0)


@pytest.mark.parametrize("used", [False, True])
def test_pickled_environment_works_before_and_after_use(used, server, make):
    env = make(2, url=server.url, token=server.token, task="pick", autoreset_mode="SameStep")
    env.reset(seed=1)
    if used:
        env.action_space.sample()
        env.step([call(0)] * 2)
    copy = pickle.loads(pickle.dumps(env))
    assert copy.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    with pytest.raises(ResetNeeded):
        copy.step([call(0)] * 2)
    assert_same(copy.reset(), env.reset())
    copy.close()


def test_forked_process_opens_its_own_connection(server):
    code = f"""
import os, warnings
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
from agentrl_env.client.http import HttpBackend
from agentrl_env.gym.vector import GymVectorEnv
env = GymVectorEnv(2, {server.url!r}, "pick", token={server.token!r})
first, _ = env.reset(seed=1)
calls = [{{"name": "pick", "arguments": {{"n": 0}}}}] * 2
child = os.fork()
if child == 0:
    try:
        env.step(calls)
    except Exception as error:
        print(type(error).__name__, env.reset(seed=1)[0] == first, flush=True)
    env.close()
    os._exit(0)
os.waitpid(child, 0)
print(env.step(calls)[0][0][-1]["content"])
env.close()
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "ResetNeeded True\nNo.\n", ran.stderr
    assert ran.stderr == ""


# gymnasium before 1.4 closes what its constructor rejected.
@pytest.mark.filterwarnings(r"ignore:Exception ignored in. <function VectorEnv\.__del__")
def test_invalid_constructor_arguments_are_rejected(server):
    with pytest.raises(ValueError, match="either url="):
        GymVectorEnv(2)
    with pytest.raises(ValueError, match="at least 1"):
        GymVectorEnv(0, client=Pick.local)
    with pytest.raises(ValueError, match="render mode 'human'"):
        GymVectorEnv(2, client=Pick.local, render_mode="human")
    with pytest.raises(ValueError, match="'Never'"):
        GymVectorEnv(2, client=Pick.local, autoreset_mode="Never")
    env = GymVectorEnv(2, server.url, token=server.token)
    with pytest.raises(UnknownTask, match="pick, pages"):
        env.reset()
    env.close()


def test_render_returns_the_conversations_as_text(make):
    env = make(2, render_mode="ansi")
    env.reset(seed=0)
    env.step([call(0), "Hm."])
    first, second = env.render()
    assert first.splitlines()[1:] == ["assistant: pick(n=0)", "tool: No."]
    assert second.splitlines()[1] == "assistant: Hm."


# Coroutines


def test_coroutines_equal_the_methods(server, make):
    env, other = make(3), make(3)

    async def trainer():
        reset = await env.areset(seed=3)
        return reset, await env.astep([call(1), call(2), call(3)])

    assert_same(asyncio.run(trainer()), (other.reset(seed=3), other.step([call(1), call(2), call(3)])))


def test_environment_works_inside_a_running_event_loop(make):
    env = make(2)

    async def notebook_cell():
        env.reset(seed=1)
        return env.step([call(0)] * 2)

    assert len(asyncio.run(notebook_cell())[0]) == 2


class Stalling(InterceptedClient):
    """A client that receives only one answer."""

    answers = 0

    def __init__(self, backend):
        super().__init__(backend)
        self.stepping = threading.Event()

    async def step(self, session, play, message):
        if not self.answers:
            self.answers += 1
            return await play(message)
        self.stepping.set()
        await asyncio.Event().wait()


@pytest.fixture
def stalling(make):
    """Return an environment, and a function that starts a step and returns while it is pending."""
    client = Stalling.local(Pick)
    env = make(2, client=client)

    async def begin():
        await env.areset(seed=0)
        step = asyncio.create_task(env.astep([call(0)] * 2))
        await asyncio.to_thread(client.stepping.wait, 10)
        return step

    return env, begin


def test_second_call_while_one_is_pending_raises(stalling):
    env, begin = stalling

    async def trainer():
        step = await begin()
        with pytest.raises(AlreadyPendingCallError, match=r"reset\(\) was called while step"):
            await env.areset(seed=1)
        with pytest.raises(AlreadyPendingCallError, match=r"step\(\) was called while step"):
            await env.astep([call(0)] * 2)
        assert not step.done()
        step.cancel()
        await asyncio.wait([step])

    asyncio.run(trainer())


def test_cancelled_step_ends_all_episodes(stalling):
    env, begin = stalling

    async def trainer():
        step = await begin()
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        with pytest.raises(ResetNeeded, match=r"\[0, 1\]"):
            await env.astep([call(0)] * 2)
        return await env.areset(seed=1)

    assert asyncio.run(trainer())[1]["seed"].tolist() == [1, 2]


def test_cancelled_reset_leaves_no_new_episode_running(make):
    class Stalling(EnvClient):
        """A client that never finishes opening seed 11."""

        def __init__(self, backend):
            super().__init__(backend)
            self.opening = threading.Event()

        async def open(self, *args, seed=None, **kwargs):
            if seed == 11:
                self.opening.set()
                await asyncio.Event().wait()
            return await super().open(*args, seed=seed, **kwargs)

    client = Stalling.local(Pick)
    env = make(3, client=client)

    async def trainer():
        await env.areset(seed=0)
        mask = np.array([True, True, False])
        reset = asyncio.create_task(env.areset(seed=10, options={"reset_mask": mask}))
        await asyncio.to_thread(client.opening.wait, 10)
        reset.cancel()
        await asyncio.wait([reset])
        with pytest.raises(ResetNeeded, match=r"\[0, 1\]"):
            await env.astep([call(0)] * 3)

    asyncio.run(trainer())
    assert env.running.tolist() == [False, False, True]


# Infos


values = st.recursive(
    st.sampled_from([1, 2**62, 2.5, True, "word", None]) | st.just([1, 2]),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(st.dictionaries(st.sampled_from("abcd"), values, max_size=4), min_size=1, max_size=4))
def test_stack_infos_is_lossless(infos):
    def one(stacked, i):
        return {
            key: one(array, i) if isinstance(array, dict) else array[i]
            for key, array in stacked.items()
            if f"_{key}" in stacked and stacked[f"_{key}"][i]
        }

    stacked = stack_infos(infos)
    assert [one(stacked, i) for i in range(len(infos))] == infos


def schema_like(kind):
    return st.fixed_dictionaries({"count": kind, "inner": st.fixed_dictionaries({"word": st.text()})})


@pytest.mark.parametrize("kind", [st.integers(-9, 9), st.floats(allow_nan=False), st.booleans(), st.text()])
def test_stack_infos_equals_gymnasiums_for_uniform_infos(kind):
    @settings(max_examples=20)
    @given(st.lists(schema_like(kind) | st.just({}), min_size=1, max_size=4))
    def check(infos):
        env, theirs = VectorEnv(), {}
        env.num_envs = len(infos)
        for i, info in enumerate(infos):
            theirs = env._add_info(theirs, info, i)
        assert_same(stack_infos(infos), theirs)

    check()


def test_infos_error_is_an_agentrl_error(make):
    env = make(1)
    env.reset(seed=0)
    infos = env.step([call(BREAKS)])[-1]
    with pytest.raises(AgentRLError, match="unlucky"):
        raise infos["error"][0]


class Unsendable(Pick):
    """Pick, but 13 returns info that is not JSON."""

    @tool
    def pick(self, n: int):
        """Pick a number."""
        return Reply("No.", info={"cells": {(0, 1): 3}} if n == BREAKS else {"seen": np.arange(2)})


@pytest.mark.parametrize("blocking", [False, True])
def test_info_that_cannot_be_sent_fails_only_its_episode(make, monkeypatch, blocking):
    monkeypatch.setattr(Unsendable, "blocking", blocking)
    env = make(3, Unsendable)
    env.reset(seed=0)
    results = env.step([call(0), call(BREAKS), call(0)])
    assert_failed(results, 1, EnvironmentFailed)
    assert "info of pick() cannot be sent as JSON" in str(results[-1]["error"][1])
    assert results[-1]["seen"].tolist() == [[0, 1], None, [0, 1]]
    assert env.running.tolist() == [True, False, True]
