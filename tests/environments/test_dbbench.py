"""The dbbench task on SQLite: generated problems, AgentBench's records, grading, and hostile SQL."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from agentrl_env import EnvClient, TaskSample, ToolCall, ToolError
from agentrl_env.errors import DefinitionError
from agentrl_env.hosting.loader import load_target
from tests.environments import agentbench
from tests.environments.play import play

pytestmark = pytest.mark.environments

Dbbench = load_target(str(Path(__file__).parents[2] / "environments" / "dbbench"))
module = sys.modules[Dbbench.__module__]
PACKAGE = Dbbench.__module__.rpartition(".")[0]
generator, grading, official, problems, server = (
    sys.modules[f"{PACKAGE}.{name}"] for name in ("generator", "grading", "official", "problems", "server")
)

LEVELS = ("", "-2", "-3")
every_level = pytest.mark.parametrize("level", LEVELS)


def started(**data):
    environment = Dbbench()
    environment.reset(TaskSample(task="dbbench", seed=1, data=data), np.random.default_rng(1))
    return environment


def reward(environment, answers=("done",)):
    return environment.commit_final_answer(list(answers)).reward


@every_level
async def test_expert_always_succeeds_and_plays_the_same_twice(level):
    async with EnvClient.local(Dbbench) as client:
        for split in ("train", "validation", "test"):
            for index in range(20):
                which = {"split": split + level, "index": index, "seed": index}
                session = await client.open("dbbench", **which)
                played = await play(session)
                assert (played.reward, session.turn) == (1.0, 2)
                assert played == await play(await client.open("dbbench", **which))


@every_level
def test_doing_nothing_and_guessing_fail(level):
    for number in generator.numbers("test")[:40]:
        for answers in ([], ["done"], ["1"], ["none"]):
            environment = started(level=int(level[1:] or 1), number=number)
            won = reward(environment, answers)
            assert won == 0.0 or environment.right == [1]
            environment.close()


@every_level
def test_questions_are_english(level):
    """Names match the kind of their row, heights are not "highest", and nobody orders a town."""
    for number in generator.numbers("test")[:150]:
        problem = generator.generate(int(level[1:] or 1), number)
        text = problem.question
        assert not re.search(r"\ba [aeio]|\ban [^aeio]", text)
        assert not re.search(r"(high|low)est (height|width|length|weight|size|capacity|stock)", text)
        for name, *_ in problem.tables[0].rows:
            assert text.count(name) == text.count(f" called {name}")
        assert level != "-3" or problem.tables[0].name not in ("towns", "players")


@pytest.mark.parametrize("count", [100, pytest.param(None, marks=pytest.mark.slow)])
@every_level
def test_problems_are_distinct_and_splits_share_none(level, count):
    level = int(level[1:] or 1)
    seen = {
        split: [repr(generator.generate(level, n)) for n in generator.numbers(split)[:count]]
        for split in generator.COUNT
    }
    assert all(len(set(found)) == len(found) for found in seen.values())
    assert len({problem for found in seen.values() for problem in found}) == sum(map(len, seen.values()))


@pytest.mark.parametrize(
    ("right", "given"),
    [
        (["26"], ["26"]),
        (["26"], ["26.0"]),
        ([26], ["'26'"]),
        (["62,129"], ["62129"]),
        (["45%"], ["45"]),
        ([33.333333], ["33.33"]),
        (["none"], []),
        ([None], ["NULL"]),
        (["Checco D'Angelo"], ["checco  d'angelo"]),
        (["a", "b"], ["b", "a"]),
        (["a", "b"], ['["a", "b"]']),
        (["a", "b"], ["[('a',), ('b',)]"]),
    ],
)
def test_correct_answers_are_accepted(right, given):
    assert grading.same_answers(right=right, given=given)


@pytest.mark.parametrize(
    ("right", "given"),
    [
        (["26"], ["27"]),
        (["26"], ["26", "27"]),
        (["26"], ["26", "26"]),
        (["26"], []),
        ([0], ["none"]),
        (["none"], ["0"]),
        ([33.333333], ["33.3"]),
        ([26], ["26.004"]),
        (["1–0", "2–0"], ["1–0"]),
        (["True"], ["1"]),
        (["a"], ["__import__('os').system('true')"]),
        (["a"], ["[" * 5000]),
        (["1e999"], ["1e998"]),
        ([1.0], ["inf"]),
        ([1], ["٢"]),
    ],
)
def test_wrong_answers_are_rejected(right, given):
    assert not grading.same_answers(right=right, given=given)


def test_order_and_repetition_count_if_the_question_requires_them():
    assert not grading.same_answers(["b", "a"], ["a", "b"], ordered=True)
    assert grading.same_answers(["a", "a"], ["a"], as_set=True)
    assert grading.same_answers([5], [5, 5], as_set=True)  # documented: AgentBench rejects it
    assert not grading.same_answers(["a", "b"], ["a"], as_set=True)


@pytest.mark.parametrize(
    ("hosts", "remedy"),
    [
        ((), "DBBENCH_URL must reach a server that accepts password logins from this machine"),
        (("localhost",), "run DROP USER ''@'localhost'"),
        (("localhost", "db"), "run DROP USER ''@'localhost'; DROP USER ''@'db'"),
    ],
)
def test_denied_connection_of_an_episode_names_the_remedy(hosts, remedy):
    assert server.denial("Access denied", hosts).startswith("Access denied")
    assert server.denial("Access denied", hosts).endswith(remedy)


def test_tables_are_compared_by_type_and_without_order():
    same = grading.same_contents
    assert same({"t": [(1, "a"), (2, None)]}, {"t": [(2.0, None), (1, "a")]})
    for other in ([(1, "a")], [(1, "a"), (1, "a")], [("1", "a"), (2, None)], [(1, "a"), (2, "")]):
        assert not same({"t": [(1, "a"), (2, None)]}, {"t": other})


def dev_records():
    return agentbench.folder("dbbench") / "dev.jsonl"


def corrupted(record):
    """Return a record's answers or SQL with one value changed."""
    wrong = record["label"][0]
    if not official.WRITE.match(wrong):
        return [f"{wrong}7" if wrong != "none" else "7", *record["label"][1:]]
    last = list(re.finditer(r"'[^']*'", wrong))[-1 if wrong.startswith("INSERT") else 0]
    return [wrong[: last.start()] + "'corrupted'" + wrong[last.end() :]]


