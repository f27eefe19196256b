"""The engine: one process with TextWorld imported, and a copy of it for each session.

Run as a script. Its argument is the number of seconds of processor time that a request can take, and its
standard input is a Unix socket. Each message on the socket carries one end of a socket pair. The process
forks, and the child plays one game over that socket, with a JSON object on each line. A crash or a hang of
the interpreter of games, which is written in C, affects only its child.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import sys
import tempfile
import warnings
from pathlib import Path

try:
    import textworld
    from generator import knowledge, make
    from textworld.generator import compile_game
    from textworld.generator.data import KnowledgeBase
except ImportError as error:
    missing: ImportError | None = error
else:
    missing = None

SECONDS = 240
"""Wall time limit of one request in seconds. The kernel then ends the child."""
MEMORY = 2 << 30
BANNER = re.compile(r"\A.*\$\$[^\n]*\n", re.DOTALL)
STATUS_LINE = re.compile(r"\n>\s.*\Z", re.DOTALL)
"""The prompt after a text, and the status line at the top of a screen."""
THE_END = re.compile(r"(\*\*\* [^*]+ \*\*\*).*\Z", re.DOTALL)
"""The end of a game, after which it asks whether to restart."""


class Game:
    """One game that is being played."""

    def generate(self, folder: str, split: str, level: int, number: int) -> dict:
        """Start a generated game."""
        tempfile.tempdir = folder
        return self._compile(make(split, level, number))

    def load(self, folder: str, path: str) -> dict:
        """Start the game of a TextWorld JSON file, with the story file next to it, or compile one."""
        tempfile.tempdir = folder
        try:
            game = textworld.Game.load(path)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no game of TextWorld 1.7: {error!r}") from error
        story = Path(path).with_suffix(".z8")
        return self._open(str(story)) if story.is_file() else self._compile(game)

    def step(self, command: str) -> dict:
        """Do what an admissible command says."""
        if command not in self.state["admissible_commands"]:
            return self._seen(text="Nothing happens.")
        self.state, _, _ = self.env.step(command)
        return self._seen()

    def plan(self) -> list[str]:
        """Return commands that win from the current state, or no commands if the game knows none."""
        return list(self.state["policy_commands"])

    def _compile(self, game: textworld.Game) -> dict:
        with (
            tempfile.TemporaryDirectory() as build
        ):  # the files contain the answer, so they are deleted after this call
            options = textworld.GameOptions()
            options.path = os.path.join(build, "game.z8")
            return self._open(compile_game(game, options))

    def _open(self, path: str) -> dict:
        infos = textworld.EnvInfos(
            admissible_commands=True, policy_commands=True, won=True, lost=True, score=True, max_score=True
        )
        self.env = textworld.start(path, infos)
        self.env.seed(0)
        self.state = self.env.reset()
        return self._seen()

    def _seen(self, text: str | None = None) -> dict:
        if text is None:
            text = BANNER.sub("", self.state["feedback"])
            text = THE_END.sub(r"\1", STATUS_LINE.sub("", text)).strip()
        return {
            "text": text,
            "commands": self.state["admissible_commands"],
            "won": bool(self.state["won"]),
            "lost": bool(self.state["lost"]),
            "points": (self.state["score"] or 0) / max(self.state["max_score"] or 1, 1),
        }


def remember_rules() -> None:
    """Parse the rules of generated games once. Every game's file repeats them, and parsing takes a second."""
    own, parse = json.dumps(knowledge().serialize()), KnowledgeBase.deserialize
    KnowledgeBase.deserialize = lambda data: knowledge() if json.dumps(data) == own else parse(data)


def play(connection: socket.socket, cpu_seconds: float) -> None:
    """Answer the requests of one session until it closes its end."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    game = Game()
    with connection.makefile("rwb") as stream:
        for line in stream:
            # The default action of both signals ends the process, even while C code loops.
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
    warnings.simplefilter("ignore")  # Jericho warns at each start that it has no scores of generated games
    remember_rules()
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
