"""The dbbench task on a private MariaDB server."""

import asyncio
import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from agentrl_env import EnvClient, SessionStatus, TaskSample, ToolCall, ToolError
from agentrl_env.errors import EnvironmentFailed
from agentrl_env.hosting.loader import load_target
from tests.environments import agentbench
from tests.environments.mariadb_server import MariaDbServer
from tests.environments.play import play

pytestmark = pytest.mark.environments

FOLDER = Path(__file__).parents[2] / "environments" / "dbbench"
Dbbench = load_target(str(FOLDER))
module = sys.modules[Dbbench.__module__]
official = sys.modules[f"{Dbbench.__module__.rpartition('.')[0]}.official"]


@pytest.fixture(scope="module")
def mariadb(tmp_path_factory):
    server = MariaDbServer(tmp_path_factory.mktemp("mariadb"))
    server.start()
    yield server
    server.end()


@pytest.fixture
def start(mariadb):
    """Start an episode on the server. It is closed when the test ends."""
    task = type("Dbbench", (Dbbench,), {"server": module.Server(mariadb.url)})
    opened = []

    def started(**data):
        environment = task()
        opened.append(environment)
        environment.reset(TaskSample(task="dbbench", seed=1, data=data), np.random.default_rng(1))
        return environment

    yield started
    for environment in opened:
        environment.close()
    task.server.close()
    assert mariadb.leftovers() == []


@pytest.fixture
async def client(mariadb, monkeypatch):
    monkeypatch.setattr(module, "URL", mariadb.url)
    async with EnvClient.local(Dbbench) as client:
        yield client


@pytest.mark.parametrize("level", ["", "-2", "-3"])
async def test_expert_succeeds_and_nothing_is_left(mariadb, client, level):
    for index in range(15):
        played = await play(await client.open("dbbench", split=f"test{level}", index=index))
        assert "(MariaDB)" in played.transcript[0]
        assert played.reward == 1.0
    assert played == await play(await client.open("dbbench", split=f"test{level}", index=index))
    deadline = time.monotonic() + 60
    while mariadb.leftovers():  # an episode is closed in the background
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def test_every_development_record_is_graded_by_its_label_or_gold_sql(start):
    usable, _ = official.read(agentbench.folder("dbbench") / "dev.jsonl")
    for number, record in enumerate(usable):
        gold = record["label"]
        wrong = [
            re.sub(r"'[^']*'(?=[^']*$)", "'corrupted'", gold[0]) if "answer_md5" in record else f"{gold}7"
        ]
        if gold[0].startswith("UPDATE"):
            wrong = [re.sub(r"'[^']*'", "'corrupted'", gold[0], count=1)]
        for answers, expected in ((gold, 1.0), (wrong, 0.0)):
            environment = start(record=record)
            if environment.problem.writes:
                environment.execute_sql(answers[0])
            assert environment.commit_final_answer(list(map(str, answers))).reward == expected, number
            environment.close()


LONG = "total revenue of " + "all " * 20


def test_names_that_mysql_does_not_allow_are_shortened_on_the_server(start):
    columns = [LONG, f"{LONG}2", "name ", "", "\U0001f600"]
    names = [LONG[:60].strip(), f"{LONG[:60].strip()}_2", "name", "column_4", "?"]
    info = {"columns": [{"name": name, "type": "TEXT"} for name in columns], "rows": [list("12345")]}
    table = {"table_name": f"Table of {LONG}", "table_info": info}
    record = {"description": "How much?", "label": ["2"], "table": table, "type": ["other"]}
    environment = start(record=record)
    shown = environment.database.tables[0]
    assert len(shown.name) <= 64
    assert [column for column, _ in shown.columns] == names
    found = environment.execute_sql(f"SELECT `{names[1]}`, `{names[4]}` FROM `{shown.name}`")
    assert found.splitlines()[1] == "2 | 5"
    assert environment.commit_final_answer(["2"]).reward == 1.0


