"""Gymnasium environments for the bridge's tests: unusual spaces and failing environments."""

import io
import time

import gymnasium
import numpy as np
from gymnasium import spaces


class Echo(gymnasium.Env):
    """Returns the action as the observation.

    ## Action Space
    Whatever ``action_space`` says.
    """

    def __init__(self, space):
        self.action_space = space
        self.observation_space = spaces.Box(-1, 1, (2,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return {"draw": float(self.np_random.random())}, {}

    def step(self, action):
        return action, 0.0, False, False, {}


class Answering(Echo):
    """Returns ``answer`` from every step."""

    answer = None

    def __init__(self):
        super().__init__(spaces.Discrete(2))

    def step(self, action):
        return self.answer


class Faulty(Echo):
    """Raises, blocks or rewards NaN, depending on the action. Seed 13 fails in ``reset``."""

    def __init__(self):
        super().__init__(spaces.Discrete(4))

    def reset(self, *, seed=None, options=None):
        if seed == 13:
            raise RuntimeError("an unlucky number")
        return super().reset(seed=seed)

    def step(self, action):
        if action == 1:
            raise RuntimeError("the engine broke")
        if action == 2:
            time.sleep(3.0)
        return 0, float("nan") if action == 3 else 1.0, False, False, {}


class Drifting(Echo):
    """Returns observations that do not depend on the seed."""

    def __init__(self):
        super().__init__(spaces.Discrete(2))

    def step(self, action):
        return time.perf_counter_ns(), 0.0, False, False, {}


class Printed(Echo):
    """Renders to a stream, which Gymnasium permits instead of a string. Seed 13 renders nothing."""

    metadata = {"render_modes": ["ansi"]}  # noqa: RUF012

    def __init__(self, render_mode=None):
        super().__init__(spaces.Discrete(2))
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        self.seed = seed
        return super().reset(seed=seed)

    def render(self):
        return None if self.seed == 13 else io.StringIO("the board")


SPACES = {
    "Numbers": spaces.MultiDiscrete([2, 3], start=[0, 1]),
    "Switches": spaces.MultiBinary(3),
    "Point": spaces.Box(np.array([-1, 0], np.float32), np.array([1, 5], np.float32)),
    "Level": spaces.Box(0.0, 1.0, ()),
    "Free": spaces.Box(-np.inf, np.inf, (2, 2)),
    "Word": spaces.Text(5, min_length=1, charset="abc"),
    "Form": spaces.Dict({"kind": spaces.Discrete(3, start=1), "where": spaces.Box(0, 9, (2,), np.int64)}),
    "Odd": spaces.Dict({"a b": spaces.Discrete(2), "class": spaces.Text(2)}),
    "Pair": spaces.Tuple([spaces.Discrete(2), spaces.Sequence(spaces.Discrete(3))]),
    "Numbered": spaces.Dict({0: spaces.Discrete(2)}),
    "Graph": spaces.Graph(spaces.Box(0, 1, (1,)), None),
    "Huge": spaces.Box(0, 1, (1000,)),
}
for name, space in SPACES.items():
    gymnasium.register(f"{name}-v0", Echo, kwargs={"space": space})
gymnasium.register("Answering-v0", Answering)
gymnasium.register("Faulty-v0", Faulty)
gymnasium.register("Drifting-v0", Drifting)
gymnasium.register("Printed-v0", Printed)
gymnasium.register("Unseeded-v0", Drifting, nondeterministic=True)


def cell(task, observation, info):
    return f"cell {observation} after {len(task._played)} steps"
