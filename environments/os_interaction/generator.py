"""Generated problems: files, and questions about them or changes to make, with gold commands.

Level and number determine a problem. Its answer, or the right output of its check, is computed here in Python
and never by the gold command, which proves that the problem can be solved.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable

import numpy as np

from .problems import Problem

FIRST = {"train": 0, "validation": 1_000_000, "test": 2_000_000}
"""Number of the first problem of a split."""
COUNT = {"train": 10_000, "validation": 1_000, "test": 1_000}
WORDS = (
    "amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "islet", "jolly", "koala",
    "lemon", "maple", "night", "olive", "pearl", "quartz", "river", "stone", "tulip", "umber", "viola",
    "wheat", "yeast",
)  # fmt: skip
FOLDERS = ("notes", "letters", "drafts", "reports", "music", "photos")
ENDINGS = ("txt", "csv", "log", "cfg", "md")
PEOPLE = ("ann", "bob", "cleo", "dan", "eve", "finn", "gus", "hana")
Rng = np.random.Generator


def pick(rng: Rng, words: tuple[str, ...]) -> str:
    """Return one of the words."""
    return words[int(rng.integers(len(words)))]


def some(rng: Rng, words: tuple[str, ...], count: int) -> list[str]:
    """Return different words."""
    return [words[int(i)] for i in rng.permutation(len(words))[:count]]


def text(rng: Rng, lines: int, words: tuple[str, ...] = WORDS) -> str:
    """Return lines of four words."""
    return "".join(" ".join(pick(rng, words) for _ in range(4)) + "\n" for _ in range(lines))


def count_files(rng: Rng) -> Problem:
    """Count the files of a folder with an extension."""
    folder, ending = pick(rng, FOLDERS), pick(rng, ENDINGS)
    subfolders = ["", *(f"{word}/" for word in some(rng, WORDS, 2))]
    files = {
        f"{folder}/{pick(rng, tuple(subfolders))}{word}.{pick(rng, (ending, *ENDINGS))}": f"{word}\n"
        for word in some(rng, WORDS, int(rng.integers(6, 14)))
    }
    files[f"{folder}/{subfolders[1]}last.{ending}"] = "last\n"
    return Problem(
        question=f"How many files in {folder}, subfolders included, have a name that ends in .{ending}?",
        files=files,
        gold=("bash", f"find {folder} -type f -name '*.{ending}' | wc -l"),
        answer=str(sum(path.endswith(f".{ending}") for path in files)),
    )


def count_lines(rng: Rng) -> Problem:
    """Count the lines of a file with a word."""
    name, word = pick(rng, WORDS), pick(rng, WORDS)
    body = text(rng, int(rng.integers(12, 40)), (word, *some(rng, WORDS, 5)))
    return Problem(
        question=f"How many lines of {name}.txt contain the word {word}?",
        files={f"{name}.txt": body},
        gold=("bash", f"grep -c {word} {name}.txt"),
        answer=str(sum(word in line for line in body.splitlines())),
    )


def find_word(rng: Rng) -> Problem:
    """Find the file with a word."""
    folder, word = pick(rng, FOLDERS), pick(rng, WORDS)
    others = tuple(w for w in WORDS if w != word)
    names = some(rng, WORDS, 6)
    files = {f"{folder}/{name}.txt": text(rng, int(rng.integers(3, 8)), others) for name in names}
    home = pick(rng, tuple(names))
    files[f"{folder}/{home}.txt"] += f"{pick(rng, others)} {word}\n"
    return Problem(
        question=f"Which file in {folder} contains the word {word}?",
        files=files,
        gold=("bash", f"grep -l {word} {folder}/* | xargs -n 1 basename"),
        answer=f"{home}.txt",
    )


def largest(rng: Rng) -> Problem:
    """Find the largest file."""
    folder, names = pick(rng, FOLDERS), some(rng, WORDS, 6)
    sizes = [int(size) for size in rng.permutation(np.arange(20, 400, 17))[: len(names)]]
    return Problem(
        question=f"Which file in {folder} is the largest?",
        files={f"{folder}/{name}.txt": "x" * size for name, size in zip(names, sizes, strict=True)},
        gold=("bash", f"ls -S {folder} | head -n 1"),
        answer=f"{names[sizes.index(max(sizes))]}.txt",
    )


def _requests(rng: Rng) -> list[tuple[str, str, str, int]]:
    addresses = tuple(f"10.0.0.{int(n)}" for n in rng.permutation(250)[:6] + 1)
    return [
        (pick(rng, addresses), f"/{pick(rng, WORDS)}", pick(rng, ("200", "301", "404", "500")),
         int(rng.integers(100, 5000)))
        for _ in range(int(rng.integers(40, 90)))
    ]  # fmt: skip


def _access_log(requests: list[tuple[str, str, str, int]]) -> dict[str, str]:
    return {"access.log": "".join(f"{a} GET {path} {status} {size}\n" for a, path, status, size in requests)}


def log_sum(rng: Rng) -> Problem:
    """Sum a column of a log under a condition."""
    requests, status = _requests(rng), pick(rng, ("200", "301", "404", "500"))
    return Problem(
        question="Each line of access.log has an address, a method, a path, a status and a number of bytes. "
        f"How many bytes do all the requests with status {status} have together?",
        files=_access_log(requests),
        gold=("bash", f"awk '$4 == {status} {{ s += $5 }} END {{ print s + 0 }}' access.log"),
        answer=str(sum(size for _, _, found, size in requests if found == status)),
    )


def log_top(rng: Rng) -> Problem:
    """Find the most frequent address of a log."""
    requests = _requests(rng)
    favourite = requests[0][0]
    requests += [(favourite, f"/{pick(rng, WORDS)}", "200", 100)] * int(rng.integers(0, 9))
    counts = Counter(address for address, *_ in requests).most_common(2)
    while len(counts) > 1 and counts[0][1] == counts[1][1]:
        requests.append((favourite, f"/{pick(rng, WORDS)}", "200", 100))
        counts = Counter(address for address, *_ in requests).most_common(2)
    shuffled = [requests[int(i)] for i in rng.permutation(len(requests))]
    return Problem(
        question="Each line of access.log starts with an address. Which address has the most lines?",
        files=_access_log(shuffled),
        gold=(
            "bash",
            "cut -d' ' -f1 access.log | sort | uniq -c | sort -rn | head -n 1 | awk '{ print $2 }'",
        ),
        answer=counts[0][0],
    )


def executables(rng: Rng) -> Problem:
    """Count the files with a permission."""
    folder, names = pick(rng, FOLDERS), some(rng, WORDS, int(rng.integers(8, 20)))
    chosen = names[: int(rng.integers(2, 7))]
    paths = " ".join(f"{folder}/{name}" for name in chosen)
    return Problem(
        question=f"How many files in {folder} can their owner execute?",
        files={f"{folder}/{name}": f"{name}\n" for name in sorted(names)},
        init=[("bash", f"chmod 644 {folder}/*; chmod {pick(rng, ('755', '700', '744'))} {paths}")],
        gold=("bash", f"find {folder} -type f -perm -u=x | wc -l"),
        answer=str(len(chosen)),
    )


def writer(rng: Rng) -> Problem:
    """Find the file that a running program writes to."""
    folder, names = pick(rng, FOLDERS), some(rng, WORDS, 5)
    name = names[int(rng.integers(5))]
    return Problem(
        question=f"A running program keeps writing to one of the files in {folder}. Which one?",
        files={f"{folder}/{other}.log": "begun\n" for other in names},
        start=f"(while sleep 0.2; do echo on >> {folder}/{name}.log; done) > /dev/null 2>&1 &",
        gold=("bash", f"a=$(md5sum {folder}/*); sleep 1; diff <(echo \"$a\") <(md5sum {folder}/*) | "
              "grep '^>' | awk '{ print $3 }' | xargs -n 1 basename"),
        answer=f"{name}.log",
    )  # fmt: skip


def distinct(rng: Rng) -> Problem:
    """Count the different values of a column under a condition."""
    day = int(rng.integers(1, 4))
    rows = [
        (int(rng.integers(1, 4)), pick(rng, PEOPLE), pick(rng, ("login", "logout", "error")))
        for _ in range(int(rng.integers(25, 60)))
    ]
    rows += [(day, pick(rng, PEOPLE), "login")] * 2  # so that the number of lines is wrong
    return Problem(
        question=f"The columns of events.csv are day, user and event. How many different users logged in "
        f"on day {day}?",
        files={"events.csv": "day,user,event\n" + "".join(f"{d},{u},{e}\n" for d, u, e in rows)},
        gold=("bash", f"grep '^{day},.*,login$' events.csv | cut -d, -f2 | sort -u | wc -l"),
        answer=str(len({user for d, user, event in rows if (d, event) == (day, "login")})),
    )


def links(rng: Rng) -> Problem:
    """Follow a chain of symbolic links."""
    *names, link = some(rng, WORDS, 7)
    hops = names[: int(rng.integers(2, 5))]
    chain = [f"{name}.link" for name in hops]
    target = names[-1]
    commands = [f"ln -s {after} {before}" for before, after in zip([link, *chain], [*chain, f"{target}.txt"],
                                                                  strict=True)]  # fmt: skip
    return Problem(
        question=f"{link} is a symbolic link. Which file does it lead to in the end?",
        files={f"{name}.txt": f"{name}\n" for name in names},
        init=[("bash", "; ".join(commands))],
        gold=("bash", f"basename $(readlink -f {link})"),
        answer=f"{target}.txt",
    )


LISTING = (
    "find {folders} -type f 2>/dev/null | LC_ALL=C sort | while read -r f; do "
    'echo "$f $(md5sum < "$f" | cut -c1-32)"; done'
)


def _listing(files: dict[str, str], *folders: str) -> tuple[str, str]:
    """Return a command that lists the files of folders with their hashes, and its output for these files."""
    lines = [
        f"{path} {hashlib.md5(content.encode(), usedforsecurity=False).hexdigest()}\n"
        for path, content in sorted(files.items())
        if path.split("/")[0] in folders or path in folders
    ]
    return LISTING.format(folders=" ".join(folders)), "".join(lines)


def move(rng: Rng) -> Problem:
    """Move files by their content."""
    folder, target = some(rng, FOLDERS, 2)
    word = pick(rng, WORDS)
    few = (word, *some(rng, WORDS, 12))
    files = {f"{folder}/{name}.txt": text(rng, 3, few) for name in some(rng, WORDS, 7)}
    files[f"{folder}/{word}.md"] = f"{word}\n"
    wanted = {
        path.replace(folder, target, 1) if word in content else path: content
        for path, content in files.items()
    }
    return Problem(
        question=f"Move every file in {folder} that contains the word {word} to a new folder called "
        f"{target}.",
        files=files,
        gold=("bash", f"mkdir {target}; mv $(grep -l {word} {folder}/*) {target}/"),
        outputs=[_listing(wanted, folder, target)],
    )


def rename(rng: Rng) -> Problem:
    """Change the extension of files."""
    folder = pick(rng, FOLDERS)
    old, new, other = some(rng, ENDINGS, 3)
    files = {
        f"{folder}/{name}.{pick(rng, (old, old, other))}": f"{name}\n"
        for name in some(rng, WORDS, int(rng.integers(6, 12)))
    }
    files[f"{folder}/sub/{pick(rng, WORDS)}.{old}"] = "below\n"
    wanted = {
        f"{path.removesuffix(old)}{new}" if path.endswith(f".{old}") else path: content
        for path, content in files.items()
    }
    return Problem(
        question=f"Change the extension of every .{old} file in {folder}, subfolders included, to .{new}.",
        files=files,
        gold=("bash", f"find {folder} -name '*.{old}' | while read f; do mv $f ${{f%.{old}}}.{new}; done"),
        outputs=[_listing(wanted, folder)],
    )


def modes(rng: Rng) -> Problem:
    """Set the permissions of files."""
    folder, ending = pick(rng, FOLDERS), pick(rng, ENDINGS)
    names = sorted(f"{n}.{pick(rng, (ending, 'sh'))}" for n in some(rng, WORDS, int(rng.integers(6, 12))))
    shell, other = pick(rng, ("750", "700", "555")), pick(rng, ("640", "600", "444"))
    wanted = "".join(f"{folder}/{name} {shell if name.endswith('.sh') else other}\n" for name in names)
    return Problem(
        question=f"Set the permissions of every .sh file in {folder} to {shell}, and of every other file "
        f"there to {other}.",
        files={f"{folder}/{name}": f"{name}\n" for name in names},
        gold=("bash", f"chmod {other} {folder}/*; chmod {shell} {folder}/*.sh 2>/dev/null; true"),
        outputs=[(f"find {folder} -type f -printf '%p %m\\n' | LC_ALL=C sort", wanted)],
    )


def select_rows(rng: Rng) -> Problem:
    """Write a file of sorted rows."""
    bound = int(rng.integers(30, 70))
    numbers = [int(n) for n in rng.permutation(100)[:24]]
    rows = [(pick(rng, WORDS), number) for number in numbers]
    wanted = sorted((row for row in rows if row[1] > bound), key=lambda row: row[1])
    return Problem(
        question=f"Write the rows of prices.csv whose second column is above {bound} to high.csv, sorted by "
        "the second column in ascending order. The file has no header line.",
        files={"prices.csv": "".join(f"{name},{n}\n" for name, n in rows)},
        gold=("bash", f"awk -F, '$2 > {bound}' prices.csv | sort -t, -k2 -n > high.csv"),
        outputs=[("cat high.csv", "".join(f"{name},{n}\n" for name, n in wanted))],
    )


def setting(rng: Rng) -> Problem:
    """Change a value in several files."""
    folder, (key, *others) = pick(rng, FOLDERS), some(rng, WORDS, 5)
    value = int(rng.integers(100, 1000))
    files, wanted = {}, {}
    for name in some(rng, WORDS, 4):
        old = [(word, int(rng.integers(1, 100))) for word in [*others, key, f"{key}s"]]
        rng.shuffle(old)
        files[f"{folder}/{name}.cfg"] = "".join(f"{word}={number}\n" for word, number in old)
        changed = [(word, value if word == key else number) for word, number in old]
        wanted[f"{folder}/{name}.cfg"] = "".join(f"{word}={number}\n" for word, number in changed)
    return Problem(
        question=f"Set {key} to {value} in every file in {folder}. Each line there is a name, = and a "
        "number.",
        files=files,
        gold=("bash", f"sed -i 's/^{key}=.*/{key}={value}/' {folder}/*.cfg"),
        outputs=[_listing(wanted, folder)],
    )


def duplicates(rng: Rng) -> Problem:
    """Delete files with equal content."""
    folder = pick(rng, FOLDERS)
    contents = [text(rng, 2) for _ in range(4)]
    files = {f"{folder}/{name}.txt": contents[int(rng.integers(4))] for name in sorted(some(rng, WORDS, 9))}
    wanted, seen = {}, set()
    for path, content in files.items():
        if content not in seen:
            wanted[path] = content
        seen.add(content)
    return Problem(
        question=f"Some files in {folder} have the same content. Of each set of files with the same content, "
        "keep the one whose name comes first in the alphabet, and delete the others.",
        files=files,
        gold=(
            "bash",
            f"md5sum {folder}/* | LC_ALL=C sort -k2 | awk 'seen[$1]++ {{ print $2 }}' | xargs rm -f",
        ),
        outputs=[_listing(wanted, folder)],
    )


def program(rng: Rng) -> Problem:
    """Write a program, which is run with hidden arguments."""
    name, word = some(rng, WORDS, 2)
    start, factor = int(rng.integers(2, 50)), int(rng.integers(2, 9))
    cases = [[int(n) for n in rng.integers(1, 100, size=int(size))] for size in rng.integers(1, 6, size=8)]
    return Problem(
        question=f"Write an executable bash script {name}.sh that prints {word}, a space, and "
        f"{factor} times the sum of its arguments plus {start}. For example, with the arguments 1 and 2 it "
        f"prints {word} {factor * 3 + start}.",
        gold=("bash", f"printf '%s\\n' '#!/bin/bash' 's=0; for n in \"$@\"; do s=$((s + n)); done' "
              f"'echo {word} $((s * {factor} + {start}))' > {name}.sh; chmod +x {name}.sh"),
        outputs=[
            (f"./{name}.sh {' '.join(map(str, case))}", f"{word} {factor * sum(case) + start}\n")
            for case in cases
        ],
    )  # fmt: skip


FAMILIES: dict[int, tuple[Callable[[Rng], Problem], ...]] = {
    1: (count_files, count_lines, find_word, largest),
    2: (log_sum, log_top, executables, writer, distinct, links),
    3: (move, rename, modes, select_rows, setting, duplicates, program),
}


def numbers(split: str) -> range:
    """Return the numbers of the problems of a split."""
    return range(FIRST[split], FIRST[split] + COUNT[split])


def generate(level: int, number: int) -> Problem:
    """Return the problem of a level and a number."""
    rng = np.random.default_rng([level, number])
    families = FAMILIES[level]
    while True:
        problem = families[int(rng.integers(len(families)))](rng)
        if all(wanted not in ("", _before(problem, code)) for code, wanted in problem.outputs or []):
            return problem


def _before(problem: Problem, code: str) -> str | None:
    """Return the output of a check that lists files before any change, or None for other checks."""
    for folder in {path.split("/")[0] for path in problem.files}:
        command, output = _listing(problem.files, folder)
        if command == code:
            return output
    return None
