"""Who is next: openings that wait for room, fair between clients and in order for each."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping

from agentrl_env.fleet.worker import Member, take_one

Group = tuple[str, str]
"""Openings of one task by one client: what holds for one of them holds for all."""


def least_loaded(members: Iterable[Member], task: str) -> Member | None:
    """Return the server with the smallest share of its capacity taken, among those with room."""
    able = [member for member in members if member.has_room(task)]
    return min(able, key=lambda member: (member.load, -member.capacity, member.server_id), default=None)


class Placement:
    """Gives each opening a place on a server, at once or when one comes free.

    Clients take turns; the openings of one client for one task are served in order. A place counts as
    taken until ``release``.

    Args:
        members: the servers, as they are now.
        task_limits: how many sessions of a task may be open in the whole fleet.
        client_limit: how many sessions one client may have open.
    """

    def __init__(
        self,
        members: Mapping[str, Member],
        *,
        task_limits: Mapping[str, int],
        client_limit: int | None = None,
    ) -> None:
        self._members = members
        self._task_limits = task_limits
        self._client_limit = client_limit
        self._waiting: OrderedDict[Group, deque[asyncio.Future[Member | None]]] = OrderedDict()
        self._placing: Counter[Group] = Counter()

    @property
    def waiting(self) -> int:
        """How many openings wait."""
        return sum(map(len, self._waiting.values()))

    async def take(self, task: str, client: str, wait_s: float) -> Member | None:
        """Return a server that has a place kept for the caller; None where none came free in time."""
        group = (task, client)
        if not self._waiting.get(group) and (member := self._try(group)) is not None:
            return member
        if wait_s <= 0:
            return None
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[Member | None] = loop.create_future()
        self._waiting.setdefault(group, deque()).append(turn)
        timer = loop.call_later(wait_s, _give_up, turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if not turn.cancelled() and (member := turn.result()) is not None:
                self.release(group, member)
            raise
        finally:
            timer.cancel()
            self._forget(group, turn)

    def release(self, group: Group, member: Member) -> None:
        """Give back a place that was kept: the session is open, and counted as such, or it never will be."""
        member.opening -= 1
        take_one(self._placing, group)
        self.serve()

    def serve(self) -> None:
        """Give places that have come free to those who wait."""
        blocked: set[Group] = set()
        while len(blocked) < len(self._waiting):
            group, turns = self._waiting.popitem(last=False)
            self._waiting[group] = turns  # to the back: the next client's turn
            while turns and turns[0].done():
                turns.popleft()
            if not turns:
                del self._waiting[group]
            elif group not in blocked:
                member = self._try(group)
                if member is None:
                    blocked.add(group)
                else:
                    turns.popleft().set_result(member)

    def refuse_all(self, wanted: Callable[[Group], bool], error: Exception) -> None:
        """Answer those who wait for certain openings with an error."""
        for group, turns in self._waiting.items():
            for turn in turns if wanted(group) else ():
                if not turn.done():
                    turn.set_exception(error)

    def _try(self, group: Group) -> Member | None:
        task, client = group
        if task in self._task_limits and self._count(task=task) >= self._task_limits[task]:
            return None
        if self._client_limit is not None and self._count(client=client) >= self._client_limit:
            return None
        member = least_loaded(self._members.values(), task)
        if member is not None:
            member.opening += 1
            self._placing[group] += 1
        return member

    def _count(self, *, task: str | None = None, client: str | None = None) -> int:
        """Count the sessions of a task, or of a client: those open and those being opened."""
        counts = [member.held for member in self._members.values()] + [self._placing]
        return sum(
            number
            for held in counts
            for (its_task, its_client), number in held.items()
            if task in (None, its_task) and client in (None, its_client)
        )

    def _forget(self, group: Group, turn: asyncio.Future[Member | None]) -> None:
        turns = self._waiting.get(group)
        if turns is not None and turn in turns:
            turns.remove(turn)
        if turns is not None and not turns:
            del self._waiting[group]


def _give_up(turn: asyncio.Future[Member | None]) -> None:
    if not turn.done():
        turn.set_result(None)
