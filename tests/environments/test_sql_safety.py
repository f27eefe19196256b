"""The model's SQL runs safely: it cannot hang, write, or access files and the clock."""

from pathlib import Path

import numpy as np
import pytest

from agentrl_env import Message, TaskSample, ToolCall, ToolError
from agentrl_env.hosting.loader import load_target
from agentrl_env.session.loop_watch import LoopWatch

Sql = load_target(str(Path(__file__).parents[2] / "environments" / "sql"))
SLOW = (
    f"WITH RECURSIVE n(i, s) AS (SELECT 1, '{'a' * 450}' UNION ALL SELECT i + 1, s FROM n LIMIT 10000) "
    f"SELECT COUNT(*) FROM n WHERE s LIKE '{'%a' * 150}b'"
)
"""A slow query within the limits."""
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "


@pytest.fixture
def sql():
    environment = Sql()
    data = {"level": 1, "colour": "red", "thing": "hammer", "column": "price"}
    environment.reset(TaskSample(task="sql", seed=1, data=data), np.random.default_rng(1))
    environment.open("tools")
    yield environment
    environment.close()


@pytest.mark.parametrize(
    "query",
    [
        "SELECT COUNT(*) FROM goods",
        "SELECT name, price FROM goods WHERE name LIKE '%r%' ORDER BY price DESC",
        "SELECT customer, SUM(amount) FROM orders GROUP BY customer HAVING SUM(amount) > 1",
        "WITH cheap AS (SELECT * FROM goods WHERE price < 60) SELECT AVG(price) FROM cheap",
        "SELECT name FROM goods JOIN orders ON name = thing LIMIT 3",
        "SELECT name FROM sqlite_master",
    ],
)
def test_ordinary_queries_run(sql, query):
    assert "\n" in sql.query(query)


@pytest.mark.parametrize(
    "query",
    [
        "DELETE FROM goods",
        "INSERT INTO goods VALUES ('x', 1, 1, 1, 1)",
        "UPDATE goods SET price = 1",
        "DROP TABLE goods",
        "CREATE TABLE x (y)",
        "ATTACH DATABASE '/tmp/agentrl-x.db' AS x",
        "VACUUM INTO '/tmp/agentrl-x.db'",
        "PRAGMA query_only = OFF",
        "BEGIN",
        "SELECT load_extension('x')",
        "SELECT readfile('/etc/hostname')",
        "SELECT random()",
        "SELECT CURRENT_TIMESTAMP",
        "SELECT date('now')",
        "SELECT 1; SELECT 2",
        "SELECT hex(zeroblob(1000000))",
        "SELECT printf('%1000000d', 1)",
        "SELECT " + "1, " * 1000 + "1",
        "SELECT CAST(x'ff' AS TEXT)",
        "SELECT 'a\0b'",
        "SELECT '\ud800'",
        "nonsense",
    ],
)
def test_forbidden_queries_give_an_error_for_the_model(sql, query):
    before = sql.query("SELECT * FROM goods")
    with pytest.raises(ToolError, match=r"SQL error: .*SELECT is allowed"):
        sql.query(query)
    assert sql.query("SELECT * FROM goods") == before


@pytest.mark.parametrize(
    "query",
    [
        ENDLESS + "SELECT COUNT(*) FROM n",
        ENDLESS + "SELECT MAX(i) FROM n",
        "SELECT COUNT(*) FROM goods a, goods b, goods c, goods d, goods e, goods f, goods g, goods h",
    ],
)
def test_endless_query_is_interrupted(sql, query):
    with pytest.raises(ToolError, match="interrupted"):
        sql.query(query)


def test_rows_are_limited(sql):
    answer = sql.query(ENDLESS + "SELECT i FROM n LIMIT 1000")
    assert answer.endswith("(more rows left out)")
    assert len(answer.splitlines()) == 22


def test_queries_use_the_last_opened_database(sql):
    assert "bread" not in sql.query("SELECT name FROM goods")
    sql.open("food")
    assert "honey" in sql.query("SELECT name FROM goods")


def test_query_before_open_gives_a_hint():
    environment = Sql()
    data = {"level": 1, "colour": "red", "thing": "hammer", "column": "price"}
    environment.reset(TaskSample(task="sql", data=data), np.random.default_rng(0))
    assert environment.query("SELECT 1") == "Open a database first."


@pytest.mark.parametrize("value", ["{}", " {} ", "{}.0", "'{}'", "{}."])
def test_equivalent_answers_are_accepted(sql, value):
    assert sql.answer(value.format(sql.right)).reward == 1.0


def test_wrong_answer_ends_the_task_without_reward(sql):
    assert sql.answer("no idea").reward == 0.0


async def test_slow_queries_leave_the_event_loop_to_other_sessions():
    blocks = []
    watch = LoopWatch(0.02, blocks.append)
    watch.start()
    async with Sql.local() as client:
        session = await client.open(seed=1)
        calls = [ToolCall.of("open", database="tools"), *(ToolCall.of("query", sql=SLOW) for _ in range(4))]
        result = await session.step(Message.assistant(None, *calls))
    watch.stop()
    assert [message.content for message in result.messages[1:]] == ["COUNT(*)\n0"] * 4
    assert [block for block in blocks if block.function.startswith("Sql.")] == []
