"""Agent programs: commands and functions, rewards and failures."""

import asyncio
import inspect
import json
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from agentrl_env import ToolCall
from agentrl_env.types import Message, TaskSample
from agentrl_train.actor import Actor
from agentrl_train.config import RolloutSection
from agentrl_train.gateway import programs
from agentrl_train.gateway.programs import AgentProgram
from agentrl_train.gateway.server import Gateway, Session
from agentrl_train.types import Completion, Episode, EpisodeEnd, Sampling, Trajectory
from tests.processes import until_dead
from tests.train.fakes import CHAT, Countdown, ScriptedEngine, always

EPISODE = Episode(task="questions", split="train", index=1, seed=3, draw_seed=(0, 1))
SAMPLES = {"train": [{"question": "?"}, {"question": "2 + 2", "answer": "4"}]}
FOUR = always(Message.assistant("4"))
ASK = """
import json, os, sys, urllib.request
def post(path, body):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request))
sample = json.load(open(os.environ["AGENTRL_SAMPLE"]))
def ask(text):
    messages = [{"role": "user", "content": text}]
    return post("/chat/completions", {"messages": messages})["choices"][0]["message"]["content"]
"""


@asynccontextmanager
async def actor_of(
    run: Any, *, engine: ScriptedEngine | None = None, limit_s: float = 60.0, retries: int = 0, **options: Any
) -> AsyncIterator[Actor]:
    """Yield an actor with the task ``questions``, played by a program."""
    options.setdefault("samples", SAMPLES)
    sampling = Sampling(max_new_tokens=60, max_context=400)
    async with Gateway() as gateway:
        program = AgentProgram(run, gateway=gateway, stated=sampling, **options)
        yield Actor(
            engine=engine or ScriptedEngine(CHAT, FOUR),
            chat=CHAT,
            clients={},
            sampling=sampling,
            rollout=RolloutSection(environment_retries=retries, episode_timeout_s=limit_s),
            slots=asyncio.Semaphore(4),
            programs={EPISODE.task: program},
        )
        assert not gateway.sessions


async def play(run: Any, **options: Any) -> Trajectory:
    async with actor_of(run, **options) as actor:
        return await actor.sibling(EPISODE)


async def ask(base_url: str, text: str = "hello") -> str:
    async with httpx.AsyncClient(base_url=base_url, trust_env=False) as client:
        body = {"messages": [{"role": "user", "content": text}]}
        answer = (await client.post("/chat/completions", json=body)).raise_for_status()
        return str(answer.json()["choices"][0]["message"]["content"])


async def post(base_url: str, reward: float) -> None:
    async with httpx.AsyncClient(base_url=base_url, trust_env=False) as client:
        (await client.post("/reward", json={"reward": reward})).raise_for_status()


def command(code: str) -> list[str]:
    return [sys.executable, "-c", ASK + code]


async def right(base_url: str, sample: TaskSample) -> float:
    return float(await ask(base_url, sample.data["question"]) == sample.data["answer"])


def right_blocking(base_url: str, sample: TaskSample) -> dict[str, Any]:
    reward = asyncio.run(right(base_url, sample))
    return {"reward": reward, "metrics": {"success": reward, "length": 1}}


@pytest.mark.parametrize(
    "run",
    [
        right,
        right_blocking,
        command(
            "print('thinking'); print(float(ask(sample['data']['question']) == sample['data']['answer']))"
        ),
        command("print(json.dumps({'reward': float(ask('2 + 2')), 'metrics': {'success': 1}}))"),
        command("ask('2 + 2'); post('/reward', {'reward': 1.0}); print('done, and this is no reward')"),
    ],
    ids=["function", "blocking function", "prints a number", "prints an object", "posts"],
)
async def test_program_gives_a_trajectory_with_its_reward(run: Any) -> None:
    trajectory = await play(run)
    assert trajectory.error is None
    assert trajectory.end is EpisodeEnd.TERMINATED
    assert trajectory.reward == trajectory.turns[-1].reward >= 1.0
    assert trajectory.success
    assert trajectory.sample.data == SAMPLES["train"][1]
    assert [message.content for message in trajectory.opening] == [trajectory.sample.data["question"]]
    assert trajectory.turns[0].completion.token_ids == CHAT.completion(Message.assistant("4"))
    assert trajectory.started is not None
    assert 0 <= trajectory.turns[0].times[0] <= trajectory.turns[0].times[1] <= trajectory.seconds


