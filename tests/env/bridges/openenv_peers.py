"""Real OpenEnv servers. ``python -m tests.env.bridges.openenv_peers NAME PORT`` serves one of them."""

import random
import sys
import time


def dice():
    """Return an application with dictionaries as actions that respects the seed."""
    from openenv.core.env_server import Action, Environment, Observation, State, create_app

    class Say(Action):
        number: int

    class Heard(Observation):
        text: str = ""

    class Dice(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **kwargs):
            self.right = random.Random(seed).randrange(1, 7)
            return Heard(text=f"A die was thrown for {sorted(kwargs)}: {self.right}.")

        def step(self, action, timeout_s=None, **kwargs):
            if action.number == 99:
                time.sleep(4)
            if action.number == 13:
                raise ValueError("unlucky")
            done = action.number == self.right
            return Heard(text=f"you said {action.number}", reward=float(done), done=done)

        @property
        def state(self):
            return State()

    return create_app(Dice, Say, Heard, env_name="dice", max_concurrent_envs=2)


def careless():
    """Return the same application, but ignore seeds."""
    app = dice()
    random.Random = lambda seed=None: random.SystemRandom()
    return app


def silent():
    """Return an application whose episodes end after one step, with the reward under a misspelt name."""
    from openenv.core.env_server import Action, Environment, Observation, State, create_app

    class Say(Action):
        number: int

    class Heard(Observation):
        rewrad: float = 0.0

    class Silent(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **kwargs):
            return Heard()

        def step(self, action, timeout_s=None, **kwargs):
            return Heard(rewrad=1.0, done=True)

        @property
        def state(self):
            return State()

    return create_app(Silent, Say, Heard, env_name="silent", max_concurrent_envs=2)


def tools():
    """Return an application with tool calls as actions."""
    from fastmcp import FastMCP
    from openenv.core.env_server import State, create_app
    from openenv.core.env_server.mcp_environment import MCPEnvironment
    from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
    from openenv.core.env_server.types import Observation

    class Adder(MCPEnvironment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self):
            server = FastMCP("adder")

            @server.tool
            def add(a: int, b: int) -> int:
                """Add two numbers."""
                return a + b

            super().__init__(server)

        def reset(self, seed=None, episode_id=None, **kwargs):
            return Observation(metadata={"ready": True})

        def _step_impl(self, action, timeout_s=None, **kwargs):
            return Observation()

        @property
        def state(self):
            return State()

    return create_app(Adder, CallToolAction, CallToolObservation, env_name="adder", max_concurrent_envs=4)


if __name__ == "__main__":
    import uvicorn

    uvicorn.run(globals()[sys.argv[1]](), host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
