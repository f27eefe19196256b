"""The requests of every level, each with a command that fulfils it, and its result without a shell."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import combinations, permutations, product
from typing import NamedTuple

TREES = ("birch", "cedar", "larch", "maple", "spruce", "willow", "rowan", "alder")
BIRDS = ("heron", "raven", "robin", "swift", "finch", "plover", "curlew", "egret")
PLACES = ("delta", "fjord", "grove", "inlet", "jetty", "meadow", "vale", "harbour")
WORDS = (*TREES, *BIRDS, *PLACES)
STONES = ("moss", "clay", "sand", "flint", "slate", "chalk", "marble", "gravel")
"""Words that no file contains."""
FOLDERS = ("notes", "letters", "drafts", "reports", "minutes", "plans")
TARGETS = ("done", "archive", "sorted", "checked", "kept", "old")
FILES = ("one.txt", "two.txt", "three.txt", "four.txt", "five.txt")
COLUMNS = ("price", "quantity", "weight")
ORDINALS = ("first", "second", "third", "fourth")
MOST = 1_700
"""Maximum number of requests of one form."""
TEST_SHARE = 4
"""One in this many requests of each form is in the test split."""

Data = dict[str, object]
Files = dict[str, str | None]
"""Path -> content, or None if there is no file."""


class Form(NamedTuple):
    """A form of requests."""

    request: str
    command: str
    blanks: list[Data]
    solve: Callable[[dict[str, str], Data], object]
    """Returns the answer, or at level 3 the required files, from the files and the words."""
    careless: Callable[[dict[str, str], Data], object] | None = None
    """Returns the answer of somebody who overlooks a part of the request. It is wrong on every machine."""


def _each(**blanks) -> list[Data]:
    """List the combinations of values."""
    return [dict(zip(blanks, values, strict=True)) for values in product(*blanks.values())]


def _pairs(names: tuple[str, str], values, ordered: bool, **blanks) -> list[Data]:
    """List the combinations of values with two different elements of ``values``."""
    pairs = permutations(values, 2) if ordered else combinations(values, 2)
    return [dict(zip(names, pair, strict=True)) | rest for pair in pairs for rest in _each(**blanks)]


def _texts(files, data) -> dict[str, str]:
    """Return the files of the folder in question by their paths."""
    return {path: text for path, text in files.items() if path.startswith(f"{data['folder']}/")}


def _lines(files, data) -> list[str]:
    return [line for text in _texts(files, data).values() for line in text.splitlines()]


def _with_word(files, data) -> dict[str, str]:
    return {path: text for path, text in _texts(files, data).items() if data["word"] in text}


def _rows(files) -> list[dict[str, str | int]]:
    names, *rows = (row.split(",") for row in files["orders.csv"].splitlines())
    return [{names[0]: row[0]} | dict(zip(names[1:], map(int, row[1:]), strict=True)) for row in rows]


def _total(files, column, keep) -> int:
    return sum(row[column] for row in _rows(files) if keep(row))


def _count(files, data) -> int:
    return sum(data["word"] in line for line in _lines(files, data))


def _find_both(files, data):
    return next(
        path.split("/")[1] for path, text in _with_word(files, data).items() if data["second"] in text
    )


def _place(files, data):
    line = files[f"{data['folder']}/{data['file']}"].splitlines()[data["line"] - 1]
    return line.split()[ORDINALS.index(data["ordinal"])]


def _most(files, data, without=None):
    """Return the name with the highest total, or the last of several, as in ``sort -rn``."""
    totals = Counter()
    for row in _rows(files):
        if row["name"] != without:
            totals[row["name"]] += row[data["column"]]
    return max(totals, key=lambda name: (totals[name], name))


def _move(files, data, keep=False):
    wanted: Files = {}
    for path, text in _with_word(files, data).items():
        wanted[path.replace(f"{data['folder']}/", f"{data['target']}/")] = text
        wanted[path] = text if keep else None
    return wanted


def _rename(files, data):
    wanted: Files = {}
    for path, text in _with_word(files, data).items():
        wanted |= {path: None, f"{path.removesuffix('.txt')}.{data['ending']}": text}
    return wanted


def _edit(change) -> Callable[[dict[str, str], Data], Files]:
    """Return a solution that changes the lines of every file with the word."""

    def solve(files, data):
        return {
            path: "".join(f"{line}\n" for line in change(text.splitlines(), data))
            for path, text in _with_word(files, data).items()
        }

    return solve


LISTED = "$(grep -l {word} {folder}/*.txt)"
SKIP = "tail -n +2 orders.csv | "
CLOSE = ' Leave everything else as it is, then answer "done".'

FORMS: dict[int, dict[str, Form]] = {
    1: {
        "find": Form(
            "Which file in the folder {folder} contains the word {word}?",
            "grep -l {word} {folder}/*.txt | xargs -n 1 basename",
            _each(word=WORDS, folder=FOLDERS),
            lambda files, data: next(iter(_with_word(files, data))).split("/")[1],
        ),
        "find_both": Form(
            "Which file in the folder {folder} contains both the word {word} and the word {second}?",
            "grep -l {second} $(grep -l {word} {folder}/*.txt) | xargs -n 1 basename",
            _pairs(("word", "second"), WORDS, ordered=False, folder=FOLDERS),
            _find_both,
        ),
        "count": Form(
            "How many lines of the files in the folder {folder} contain the word {word}?",
            "cat {folder}/*.txt | grep -c {word}",
            _each(word=WORDS, folder=FOLDERS),
            _count,
        ),
        "count_either": Form(
            "How many lines of the files in the folder {folder} contain the word {word} or the word "
            "{second}?",
            "cat {folder}/*.txt | grep -c -e {word} -e {second}",
            _pairs(("word", "second"), WORDS, ordered=False, folder=FOLDERS),
            lambda files, data: sum(
                data["word"] in line or data["second"] in line for line in _lines(files, data)
            ),
            careless=_count,
        ),
        "occurrences": Form(
            "How often does the word {word} occur in the files in the folder {folder}?",
            "cat {folder}/*.txt | grep -o {word} | wc -l",
            _each(word=WORDS, folder=FOLDERS),
            lambda files, data: sum(line.count(data["word"]) for line in _lines(files, data)),
            careless=_count,
        ),
        "place": Form(
            "What is the {ordinal} word in line {line} of the file {file} in the folder {folder}?",
            "sed -n {line}p {folder}/{file} | cut -d' ' -f{place}",
            _each(ordinal=ORDINALS, line=(1, 2, 3), file=FILES, folder=FOLDERS),
            _place,
        ),
    },
    2: {
        "sum": Form(
            "What is the total {column} in the rows of orders.csv with the name {word} or {second}?",
            SKIP
            + 'awk -F, \'$1 == "{word}" || $1 == "{second}" {{ sum += ${number} }} END {{ print sum + 0 }}\'',
            _pairs(("word", "second"), WORDS, ordered=False, column=COLUMNS),
            lambda files, data: _total(
                files, data["column"], lambda row: row["name"] in (data["word"], data["second"])
            ),
        ),
        "most": Form(
            "Which name other than {word} has the highest total {column} in orders.csv?",
            SKIP + "grep -v '^{word},' | awk -F, '{{ sum[$1] += ${number} }} "
            "END {{ for (name in sum) print sum[name], name }}' | sort -rn | head -n 1 | cut -d' ' -f2",
            _each(word=WORDS, column=COLUMNS),
            lambda files, data: _most(files, data, without=data["word"]),
            careless=_most,
        ),
        "count": Form(
            "How many rows of orders.csv have a {column} above {low} and a {other} below {high}?",
            SKIP + "awk -F, '${number} > {low} && ${second_number} < {high}' | wc -l",
            _pairs(("column", "other"), COLUMNS, True, low=range(10, 61, 3), high=range(45, 96, 3)),
            lambda files, data: sum(
                row[data["column"]] > data["low"] and row[data["other"]] < data["high"]
                for row in _rows(files)
            ),
        ),
        "sum_above": Form(
            "What is the total {column} in the rows of orders.csv with a {other} above {bound}?",
            SKIP + "awk -F, '${second_number} > {bound} {{ sum += ${number} }} END {{ print sum + 0 }}'",
            _pairs(("column", "other"), COLUMNS, ordered=True, bound=range(10, 90)),
            lambda files, data: _total(files, data["column"], lambda row: row[data["other"]] > data["bound"]),
        ),
        "highest": Form(
            "What is the highest {column} in the rows of orders.csv with a {other} below {bound}? "
            "Answer 0 if there is no such row.",
            SKIP + "awk -F, '${second_number} < {bound} && ${number} > top {{ top = ${number} }} "
            "END {{ print top + 0 }}'",
            _pairs(("column", "other"), COLUMNS, ordered=True, bound=range(5, 90)),
            lambda files, data: max(
                (row[data["column"]] for row in _rows(files) if row[data["other"]] < data["bound"]), default=0
            ),
            careless=lambda files, data: max(row[data["column"]] for row in _rows(files)),
        ),
        "value": Form(
            "What is the sum of price times quantity over all rows of orders.csv with the name {word} or "
            "{second}?",
            SKIP
            + 'awk -F, \'$1 == "{word}" || $1 == "{second}" {{ sum += $2 * $3 }} END {{ print sum + 0 }}\'',
            _pairs(("word", "second"), WORDS, ordered=False),
            lambda files, data: sum(
                row["price"] * row["quantity"]
                for row in _rows(files)
                if row["name"] in (data["word"], data["second"])
            ),
        ),
        "names": Form(
            "How many different names have a row in orders.csv with a {column} above {bound}?",
            SKIP + "awk -F, '${number} > {bound} {{ print $1 }}' | sort -u | wc -l",
            _each(column=COLUMNS, bound=range(20, 95)),
            lambda files, data: len(
                {row["name"] for row in _rows(files) if row[data["column"]] > data["bound"]}
            ),
        ),
    },
    3: {
        "move": Form(
            "Move every file in the folder {folder} that contains the word {word} to the folder {target}."
            + CLOSE,
            f"mkdir -p {{target}}; mv {LISTED} {{target}}/",
            _each(word=WORDS, folder=FOLDERS, target=TARGETS),
            _move,
        ),
        "copy": Form(
            "Copy every file in the folder {folder} that contains the word {word} to the folder {target}."
            + CLOSE,
            f"mkdir -p {{target}}; cp {LISTED} {{target}}/",
            _each(word=WORDS, folder=FOLDERS, target=TARGETS),
            lambda files, data: _move(files, data, keep=True),
        ),
        "replace": Form(
            "In every file in the folder {folder}, replace the word {word} with the word {stone}." + CLOSE,
            "sed -i 's/{word}/{stone}/g' {folder}/*.txt",
            _each(word=WORDS, folder=FOLDERS, stone=STONES),
            _edit(lambda lines, data: [line.replace(data["word"], data["stone"]) for line in lines]),
        ),
        "delete": Form(
            "Delete every line that contains the word {word} from the files in the folder {folder}." + CLOSE,
            "sed -i '/{word}/d' {folder}/*.txt",
            _each(word=WORDS, folder=FOLDERS),
            _edit(lambda lines, data: [line for line in lines if data["word"] not in line]),
        ),
        "append": Form(
            "Add the word {stone} as a new last line to every file in the folder {folder} that "
            "contains the word {word}." + CLOSE,
            f"for f in {LISTED}; do echo {{stone}} >> $f; done",
            _each(word=WORDS, folder=FOLDERS, stone=STONES),
            _edit(lambda lines, data: [*lines, data["stone"]]),
        ),
        "rename": Form(
            "Change the extension from .txt to .{ending} for every file in the folder {folder} that "
            "contains the word {word}." + CLOSE,
            f"for f in {LISTED}; do mv $f ${{{{f%.txt}}}}.{{ending}}; done",
            _each(word=WORDS, folder=FOLDERS, ending=("bak", "old", "md", "log")),
            _rename,
        ),
        "sort": Form(
            "In every file in the folder {folder} that contains the word {word}, sort the lines "
            "alphabetically." + CLOSE,
            f"for f in {LISTED}; do sort -o $f $f; done",
            _each(word=WORDS, folder=FOLDERS),
            _edit(lambda lines, data: sorted(lines)),
        ),
        "report": Form(
            "Count the lines that contain the word {word} in all files in the folder {folder}, and write the "
            "number to a new file called {target}.txt." + CLOSE,
            "cat {folder}/*.txt | grep -c {word} > {target}.txt",
            _each(word=WORDS, folder=FOLDERS, target=("count", "result", "total", "lines")),
            lambda files, data: {f"{data['target']}.txt": str(_count(files, data))},
        ),
    },
}
"""Level -> name -> form."""


@cache
def requests(level: int, split: str, number: int) -> list[Data]:
    """List the requests of a split, which alternates between the forms.

    When all requests of a form have been made, they are made again on the next machine.
    """
    forms: list[list[Data]] = []
    for name, form in FORMS[level].items():
        blanks = random.Random(f"terminal {level} {name}").sample(form.blanks, len(form.blanks))
        forms.append(
            [
                {"level": level, "ask": name, **words}
                for place, words in enumerate(blanks[:MOST])
                if (place % TEST_SHARE == 0) == (split == "test")
            ]
        )
    asked: list[Data] = []
    for i in range(number):
        turn, chosen = divmod(i, len(forms))
        machine, place = divmod(turn, len(forms[chosen]))
        asked.append({**forms[chosen][place], "machine": machine + 1})
    return asked


def fill(data: Data) -> tuple[str, str]:
    """Return a request, and a command that fulfils it."""
    form, words = FORMS[data["level"]][data["ask"]], dict(data)
    # awk counts columns from 1, and the name is the first.
    for number, column in (("number", "column"), ("second_number", "other")):
        words[number] = COLUMNS.index(data[column]) + 2 if column in data else 0
    words["place"] = ORDINALS.index(data["ordinal"]) + 1 if "ordinal" in data else 0
    return form.request.format(**words), form.command.format(**words)


def solve(data: Data, files: dict[str, str]) -> object:
    """Return the answer of level 1 or 2, or the required files of level 3."""
    found = FORMS[data["level"]][data["ask"]].solve(files, data)
    return {**files, **found} if isinstance(found, dict) else str(found)


def careless(data: Data, files: dict[str, str]) -> str | None:
    """Return the answer of somebody who overlooks a part of the request, or None if the form has none."""
    answer = FORMS[data["level"]][data["ask"]].careless
    return None if answer is None else str(answer(files, data))
