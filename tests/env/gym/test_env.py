import asyncio
import contextlib
import json
import pickle
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env

from agentrl_env import Done, Environment, Message, ToolCall, tool
from agentrl_env.errors import EnvironmentFailed, SessionExpired, UnknownSample, UnknownTask
from agentrl_env.gym.env import GymEnv
from agentrl_env.gym.spaces import action_message
from agentrl_env.launch.process import ServerProcess
from tests.env.intercepted_client import pool_of
from tests.env.tasks import expire_idle

ID = "agentrl_env:agentrl/Env-v0"


class Guess(Environment):
    """Guess a secret number between 1 and 20."""

    max_turns = 8

    def reset(self, sample, rng):
        self.secret = int(rng.integers(1, 21))
        return f"I picked a number between 1 and 20. (My word for today: {rng.integers(1000)}.)"

    @tool
    def guess(self, n: int):
        """Guess the number."""
        if n == self.secret:
            return Done("Correct!", reward=1.0)
        return "higher" if n < self.secret else "lower"

    def expert(self, rng):
        return ToolCall.of("guess", n=self.secret)


class Unlucky(Guess):
    """Guess, but 13 breaks it."""

    @tool
    def guess(self, n: int):
        """Guess the number."""
        if n == 13:
            raise RuntimeError("unlucky")
        return "lower"


class Pages(Guess):
    """Guess, with a data set."""

    @classmethod
    def samples(cls, split):
        return [{"word": f"{split}{i}"} for i in range(5)]

    def reset(self, sample, rng):
        self.secret = 4
        return sample.data["word"]


@pytest.fixture(scope="module")
def server():
    with ServerProcess(f"{__file__}:Guess", f"{__file__}:Pages", token="s3cret") as server:
        yield server


@pytest.fixture
def env():
    env = Guess.gym()
    yield env
    env.close()


def call(n):
    return {"name": "guess", "arguments": {"n": n}}


def test_local_environment_passes_check_env():
    env = gymnasium.make(ID, client=Guess.local)
    check_env(env.unwrapped)
    env.close()


def test_remote_environment_passes_check_env(server):
    env = gymnasium.make(ID, url=server.url, token=server.token, task="guess", render_mode="ansi")
    check_env(env.unwrapped)
    env.close()