async def test_first_message_shows_the_shortened_names(client):
    table = {"table_name": LONG, "table_info": {"columns": [LONG], "rows": []}}
    record = {"description": "How much?", "label": ["2"], "table": table}
    session = await client.open("dbbench", sample={"record": record})
    short = LONG[:60].strip()
    assert f"Table {short}: {short} TEXT. (MariaDB)" in session.messages[0].content
    await session.close()


def test_change_of_a_table_with_a_long_name_is_graded(start):
    name = f"Table of {LONG}".strip()
    info = {"columns": ["a"], "rows": [["1"]]}
    record = {"description": "Add 2", "type": ["INSERT"], "table": {"table_name": name, "table_info": info}}
    record["sql"] = {"query": f"INSERT INTO `{name}` (a) VALUES ('2')"}
    environment = start(record=record)
    shown = environment.database.tables[0].name
    environment.execute_sql(f"INSERT INTO `{shown}` (a) VALUES ('2')")
    assert environment.commit_final_answer(["done"]).reward == 1.0


HOSTILE = [
    "SELECT user, authentication_string FROM mysql.user",
    "SELECT * FROM {other}.{table}",
    "UPDATE {other}.{table} SET name = 'x'",
    "SELECT LOAD_FILE('/etc/passwd') INTO @x",
    "SELECT 1 INTO OUTFILE '/tmp/agentrl-x'",
    "SELECT 1 INTO DUMPFILE '/tmp/agentrl-x'",
    "LOAD DATA LOCAL INFILE '/etc/passwd' INTO TABLE {table}",
    "SET GLOBAL general_log = ON",
    "SET SESSION max_statement_time = 0",
    "DROP TABLE {table}",
    "DELETE FROM {table}; DROP TABLE {table}",
    "/*!50000 DROP TABLE {table} */",
    "SELECT /*! SLEEP(1) */ 1",
    "CREATE TABLE x (y INT)",
    "GRANT ALL ON *.* TO CURRENT_USER",
    "KILL 1",
    "COMMIT",
    "START TRANSACTION",
    "LOCK TABLES {table} WRITE",
    "CALL x()",
    "DO RELEASE_ALL_LOCKS()",
    "SELECT * FROM information_schema.nothing",
]


@pytest.mark.parametrize("query", HOSTILE)
def test_hostile_statement_is_refused_and_changes_nothing(start, query):
    one, other = start(level=1, number=0), start(level=1, number=0)
    before = one.database.contents()
    words = {"table": one.problem.tables[0].name, "other": other.database._name}
    if "LOAD_FILE" in query:
        one.execute_sql(query.format(**words))
        assert "root" not in str(one.execute_sql("SELECT @x"))
    else:
        with pytest.raises(ToolError, match="SQL error"):
            one.execute_sql(query.format(**words))
    assert one.database.contents() == other.database.contents() == before
    assert not Path("/tmp/agentrl-x").exists()


@pytest.mark.parametrize(
    "query",
    [
        "SHOW DATABASES",
        "SHOW TABLES",
        "SELECT schema_name FROM information_schema.schemata",
        "SELECT table_schema, table_name FROM information_schema.tables WHERE table_schema LIKE 'agentrl%'",
        "SELECT * FROM information_schema.processlist",
        "SHOW GRANTS",
        "SHOW VARIABLES LIKE '%passw%'",
    ],
)
def test_catalogue_shows_neither_other_episodes_nor_the_answer(start, query):
    one, other = start(level=1, number=0), start(level=1, number=1)
    text = str(one.execute_sql(query))
    assert other.database._name not in text
    assert one.problem.gold not in text


