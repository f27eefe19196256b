"""Starts the server layouts and the honest clients, and runs the attacks of each kind."""

from __future__ import annotations

import asyncio
import shutil
import time
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

from agentrl_env.errors import AgentRLError
from tests.hostile import (
    agents,
    bodies,
    clock,
    escapes,
    framing,
    member,
    redis_writer,
    sockets,
    stuck,
    tokens,
)
from tests.hostile.account import Account
from tests.hostile.neighbours import Neighbours
from tests.hostile.site import (
    Attack,
    Ground,
    Kind,
    Site,
    Skipped,
    fleet,
    make_folder,
    single,
    threads,
    workers,
)

KINDS: tuple[Kind, ...] = (
    tokens.KIND,
    framing.KIND,
    bodies.KIND,
    sockets.KIND,
    agents.KIND,
    redis_writer.KIND,
    member.KIND,
    clock.KIND,
    stuck.KIND,
    stuck.THREADS,
    *escapes.KINDS,
)
LAYOUTS: dict[str, Callable[[Path], Site]] = {
    "single": single,
    "workers": workers,
    "fleet": fleet,
    "threads": threads,
    **escapes.LAYOUTS,
}
ATTACK_S = 120.0
"""Maximum seconds of one attack. A longer attack counts as hung."""
OVERRUN_S = 120.0
"""Seconds that the first pass can exceed the time of the run. Later attacks are skipped."""
SETTLE_S = 1.0
"""Seconds of honest play before the first attack and after the last attack of a kind."""


async def run(account: Account, seconds: float, kinds: Sequence[Kind] = KINDS) -> None:
    """Run all attacks once, then repeat them with other random choices until the time is up.

    Args:
        account: counts their findings.
        seconds: time for the attacks, excluding the start and stop of the servers.
        kinds: attackers.
    """
    lanes = dict.fromkeys(kind.lane for kind in kinds)
    await asyncio.gather(*(_lane([k for k in kinds if k.lane == lane], account, seconds) for lane in lanes))


async def _lane(kinds: Sequence[Kind], account: Account, seconds: float) -> None:
    """Run the attacks of several kinds one after another. Kinds on the same layouts share their servers."""
    shares = sum(kind.share for kind in kinds)
    for names in dict.fromkeys(kind.sites for kind in kinds):
        chosen = [kind for kind in kinds if kind.sites == names]
        async with _started(names, account) as (sites, neighbours):
            for kind in chosen:
                if not sites:
                    account.skip(kind.name, "this machine cannot start any of its servers")
                    continue
                await _attack(kind, sites, account, seconds * kind.share / shares, seconds + OVERRUN_S)
                slowest = max(one.slowest_s for one in neighbours)
                account.say(
                    f"{kind.name}: {account.attacks[kind.name]} attacks; slowest call {slowest:.1f} s"
                )
                for one in neighbours:
                    one.slowest_s = 0.0


@asynccontextmanager
async def _started(
    names: Sequence[str], account: Account
) -> AsyncIterator[tuple[list[Site], list[Neighbours]]]:
    """Run the sites of these layouts with their neighbours."""
    sites: list[Site] = []
    neighbours: list[Neighbours] = []
    try:
        for name in names:
            folder = make_folder(readable="sandbox" in name)
            try:
                # A layout can build an image. This must not block the clients of other lanes.
                sites.append(await asyncio.to_thread(LAYOUTS[name], folder))
            except Skipped as error:
                account.skip(name, str(error))
                shutil.rmtree(folder)
        await asyncio.gather(*(site.start() for site in sites))
        account.say(f"started {', '.join(site.name for site in sites) or 'nothing'}")
        rng = Random(account.seed)
        neighbours += [Neighbours(site, account, Random(rng.random())) for site in sites]
        await asyncio.sleep(SETTLE_S)
        yield sites, neighbours
    finally:
        await asyncio.gather(*(one.stop() for one in neighbours))
        for site, left in zip(sites, await asyncio.gather(*(site.stop() for site in sites)), strict=True):
            for pid in left:
                account.find("breaches", f"process {pid} outlived its parent", *site.running)
            site.read_logs(account)
            if account.failed:
                account.say(f"logs of {site.name} are in {site.folder}")
            else:
                shutil.rmtree(site.folder, ignore_errors=True)


async def _attack(kind: Kind, sites: list[Site], account: Account, seconds: float, last_s: float) -> None:
    """Attack all sites of a kind concurrently. No attack starts later than ``last_s`` into the run."""
    rng, end = Random(f"{account.seed} {kind.name}"), account.seconds + seconds
    tries = [_attack_site(kind, site, Random(rng.random()), account, end, last_s) for site in sites]
    await asyncio.gather(*tries)


async def _attack_site(
    kind: Kind, site: Site, rng: Random, account: Account, end: float, last_s: float
) -> None:
    """Run every attack of a kind once, in seeded order, then repeat until the time is up."""
    names = [name for name in kind.attacks if site.name in kind.only_on.get(name, kind.sites)]
    first = True
    while first or account.seconds < min(end, last_s):
        rng.shuffle(names)
        for name in names:
            if not first and account.seconds >= end:
                break
            if account.seconds > last_s:
                account.skip(f"{kind.name}/{name}", "the time was up")
            if f"{kind.name}/{name}" not in account.skipped:
                await _one(kind, name, Ground(site, Random(rng.random()), account), account)
        names, first = [name for name in names if f"{kind.name}/{name}" not in account.skipped], False
        if not names:
            break
    await asyncio.sleep(SETTLE_S)
    site.read_logs(account)


async def _one(kind: Kind, name: str, ground: Ground, account: Account) -> None:
    """Run one attack, and count its side effects in addition to its own findings."""
    site = ground.site
    site.running = (kind.name, f"{name} on {site.name}")
    account.attacks[kind.name] += 1
    attack: Attack = kind.attacks[name]
    begin = time.monotonic()
    try:
        async with site.within(ATTACK_S):
            await attack(ground)
    except Skipped as error:
        account.skip(f"{kind.name}/{name}", str(error))
    except TimeoutError:
        ground.find("hung", f"the attack was not over after {ATTACK_S:g} s")
    except AgentRLError as error:  # an honest call that prepares or checks the attack failed
        ground.find("hung", f"an honest call failed: {type(error).__name__}: {error}")
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        ground.find("uncaught", f"the attack itself failed: {error!r} in {where.filename}:{where.lineno}")
    account.say(f"{kind.name}/{name} on {site.name}: {time.monotonic() - begin:.1f} s")
    for part in site.ended_badly():
        ground.find("uncaught", f"the process {part} ended")
    site.read_logs(account)
