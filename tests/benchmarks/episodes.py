"""``python -m tests.benchmarks.episodes TARGET [EPISODES] [SESSIONS]`` plays experts, and finds leaks.

It prints the episodes and steps per second of ``SESSIONS`` concurrent sessions in one process, the memory of
a session, and how the process grew after the first fifth of the episodes: memory, descriptors, processes.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from agentrl_env import EnvClient
from agentrl_env.server.loader import load_target

LEVELS = ("test", "test-2", "test-3")


def usage() -> tuple[float, int, int]:
    """Return this process's memory in MiB, and its numbers of descriptors and of child processes."""
    status = Path("/proc/self/status").read_text()
    memory = int(status.split("VmRSS:")[1].split()[0]) / 1024
    tasks = Path("/proc/self/task").iterdir()
    children = sum(len((task / "children").read_text().split()) for task in tasks)
    return memory, len(os.listdir("/proc/self/fd")), children


async def main(target: str, episodes: int, concurrency: int) -> None:
    """Open many sessions, then play episodes."""
    task = load_target(target)
    async with EnvClient.local(task) as client:
        name = next(iter(await client.tasks()))
        before = usage()
        held = [await client.open(name, split=LEVELS[i % 3], index=i) for i in range(concurrency)]
        during = usage()
        for session in held:
            await session.close()
        print(f"{concurrency} sessions: {(during[0] - before[0]) / concurrency:.2f} MiB each in the server")
        numbers, steps, won = iter(range(episodes)), 0, 0.0
        marks: list[tuple[float, int, int]] = []

        async def play() -> None:
            nonlocal steps, won
            for number in numbers:
                if number == episodes // 5:
                    marks.append(usage())
                session = await client.open(name, split=LEVELS[number % 3], index=number % 1000)
                while not session.status.final:
                    result = await session.step(await session.expert())
                    steps += 1
                won += result.reward
                await session.close()

        begin = time.perf_counter()
        await asyncio.gather(*(play() for _ in range(concurrency)))
        seconds = time.perf_counter() - begin
        marks.append(usage())
        await asyncio.sleep(2)
        after = usage()
    print(f"{episodes} episodes, mean reward {won / episodes:.3f}: {episodes / seconds:.1f} episodes/s, "
          f"{steps / seconds:.1f} steps/s")  # fmt: skip
    for label, (memory, descriptors, children) in zip(("after a fifth", "at the end", "closed"),
                                                      (*marks, after), strict=True):  # fmt: skip
        print(f"{label}: {memory:.0f} MiB, {descriptors} descriptors, {children} child processes")


if __name__ == "__main__":
    counts = [int(word) for word in sys.argv[2:]] + [1000, 64][len(sys.argv) - 2 :]
    asyncio.run(main(sys.argv[1], *counts))
