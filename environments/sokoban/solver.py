"""Solves boards with A* over pushes. Positions between which the player can walk count as one."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from functools import lru_cache

from .board import Board, Position

MAX_POSITIONS = 20_000
"""Maximum number of visited positions in a search. Every board of the splits takes fewer."""


@dataclass(frozen=True)
class Plan:
    """A solution with the fewest pushes."""

    moves: tuple[str, ...]
    pushes: int


@lru_cache(4096)
def solve(board: Board, position: Position) -> Plan | None:
    """Return a plan from a position, or None if there is none or the search reaches its limit."""
    far = _pushes_to_a_target(board)
    if not all(box in far for box in position.boxes):
        return None
    start = min(board.reach(position.player, position.boxes)), position.boxes
    came: dict[tuple[int, frozenset[int]], tuple[tuple[int, frozenset[int]], int, int] | None] = {start: None}
    cost, done, ties = {start: 0}, set(), 0
    queue = [(sum(far[box] for box in position.boxes), 0, start, position.player)]
    while queue and len(done) < MAX_POSITIONS:
        _, _, key, player = heapq.heappop(queue)
        if key in done:
            continue
        done.add(key)
        boxes = key[1]
        if boxes == board.targets:
            return _plan(board, position, came, key)
        reached = board.reach(player, boxes)
        for box in sorted(boxes):
            for step in board.steps.values():
                ahead = box + step
                if box - step not in reached or ahead not in far or ahead in boxes:
                    continue
                moved = boxes - {box} | {ahead}
                other = min(board.reach(box, moved)), moved
                if cost[key] + 1 < cost.get(other, MAX_POSITIONS):
                    cost[other], came[other], ties = cost[key] + 1, (key, box, step), ties + 1
                    estimate = cost[other] + sum(far[one] for one in moved)
                    heapq.heappush(queue, (estimate, ties, other, box))
    return None


@lru_cache(4096)
def _pushes_to_a_target(board: Board) -> dict[int, int]:
    """Return the number of pushes that a single box needs from each cell. Dead cells are omitted."""
    far, queue = dict.fromkeys(board.targets, 0), deque(sorted(board.targets))
    while queue:
        cell = queue.popleft()
        for step in board.steps.values():
            before = cell - step
            if before not in far and before not in board.walls and before - step not in board.walls:
                far[before] = far[cell] + 1
                queue.append(before)
    return far


def _plan(board, position, came, key):
    pushes = []
    while came[key] is not None:
        key, box, step = came[key]
        pushes.append((box, step))
    names = {step: name for name, step in board.steps.items()}
    moves: list[str] = []
    player, boxes = position.player, position.boxes
    for box, step in reversed(pushes):
        moves += [*_walk(board, player, box - step, boxes), names[step]]
        player, boxes = box, boxes - {box} | {box + step}
    return Plan(tuple(moves), len(pushes))


def _walk(board, start, end, boxes):
    """Return the shortest way of the player between two cells."""
    ways, queue = {start: ()}, deque([start])
    while end not in ways:
        cell = queue.popleft()
        for name, step in board.steps.items():
            other = cell + step
            if other not in ways and other not in board.walls and other not in boxes:
                ways[other] = (*ways[cell], name)
                queue.append(other)
    return ways[end]
