"""The sweeps of ``make paper``: tasks, policy, and the figures in the documentation."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from agentrl_env import EnvClient
from agentrl_env.types import Message, ToolCall
from agentrl_train.batch import token_weights
from agentrl_train.chat import ChatFormat
from agentrl_train.storage.run_dir import write_config
from agentrl_train.sweep.plan import load_sweep
from agentrl_train.sweep.processes import finished, require_unchanged, usage
from agentrl_train.types import TokenSequence
from examples.quickstart.starter import new_tokenizer
from tests.benchmarks.paper import rooms, tasks
from tests.benchmarks.paper.__main__ import EVIDENCE, POLICIES, REAL, TITLES, write_evidence
from tests.benchmarks.paper.policy import small_tokenizer, write_policy
from tests.benchmarks.paper.records import RECORDS, keep, restore

ROOT = Path(__file__).parents[2]
PAPER = ROOT / "tests/benchmarks/paper"
ONE_POLICY = ("starter_tasks", "long_credit", "workers")
"""Sweeps with five seeds and one initial policy."""
MEASURED = sorted(path.stem for path in EVIDENCE.glob("*.json"))


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of the sweeps with the policy, which ``make paper`` writes first."""
    root = tmp_path_factory.mktemp("checkout")
    for seed in range(POLICIES):
        write_policy(root / f"runs/paper/policies/{seed}", seed=seed)
        (root / f"runs/paper/imitations/{seed}").mkdir(parents=True)
        for half in ("front", "back"):
            specialist = root / f"runs/paper/specialists/{half}/seed-{seed}"
            (specialist / "checkpoints/step_000036/model").mkdir(parents=True)
    (root / "runs/paper/rooms").mkdir()
    (root / "examples").mkdir()
    for folder in ("environments", "examples/quickstart"):
        (root / folder).symlink_to(ROOT / folder)
    shutil.copytree(ROOT / "examples/real", root / "examples/real")
    return Path(shutil.copytree(PAPER, root / "tests/benchmarks/paper"))


@pytest.mark.parametrize("name", [*TITLES, *REAL])
def test_sweep_of_the_paper_is_valid_and_has_its_seeds_and_policies(name: str, paper: Path) -> None:
    sweep = load_sweep(paper / f"{name}.toml", cores=2)
    assert sweep.config.name == name
    seeds = 5 if name in ONE_POLICY else 3 if name in REAL else POLICIES
    assert len(sweep.config.seeds) == seeds
    assert len({run.config.model.path for run in sweep.runs}) == (1 if name in ONE_POLICY else seeds)


