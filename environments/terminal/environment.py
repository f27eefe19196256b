"""Terminal: answer a question about files, or change them, with a real shell in a sandbox.

Level 1 asks about a folder of text files. Level 2 aggregates over a table. Level 3 asks for a change, which
is graded by the state of the files.
"""

from __future__ import annotations

from itertools import product

from agentrl_env import Done, Environment, Message, ToolCall, tool
from agentrl_env.sandbox import open_sandbox

from .forms import COLUMNS, FILES, FOLDERS, WORDS, careless, fill, requests, solve

NUM_SAMPLES = {"train": 10_000, "test": 1_000}


class Terminal(Environment):
    """Answer a question about files, or put them in order, with a shell on a small Linux machine."""

    splits = ("train", "test", "train-2", "test-2", "train-3", "test-3")
    max_turns = 8
    box = None

    @classmethod
    def samples(cls, split):
        """Return the problems of "train" or "test" (level 1), or of "train-2", "test-3" and so on."""
        name, _, level = split.partition("-")
        return requests(int(level or 1), name, NUM_SAMPLES[name])

    def reset(self, sample, rng):
        self.data = sample.data
        self.ran = set()
        if (machine := self.data.get("machine", 1)) > 1:
            rng = rng.spawn(machine - 1)[-1]  # with equal seeds, another machine has other files
        request, self.gold = fill(self.data)
        draw = self._table if self.data["level"] == 2 else self._texts
        self.files = draw(rng)
        while (right := solve(self.data, self.files)) == careless(self.data, self.files):
            self.files = draw(rng)
        self.right = right
        self.box = self._open(self.files)
        return request

    @tool
    def shell(self, command: str):
        """Run a command in a new shell in the home folder and see its output. Files are kept.

        Args:
            command: What to run, such as "ls" or "grep -c apple notes/*.txt".
        """
        done = self.box.run(command)
        self.ran.add(command)
        return done.text if self.box.alive else Done(f"{done.text}\nThe command has stopped the machine.")

    @tool
    def answer(self, text: str):
        """Give the answer. This ends the task, so be sure.

        Args:
            text: The answer: a file's name, a number, a word, or "done".
        """
        given = text.strip().strip("'\".").lower()
        right = given == self.right if self.data["level"] < 3 else self._in_order()
        return Done("Well done." if right else "That is not right.", reward=float(right))

    def close(self):
        if self.box:
            self.box.close()

    def snapshot(self):
        state = {name: value for name, value in vars(self).items() if name != "box"}
        return {**state, "machine": self.box.snapshot()}

    def restore(self, state):
        machine = state.pop("machine")
        vars(self).update(state)
        self.box = self._open({})
        self.box.restore(machine)

    def expert(self, rng):
        if self.gold not in self.ran:
            return Message.assistant("Let me see.", ToolCall.of("shell", command=self.gold))
        text = self.right if self.data["level"] < 3 else "done"
        return Message.assistant(f"It is {text}.", ToolCall.of("answer", text=text))

    def _open(self, files):
        return open_sandbox(memory="96m", disk="16m", pids=32, timeout=10.0, max_output=4000, files=files)

    def _texts(self, rng):
        """Generate the files. The words of the request are in at least one file of its folder.

        If the request asks for that file, no other file has the word, or both of the words.
        """
        files = {}
        for folder, name in product(FOLDERS, FILES):
            lines = [" ".join(rng.choice(WORDS, size=4)) for _ in range(int(rng.integers(3, 9)))]
            files[f"{folder}/{name}"] = "\n".join(lines) + "\n"
        word, home = self.data.get("word"), f"{self.data['folder']}/{rng.choice(FILES)}"
        if word is None:
            return files
        second = self.data.get("second", "")
        other = next(w for w in WORDS if w not in (word, second))
        if self.data["ask"] in ("find", "find_both"):
            files = {p: t.replace(word, other) if second in t else t for p, t in files.items()}
        files[home] = f"{word} {second or other}\n{files[home]}{other} {word}\n"
        if self.data["ask"] == "sort":  # never sorted already
            files[home] = f"{WORDS[-2]} {other}\n{files[home]}"
        return files

    def _table(self, rng):
        rows = [[str(rng.choice(WORDS)), *map(str, rng.integers(1, 100, size=3))] for _ in range(60)]
        return {"orders.csv": "\n".join(",".join(row) for row in [["name", *COLUMNS], *rows]) + "\n"}

    def _in_order(self):
        """Return True if the files are as requested. Reads them without the shell, which could be forged."""
        return all(self._content(path) == (text and text.rstrip("\n")) for path, text in self.right.items())

    def _content(self, path):
        try:
            return self.box.read(path, 10_000).decode("utf-8", "replace").rstrip("\n")
        except OSError:
            return None