@pytest.mark.filterwarnings("ignore:.*is different from the unwrapped version")
def test_documented_wrapper_has_the_spaces_that_stable_baselines3_needs():
    page = (Path(__file__).parents[3] / "docs/how-to/gymnasium.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    documented = {"gymnasium": gymnasium}
    for block in blocks[-2:]:
        exec(block, documented)
    arrays = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
    plain = documented["Coin"].gym()
    wrapped = documented["Bytes"](plain)
    assert not isinstance(plain.observation_space, arrays), "the page requires a wrapper"
    assert not isinstance(plain.action_space, arrays), "the page requires a wrapper"
    assert isinstance(wrapped.observation_space, spaces.Box)
    assert isinstance(wrapped.action_space, spaces.Discrete)
    check_env(wrapped, skip_render_check=True)
    for seed in range(4):
        observation, _ = wrapped.reset(seed=seed)
        assert type(observation) is np.ndarray
        observation, reward, *ended, info = wrapped.step(wrapped.action_space.sample())
        assert observation in wrapped.observation_space
        assert [type(value) for value in (reward, *ended, info)] == [float, bool, bool, dict]
    wrapped.close()


def test_wrappers_of_make_emit_no_warnings():
    env = gymnasium.make(ID, client=Guess.local)
    env.reset(seed=3)
    env.action_space.seed(3)
    for _ in range(3):
        *_, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            env.reset()
    env.close()


def test_local_and_remote_episodes_are_identical(server, env):
    remote = GymEnv(server.url, "guess", token=server.token)
    for seed in (5, None, None):
        assert env.reset(seed=seed) == remote.reset(seed=seed)
        for n in (1, 20, 7, 8):
            assert env.step(call(n)) == remote.step(call(n))
    remote.close()


def test_run_is_reproducible_from_its_first_seed(env):
    def run(seed):
        return [env.reset(seed=seed)] + [env.reset() for _ in range(3)]

    first = run(7)
    assert first == run(7)
    assert first != run(8)
    assert len({json.dumps(observation) for observation, _ in first}) == 4


def test_reset_seed_is_the_session_seed(env):
    observation, info = env.reset(seed=123)
    assert info["seed"] == 123

    async def opened():
        async with Guess.local() as client:
            session = await client.open("guess", seed=123)
            return [message.wire() for message in session.messages]

    assert asyncio.run(opened()) == list(observation)


def test_reset_options_choose_the_sample():
    env = Pages.gym(split="test")
    observation, info = env.reset(options={"index": 3})
    assert observation[0]["content"] == "test3"
    assert (info["split"], info["index"]) == ("test", 3)
    assert env.reset(options={"index": 3})[1]["seed"] == info["seed"]
    assert env.reset(options={"split": "train", "index": 0})[0][0]["content"] == "train0"
    assert env.reset(options={"sample": {"word": "own"}})[0][0]["content"] == "own"
    with pytest.raises(UnknownSample):
        env.reset(options={"index": 5})
    with pytest.raises(ValueError, match="Unknown reset option 'indx'"):
        env.reset(options={"indx": 3})
    env.close()


def test_observation_is_a_chat_conversation(env):
    env.reset(seed=1)
    observation, *_, info = env.step(call(30))
    assert [message["role"] for message in observation] == ["user", "assistant", "tool"]
    assert observation[1]["tool_calls"][0]["function"]["arguments"] == '{"n": 30}'
    assert observation[2]["tool_call_id"] == observation[1]["tool_calls"][0]["id"]
    assert info == {"status": "running", "metrics": {"invalid_calls": 0.0}}
    assert json.loads(json.dumps(observation))
    assert observation in env.observation_space


def test_episode_terminates_at_its_goal(env):
    env.reset(seed=1)
    secret = next(n for n in range(1, 21) if env.reset(seed=1) and env.step(call(n))[1])
    env.reset(seed=1)
    _, reward, terminated, truncated, info = env.step(call(secret))
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert info["status"] == "completed"
    assert info["metrics"]["success"] == 1.0
    with pytest.raises(ResetNeeded):
        env.step(call(secret))


def test_episode_truncates_at_its_turn_limit(env):
    env.reset(seed=1)
    for turn in range(1, 9):
        _, reward, terminated, truncated, info = env.step(call(0))
        assert (reward, terminated, truncated) == (0.0, False, turn == 8)
    assert info["status"] == "truncated_turns"


class Unprintable:
    def __repr__(self):
        return "no JSON"


loop = []
loop.append(loop)


@pytest.mark.parametrize(
    "action",
    [
        "Let me think.",
        "",
        {},
        {"name": 3},
        {"name": "fly"},
        {"name": "guess"},
        {"name": "guess", "arguments": None},
        {"name": "guess", "arguments": "{broken"},
        {"name": "guess", "arguments": {"n": "seven"}},
        {"name": "guess", "arguments": {"n": float("nan")}},
        {"name": "guess", "arguments": {"n": Unprintable()}},
        {"name": "guess", "arguments": {(1, 2): 3}},
        {"name": "guess", "arguments": {"n": loop}},
        {"name": "guess", "arguments": {"n": "\ud800"}},
        {"name": "\ud800", "arguments": {}},
        "\ud800",
        {"role": "assistant"},
        {"role": "assistant", "content": 7},
        {"role": "assistant", "tool_calls": "guess"},
        {"role": "user", "content": "hello"},
        {"function": "guess"},
        {"function": {"name": "guess", "arguments": {"n": 3}}},
        Message(role="user", content="hello"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("where", ["local", "remote"])
def test_invalid_action_uses_a_turn(action, where, env, server):
    if where == "remote":
        env = GymEnv(server.url, "guess", token=server.token)
    env.reset(seed=1)
    observation, reward, terminated, truncated, info = env.step(action)
    assert observation in env.observation_space
    assert len(observation) > 2
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert info["metrics"]["invalid_calls"] == 1.0
    env.close()


class Talk(Guess):
    """Guess, and talk about it."""

    def respond(self, text):
        return f"You said {text!r}."


@pytest.mark.parametrize(
    "action",
    [
        {},
        {"role": "assistant"},
        {"role": "assistant", "tool_call": {"name": "guess", "arguments": {"n": 3}}},
        {"tool": "guess", "arguments": {"n": 3}},
        {"role": "user", "content": "hello"},
        Message(role="user", content="hello"),
    ],
    ids=repr,
)
def test_malformed_dict_is_an_invalid_call_and_not_text(action):
    with contextlib.closing(Talk.gym()) as env:
        env.reset(seed=1)
        assert env.step({"role": "assistant", "content": ""})[4]["metrics"]["invalid_calls"] == 0.0
        observation, *_, info = env.step(action)
        assert info["metrics"]["invalid_calls"] == 1.0
        assert observation[-1]["content"] == 'Error: there is no tool "". Tools: guess.'


@pytest.mark.parametrize(
    "action", [None, 42, 3.5, [], b"\xff", np.int64(3), np.zeros(3), ("guess", {"n": 3})], ids=repr
)
def test_action_of_another_type_raises_type_error_and_plays_no_turn(action, env):
    env.reset(seed=1)
    with pytest.raises(TypeError, match=r'an action is a tool call such as {"name": "guess", "arguments"'):
        env.step(action)
    assert len(env.step(call(0))[0]) == 3


@pytest.mark.parametrize(
    "make", [partial(gymnasium.make, disable_env_checker=True), partial(gymnasium.make_vec, num_envs=2)]
)
def test_environment_is_made_from_a_target(make):
    env = make(ID, target=f"{__file__}:Guess")
    try:
        observation, _ = env.reset(seed=1)
        assert "number" in str(observation)
    finally:
        env.close()


@pytest.mark.parametrize(
    "action",
    [
        {"name": "guess", "arguments": {"n": 3}},
        {"name": "guess", "arguments": {"n": np.int64(3)}},
        {"name": "guess", "arguments": '{"n": 3}'},
        {"function": {"name": "guess", "arguments": '{"n": 3}'}},
        ToolCall.of("guess", n=3),
        Message.assistant("I try.", ToolCall.of("guess", n=3)),
        Message.assistant(None, ToolCall.of("guess", n=3)).wire(),
    ],
)
def test_tool_calls_are_accepted_in_every_format(action):
    (taken,) = action_message(action).tool_calls
    assert taken.function.name == "guess"
    assert json.loads(taken.function.arguments) == {"n": 3}


def test_failed_environment_raises():
    env = Unlucky.gym()
    env.reset(seed=1)
    with pytest.raises(EnvironmentFailed, match="unlucky"):
        env.step(call(13))
    with pytest.raises(ResetNeeded):
        env.step(call(1))
    env.reset(seed=1)
    env.step(call(1))
    env.close()


def test_expired_session_raises():
    now = [0.0]
    client = Guess.local(lease_s=5.0, clock=lambda: now[0])
    env = GymEnv(client=client)
    env.reset(seed=1)
    now[0] = 60.0
    env._client.run(expire_idle(pool_of(client)))
    with pytest.raises(SessionExpired):
        env.step(call(1))
    env.close()


def test_step_before_reset_raises(env):
    with pytest.raises(ResetNeeded):
        env.step(call(1))


def test_close_is_idempotent_and_reset_reconnects(env):
    env.close()
    first = env.reset(seed=1)
    env.close()
    env.close()
    assert env.reset(seed=1) == first


def test_connection_is_made_on_first_use():
    env = GymEnv("http://127.0.0.1:9", "guess")
    env.close()


@pytest.mark.parametrize("used", [False, True])
def test_pickled_environment_works_before_and_after_use(used, env, server):
    remote = GymEnv(server.url, "guess", token=server.token)
    if used:
        env.reset(seed=1)
        remote.reset(seed=1)
        assert remote.action_space.sample() in env.action_space
    copy = pickle.loads(pickle.dumps(remote))
    assert copy.reset(seed=5) == env.reset(seed=5)
    copy.close()
    remote.close()


def test_forked_process_opens_its_own_connection(server):
    code = f"""
import os, sys, warnings
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
from agentrl_env import GymEnv
env = GymEnv({server.url!r}, "guess", token={server.token!r})
first = env.reset(seed=1)
call = {{"name": "guess", "arguments": {{"n": 0}}}}
child = os.fork()
if child == 0:
    try:
        env.step(call)
    except Exception as error:
        print(type(error).__name__, env.reset(seed=1) == first, flush=True)
    env.close()
    os._exit(0)
os.waitpid(child, 0)
print(env.step(call)[0][-1]["content"])
env.close()
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "ResetNeeded True\nhigher\n", ran.stderr
    assert ran.stderr == ""


def test_environment_works_inside_a_running_event_loop(env):
    async def notebook_cell():
        env.reset(seed=1)
        return env.step(call(1))[0][-1]["content"]

    assert asyncio.run(notebook_cell()) in ("higher", "lower", "Correct!")


def test_environment_works_in_gymnasiums_async_vector_env(server):
    class_path = f"{Path(__file__).parent}"
    code = f"""
import gymnasium
def make():
    return gymnasium.make({ID!r}, url={server.url!r}, token={server.token!r}, task="guess")
if __name__ == "__main__":
    env = gymnasium.vector.AsyncVectorEnv([make, make], shared_memory=False)
    observations, infos = env.reset(seed=1)
    print(infos["seed"].tolist())
    env.close()
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=class_path
    )
    assert ran.stdout == "[1, 2]\n", ran.stderr


def test_render_returns_the_conversation_as_text():
    env = Guess.gym(render_mode="ansi")
    env.reset(seed=1)
    env.step(call(0))
    assert env.render().splitlines()[1:] == ["assistant: guess(n=0)", "tool: higher"]
    env.close()


def test_invalid_constructor_arguments_are_rejected():
    with pytest.raises(ValueError, match="either url="):
        GymEnv()
    with pytest.raises(ValueError, match="either url="):
        GymEnv("http://127.0.0.1:9", client=Guess.local)
    with pytest.raises(
        ValueError, match=r"render mode 'rgb_array'; an episode is a conversation, so .* 'ansi'"
    ):
        Guess.gym(render_mode="rgb_array")


def test_task_must_be_named_if_several_are_served(server):
    env = GymEnv(server.url, token=server.token)
    with pytest.raises(UnknownTask, match="guess, pages"):
        env.reset()
    env.close()


def test_spec_is_serializable(server):
    env = gymnasium.make(ID, url=server.url, token="t", task="guess", disable_env_checker=True)
    assert server.url in env.spec.to_json()
    env.close()
