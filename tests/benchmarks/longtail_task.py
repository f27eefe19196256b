"""A shop with slow calls. Most take up to half a second, a few more than ten seconds.

Each call waits for a Pareto-distributed time, ``SHORTEST_S (1 - u) ** (-1 / SHAPE)``, at most ``LONGEST_S``.
The waits are drawn from the episode's seed, so they are equal in all runs. Waiting takes no processor time.
"""

from __future__ import annotations

import asyncio

from agentrl_env import tool
from environments.shop.environment import Shop

SHORTEST_S, SHAPE, LONGEST_S = 0.2, 1.1, 12.0


class LateShop(Shop):
    """Buy an article within the budget: search, view the sellers' offers, buy one."""

    name = "shop"

    def reset(self, sample, rng):
        (self.waits,) = rng.spawn(1)
        return super().reset(sample, rng)

    async def _wait(self):
        await asyncio.sleep(min(LONGEST_S, SHORTEST_S * (1.0 - self.waits.random()) ** (-1.0 / SHAPE)))

    @tool
    async def search(self, query: str):
        """Search the shop for an article; its offers can then be viewed and bought."""
        await self._wait()
        return super().search(query)

    @tool
    async def view(self, seller: str):
        """See a seller's offer; search first."""
        await self._wait()
        return super().view(seller)

    @tool
    async def buy(self, seller: str):
        """Buy a seller's offer. This ends the task, so be sure; search first."""
        await self._wait()
        return super().buy(seller)
