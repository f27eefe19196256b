"""Number of the project's files that one step and one token enter, counted by the interpreter's profiler."""

import asyncio
import sys
import threading
from pathlib import Path

from agentrl_env import EnvClient, ToolCall
from agentrl_env.server.serve import EnvServer
from tests.env.tasks import Guess

ROOT = Path(__file__).parent.parent


class EnteredFiles:
    """Records the files of a package in which a function is called, on all threads."""

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
    async with EnvClient.connect(url) as client:
        session = await client.open("guess", seed=1)
        await session.step(ToolCall.of("guess", n=1))  # connects
        with EnteredFiles("agentrl_env") as files:
            await session.step(ToolCall.of("guess", n=2))
            await asyncio.sleep(0)
    return files


async def test_step_over_the_network_enters_at_most_23_files() -> None:
    server = EnvServer([Guess], port=0, drain_s=0.0)
    await server.start()
    try:
        files = await entered_by_a_step(server.url)
    finally:
        await server.stop()
    print(f"{len(files)} files: {', '.join(sorted(files))}")
    assert "agentrl_env/session/session.py" in files
    assert len(files) <= 23, sorted(files)
