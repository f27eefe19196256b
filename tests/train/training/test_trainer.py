"""``Trainer`` from Python, with tiny steps of a random model."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from agentrl_env import EnvClient, Environment, Reply
from agentrl_train import Evaluations, Step, Trainer, Trajectory
from agentrl_train.errors import CallbackFailed, ConfigError, RunFolderError, TrainError
from agentrl_train.learner import Learner
from agentrl_train.learner.state import Snapshot
from agentrl_train.training.run import run_until_rank_lost
from agentrl_train.training.step_trainer import StepTrainer
from tests.env.thread_server import server_on_thread
from tests.tiny_models import make_model, make_tokenizer
from tests.train.runs.babble import Babble

ROOT = Path(__file__).parents[3]
TINY = {
    "run.threads": 1,
    "engine.max_sessions": 8,
    "engine.max_context": 256,
    "engine.max_new_tokens": 8,
    "rollout.groups_per_step": 2,
    "rollout.group_size": 2,
    "checkpoint.every": 100,
    "eval.samples": 0,
    "metrics.tensorboard": False,
    "metrics.trace": False,
}
Make = Callable[..., Trainer]
NewThreads = Callable[[], set[threading.Thread]]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def make(policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Return a function that makes trainers of the run ``runs/run-1`` in an empty working directory."""
    monkeypatch.chdir(tmp_path)

    def trainer(*, settings: dict[str, Any] | None = None, **options: Any) -> Trainer:
        options = {"model": policy, "environments": [Babble], "steps": 3} | options
        return Trainer(settings=TINY | (settings or {}), **options)

    return trainer


def logged(trainer: Trainer) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (trainer.folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def new_threads() -> NewThreads:
    """Return the package's running threads that did not exist at the start of the test."""
    before = set(threading.enumerate())
    return lambda: {
        thread
        for thread in set(threading.enumerate()) - before
        if thread.name.startswith(("agentrl", "torch"))
    }


def test_run_whose_first_checkpoint_cannot_be_written_trains_no_step_and_can_be_started_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, **options: Any) -> int:
        raise RunFolderError(f"The disk of {folder} is full; free some space, then continue with --resume.")

    with monkeypatch.context() as patch:
        patch.setattr("agentrl_train.training.checkpoints.save_checkpoint", full)
        with pytest.raises(RunFolderError, match="is full"):
            make(steps=1).train()
    trainer = make(steps=1, resume=True)
    assert not (trainer.folder / "metrics.jsonl").exists()
    trainer.train()
    assert [line["step"] for line in logged(trainer)] == [1]


