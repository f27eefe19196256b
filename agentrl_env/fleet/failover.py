"""What servers tell of their sessions, put by before the answers that it belongs to are handed on."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence

from agentrl_env.errors import SessionLost, StateUnavailable
from agentrl_env.fleet.store import FleetState
from agentrl_env.wire import KeptHead

ANSWERED_S = 5.0
"""How long the last answer of a session may be on its way after its server has told that it ended."""
AGAIN_S = 0.25
PATIENCE_S = 5.0
"""How long a caller waits until what it is to be told of is written."""
MOVED = "another server has gone on with the session"


class Keeper:
    """Writes where sessions stand to the shared state, for each session in the order it is told.

    Only the holder of a session may write, so that a server which was given up by mistake cannot go on
    beside the one that has adopted its session. While the state is away, no answer is handed on: what
    a client was told of must never be undone.

    Args:
        state: what is shared with the other controllers.
        disown: is told of a session that a server had after it was given to another.
    """

    def __init__(self, state: FleetState, disown: Callable[[str, str], Awaitable[None]]) -> None:
        self._state = state
        self._disown = disown
        self._writing: dict[str, asyncio.Task[bool]] = {}
        self._ended: deque[tuple[float, str, str]] = deque()

    def keep(self, server_id: str, head: KeptHead, kept: bytes, turns: Sequence[bytes]) -> None:
        """Take in where a session stands, or that it cannot be kept.

        Args:
            server_id: who says so.
            head: what it begins with.
            kept: all of it but the turns, as JSON.
            turns: those that have not been told of before, each as JSON.
        """
        if head.seal:
            self._write(head.session_id, lambda: self._keep(head, server_id, kept, turns))
        else:
            self._forget(server_id, head.session_id)

    def ended(self, server_id: str, session_ids: Iterable[str]) -> None:
        """Take in that sessions have ended; if the server dies before it says how, others go on with them."""
        then = asyncio.get_running_loop().time() + ANSWERED_S
        self._ended.extend((then, session_id, server_id) for session_id in session_ids)

    async def written(self, *session_ids: str) -> None:
        """Return once what was told of sessions is written.

        Raises SessionLost where one has moved on, StateUnavailable where it takes too long; whoever asks
        again then waits again.
        """
        writing = {name: self._writing[name] for name in session_ids if name in self._writing}
        if not writing:
            return
        _, late = await asyncio.wait(writing.values(), timeout=PATIENCE_S)
        if late:
            raise StateUnavailable(
                "it could not be kept yet where a session stands; ask again", retry_after=1
            )
        for session_id, task in writing.items():
            if not task.result():
                if self._writing.get(session_id) is task:
                    del self._writing[session_id]
                raise SessionLost(MOVED)

    def forget_ended(self) -> None:
        """Forget what has ended."""
        now = asyncio.get_running_loop().time()
        while self._ended and self._ended[0][0] <= now:
            _, session_id, server_id = self._ended.popleft()
            self._forget(server_id, session_id)

    async def aclose(self) -> None:
        """Return once all is written that can be."""
        for _, session_id, server_id in self._ended:
            self._forget(server_id, session_id)
        if self._writing:
            _, late = await asyncio.wait(self._writing.values(), timeout=PATIENCE_S)
            for task in late:
                task.cancel()

    def _write(self, session_id: str, work: Callable[[], Awaitable[bool]]) -> None:
        writing = asyncio.create_task(self._run(self._writing.get(session_id), work))
        self._writing[session_id] = writing
        writing.add_done_callback(lambda _: self._end(session_id, writing))

    async def _run(self, before: asyncio.Task[bool] | None, work: Callable[[], Awaitable[bool]]) -> bool:
        if before is not None:
            await asyncio.wait((before,))
        while True:
            try:
                return await work()
            except StateUnavailable:
                await asyncio.sleep(AGAIN_S)

    def _end(self, session_id: str, writing: asyncio.Task[bool]) -> None:
        """Forget a write that is done; one that was refused is of interest to who waits for the answer."""
        if self._writing.get(session_id) is writing and (writing.cancelled() or writing.result()):
            del self._writing[session_id]

    async def _keep(self, head: KeptHead, server_id: str, kept: bytes, turns: Sequence[bytes]) -> bool:
        if await self._state.keep(head.session_id, server_id, head.seq, kept, turns):
            return True
        await self._disown(head.session_id, server_id)
        return False

    def _forget(self, server_id: str, session_id: str) -> None:
        async def forget() -> bool:
            await self._state.forget_kept(session_id, server_id)
            return True

        self._write(session_id, forget)