async def crashing(base_url: str, sample: TaskSample) -> float:
    await ask(base_url)
    raise RuntimeError("the agent is broken")


def leaving(base_url: str, sample: TaskSample) -> float:
    sys.exit(3)


async def leaving_a_group(base_url: str, sample: TaskSample) -> float:
    async with anyio.create_task_group():
        sys.exit(3)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def exhausted(base_url: str, sample: TaskSample) -> float:
    return next(iter([]))


def unspeakable(base_url: str, sample: TaskSample) -> float:
    raise Unspeakable


async def cancelled(base_url: str, sample: TaskSample) -> float:
    raise asyncio.CancelledError


async def hanging(base_url: str, sample: TaskSample) -> float:
    await ask(base_url)
    await asyncio.Event().wait()
    return 1.0


async def silent(base_url: str, sample: TaskSample) -> float:
    await asyncio.Event().wait()
    return 1.0


async def misspelt(base_url: str, sample: TaskSample) -> dict[str, float]:
    await ask(base_url)
    return {"score": 1.0}


async def empty(base_url: str, sample: TaskSample) -> dict[str, float]:
    await ask(base_url)
    return {}


async def metrics_alone(base_url: str, sample: TaskSample) -> dict[str, Any]:
    await ask(base_url)
    return {"metrics": {"success": 1.0}}


async def misspelt_metrics(base_url: str, sample: TaskSample) -> dict[str, Any]:
    await ask(base_url)
    return {"reward": 0.5, "Metrics": {"success": 1.0}}


async def metric_of_nothing(base_url: str, sample: TaskSample) -> dict[str, Any]:
    await ask(base_url)
    return {"reward": 0.5, "metrics": {"success": float("nan")}}


async def misspelt_post(base_url: str, sample: TaskSample) -> None:
    await ask(base_url)
    async with httpx.AsyncClient(base_url=base_url, trust_env=False) as client:
        assert (await client.post("/reward", json={"score": 1.0})).status_code == 400


async def without_reward(base_url: str, sample: TaskSample) -> None:
    await ask(base_url)


async def without_call(base_url: str, sample: TaskSample) -> float:
    return 1.0


async def not_a_number(base_url: str, sample: TaskSample) -> float:
    await ask(base_url)
    return float("nan")