def test_trainer_returns_if_system_exit_breaks_the_event_loop_of_the_run(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def leave(after_s: float) -> None:
        try:
            await asyncio.sleep(after_s)
        finally:
            raise SystemExit(3)

    async def train(*arguments: object, **options: object) -> None:
        leaving = [asyncio.create_task(leave(after_s)) for after_s in (0, 60)]
        await asyncio.gather(*leaving)

    monkeypatch.setattr("agentrl_train.training.compose.train", train)
    with pytest.raises(SystemExit):
        make().train()


def test_loop_yields_trained_steps_and_closes_everything(make: Make, new_threads: NewThreads) -> None:
    trainer = make(settings={"rollout.group_size": 4})  # some siblings of each step have different rewards
    steps = list(trainer)
    assert [step.number for step in steps] == [1, 2, 3]
    assert all({"reward", "success", "loss_tokens"} <= step.metrics.keys() for step in steps)
    assert all(step.tasks["babble"]["reward"] == step.metrics["reward"] for step in steps)
    assert [line["step"] for line in logged(trainer)] == [1, 2, 3]
    assert new_threads() == set()


class Chatter(Environment):
    """A task of text alone."""

    max_turns = 2
    blocking = False

    def reset(self, sample, rng):  # type: ignore[no-untyped-def]
        return "Speak."

    def respond(self, text: str) -> Reply:
        return Reply("Go on.", reward=float(len(text) % 3))


def test_text_only_task_is_trained(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    (step,) = make(steps=1, environments=[Chatter], settings={"rollout.group_size": 4})
    turns = [turn for group in step.groups for one in group.trajectories for turn in one.turns]
    assert {turn.reply[-1].content for turn in turns} == {"Go on."}
    assert step.metrics["loss_tokens"] > 0
    assert "tool call" not in caplog.text


async def test_trainer_works_inside_a_running_event_loop(make: Make) -> None:
    assert [step.number for step in make(steps=1)] == [1]


def test_trainer_evaluates_and_saves_before_between_and_after_steps(make: Make, policy: Path) -> None:
    trainer = make(steps=1)
    found = [trainer.evaluate(samples=3)]
    trainer.save("before")
    for _ in trainer:
        found.append(trainer.evaluate(samples=3))
        trainer.save("between")
    found.append(trainer.evaluate(samples=3))
    trainer.save("after")
    assert [result.step for result in found] == [0, 1, 1]
    assert all(len(result["babble"].counted) == 3 for result in found)
    assert found[0]["babble"].versions == {0}
    assert found[1]["babble"].versions == {1}
    assert "babble: success " in repr(found[0])
    assert "95 % interval" in repr(found[0])
    first, between, after = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in ("before", "between", "after")
    )
    name = next(iter(first))
    assert bool((between[name] == after[name]).all())
    assert not bool((first[name] == after[name]).all())
    assert not (trainer.folder / ".saving").exists()


def test_loop_that_is_left_early_continues(make: Make, new_threads: NewThreads) -> None:
    trainer = make()
    for step in trainer:
        assert step.number == 1
        break
    assert new_threads() == set()
    with pytest.raises(ZeroDivisionError):
        print([1 / (2 - step.number) for step in trainer])
    assert new_threads() == set()
    assert [step.number for step in make(resume=True)] == [3]
    assert [line["step"] for line in logged(trainer)] == [1, 2, 3]


def test_new_trainer_starts_another_run(make: Make) -> None:
    first = make(steps=1)
    assert first.train() is not None
    assert make().folder != first.folder
    with pytest.raises(ConfigError, match="resume=True"):
        make(settings={"run.name": first.folder.name}).train()


def test_ctrl_c_leaves_a_resumable_run(make: Make, new_threads: NewThreads) -> None:
    def interrupt(step: Step) -> None:
        if step.number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(on_step=interrupt).train()
    assert new_threads() == set()
    outcome = make(resume=True).train()
    assert outcome is not None
    assert outcome.step == 3


def test_callbacks_add_metrics_and_stop_the_run(make: Make) -> None:
    episodes: list[Trajectory] = []
    evaluations: list[Evaluations] = []

    def on_episode(episode: Trajectory) -> dict[str, float]:
        episodes.append(episode)
        return {"turns_twice": 2.0 * len(episode.turns)}

    def on_step(step: Step) -> dict[str, float]:
        trainer.stop()
        return {"number": step.number}

    trainer = make(
        on_episode=on_episode, on_step=on_step, on_evaluation=evaluations.append, settings={"eval.samples": 2}
    )
    outcome = trainer.train()
    assert outcome is not None
    assert (outcome.step, outcome.summary) == (1, None)
    (line,) = logged(trainer)
    assert len(episodes) == 4
    assert line["turns_twice"] == 2 * sum(len(episode.turns) for episode in episodes) / 4
    assert line["number"] == 1
    assert [evaluation.step for evaluation in evaluations] == [0]


def test_failing_callback_is_named_and_ends_the_run_resumably(make: Make) -> None:
    def divide(step: Step) -> None:
        if step.number == 2:
            raise ZeroDivisionError("nothing to divide")

    with pytest.raises(CallbackFailed, match=r"on_step \(.*divide\) failed: ZeroDivisionError: nothing"):
        make(on_step=divide).train()
    assert [step.number for step in make(resume=True)] == [3]


def test_custom_functions_of_reward_and_algorithm_are_used(make: Make) -> None:
    seen: list[float] = []

    def length(trajectory: Trajectory) -> float:
        return float(len(trajectory.turns))

    def median(siblings: Any) -> float:
        seen.extend(siblings.returns)
        return float(np.median(siblings.returns))

    trainer = make(
        steps=1,
        reward={"functions": length, "weights": {"environment": 0.0}},
        algorithm={"preset": "grpo", "baseline": median},
    )
    (step,) = trainer
    rewards = [episode.reward for group in step.groups for episode in group.trajectories]
    assert rewards == [len(episode.turns) for group in step.groups for episode in group.trajectories]
    assert sorted(seen[:4]) == sorted(rewards)


def test_clients_and_servers_can_be_environments(make: Make) -> None:
    with server_on_thread(Babble) as url:
        clients = [url, EnvClient.connect(url), EnvClient.local(Babble)]
        for source in clients:
            trainer = make(environments=[source], steps=1)
            assert trainer.evaluate(samples=1).tasks.keys() == {"babble"}
            assert [step.number for step in trainer] == [1]
            assert trainer.evaluate(samples=1).step == 1


class Meeting(Environment):
    """Two episodes meet on separate threads."""

    max_turns = 1
    barrier = threading.Barrier(2)

    def reset(self, sample, rng):  # type: ignore[no-untyped-def]
        return "Speak."

    def respond(self, text: str) -> Reply:
        """Wait for the other episode."""
        self.barrier.wait(60)
        return Reply("met", reward=1.0)

    tool_specs = Babble.tool_specs


def test_blocking_tools_of_a_class_do_not_stall_other_episodes(make: Make) -> None:
    (step,) = make(environments=[Meeting], steps=1, settings={"rollout.max_staleness": 0})
    assert step.metrics["reward"] == 1.0
    assert not Meeting.barrier.broken


def test_model_and_tokenizer_can_be_given_as_objects(make: Make) -> None:
    trainer = make(model=(make_model(), make_tokenizer()), steps=1)
    assert [step.number for step in trainer] == [1]
    assert (trainer.folder / "initial" / "config.json").exists()


def test_file_and_overrides_make_a_trainer(policy: Path, tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    file.write_text(
        f'[run]\nname = "file"\nsteps = 4\n[model]\npath = "{policy}"\n[engine]\nmax_sessions = 2\n'
    )
    from_file = partial(Trainer.from_config, file, environments=[Babble])
    assert from_file(["run.steps=5"]).config.run.steps == 5
    assert from_file({"run.steps": 6}, algorithm="rloo").config.algorithm.preset == "rloo"
    assert from_file(steps=7).config.engine.max_sessions == 2


def test_environment_and_override_can_be_given_alone(policy: Path, tmp_path: Path) -> None:
    alone = partial(Trainer, model=policy, steps=1)
    assert alone(environments="http://one").config.environments[0].url == "http://one"
    trainer = alone(environments=Babble, settings="run.name=two")
    assert trainer.config.environments[0].serve == (f"{Babble.__module__}:Babble",)
    assert trainer.config.run.name == "two"


def test_policy_is_not_saved_over_a_file(make: Make) -> None:
    Path("notes").write_text("mine")
    with pytest.raises(RunFolderError, match=r"notes cannot be written .*; fix it or choose another folder"):
        make().save("notes")
    assert Path("notes").read_text() == "mine"


def test_wrong_arguments_are_reported_immediately(make: Make) -> None:
    with pytest.raises(ConfigError, match="environments holds 3: give Environment classes"):
        make(environments=[3])
    with pytest.raises(ConfigError, match=r"unknown key train\.learning_rat; did you mean learning_rate"):
        make(settings={"train.learning_rat": 1.0})
    with pytest.raises(ConfigError, match=r"run\.name = .* should be a valid string"):
        make(settings={"run.name": "one", "run.name.first": 1})


def rewarding(task: str, reward: float) -> type[Environment]:
    class Rewarding(Chatter):
        name = task

        def respond(self, text: str) -> Reply:
            return Reply("Go on.", reward=reward)

    return Rewarding


def test_classes_with_the_same_qualified_name_are_served_separately(make: Make) -> None:
    (step,) = make(steps=1, environments=[rewarding("few", 1.0), rewarding("many", 2.0)])
    assert {task: means["reward"] for task, means in step.tasks.items()} == {"few": 2.0, "many": 4.0}


def test_trainers_without_a_name_that_are_made_before_the_first_starts_have_their_own_runs(
    make: Make,
) -> None:
    first, second = make(steps=1), make(steps=1)
    assert [step.number for step in first] == [1]
    assert second.evaluate(samples=1).step == 0
    assert [step.number for step in second] == [1]


def test_model_of_a_failed_start_is_replaced(make: Make) -> None:
    start = partial(make, settings={"run.name": "mine"})
    with pytest.raises(ConfigError):
        start(model=(make_model(0), make_tokenizer()), steps=0)
    trainer = start(model=(make_model(1), make_tokenizer()), steps=1)
    list(trainer)
    start(model=(make_model(2), make_tokenizer()), resume=True)
    kept = AutoModelForCausalLM.from_pretrained(trainer.config.model.path).state_dict()
    assert all(bool((kept[name] == value).all()) for name, value in make_model(1).state_dict().items())


@pytest.mark.parametrize("name", ["reward", "step", "groups"])
def test_metric_of_a_callback_cannot_replace_a_value_that_the_run_logs(make: Make, name: str) -> None:
    trainer = make(on_step=lambda step: {name: 100.0})
    with pytest.raises(CallbackFailed, match=f"returned the metric '{name}', which the run itself logs"):
        trainer.train()
    assert [line["step"] for line in logged(trainer)] == [1]
    assert [step.number for step in make(resume=True)] == [2, 3]


@pytest.mark.parametrize("samples", [0, -1])
def test_evaluation_without_samples_is_refused(make: Make, samples: int) -> None:
    with pytest.raises(ConfigError, match=f"samples = {samples}: give at least 1"):
        make().evaluate(samples=samples)


def test_success_of_an_earlier_end_is_not_reported_after_more_steps(make: Make) -> None:
    ended = make(steps=1, settings={"eval.samples": 2}).train()
    assert ended is not None
    assert ended.summary is not None
    assert ended.summary["tasks"]["babble"]["after"] is not None
    longer = make(steps=2, resume=True)
    for _ in longer:
        assert not (longer.folder / "summary.json").exists()
    summary = json.loads((longer.folder / "summary.json").read_text())
    assert summary["policy_version"] == 2
    assert summary["tasks"]["babble"]["before"] is not None
    assert summary["tasks"]["babble"]["after"] is None
    evaluations = [
        json.loads(line) for line in (longer.folder / "evaluations.jsonl").read_text().splitlines()
    ]
    assert [(line["name"], line["policy_version"]) for line in evaluations] == [("before", 0), ("step 1", 1)]
    assert (longer.folder / "trajectories" / "held_out_step_1.jsonl").exists()
    again = make(steps=2, resume=True, settings={"eval.samples": 2}).train()
    assert again is not None
    assert again.summary is not None
    assert again.summary["tasks"]["babble"]["after"] is not None


def test_weights_do_not_change_during_the_callback_of_a_concurrent_evaluation(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, saving, overlaps = threading.Event(), threading.Event(), []
    step_of, snapshot_of = StepTrainer.step, Learner.snapshot

    def step(trainer: StepTrainer, taken: Step) -> dict[str, float]:
        training.set()
        saving.wait(0.5)  # in vain if the callback waits for the end of the step
        metrics = step_of(trainer, taken)
        training.clear()
        return metrics

    def snapshot(learner: Learner) -> Snapshot:
        overlaps.append(training.is_set())
        saving.set()
        return snapshot_of(learner)

    def on_evaluation(evaluations: Evaluations) -> None:
        if evaluations.step == 0:
            found = trainer.evaluate(samples=1)
            assert found["babble"].versions == {found.step}
            trainer.save("policy")

    settings = {"eval.samples": 1, "eval.concurrent.max_sessions": 2, "checkpoint.best": False}
    trainer = make(on_evaluation=on_evaluation, settings=settings)
    monkeypatch.setattr(StepTrainer, "step", step)
    monkeypatch.setattr(Learner, "snapshot", snapshot)
    assert [step.number for step in trainer] == [1, 2, 3]
    assert len(overlaps) > 1
    assert not any(overlaps)


class Even(Chatter):
    """Every episode has the same reward."""

    def respond(self, text: str) -> Reply:
        """Reward everything."""
        return Reply("Go on.", reward=1.0)


def test_step_without_a_learning_signal_trains_no_tokens(make: Make) -> None:
    (step,) = make(steps=1, environments=[Even])
    assert step.metrics["loss_tokens"] == 0.0


def test_learning_rate_follows_the_steps_if_the_number_of_mini_batches_changes(make: Make) -> None:
    decay = {"train.learning_rate": 1e-3, "train.decay.name": "linear", "train.decay.to": 0.0}
    settings = decay | {"rollout.max_staleness": 0, "rollout.group_size": 4}
    for step in make(steps=4, settings=settings):
        assert step.metrics["learning_rate"] == pytest.approx(0.75e-3)
        break
    steps = list(make(steps=4, settings=settings | {"train.minibatches": 2}, resume=True))
    # The eight updates of the whole run have the rates 7/8, 6/8 ... 0.
    means = [2.5e-3 / 4 - 1e-3 / 16, 1.5e-3 / 4 - 1e-3 / 16, 0.5e-3 / 4 - 1e-3 / 16]
    assert [step.metrics["learning_rate"] for step in steps] == pytest.approx(means)


def test_running_trainer_refuses_another_loop(make: Make) -> None:
    trainer = make()
    for _ in trainer:
        with pytest.raises(TrainError, match="running already"):
            trainer.train()
        break


SCRIPT = """
import sys
from agentrl_env import Environment, Reply, tool
from agentrl_train import Trainer

class Speak(Environment):
    max_turns = 1

    def reset(self, sample, rng):
        return "Speak."

    @tool
    def stop(self) -> str:
        "Do nothing."
        return "fine"

    def respond(self, text: str) -> Reply:
        return Reply("thanks", reward=float(len(text) % 3))

trainer = Trainer(model=sys.argv[1], environments=[Speak], steps=2, settings={settings})
for step in trainer:
    print("step", step.number, "reward", step.metrics["reward"])
print(trainer.evaluate(samples=2))
trainer.save("policy")
"""


def run_script(policy: Path, folder: Path, *launcher: str, **settings: Any) -> str:
    """Run the script in a folder and return its output."""
    (folder / "script.py").write_text(SCRIPT.replace("{settings}", repr(TINY | settings)))
    command = [sys.executable, *launcher, "script.py", str(policy)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_script_trains_its_own_class(policy: Path, tmp_path: Path) -> None:
    output = run_script(policy, tmp_path)
    assert [line.split()[:2] for line in output.splitlines()[:2]] == [["step", "1"], ["step", "2"]]
    assert "policy of step 2 on held-out samples\n  speak: success" in output
    assert (tmp_path / "policy" / "config.json").exists()


SPINNING = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
MAKE = """
{imports}
import os
Trainer(model="org/name", environments=["http://127.0.0.1:1"], steps=1, settings={settings})
print(os.environ.get("OMP_WAIT_POLICY"), os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize(
    ("imports", "settings", "given", "policy", "warned"),
    [
        ("from agentrl_train import load_policy, Trainer", {}, {}, "PASSIVE 3000", False),
        pytest.param(
            "from agentrl_train import Trainer",
            {},
            {"OMP_WAIT_POLICY": "ACTIVE"},
            "ACTIVE None",
            False,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "from agentrl_train import Trainer",
            {},
            {"GOMP_SPINCOUNT": "20"},
            "PASSIVE 20",
            False,
            marks=pytest.mark.slow,
        ),
        ("import torch; from agentrl_train import Trainer", {}, {}, "None None", True),
        pytest.param(
            "import torch; from agentrl_train import Trainer",
            {"run.threads": 1},
            {},
            "None None",
            False,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_idle_threads_of_a_script_wait_actively_only_for_a_moment(
    tmp_path: Path,
    imports: str,
    settings: dict[str, Any],
    given: dict[str, str],
    policy: str,
    warned: bool,
) -> None:
    code = MAKE.replace("{imports}", imports).replace("{settings}", repr(settings))
    environment = {name: value for name, value in os.environ.items() if name not in SPINNING}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(ROOT)} | given,
        timeout=500,
    )
    assert done.stdout.splitlines() == [policy], done.stderr
    assert ("set GOMP_SPINCOUNT=3000" in done.stderr) is warned


@pytest.mark.slow
def test_torchrun_runs_the_same_script_on_two_ranks(policy: Path, tmp_path: Path) -> None:
    output = run_script(
        policy, tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    )
    assert sorted(line.split()[1] for line in output.splitlines() if line.startswith("step")) == ["1", "2"]
    assert output.count("policy of step 2 on held-out samples") == 1
    assert output.count("no results: rank 0 evaluates") == 1
    assert (tmp_path / "policy" / "config.json").exists()


async def test_cancelled_run_ends_before_its_engines_are_closed() -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def run() -> Any:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.set()

    async def lost() -> None:
        await asyncio.Event().wait()

    running = asyncio.create_task(run_until_rank_lost(run(), lost()))
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended.is_set()
