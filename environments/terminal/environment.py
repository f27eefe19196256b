"""Terminal: answer a question about files, or change them, with a real shell in a sandbox.

Level 1 asks about a folder of text files. Level 2 aggregates over a table. Level 3 asks for a change, which
is checked by the state of the files.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import product

from agentrl_env import Done, Environment, Message, ToolCall, tool
from agentrl_env.sandbox import open_sandbox

TREES = ("birch", "cedar", "larch", "maple", "spruce", "willow", "rowan", "alder")
BIRDS = ("heron", "raven", "robin", "swift", "finch", "plover", "curlew", "egret")
PLACES = ("delta", "fjord", "grove", "inlet", "jetty", "meadow", "vale", "harbour")
WORDS = (*TREES, *BIRDS, *PLACES)
FOLDERS = ("notes", "letters", "drafts", "reports", "minutes", "plans")
FILES = ("one.txt", "two.txt", "three.txt", "four.txt", "five.txt")
COLUMNS = ("price", "amount", "weight")
NUM_SAMPLES = {"train": 10_000, "test": 1_000}

ASKS = {
    1: {
        "find": (
            "Which file in the folder {folder} contains the word {word}?",
            "grep -l {word} {folder}/*.txt | xargs -n 1 basename",
        ),
        "count": (
            "How many lines in the folder {folder} contain the word {word}?",
            "cat {folder}/*.txt | grep -c {word}",
        ),
    },
    2: {
        "sum": (
            "What is the sum of {column} over the rows of orders.csv whose name is {word}?",
            "awk -F, '$1 == \"{word}\" {{ sum += ${number} }} END {{ print sum + 0 }}' orders.csv",
        ),
        "most": (
            "Which name has the highest total {column} in orders.csv, {word} left out?",
            "tail -n +2 orders.csv | grep -v '^{word},' | awk -F, '{{ sum[$1] += ${number} }} "
            "END {{ for (name in sum) print sum[name], name }}' | sort -rn | head -n 1 | cut -d' ' -f2",
        ),
    },
    3: {
        "move": (
            "Move every file of the folder {folder} that contains the word {word} to the folder done. "
            "Leave everything else as it is, then answer done.",
            "mkdir -p done; for f in $(grep -l {word} {folder}/*.txt); do mv $f done/; done",
        ),
        "replace": (
            "In every file of the folder {folder}, replace the word {word} by the word moss. "
            "Leave everything else as it is, then answer done.",
            "sed -i 's/{word}/moss/g' {folder}/*.txt",
        ),
    },
}
"""Level -> ask -> the request, and a command that fulfils it."""


@lru_cache
def _problems(level: int, split: str) -> list[dict[str, object]]:
    """List the combinations of one split; both splits use the same words."""
    third = ("column", COLUMNS) if level == 2 else ("folder", FOLDERS)
    fields = {"ask": tuple(ASKS[level]), "word": WORDS, third[0]: third[1]}
    problems = [
        {"level": level, **{name: word for name, (_, word) in zip(fields, choice, strict=True)}}
        for choice in product(*(enumerate(words) for words in fields.values()))
        if (sum(i for i, _ in choice) % 4 == 0) == (split == "test")
    ]
    return [problems[i % len(problems)] for i in range(NUM_SAMPLES[split])]


class Terminal(Environment):
    """Answer a question about files, or put them in order, with a shell on a small Linux machine."""

    splits = ("train", "test", "train-2", "test-2", "train-3", "test-3")
    max_turns = 8
    box = None

    @classmethod
    def samples(cls, split):
        """Return the problems of "train" or "test" (level 1), or of "train-2", "test-3" and so on."""
        name, _, level = split.partition("-")
        return _problems(int(level or 1), name)

    def reset(self, sample, rng):
        self.data = sample.data
        self.ran = set()
        words = {**self.data, "number": COLUMNS.index(self.data.get("column", COLUMNS[0])) + 2}
        request, gold = ASKS[self.data["level"]][self.data["ask"]]
        self.gold = gold.format(**words)
        self.files = self._table(rng) if self.data["level"] == 2 else self._texts(rng)
        self._solve()
        self.box = self._open(self.files)
        return request.format(**words)

    @tool
    def shell(self, command: str):
        """Run a command in a new shell in the home folder; its output is the answer. Files stay.

        Args:
            command: What to run, such as "ls" or "grep -c apple notes/*.txt".
        """
        done = self.box.run(command)
        self.ran.add(command)
        return done.text if self.box.alive else Done(f"{done.text}\nThe machine has died of it.")

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
        """Generate the files; the word is in some of the folder asked about, for "find" in exactly one."""
        files = {}
        for folder, name in product(FOLDERS, FILES):
            lines = [" ".join(rng.choice(WORDS, size=4)) for _ in range(int(rng.integers(3, 9)))]
            files[f"{folder}/{name}"] = "\n".join(lines) + "\n"
        word, home = self.data["word"], f"{self.data['folder']}/{rng.choice(FILES)}"
        other = next(w for w in WORDS if w != word)
        if self.data["ask"] == "find":
            files = {path: text.replace(word, other) for path, text in files.items()}
        files[home] += f"{word} {other}\n"
        return files

    def _table(self, rng):
        rows = [[str(rng.choice(WORDS)), *map(str, rng.integers(1, 100, size=3))] for _ in range(60)]
        return {"orders.csv": "\n".join(",".join(row) for row in [["name", *COLUMNS], *rows]) + "\n"}

    def _solve(self):
        """Compute the right answer without the sandbox."""
        word, ask = self.data["word"], self.data["ask"]
        self.right = None
        if ask in ("find", "count"):
            here = {
                p.split("/")[1]: t for p, t in self.files.items() if p.startswith(self.data["folder"] + "/")
            }
            lines = sum(word in line for text in here.values() for line in text.splitlines())
            self.right = str(lines) if ask == "count" else next(n for n, t in here.items() if word in t)
        elif ask in ("sum", "most"):
            totals = Counter()
            for row in self.files["orders.csv"].splitlines()[1:]:
                name, *numbers = row.split(",")
                totals[name] += int(numbers[COLUMNS.index(self.data["column"])])
            if ask == "sum":
                self.right = str(totals[word])
            else:
                del totals[word]
                # Among equal totals the last name, as with sort -rn.
                self.right = max(totals, key=lambda name: (totals[name], name))

    def _in_order(self):
        """Return whether the files are as requested; reads them without the shell, which could be forged."""
        word, folder = self.data["word"], self.data["folder"] + "/"
        wanted = dict(self.files)
        for path, text in self.files.items():
            if path.startswith(folder) and word in text:
                if self.data["ask"] == "replace":
                    wanted[path] = text.replace(word, "moss")
                else:
                    wanted[path] = None
                    wanted[path.replace(folder, "done/")] = text
        return all(self._content(path) == text for path, text in wanted.items())

    def _content(self, path):
        try:
            return self.box.read(path, 10_000).decode("utf-8", "replace")
        except OSError:
            return None