def test_every_development_record_is_graded_by_its_label_or_gold_sql():
    usable, unusable = official.read(dev_records())
    assert (len(usable), unusable) == (60, [])
    for number, record in enumerate(usable):
        for answers, expected in ((record["label"], 1.0), (corrupted(record), 0.0), ([], 0.0)):
            environment = started(record=record)
            if environment.problem.writes and answers:
                environment.execute_sql(answers[0])
            hopeless = not answers and record["label"] == ["none"]
            assert reward(environment, answers) == (1.0 if hopeless else expected), (number, answers)
            environment.close()


def test_development_records_have_the_hash_of_their_gold_sql():
    writes = [r for r in official.read(dev_records())[0] if r.get("answer_md5")]
    assert len(writes) == 40
    for record in writes:
        unlabelled = started(record={**record, "label": None})
        assert (unlabelled.problem.gold, unlabelled.target) == (None, None)
        unlabelled.execute_sql(record["label"][0])
        assert reward(unlabelled) == 1.0


async def test_file_of_agentbench_becomes_a_split_which_the_expert_solves(monkeypatch):
    path = dev_records()
    monkeypatch.setitem(module.FILES, "dev", path)
    task = type("Dbbench", (Dbbench,), {"splits": (*Dbbench.splits, "dev")})
    async with EnvClient.local(task) as client:
        for index in range(60):
            assert (await play(await client.open("dbbench", split="dev", index=index)))[1] == 1.0


RECORD = {
    "description": "How many?",
    "label": ["2"],
    "type": ["counting"],
    "table": {
        "table_name": "t",
        "table_info": {
            "columns": [{"name": "a", "type": "INT"}, {"name": "b"}],
            "rows": [["1", "x"], ["2", "y"]],
        },
    },
}


def changed(path="", **fields):
    record = json.loads(json.dumps(RECORD))
    target = record
    for name in path.split():
        target = target[name]
    target.update(fields)
    return record


