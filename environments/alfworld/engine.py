"""The engine: one process with TextWorld and ALFWorld imported, and a copy of it for each session.

Run as a script. Its argument is the number of seconds of processor time that a request can take, and its
standard input is a Unix socket. Each message on the socket carries one end of a socket pair. The process
forks, and the child plays one game over that socket, with a JSON object on each line. The child contains all
leaks, crashes and hangs of its game and of the planner.

TextWorld, Jericho and the planner are imported here and not by the task's server.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import sys
from copy import deepcopy
from functools import cache

try:
    import textworld
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    from generator import make_game
    from textworld.envs import PddlEnv
    from textworld.envs.pddl import logic, textgen
except ImportError as error:
    missing: ImportError | None = error
else:
    missing = None

SECONDS = 240
"""Wall time limit of one request in seconds. The kernel then ends the child."""
MEMORY = 2 << 30
TASK = re.compile(r'"rhs": "Your task is to: (?:[^"\\]|\\.)*"')
"""The rule of a game's grammar that describes its task."""
LONGEST_PLAN = 16
"""Maximum number of steps of the planner's solution of a generated game."""
ATTEMPTS = 40


class Game:
    """One game that is being played."""

    def __init__(self) -> None:
        infos = textworld.EnvInfos(won=True, admissible_commands=True)
        self.env = AlfredDemangler(PddlEnv(infos), shuffle=False)
        self.state = None

    def generate(self, split: str, level: int, seed: int) -> dict:
        """Start a generated game that the planner can solve."""
        for attempt in range(ATTEMPTS):
            self.data = make_game(split, level, seed * ATTEMPTS + attempt)
            self._start()
            self.solution = [] if self.state["won"] else self.plan()
            if 0 < len(self.solution) <= LONGEST_PLAN:
                return self._seen(plan=self.solution, task=self.data["traj"]["task_type"])
        raise RuntimeError(f"no solvable game in {ATTEMPTS} attempts")

    def load(self, path: str) -> dict:
        """Start the game of a file in ALFWorld's format."""
        with open(path, encoding="utf-8") as file:
            self.data = json.load(file)
        self._start()
        return self._seen(plan=self.plan())

    def step(self, command: str) -> dict:
        """Do what an admissible command says."""
        if command not in self.state["admissible_commands"]:
            return self._seen(text="Nothing happens.")
        self.state, _, _ = self.env.step(command)
        return self._seen()

    def plan(self) -> list[str]:
        """Return commands that win from the current state, without changing the state."""
        inner = self.env.unwrapped
        return inner._pddl_state.replan(inner._entity_infos)

    def save(self, folder: str) -> dict:
        """Write the game in the format of ALFWorld's download."""
        os.makedirs(folder, exist_ok=True)
        game = {name: value for name, value in self.data.items() if name != "traj"}
        for name, content in (
            ("traj_data.json", self.data["traj"]),
            ("game.tw-pddl", {**game, "solvable": True, "walkthrough": self.solution}),
        ):
            with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
                json.dump(content, file)
        return {}

    def _start(self) -> None:
        self.env.load(self.data)
        # reset() would translate the problem a second time, which takes most of the time.
        fresh, original = self.env.unwrapped._pddl_state, logic.PddlState
        logic.PddlState = lambda *arguments: fresh
        try:
            self.state = self.env.reset()
        finally:
            logic.PddlState = original

    def _seen(self, text: str | None = None, **more) -> dict:
        return {
            "text": self.state.feedback if text is None else text,
            "commands": list(self.state["admissible_commands"]),
            "won": bool(self.state["won"]),
            **more,
        }


def remember_parsed_texts() -> None:
    """Parse each text of the grammar once, because parsing takes most of the time of a start and of a step.

    The documents of two games differ only in the words of the task.
    """
    texts, documents = cache(textgen._parse_and_convert), cache(logic._parse_and_convert)

    def parse_document(document: str, rule_name: str) -> tuple[dict, textgen.ContextSensitiveGrammar]:
        actions, rules = documents(TASK.sub('"rhs": ""', document, count=1), rule_name=rule_name)
        grammar = textgen.ContextSensitiveGrammar()
        grammar.update(rules)
        if words := TASK.search(document):
            task = textgen.ContextSensitiveGrammar.parse(f'{{"task": [{{{words[0]}}}]}}')
            grammar._rules["task"] = task._rules["task"]
        return actions, grammar

    # Deriving a text changes its symbols.
    textgen._parse_and_convert = lambda text, rule_name, **_: deepcopy(texts(text, rule_name=rule_name))
    logic._parse_and_convert = parse_document
    game = make_game("train", 1, 0)
    logic.GameLogic(game["pddl_domain"], game["grammar"])


def play(connection: socket.socket, cpu_seconds: float) -> None:
    """Answer the requests of one session until it closes its end."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    game = Game()
    with connection.makefile("rwb") as stream:
        for line in stream:
            # The default action of both signals ends the process, even while the planner's C++ code loops.
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
            signal.alarm(SECONDS)
            name, *arguments = json.loads(line)
            try:
                answer = {"value": getattr(game, name)(*arguments)}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.alarm(0)
            stream.write(json.dumps(answer).encode() + b"\n")
            stream.flush()


def main() -> None:
    control = socket.socket(fileno=0)
    if missing is not None:
        control.sendall(json.dumps({"error": str(missing)}).encode() + b"\n")
        return
    remember_parsed_texts()
    control.sendall(b"{}\n")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        if os.fork():
            for descriptor in descriptors:
                os.close(descriptor)
            continue
        control.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            play(socket.socket(fileno=descriptors[0]), float(sys.argv[1]))
        except BaseException:
            os._exit(1)
        os._exit(0)


if __name__ == "__main__":
    main()
