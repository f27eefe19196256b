"""Dbbench: answer a question about a database or change its rows, with SQL, as in AgentBench.

The database is SQLite in memory, or a separate database on the MariaDB or MySQL server in ``DBBENCH_URL``.
The problems are generated. ``DBBENCH_DATA`` adds the problems of AgentBench's files.
"""

from __future__ import annotations

import logging
import os
from functools import cache

from agentrl_env import Done, Environment, Message, ToolCall, Wording, tool

from . import generator, official
from .grading import flat, same_answers, same_contents
from .server import Server
from .sqlite import SqliteDatabase, solve, split

logger = logging.getLogger("agentrl_env")
URL = os.environ.get("DBBENCH_URL", "")
"""Server of the databases, as ``mysql://user:password@host:port`` or ``mysql://root@/?unix_socket=PATH``."""
LEVELS = {f"{split}{suffix}": (level, split) for level, suffix in ((1, ""), (2, "-2"), (3, "-3"))
          for split in generator.COUNT}  # fmt: skip
MAX_ROWS = 50
"""Maximum number of shown rows of the table."""
MAX_READ = 200
"""Maximum number of rows to read. In ``{rows}``, fewer rows already exceed MAX_CHARS."""
MAX_CHARS = 800
"""Maximum length of the shown result, as in AgentBench."""
FILES = official.files(os.environ.get("DBBENCH_DATA", ""), taken=LEVELS)
"""AgentBench's file, or a folder of such files. Each file is a split with the file's name."""


@cache
def _records(split: str) -> list[dict[str, object]]:
    usable, unusable = official.read(FILES[split])
    for reason in unusable:
        logger.warning("dbbench leaves a record out: %s", reason)
    return [{"record": record} for record in usable]


class Dbbench(Environment):
    """Answer a question about a database, or change its rows, with SQL."""

    splits = (*LEVELS, *FILES)
    max_turns = 15
    wording = Wording(
        os.environ.get("DBBENCH_WORDING"),
        opening=("{request}\n{tables} ({dialect})", "question", "evidence", "notes"),
        evidence="{evidence}\n",
        notes="{notes}\n",
        result=("{table}", "rows"),
        no_rows=("no rows", "rows"),
        changed=("{changed} rows changed", "rows"),
        cut="\n(cut off)",
    )
    server: Server | None = None
    database = None
    expert_noise = 0.0
    """Probability that the expert asks for another row or column, or commits a wrong answer."""

    @classmethod
    def startup(cls):
        if URL:
            cls.server = Server(URL)

    @classmethod
    def shutdown(cls):
        if cls.server:
            cls.server.close()
        cls.server = None

    @classmethod
    def samples(cls, split):
        """Return the problems of "train", "validation", "test" (level 1), "train-2" and so on, or a file."""
        if split in FILES:
            return _records(split)
        level, name = LEVELS[split]
        return [{"level": level, "number": number} for number in generator.numbers(name)]

    def reset(self, sample, rng):
        self.data = sample.data
        self.seen, self.ran = None, 0
        self._open()
        self.right, self.target = self.problem.label, None
        if self.problem.gold and (self.problem.writes or self.right is None):
            rows, self.target = solve(self.problem)
            self.right = flat(rows)
        problem, text = self.problem, self.wording.text
        tables = "\n".join(map(str, self.database.tables))
        return self.wording.opening(
            request="\n".join(filter(None, (problem.question, problem.evidence, problem.notes))),
            question=problem.question,
            evidence=text("evidence", evidence=problem.evidence) if problem.evidence else "",
            notes=text("notes", notes=problem.notes or tables),
            tables=tables,
            dialect=self.database.dialect,
        )

    @tool
    def execute_sql(self, query: str):
        """Run one SQL statement and see its rows; changes are kept.

        Args:
            query: One SELECT, INSERT, UPDATE or DELETE statement.
        """
        names, rows, changed = self.database.run(query, MAX_READ)
        self.seen, self.ran = [str(value) for value in flat(rows)], self.ran + 1
        wording, listed = self.wording, str([tuple(row) for row in rows])
        if not names:
            text = wording.text("changed", changed=max(changed, 0), rows=listed)
        elif not rows:
            text = wording.text("no_rows", rows=listed)
        else:
            text = wording.text("result", table=_as_table(names, rows), rows=listed)
        return text if len(text) <= MAX_CHARS else text[:MAX_CHARS] + wording.text("cut")

    @tool
    def commit_final_answer(self, answers: list[str]):
        """Give the answer and end the task, so be sure. After a change, commit ["done"].

        Args:
            answers: The values asked for, one text for each.
        """
        right = self._changed() if self.problem.writes else self._answered(answers)
        return Done("Well done." if right else "That is not right.", reward=float(right))

    def close(self):
        if self.database is not None:
            self.database.close()
        self.database = None

    def snapshot(self):
        state = {name: value for name, value in vars(self).items() if name not in ("database", "problem")}
        return {**state, "contents": self.database.contents()}

    def restore(self, state):
        contents = state.pop("contents")
        vars(self).update(state)
        self._open(contents)

    def expert(self, rng):
        wish = self.problem.question.split("\n")[0].rstrip("?.")
        slip = self.expert_noise > 0 and rng.random() < self.expert_noise
        if slip and rng.random() < 0.5:
            return Message.assistant(f"{wish}.", ToolCall.of("commit_final_answer", answers=["1"]))
        runs = self.problem.writes or self.problem.label is None
        statements = split(self.problem.gold) if self.problem.gold and runs else []
        if self.ran < len(statements):
            gold = f"SELECT * FROM {self.problem.tables[0].name} LIMIT 2" if slip else statements[self.ran]
            return Message.assistant(f"{wish}.", ToolCall.of("execute_sql", query=gold))
        answers = ["done"] if self.problem.writes else self.problem.label or self.seen
        answers = [str(answer) for answer in answers]
        text = ", ".join(answers)
        return Message.assistant(f"{wish}: {text}.", ToolCall.of("commit_final_answer", answers=answers))

    def _open(self, contents=None):
        """Open the problem's database, with other rows if given."""
        data = self.data
        if "record" in data:
            self.problem = official.problem(data["record"])
        else:
            self.problem = generator.generate(data["level"], data["number"])
        tables = self.problem.tables
        if contents is not None:
            tables = [type(t)(t.name, t.columns, [tuple(row) for row in contents[t.name]]) for t in tables]
        self.database = self.server.database(tables) if self.server else SqliteDatabase(tables)

    def _answered(self, answers):
        problem = self.problem
        return same_answers(answers, self.right, ordered=problem.ordered, as_set=problem.as_set)

    def _changed(self):
        contents = self.database.contents()
        exact = self.target is not None and same_contents(self.target, contents)
        return exact or official.right_table(self.problem, contents)


def _as_table(names, rows):
    lines = [" | ".join("NULL" if v is None else str(v) for v in row) for row in (names, *rows[:MAX_ROWS])]
    return "\n".join(lines + ["(more rows left out)"] * (len(rows) > MAX_ROWS))
