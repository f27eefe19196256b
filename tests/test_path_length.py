"""Count the project's files involved in one step and in one token, with the interpreter's profiler."""

import asyncio
import sys
import threading
from pathlib import Path

from agentrl_env import Done, EnvClient, Environment, ToolCall
from agentrl_env.hosting.serve import EnvServer
from agentrl_train.actor import Actor, Episode
from agentrl_train.chat import ChatFormat
from agentrl_train.config import TrainSection
from agentrl_train.engine.torch import TorchEngine
from agentrl_train.learner import Learner
from agentrl_train.training.step_trainer import StepTrainer
from agentrl_train.types import Sampling, Step
from agentrl_train.weights import Publisher
from tests.env.tasks import Guess
from tests.tiny_models import make_model, make_tokenizer

ROOT = Path(__file__).parent.parent


class EnteredFiles:
    """Records the files of a package with called functions, on all threads."""

    def __init__(self, package: str) -> None:
        self._folder = str(ROOT / package)
        self.files: set[str] = set()

    def __enter__(self) -> set[str]:
        threading.setprofile(self._record)
        sys.setprofile(self._record)
        return self.files

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _record(self, frame, event, argument) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(self._folder):
            self.files.add(name.removeprefix(f"{ROOT}/"))


async def entered_by_a_step(url: str) -> set[str]:
    """Return the files entered by all of three steps, which excludes most background work."""
    entered = []
    async with EnvClient.connect(url) as client:
        for _ in range(3):
            session = await client.open("guess", seed=1)
            await session.step(ToolCall.of("guess", n=1))  # connects
            with EnteredFiles("agentrl_env") as files:
                await session.step(ToolCall.of("guess", n=2))
                await asyncio.sleep(0)
            entered.append(files)
    return set.intersection(*entered)


async def test_step_over_the_network_involves_at_most_18_files() -> None:
    server = EnvServer([Guess], port=0, drain_s=0.0)
    await server.start()
    try:
        files = await entered_by_a_step(server.url)
    finally:
        await server.stop()
    print(f"{len(files)} files: {', '.join(sorted(files))}")
    assert "agentrl_env/session/session.py" in files
    assert len(files) <= 18, sorted(files)


class Echo(Environment):
    """Say anything; the reward is a function of the text."""

    def reset(self, sample, rng):
        return "Say something."

    def respond(self, text):
        return Done("thanks", reward=float(sum(map(ord, text)) % 2))


async def sampled_trained_and_published(folder: Path) -> tuple[set[str], dict[str, float]]:
    chat, model = ChatFormat(make_tokenizer()), make_model()
    with EnteredFiles("agentrl_train") as files:  # the engine's thread must start with the profiler
        engine = TorchEngine(
            {"current": model}, stop_token_ids=chat.stop_token_ids, max_sequences=8, max_context=512
        )
    trainer = StepTrainer(
        Learner(make_model(), TrainSection(learning_rate=1e-3)),
        Publisher(engine),
        max_context=512,
        bad_batches=folder,
    )
    async with EnvClient.local(Echo) as client:
        actor = Actor(
            engine=engine,
            chat=chat,
            clients={"echo": client},
            sampling=Sampling(max_new_tokens=8, max_context=512),
        )
        episode = Episode(task="echo", split="train", index=0, seed=0, draw_seed=(0,))
        with EnteredFiles("agentrl_train") as more:
            group, _ = await actor.group(episode, size=8, group_id=0, admitted_version=0)
            metrics = await asyncio.to_thread(trainer.step, Step(groups=[group]))
    await engine.close()
    return files | more, metrics


async def test_token_involves_at_most_15_files_from_sampling_to_publication(tmp_path: Path) -> None:
    files, metrics = await sampled_trained_and_published(tmp_path)
    print(f"{len(files)} files: {', '.join(sorted(files))}")
    assert metrics["grad_norm"] > 0
    assert {"agentrl_train/actor.py", "agentrl_train/loss.py", "agentrl_train/weights.py"} <= files
    assert len(files) <= 15, sorted(files)