async def impatient(base_url: str, sample: TaskSample) -> float:
    """Disconnect in the middle of an answer but still give a reward."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await ask(base_url)
    return 1.0


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (crashing, "the program raised RuntimeError: the agent is broken ("),
        (crashing, f"test_programs.py:{inspect.getsourcelines(crashing)[1] + 2}, in crashing)"),
        (leaving, "the program raised SystemExit: 3"),
        (leaving_a_group, "the program raised SystemExit: 3"),
        (exhausted, "the program raised RuntimeError: coroutine raised StopIteration"),
        (unspeakable, "the program raised Unspeakable: its text cannot be read"),
        (cancelled, "the program raised CancelledError"),
        (silent, "got no answer from the model within 2 s"),
        (misspelt, "{'score': 1.0}, which is not a reward (reward: Field required)"),
        (empty, "{}, which is not a reward"),
        (metrics_alone, "which is not a reward (reward: Field required)"),
        (misspelt_metrics, "(Metrics: Extra inputs are not permitted)"),
        (metric_of_nothing, "(metrics.success: Input should be a finite number)"),
        (misspelt_post, "ended without a reward"),
        (without_reward, "ended without a reward"),
        (without_call, "ended without an answer from the model"),
        (impatient, "ended without an answer from the model"),
        (not_a_number, "not a reward"),
        (command("ask('x'); print('oh no', file=sys.stderr); sys.exit(3)"), "exited with status 3: oh no"),
        (command("ask('x'); raise ValueError('broken')"), "ValueError: broken"),
        (command("import time; time.sleep(600)"), "got no answer from the model within 2 s"),
        (command("ask('x'); print('{}')"), "ended without a reward"),
        (command("ask('x'); print('{\"score\": 1.0}')"), "ended without a reward"),
        (command("ask('x'); print('{\"reward\": 1.0, \"sucess\": 1}')"), "(sucess: Extra inputs"),
        (command("ask('x' * 500); print(1.0)"), "its messages do not fit engine.max_context"),
        (command("ask('x'); print('fine')"), "ended without a reward"),
        (command("ask('x'); print('{\"reward\": \"much\"}')"), "which is not a reward"),
        (command("ask('x'); os.kill(os.getpid(), 9)"), "exited with status -9"),
        (["no-such-program"], "'no-such-program' cannot be started"),
    ],
)
async def test_program_without_a_result_is_a_failure_and_not_a_reward_of_zero(run: Any, reason: str) -> None:
    trajectory = await play(run, limit_s=2.0 if "within 2 s" in reason else 60.0)
    assert trajectory.end is EpisodeEnd.FAILED_ENVIRONMENT
    assert trajectory.error is not None
    assert trajectory.error.startswith("ProgramFailed: ")
    assert reason in trajectory.error


async def test_program_that_prints_without_end_fails_before_it_fills_the_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(programs, "MAX_PRINTED", 1_000_000)
    code = "import time; ask('x')\nwhile True: print('x' * 10_000, file=sys.stderr); time.sleep(0.001)"
    trajectory = await play(command(code), limit_s=20.0)
    assert trajectory.end is EpisodeEnd.FAILED_ENVIRONMENT
    assert "printed more than 1 MB" in str(trajectory.error)


@pytest.mark.parametrize(
    ("last", "reward", "reason"),
    [("print(1.0)", 1.0, None), ("sys.exit('no file')", 0.0, "status 1: no file")],
)
async def test_program_can_delete_its_temporary_files(last: str, reward: float, reason: str | None) -> None:
    """Agents run commands such as ``rm -rf /tmp/*``."""
    code = f"ask('x'); import shutil; shutil.rmtree(os.path.dirname(os.environ['AGENTRL_SAMPLE'])); {last}"
    trajectory = await play(command(code))
    assert trajectory.reward == reward
    assert reason is None or reason in str(trajectory.error)


async def test_failed_episodes_are_retried_then_omitted_from_their_group() -> None:
    tries = []

    async def flaky(base_url: str, sample: TaskSample) -> float:
        tries.append(base_url)
        await ask(base_url)
        if len(tries) == 1:
            raise RuntimeError("once")
        return 1.0

    async with actor_of(flaky, retries=1) as actor:
        assert (await actor.sibling(EPISODE)).reward == 1.0
        assert actor.discarded_tokens == 2
    async with actor_of(crashing, retries=1) as actor:
        group, failed = await actor.group(EPISODE, size=2, group_id=0, admitted_version=0)
    assert (len(group.trajectories), len(failed)) == (0, 2)
    assert len(set(tries)) == 2


async def test_program_that_posted_a_reward_is_truncated_by_the_time_limit() -> None:
    async def slow(base_url: str, sample: TaskSample) -> None:
        await ask(base_url)
        await post(base_url, 0.5)
        await asyncio.Event().wait()

    trajectory = await play(slow, limit_s=2.0)
    assert (trajectory.end, trajectory.reward) == (EpisodeEnd.TRUNCATED_TIME, 0.5)


async def test_time_limit_truncates_a_program_that_has_given_no_reward() -> None:
    engine = ScriptedEngine(CHAT, FOUR)
    trajectory = await play(hanging, engine=engine, limit_s=4.0, retries=2)
    assert (trajectory.end, trajectory.reward) == (EpisodeEnd.TRUNCATED_TIME, 0.0)
    assert (trajectory.error, trajectory.success) == (None, False)
    assert len(trajectory.turns) == len(engine.calls) == 1  # the episode is not replayed


async def test_program_that_catches_its_cancellation_does_not_hang_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(programs, "CANCEL_S", 0.2)
    released = asyncio.Event()

    async def stubborn(base_url: str, sample: TaskSample) -> float:
        await ask(base_url)
        while not released.is_set():
            try:
                await released.wait()
            except:  # noqa: E722
                continue
        return 1.0

    try:
        async with asyncio.timeout(20):
            trajectory = await play(stubborn, limit_s=2.0)
    finally:
        released.set()
    assert (trajectory.end, len(trajectory.turns)) == (EpisodeEnd.TRUNCATED_TIME, 1)
    assert "the program of questions catches CancelledError" in caplog.text


async def test_time_limit_lets_the_turn_in_progress_end() -> None:
    class Late(ScriptedEngine):
        """Answers after the program's time limit."""

        async def generate(self, *args: Any, **options: Any) -> Completion:
            while not session().closed:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            return await super().generate(*args, **options)

    engine, refused = Late(CHAT, FOUR), []

    async def long(base_url: str, sample: TaskSample) -> float:
        try:
            await ask(base_url)
        except httpx.HTTPStatusError as error:
            refused.append(error.response.status_code)
        return 1.0

    async with actor_of(long, engine=engine, limit_s=0.5, retries=2) as actor:
        (program,) = actor._programs.values()

        def session() -> Session:
            (one,) = program._gateway.sessions.values()
            return one

        trajectory = await actor.sibling(EPISODE)
    assert (trajectory.end, trajectory.reward) == (EpisodeEnd.TRUNCATED_TIME, 0.0)
    assert len(trajectory.turns) == len(engine.calls) == 1
    assert set(refused) <= {410}


async def test_blocking_programs_leave_the_threads_of_the_event_loop_to_the_engine() -> None:
    """The grammar of a constrained answer is compiled on a thread of the event loop."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(max_workers=1))

    def constrained(base_url: str, sample: TaskSample) -> float:
        body = {"messages": [{"role": "user", "content": "?"}], "response_format": {"type": "json_object"}}
        with httpx.Client(base_url=base_url, trust_env=False, timeout=8.0) as client:
            client.post("/chat/completions", json=body).raise_for_status()
        return 1.0

    assert (await play(constrained, limit_s=8.0)).reward == 1.0


async def test_blocking_program_that_never_returns_occupies_no_thread_of_another() -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(max_workers=1))
    released, threads = threading.Event(), []

    def stuck(base_url: str, sample: TaskSample) -> float:
        threads.append(threading.current_thread())
        asyncio.run(ask(base_url))
        released.wait()
        return 1.0

    assert (await play(stuck, limit_s=2.0)).end is EpisodeEnd.TRUNCATED_TIME
    try:
        assert (await play(right_blocking, limit_s=8.0)).reward == 1.0
        assert all(thread.daemon for thread in threads)  # the process can exit
    finally:
        released.set()


async def test_group_of_programs_keeps_the_lengths_of_its_episodes() -> None:
    """Half of the episodes are long and correct, the others are short and wrong."""
    played = []

    async def either(base_url: str, sample: TaskSample) -> float | None:
        played.append(base_url)
        long = len(played) % 2 == 0
        await ask(base_url)
        if not long:
            return 0.0
        await post(base_url, 1.0)
        await ask(base_url, "next")
        await asyncio.Event().wait()
        return None

    async with actor_of(either, limit_s=4.0, retries=2) as actor:
        group, failed = await actor.group(EPISODE, size=4, group_id=0, admitted_version=0)
        assert actor.discarded_tokens == 0
    assert (len(played), failed) == (4, [])
    assert sorted(one.reward for one in group.trajectories) == [0.0, 0.0, 1.0, 1.0]
    assert sorted(len(one.turns) for one in group.trajectories) == [1, 1, 2, 2]


async def test_engine_that_fails_until_the_time_limit_fails_the_episode() -> None:
    class Failing(ScriptedEngine):
        """Answers once, then fails."""

        async def generate(self, *args: Any, **options: Any) -> Completion:
            self.failures = len(self.calls)
            return await super().generate(*args, **options)

    async def patient(base_url: str, sample: TaskSample) -> float:
        await ask(base_url)
        with pytest.raises(httpx.HTTPStatusError, match="500"):
            await ask(base_url, "again")
        await asyncio.Event().wait()
        return 1.0

    assert (await play(patient, engine=Failing(CHAT, FOUR), limit_s=2.0)).end is EpisodeEnd.FAILED_ENGINE


async def overflowing(base_url: str, sample: TaskSample) -> float:
    await ask(base_url)
    await ask(base_url, "x" * 500)
    return 1.0


async def overflowing_after_a_reward(base_url: str, sample: TaskSample) -> float:
    await ask(base_url)
    await post(base_url, 0.5)
    await ask(base_url, "x" * 500)
    return 1.0


@pytest.mark.parametrize(
    ("run", "reward"),
    [
        (overflowing, 0.0),
        (overflowing_after_a_reward, 0.5),
        (command("ask('x'); ask('x' * 500); print(1.0)"), 0.0),
    ],
)
async def test_full_context_truncates_a_program_that_cannot_continue(run: Any, reward: float) -> None:
    engine = ScriptedEngine(CHAT, FOUR)
    trajectory = await play(run, engine=engine, retries=2)
    assert (trajectory.end, trajectory.reward) == (EpisodeEnd.TRUNCATED_LENGTH, reward)
    assert (trajectory.error, len(trajectory.turns), len(engine.calls)) == (None, 1, 1)


async def test_answer_that_the_context_cuts_is_the_end_of_a_truncated_episode() -> None:
    async def once(base_url: str, sample: TaskSample) -> float:
        await ask(base_url, "x" * 330)
        return 0.25

    trajectory = await play(once, engine=ScriptedEngine(CHAT, always(Message.assistant("blah " * 30))))
    assert trajectory.turns[0].completion.finish_reason == "length"
    assert (trajectory.end, trajectory.reward) == (EpisodeEnd.TRUNCATED_LENGTH, 0.25)


async def test_full_context_is_a_truncation_if_the_program_gives_a_reward() -> None:
    async def long(base_url: str, sample: TaskSample) -> float:
        await ask(base_url)
        with pytest.raises(httpx.HTTPStatusError, match="400"):
            await ask(base_url, "x" * 500)
        return 0.25

    trajectory = await play(long)
    assert (trajectory.end, trajectory.reward) == (EpisodeEnd.TRUNCATED_LENGTH, 0.25)


async def test_engine_failure_is_not_a_failure_of_the_program() -> None:
    engine = ScriptedEngine(CHAT, FOUR)
    engine.failures = 1
    trajectory = await play(right, engine=engine)
    assert trajectory.end is EpisodeEnd.FAILED_ENGINE


def test_processes_that_a_command_leaves_behind_are_ended(tmp_path: Path) -> None:
    code = (
        "import subprocess\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid)); ask('x'); print(1.0)"
    )
    assert asyncio.run(play(command(code))).reward == 1.0
    until_dead(int((tmp_path / "pid").read_text()))


async def test_program_steps_the_session_of_a_served_task() -> None:
    server = Countdown.local()

    async def count_down(base_url: str, sample: TaskSample) -> float:
        assert sample.data["url"] == "http://served"
        reward = 0.0
        async with await server.open(**sample.data["open"]) as session:
            await ask(base_url, str(session.messages[0].content))
            for _ in range(3):
                reward += (await session.step(ToolCall.of("down"))).reward
        return reward

    async with server:
        episode = Episode(task="countdown", split="train", index=3, seed=None, draw_seed=(0, 3))
        async with actor_of(count_down, samples=None, url="http://served") as actor:
            actor._programs = {"countdown": actor._programs[EPISODE.task]}
            trajectory = await actor.sibling(episode)
    assert trajectory.reward == 1.0
    assert "Sample 3" in str(trajectory.opening[0].content)
    assert json.loads(trajectory.sample.model_dump_json())["data"]["open"]["index"] == 3