@pytest.mark.parametrize(
    ("record", "answers"),
    [
        (RECORD, ["2"]),
        (changed(label="2", type="other"), ["2"]),
        (changed(label=2, type=None), ["2"]),
        (changed(label=[["x", 1], ["y", 2]]), ["y", "2", "x", "1"]),
        (changed(label=None, sql="SELECT COUNT(*) FROM t;"), ["2"]),
        (changed("table table_info", columns=["a", "A"]), ["2"]),
        (changed("table table_info", columns=["", " "]), ["2"]),
        (changed("table table_info", rows=[["1"], [None, 2], []]), ["2"]),
        (changed("table table_info", rows=[{"a": 1, "b": 2.5}]), ["2"]),
        (changed("table", table_name='odd "name`; DROP'), ["2"]),
        (changed("table table_info", columns=[["a", "TEXT"], {"name": None}]), ["2"]),
        (changed("table table_info", rows=[["1", "x", None, ""]]), ["2"]),
        (changed("table table_info", rows=None), ["2"]),
        (changed("table table_info", rows=[[float("nan"), float("inf")], ["\ud83d", True]]), ["2"]),
        (changed(description="How many \ud83d?", label=["2", float("nan")]), ["2", "none"]),
        (changed(label=[None], sql="SELECT COUNT(*) FROM t"), ["none"]),
        (changed(label=[], sql="SELECT COUNT(*) FROM t"), ["2"]),
        (changed(label="", sql="{'query': 'SELECT COUNT(*) FROM t', 'length': 22}"), ["2"]),
        (changed(label=None, sql='{"query": "SELECT COUNT(*) FROM t"}'), ["2"]),
    ],
)
async def test_dirty_records_of_a_file_are_played_by_the_expert_and_solved_only_by_their_answer(
    record, answers, tmp_path, monkeypatch
):
    path = tmp_path / "dirty.jsonl"
    path.write_text(json.dumps(record))
    monkeypatch.setitem(module.FILES, "dirty", path)
    module._records.cache_clear()
    task = type("Dbbench", (Dbbench,), {"splits": (*Dbbench.splits, "dirty")})
    async with EnvClient.local(task) as client:
        sessions = [await client.open("dbbench", split="dirty", index=0) for _ in range(3)]
        assert (await play(sessions[0])).reward == 1.0
        for session, given, expected in zip(sessions[1:], (answers, ["7"]), (1.0, 0.0), strict=True):
            result = await session.step(ToolCall.of("commit_final_answer", answers=given))
            assert result.reward == expected


def test_evidence_is_part_of_the_question():
    question = started(record=changed(evidence="a is a number", add_description="t has a and b")).problem
    assert (question.question, question.evidence, question.notes) == (
        "How many?",
        "a is a number",
        "t has a and b",
    )


def test_change_by_several_statements_is_right_if_all_of_them_ran():
    changes = ["UPDATE t SET b = 'z' WHERE a = '1';", "DELETE FROM t WHERE a = '2'"]
    record = changed(type=["UPDATE"], label=changes)
    for done, expected in ((changes, 1.0), (changes[:1], 0.0), ([], 0.0)):
        environment = started(record=record)
        for statement in done:
            environment.execute_sql(statement)
        assert reward(environment) == expected
    environment = started(record=record)
    for statement in changes:
        query = json.loads(environment.expert(None).tool_calls[0].function.arguments)["query"]
        assert query.rstrip(";") == statement.rstrip(";")
        environment.execute_sql(query)
    assert environment.expert(None).tool_calls[0].function.name == "commit_final_answer"


def test_gold_sql_that_does_nothing_here_leaves_the_decision_to_the_hash():
    rows = [("1", "z"), ("2", None)]
    hashed = f"[('{grading.table_hash([('1', 'z'), ('2', 'None')])}',)]"
    update = {"type": ["UPDATE"], "label": ["UPDATE t SET b = 'z' WHERE a = '1 '"], "answer_md5": hashed}
    record = changed("table table_info", rows=[["1", "x"], ["2", None]]) | update
    idle = started(record=record)
    assert reward(idle) == 0.0
    environment = started(record=record)
    environment.execute_sql("UPDATE t SET b = 'z' WHERE a = '1'")
    assert environment.database.contents() == {"t": rows}
    assert reward(environment) == 1.0


