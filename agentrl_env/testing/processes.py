"""Checks that a fresh process reads the same samples and plays the same episodes."""

from __future__ import annotations

import asyncio
from functools import partial

from agentrl_env.errors import ServerFull
from agentrl_env.testing.context import CheckContext
from agentrl_env.testing.fresh_process import (
    CannotRead,
    Wanted,
    read_in_process,
    read_samples,
    replay_in_process,
    target_of,
)
from agentrl_env.testing.report import CheckOutcome, failed, passed, readable, shorten, skipped, warned

SAMPLES_COMPARED, SESSIONS_COMPARED = 50, 6


async def data_set(context: CheckContext) -> CheckOutcome:
    """Does the data set give the same samples in every process?"""
    wanted = {split: context.indices(SAMPLES_COMPARED, split) for split in context.task.splits}
    environment, places = context.environment, "in two processes"
    if environment is None:
        readings, places = await _samples_of_servers(context, wanted), "in two sessions"
        if len(readings) < 2:
            return skipped("The server has no capacity for two sessions at the same time.")
    elif not environment.overrides("samples"):
        return passed("There is no data set: the seed determines the problem.")
    elif target := target_of(environment):
        context.doing = f"samples() of {target} in two fresh processes"
        read_fresh = partial(read_in_process, target, wanted, timeout=context.deadline / 2)
        try:
            fresh = await asyncio.gather(*(asyncio.to_thread(read_fresh, hash_seed=n) for n in (1, 2)))
        except CannotRead as error:
            return warned(f"Not compared with another process: {error}")
        readings = [*fresh, await asyncio.to_thread(read_samples, environment, wanted)]
    else:
        context.doing, places = "samples()", "from two calls of samples()"
        readings = [await asyncio.to_thread(read_samples, environment, wanted) for _ in range(2)]
    for name, data in readings[0].items():
        if other := next((r[name] for r in readings[1:] if r.get(name, data) != data), None):
            return failed(
                f"{name} is not the same {places}: {shorten(data)}, then {shorten(other)}. A group "
                "would mix problems. Seed what is random in samples(), and sort sets and lists of files."
            )
    return passed(f"{sum(name.startswith('Sample') for name in readings[0])} samples were the same {places}.")


async def processes(context: CheckContext) -> CheckOutcome:
    """Do the same sample, seed and actions give the same episode in another process?"""
    environment = context.environment
    if environment is None:
        return skipped("Not visible from outside: isolation compares the processes of a server.")
    target = target_of(environment)
    if target is None:
        return skipped("Not compared: no other process can import the class.")
    recorded = [rollout async for rollout in context.explored(2)]
    context.doing = f"{len(recorded)} episodes of {target} in two fresh processes"
    play_fresh = partial(replay_in_process, target, recorded, timeout=context.deadline / 2)
    try:
        fresh = await asyncio.gather(*(asyncio.to_thread(play_fresh, hash_seed=n) for n in (1, 2)))
    except CannotRead as error:
        return warned(f"Not compared with another process: {error}")
    for others in fresh:
        for one, other in zip(recorded, others, strict=True):
            if one.sample != other.sample:
                return skipped("Not run, for the reason that data_set reports.")
            if difference := one.difference(other):
                return failed(
                    f"{one.name}, played in another process, differs in {difference}. The order of a set of "
                    "texts and hash() of a text are others in each process: sort sets before rng draws from "
                    "them, and let nothing depend on the process."
                )
    return passed(f"{len(recorded)} episodes were the same in three processes.")


async def _samples_of_servers(context: CheckContext, wanted: Wanted) -> list[dict[str, str]]:
    """Open a few samples several times concurrently, so that different processes can answer."""
    readings: list[dict[str, str]] = [{} for _ in range(SESSIONS_COMPARED)]
    for split, indices in wanted.items():
        for index in context.while_time(indices[:4], least=1):
            sessions = []
            for position, reading in enumerate(readings):
                try:
                    session = await context.open(index, split=split)
                except ServerFull:
                    del readings[position:]
                    break
                sessions.append(session)
                reading[f"Sample {split}/{index}"] = readable(session.sample.data)
            for session in sessions:
                await session.close()
    return readings