def test_endless_or_huge_statement_is_stopped_and_rolled_back(start, monkeypatch):
    monkeypatch.setattr(sys.modules[type(start(level=1, number=0).database).__module__], "SECONDS", 0.5)
    environment = start(level=1, number=0)
    table = environment.problem.tables[0].name
    before = environment.database.contents()
    many = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 999)"
    for query in (
        "SELECT SLEEP(100)",
        f"{many} SELECT COUNT(*) FROM n a JOIN n b JOIN n c JOIN n d",
        f"INSERT INTO {table} (name) {many} SELECT 'x' FROM n a JOIN n b WHERE b.i < 7",
        f"INSERT INTO {table} (name) {many} SELECT REPEAT('x', 60000) FROM n WHERE i < 200",
    ):
        with pytest.raises(ToolError, match="SQL error"):
            environment.execute_sql(query)
    assert environment.database.contents() == before
    assert "0" in environment.execute_sql("SELECT BENCHMARK(1000000000000, MD5('x'))")
    assert len(environment.execute_sql(f"{many} SELECT REPEAT('x', 10000000) FROM n")) < 1000


async def test_fork_has_its_own_database(client):
    session = await client.open("dbbench", split="test-2", index=0)
    (twin,) = await session.fork(1)
    tables = re.findall(r"Table (\w+):", str(session.messages[0].content))
    result = await twin.step(ToolCall.of("execute_sql", query=f"DELETE FROM {tables[0]}"))
    assert "rows changed" in str(result.messages)
    while not session.status.final:
        result = await session.step(await session.expert())
    assert result.reward == 1.0
    await twin.close()


CRASH = """
import os, sys
from agentrl_env.hosting.loader import load_target
import numpy as np
from agentrl_env import TaskSample
Dbbench = load_target(sys.argv[1])
Dbbench.startup()
environment = Dbbench()
environment.reset(TaskSample(task="dbbench", seed=1, data={"level": 1, "number": 0}), np.random.default_rng())
print("open", flush=True)
sys.stdin.read()
"""


def test_leftovers_of_killed_processes_are_removed_and_data_of_living_ones_is_kept(mariadb):
    def begun():
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(CRASH), str(FOLDER)],
            env={**os.environ, "DBBENCH_URL": mariadb.url},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdout.readline() == b"open\n"
        return process

    dead, alive = begun(), begun()
    try:
        assert len(mariadb.leftovers()) == 4
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        module.Server(mariadb.url).close()
        assert len(mariadb.leftovers()) == 2
    finally:
        for process in (dead, alive):
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()
    module.Server(mariadb.url).close()
    assert mariadb.leftovers() == []


async def test_anonymous_users_of_a_server_are_named_with_the_remedy(mariadb, client):
    mariadb.sql("CREATE USER ''@'localhost'")
    remedy = "take precedence over the users of episodes; run DROP USER ''@'localhost'"
    try:
        with pytest.raises(EnvironmentFailed, match=rf"Access denied for user .*{remedy}"):
            await client.open("dbbench", split="test", index=0)
    finally:
        mariadb.sql("DROP USER ''@'localhost'")
    assert mariadb.leftovers() == []
    assert (await play(await client.open("dbbench", split="test", index=0))).reward == 1.0


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
async def test_server_that_dies_fails_its_episodes_and_serves_new_ones_later(tmp_path, monkeypatch):
    own = MariaDbServer(tmp_path)
    own.start()
    monkeypatch.setattr(module, "URL", own.url)
    try:
        async with EnvClient.local(Dbbench) as client:
            session = await client.open("dbbench", split="test", index=0)
            own.end(signal.SIGKILL)
            result = await session.step(ToolCall.of("execute_sql", query="SELECT 1"))
            assert result.status is SessionStatus.FAILED_ENVIRONMENT
            assert result.reward == 0.0 or result.reward is None
            own.start()
            assert (await play(await client.open("dbbench", split="test", index=1)))[1] == 1.0
        module.Server(own.url).close()
        assert own.leftovers() == []
    finally:
        own.end()
        gc.collect()  # PyMySQL drops a socket that does not connect


def test_url_is_checked():
    with pytest.raises(ValueError, match="DBBENCH_URL must be"):
        module.Server("postgres://localhost")
    with pytest.raises(ValueError, match="unknown option: sslmode"):
        module.Server("mysql://localhost/?sslmode=1")
