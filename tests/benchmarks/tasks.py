"""Speed and leaks of a task: ``python -m tests.benchmarks.tasks TARGET --episodes 1000 --sessions 64``.

Plays concurrent episodes with the task's expert, in this process and without HTTP. Prints one JSON object
with scores, rates, the memory before and after, and the remaining processes and temporary files.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from agentrl_env.client.client import EnvClient
from agentrl_env.environment import find_class
from agentrl_env.testing.context import Policy, Rollout, RolloutTurn, expert_policy, random_policy
from agentrl_env.types import Message

POLICIES = ("expert", "random", "nothing")


def family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(
                int(stat.parent.name)
            )
        except OSError:
            continue
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found


def memory_mib() -> float:
    """Return the proportional memory of this process and its descendants."""
    total = 0
    for pid in family(os.getpid()):
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
    return total / 1024


def temporary_files() -> set[Path]:
    """Return the content of the folder for temporary files."""
    return set(Path(tempfile.gettempdir()).iterdir())


def policy(name: str, seed: int) -> Policy:
    if name == "random":
        return random_policy(seed)
    if name == "expert":
        return expert_policy

    async def nothing(session: Any, rollout: Rollout) -> Message:
        return Message.assistant("")

    return nothing


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    begin, files = time.perf_counter(), temporary_files()
    task = find_class(options.target)
    async with EnvClient.local(task, max_sessions=2 * options.sessions) as client:
        first = await client.open(task.name, split=options.split, index=0)
        await first.close()
        started = time.perf_counter() - begin
        before, samples = memory_mib(), []
        scores: list[float] = []
        failed: list[int] = []
        steps = 0
        queue = iter(range(options.episodes))

        async def play() -> None:
            nonlocal steps
            for index in queue:
                session = await client.open(task.name, split=options.split, index=index % options.distinct)
                rollout = Rollout(sample=None, opening=session.messages)  # type: ignore[arg-type]
                act, total = policy(options.policy, index), 0.0
                while not session.status.final:
                    move = await act(session, rollout)
                    result = await session.step(move)
                    rollout.turns.append(RolloutTurn(action=move, result=result))
                    total += result.reward
                    steps += 1
                if session.status.value.startswith("failed"):
                    failed.append(index)
                await session.close()
                scores.append(total)
                if len(scores) % max(1, options.episodes // 8) == 0:
                    gc.collect()
                    samples.append(round(memory_mib(), 1))
                    print(len(scores), samples[-1], len(family(os.getpid())) - 1, file=sys.stderr, flush=True)

        clock, cpu = time.perf_counter(), os.times()
        await asyncio.gather(*(play() for _ in range(options.sessions)))
        seconds = time.perf_counter() - clock
        used = os.times()
        processor = sum(used[:4]) - sum(cpu[:4])
        gc.collect()
        after, left = memory_mib(), len(family(os.getpid())) - 1
    left_files = sorted(path.name for path in temporary_files() - files)
    return {
        "task": task.name,
        "split": options.split,
        "policy": options.policy,
        "episodes": len(scores),
        "sessions": options.sessions,
        "mean_reward": round(sum(scores) / len(scores), 4),
        "failed": len(failed),
        "start_s": round(started, 1),
        "episodes_per_s": round(len(scores) / seconds, 2),
        "steps_per_s": round(steps / seconds, 1),
        "cpu_s": round(processor, 1),
        "mib_before": round(before, 1),
        "mib_during": samples,
        "mib_after": round(after, 1),
        "processes_after": left,
        "processes_at_end": len(family(os.getpid())) - 1,
        "temporary_files_at_end": left_files,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--split", default="test")
    parser.add_argument("--policy", default="expert", choices=POLICIES)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--distinct", type=int, default=1000)
    parser.add_argument("--sessions", type=int, default=64)
    print(json.dumps(asyncio.run(measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