def test_broken_file_does_not_affect_the_others(tmp_path):
    written = {
        "deep.json": "[" * 100_000,
        "nested.jsonl": json.dumps(RECORD).replace('["2"]', "[" * 400 + '"2"' + "]" * 400),
        "train.jsonl": json.dumps(RECORD),
        "std.json": json.dumps([RECORD]),
        "std.jsonl": json.dumps(RECORD),
        "pretty.json": json.dumps(RECORD, indent=2),
        "wrapped.json": json.dumps({"data": [RECORD, RECORD]}),
    }
    for name, text in written.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "gone.json").symlink_to(tmp_path / "missing")
    found = official.files(str(tmp_path), taken=Dbbench.splits)
    counts = {split: [len(records) for records in official.read(path)] for split, path in found.items()}
    assert counts == {
        "deep": [0, 1], "nested": [0, 1], "official-train": [1, 0], "std": [1, 0], "std.jsonl": [1, 0],
        "pretty": [1, 0], "wrapped": [2, 0],
    }  # fmt: skip
    assert official.read(tmp_path / "missing") == ([], ["missing cannot be read: No such file or directory"])
    for data in (tmp_path / "missing.jsonl", tmp_path / "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(DefinitionError, match="DBBENCH_DATA="):
            official.files(str(data), taken=())


def test_unusable_records_are_named_with_the_reason(tmp_path):
    write = {"type": ["UPDATE"], "label": ["UPDATE missing SET a = 1"]}
    lines = [
        json.dumps(RECORD),
        "",
        "{nonsense",
        "[1]",
        json.dumps(changed(description="")),
        json.dumps(changed(table=None)),
        json.dumps(changed(table=[])),
        json.dumps(changed("table table_info", rows=[["1", "2", "3"]])),
        json.dumps(changed(label=None)),
        json.dumps(changed(**write)),
        json.dumps(changed(**write, answer_md5="[('09aa8fbf72f39362970f95a1276b957c',)]")),
    ]
    (tmp_path / "std.jsonl").write_text("\ufeff" + "\n".join(lines))
    usable, unusable = official.read(tmp_path / "std.jsonl")
    assert len(usable) == 2
    reasons = (
        "JSON",
        "no JSON object",
        "no description",
        "table_info",
        "table_info",
        "row 1",
        "neither a label",
        "no such table",
    )
    assert len(unusable) == len(reasons)
    for sentence, number, reason in zip(unusable, range(3, 11), reasons, strict=True):
        assert f"std.jsonl, line {number}:" in sentence
        assert reason in sentence


HOSTILE = [
    "SELECT load_extension('x')",
    "ATTACH DATABASE '/tmp/agentrl-x.db' AS x",
    "VACUUM INTO '/tmp/agentrl-x.db'",
    "SELECT readfile('/proc/self/environ')",
    "SELECT writefile('/tmp/agentrl-x', 'x')",
    "SELECT * FROM pragma_database_list",
    "PRAGMA database_list",
    "PRAGMA max_page_count = 1000000000",
    "PRAGMA writable_schema = ON",
    "UPDATE sqlite_master SET sql = ''",
    "CREATE TABLE x (y)",
    "CREATE TRIGGER x AFTER INSERT ON goods BEGIN SELECT 1; END",
    "DROP TABLE {table}",
    "ALTER TABLE {table} RENAME TO x",
    "BEGIN",
    "SAVEPOINT x",
    "SELECT random()",
    "SELECT printf('%.*c', 2000000000, 'x')",
    "SELECT format('%.*c', 2000000000, 'x')",
    "SELECT CURRENT_TIMESTAMP",
    "SELECT hex(zeroblob(100000000))",
    "SELECT fts5('x')",
    "SELECT * FROM sqlite_dbpage",
    "SELECT 1; SELECT 2",
    "SELECT '\ud800'",
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n",
    "INSERT INTO {table} (name) WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i FROM n) SELECT i FROM n",
]


@pytest.mark.parametrize("query", HOSTILE)
def test_hostile_statement_is_refused_and_changes_nothing(query):
    environment = started(level=3, number=1)
    before = environment.database.contents()
    with pytest.raises(ToolError, match="SQL error"):
        environment.execute_sql(query.format(table=environment.problem.tables[0].name))
    assert environment.database.contents() == before
    assert not Path("/tmp/agentrl-x.db").exists()
    environment.close()


def test_catalogue_does_not_reveal_the_answer():
    environment = started(level=1, number=0)
    text = environment.execute_sql("SELECT * FROM sqlite_master")
    assert "CREATE TABLE" in text
    gold = environment.problem.gold
    assert gold not in text
    assert not {"gold", "label", "answer"} & set(re.findall(r"\w+", text))


def test_database_does_not_fill_the_memory():
    environment = started(level=1, number=0)
    table = environment.problem.tables[0].name
    refusals = ""
    for _ in range(30):
        try:
            environment.execute_sql(f"INSERT INTO {table} SELECT * FROM {table}")
        except ToolError as error:
            refusals += str(error)
    assert "interrupted" in refusals or "full" in refusals
    assert len(environment.database.contents()[table]) < 100_000
    assert reward(environment) == 0.0


async def test_crash_of_one_episode_does_not_affect_the_others():
    async with EnvClient.local(Dbbench) as client:
        one, other = [await client.open("dbbench", split="train", index=i) for i in (0, 1)]
        for _ in range(3):
            await one.step(ToolCall.of("execute_sql", query="SELECT " + "(" * 9000))
        while not other.status.final:
            result = await other.step(await other.expert())
        assert result.reward == 1.0
        assert not one.status.final