@pytest.mark.extended
@pytest.mark.slow
def test_run_of_the_paper_repeats_its_finding(paper: Path) -> None:
    name = "task_normalization"
    page = json.loads((EVIDENCE / f"{name}.json").read_text())
    (measured,) = (one for one in page["variants"] if one["name"] == "task")
    text = (paper / f"{name}.toml").read_text()
    begin, _, _ = text.partition("[variants.none]")
    _, _, chosen = text.partition("[variants.task]")
    one = paper / "one.toml"
    begin = re.sub(r"^seeds = .*$", "seeds = [0]", begin, flags=re.MULTILINE)
    one.write_text(begin + "[variants.task]" + chosen)
    command = [sys.executable, "-m", "agentrl_train", "sweep", str(one)]
    done = subprocess.run(command, cwd=paper.parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((paper.parents[2] / f"runs/paper/{name}/results.json").read_text())
    tasks = found["variants"][0]["tasks"]
    assert tasks.keys() == measured["tasks"].keys() == {"quiet", "loud"}
    for task in tasks:
        assert measured["tasks"][task]["success"]["mean"] > 0.9
        assert tasks[task]["success"]["mean"] > 0.9


def test_variants_of_lengths_weigh_the_tokens_of_unequal_turns_differently(paper: Path) -> None:
    """On one batch, the gradients differ in more than scale."""
    sizes, rewards = (2, 5, 12, 3), np.array([1.0, 0.5, 0.0, 0.0])
    pulls = []
    for run in load_sweep(paper / "lengths.toml", cores=2).runs[:3]:
        algorithm = run.config.algorithm
        advantages = rewards - rewards.mean()
        sequences = [
            TokenSequence(
                token_ids=np.zeros(size, np.int64),
                loss_mask=np.ones(size, np.float32),
                logprobs=np.zeros(size, np.float32),
                versions=np.zeros(size, np.int64),
                advantages=np.full(size, advantage, np.float32),
                task="words",
                group_id=0,
            )
            for size, advantage in zip(sizes, advantages, strict=True)
        ]
        weights = token_weights(
            sequences, aggregation=algorithm.aggregation.name, constant_tokens=algorithm.constant_tokens
        )
        pull = np.concatenate([one.advantages * each for one, each in zip(sequences, weights, strict=True)])
        pulls.append((run.variant, algorithm.scale.name, pull / np.linalg.norm(pull)))
    (_, _, grpo), (_, scaled, token_mean), (_, unscaled, constant) = pulls
    assert grpo @ token_mean < 0.9
    assert grpo @ constant < 0.9
    assert (scaled, unscaled) == ("std", "none")  # these two variants differ by the spread of each group


@pytest.mark.parametrize("name", MEASURED)
def test_figure_in_the_documentation_belongs_to_the_sweep_in_the_repository(name: str, paper: Path) -> None:
    found = json.loads((EVIDENCE / f"{name}.json").read_text())
    sweep = load_sweep(paper / f"{name}.toml", cores=2)
    assert [one["name"] for one in found["variants"]] == list(sweep.config.changes)
    assert found["seeds"] == list(sweep.config.seeds)
    for one in found["variants"]:
        assert one["final"]["success"]["n"] == len(found["seeds"])
        assert all(
            0 <= share["low"] < share["high"] <= 1
            for share in (one["final"]["success"], one["final"]["area"])
        )
        tested = one["difference"]["area"]
        assert tested is None or (one["name"] == found["baseline"]) == ("p_holm" not in tested)
    assert ElementTree.parse(EVIDENCE / f"{name}.svg").getroot().tag.endswith("svg")
    assert f"<!-- generated: evidence {name} -->" in (ROOT / "docs/evidence.md").read_text()


@pytest.mark.parametrize(
    ("task", "letters", "reward"),
    [
        ("Quiet", "a", 1.0),
        ("Quiet", "b", 0.0),
        ("Loud", "b", 100.0),
        ("Loud", "a", 0.0),
        ("Pair", "ab", 1.0),
        ("Pair", "aa", 0.0),
        ("Lock", "abc", 1.0),
        ("Lock", "abb", 0.0),
        ("Lock", "a c", 0.0),
        ("Four", "abcd", 1.0),
        ("Four", "abca", 0.0),
        ("Front", "abaa", 1.0),
        ("Front", "aacd", 0.0),
        ("Back", "aacd", 1.0),
        ("Back", "abcc", 0.0),
        ("Doors", "bbabc", 1.0),
        ("Stairs", "abaabc", 1.0),
        ("Delay", "abcdab", 1.0),
        ("Delay", "babcda", 0.0),
    ],
)
async def test_reward_is_for_the_right_letters(task: str, letters: str, reward: float) -> None:
    kind = getattr(tasks, task)
    async with EnvClient.local(kind) as client:
        session = await client.open(kind.name)
        for letter in letters:
            assert not session.status.final
            result = await session.step(Message.assistant(letter))
        assert result.terminated
        assert result.reward == reward


async def test_paid_choices_are_rewarded_in_their_turns() -> None:
    async with EnvClient.local(tasks.Paid) as client:
        session = await client.open("paid")
        rewards = [(await session.step(Message.assistant(letter))).reward for letter in "abbd"]
    assert rewards == [0.25, 0.25, 0.0, 0.25]


async def test_noisy_choices_report_true_success_and_are_sometimes_rewarded_wrongly() -> None:
    lies = 0
    async with EnvClient.local(tasks.Noisy) as client:
        for seed in range(60):
            session = await client.open("noisy", seed=seed)
            await session.step(Message.assistant("a"))
            result = await session.step(Message.assistant("b"))
            assert result.metrics["success"] == 1.0
            lies += result.reward == 0.0
    assert 4 <= lies <= 24


async def test_rooms_are_opened_by_the_words_of_their_pages() -> None:
    async with EnvClient.local(tasks.Rooms) as client:
        for right in (True, False):
            session = await client.open("rooms", seed=3)
            words = []
            for room in session.messages[0].content.split():
                result = await session.step(Message.assistant("", ToolCall.of("read", room=room)))
                words += re.findall(r"lock (\w+)" if right else r"door (\w+)", result.messages[0].content)
            assert 1 <= len(words) <= 3
            result = await session.step(Message.assistant("", ToolCall.of("submit", code=" ".join(words))))
            assert result.terminated
            assert result.reward == float(right)


def test_readers_err_in_both_forms_of_the_rooms() -> None:
    chat = ChatFormat(new_tokenizer([], vocab_size=0))
    heard = [chat.tokenizer.decode(one.token_ids) for one in rooms.traces(chat, rooms.workers(), episodes=60)]
    reports = [text for text in heard if "submit(code)" not in text]
    assert sum("delegate(task)" in text and "read(room)" not in text for text in heard) == 20
    assert 20 < len(reports) < 60
    right = [text.split("lock ")[1].split()[0] == text[: -len("<|im_end|>")].split()[-1] for text in reports]
    assert 0.4 < sum(right) / len(right) < 0.8


def test_tokens_of_the_policy_are_letters() -> None:
    tokenizer = small_tokenizer()
    text = "Say a letter, {2}!\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == 101


def test_evidence_of_a_sweep_is_a_figure_and_short_numbers(tmp_path: Path) -> None:
    variants: list[dict[str, Any]] = [
        {
            "name": name,
            "final": {"success": {"mean": 1 / 3, "low": 0.1, "high": 0.5, "n": 5}},
            "tasks": {},
            "difference": {},
            "samples": 640.0,
            "wall_s": 20.0,
            "processor_s": 12.0,
            "runs": [{"final": {"success": 0.3, "greedy": None, "area": 0.2}}] * 2,
            "curves": {"held_out_success": {"samples": [[0.0, 0.1, 0.0, 0.2], [640.0, 1 / 3, 0.1, 0.5]]}},
        }
        for name in ("one", "two")
    ]
    found = {"name": "presets", "seeds": [0, 1], "baseline": "one", "interval": "t", "area_samples": 640.0}
    write_evidence(found | {"variants": variants}, tmp_path)
    short = json.loads((tmp_path / "presets.json").read_text())
    assert short["variants"][0]["final"]["success"]["mean"] == 0.3333
    assert "curves" not in short["variants"][0]
    assert short["variants"][0]["runs"] == {"success": [0.3] * 2, "greedy": [None] * 2, "area": [0.2] * 2}
    assert 'class="band"' in (tmp_path / "presets.svg").read_text()


def test_runs_of_a_finished_seed_continue_in_another_checkout(
    paper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, moved, records = tmp_path / "checkout", tmp_path / "moved", tmp_path / "records"
    for folder in (root, moved):
        shutil.copytree(paper.parents[2], folder, symlinks=True)
    monkeypatch.chdir(root)
    plan = load_sweep(root / "tests/benchmarks/paper/real_tasks.toml", cores=2)
    for run in plan.runs:
        run.folder.mkdir(parents=True)
        write_config(run.folder, run.config.to_toml())
        (run.folder / "metrics.jsonl").write_text(f'{{"step": {run.seed}}}\n')
        (run.folder / "evaluations.jsonl").write_text("")
        run.usage.write_text('{"wall_s": 1.0}')
        if (run.seed, run.variant) != (1, "only-sql"):
            (run.folder / "summary.json").write_text("{}")
    keep(plan, root=root, records=records)
    assert not [path for path in records.iterdir() if str(root) in path.read_text()]

    monkeypatch.chdir(moved)
    assert restore("real_tasks", root=moved, records=records) == {0, 2}
    again = load_sweep(moved / "tests/benchmarks/paper/real_tasks.toml", cores=2)
    require_unchanged(again, replace=False)
    assert {run.seed for run in again.runs if finished(run)} == {0, 2}
    assert {run.seed for run in again.runs if usage(run)["wall_s"] == 1.0} == {0, 2}


@pytest.mark.parametrize("record", sorted(RECORDS.glob("*.json")), ids=lambda path: path.stem)
def test_kept_runs_belong_to_the_sweep_in_the_repository(
    record: Path, paper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _, seed = record.stem.rpartition("-")
    checkout = Path(shutil.copytree(paper.parents[2], tmp_path / "checkout", symlinks=True))
    monkeypatch.chdir(checkout)
    restore(name, root=checkout)
    plan = load_sweep(checkout / f"tests/benchmarks/paper/{name}.toml", cores=2)
    require_unchanged(plan, replace=False)
    assert all(finished(run) for run in plan.runs if run.seed == int(seed))
