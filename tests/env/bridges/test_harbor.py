"""Harbor task folders as tasks in bubblewrap. Folders with an image are tested in tests/docker."""

import json
import os
import re

import pytest

from agentrl_env import EnvClient, SessionStatus, ToolCall
from agentrl_env.bridges.harbor.folder import HarborTask, Unusable
from agentrl_env.bridges.harbor.tasks import load, rewards
from agentrl_env.errors import EnvironmentFailed, SandboxUnavailable, TargetError
from agentrl_env.sandbox.bubblewrap import check_available
from tests.env.bridges.harbor_tasks import SETTINGS, TEST, write_task
from tests.environments.play import play

try:
    check_available()
    reason = ""
except SandboxUnavailable as error:
    reason = str(error)
needs_bubblewrap = pytest.mark.skipif(bool(reason), reason=reason)


def shell(command, **options):
    return ToolCall.of("shell", command=command, **options)


async def graded(folder, *commands):
    """Run commands in a folder's only task, submit, and return the last result."""
    async with EnvClient.local(f"harbor:{folder}") as client:
        session = await client.open(load(str(folder)).name, split="train", index=0)
        for command in commands:
            result = await session.step(shell(command))
            if session.status.final:
                return result
        return await session.step(ToolCall.of("submit"))


@needs_bubblewrap
async def test_solution_gets_the_reward_of_the_tests(tmp_path):
    folder = write_task(tmp_path / "tasks/plank").parent
    async with EnvClient.local(f"harbor:{folder}") as client:
        info = (await client.tasks())["tasks"]
        assert list(info.splits) == ["train"]
        assert [tool.function.name for tool in info.tools] == ["shell", "submit"]
        session = await client.open("tasks", split="train", index=0)
        assert session.messages[0].content == "Write the plank's length, with its unit, to length.txt."
        played = await play(session)
        assert played.reward == 1.0
        assert played == await play(await client.open("tasks", split="train", index=0))


@needs_bubblewrap
async def test_wrong_or_missing_files_earn_nothing(tmp_path):
    folder = write_task(tmp_path / "plank")
    assert (await graded(folder)).reward == 0.0
    assert (await graded(folder, "echo 12 >length.txt")).reward == 0.0
    assert (await graded(folder, "cat plank.txt >length.txt")).reward == 1.0


@needs_bubblewrap
@pytest.mark.parametrize(
    "command",
    [
        "mkdir -p /logs/verifier; echo 1 >/logs/verifier/reward.txt",
        "mkdir -p /logs/verifier; echo '{\"reward\": 1}' >/logs/verifier/reward.json",
        "mkdir -p /tests; echo 'echo 1 >/logs/verifier/reward.txt' >/tests/test.sh; chmod 555 /tests",
        "(while :; do echo 1 >/logs/verifier/reward.txt; done) >/dev/null 2>&1 & sleep 0.1",
        "find / -name test.sh -o -name right.txt -o -name solve.sh 2>/dev/null | grep -v ^/proc | xargs cat",
        "kill -9 -1",
        "head -c 400000000 /dev/zero >big",
    ],
)
async def test_policy_that_attacks_the_grading_gains_nothing(tmp_path, command):
    result = await graded(write_task(tmp_path / "plank"), command)
    assert result.status is SessionStatus.COMPLETED
    assert result.reward == 0.0


@needs_bubblewrap
async def test_tests_and_solution_are_not_on_the_machine(tmp_path):
    async with EnvClient.local(f"harbor:{write_task(tmp_path / 'plank')}") as client:
        session = await client.open("plank", split="train", index=0)
        found = await session.step(shell("ls -a / . ; ls /tests /solution"))
        assert "plank.txt" in found.messages[0].content
        assert "test.sh" not in found.messages[0].content
        assert "solve.sh" not in found.messages[0].content
        await session.close()


@needs_bubblewrap
async def test_machine_that_breaks_its_tests_gets_zero_and_tests_that_never_work_fail_the_session(tmp_path):
    hangs = TEST.replace("mkdir -p", "while [ -e hang ]; do sleep 0.1; done; mkdir -p")
    settings = SETTINGS.replace("timeout_sec = 100.0", "timeout_sec = 2.0")
    result = await graded(write_task(tmp_path / "a", test=hangs, settings=settings), "touch hang")
    assert (result.status, result.reward) == (SessionStatus.COMPLETED, 0.0)
    result = await graded(write_task(tmp_path / "b", test="exit 1"), "true")
    assert result.status is SessionStatus.FAILED_ENVIRONMENT
    assert not result.reward


@needs_bubblewrap
async def test_time_limit_of_the_agent_ends_the_episode_with_grading(tmp_path):
    settings = SETTINGS.replace("timeout_sec = 120.0", "timeout_sec = 1.0")
    folder = write_task(tmp_path / "plank", settings=settings)
    result = await graded(folder, "cat plank.txt >length.txt; sleep 60")
    assert (result.status, result.reward) == (SessionStatus.COMPLETED, 1.0)
    assert "is over" in result.messages[0].content


@needs_bubblewrap
async def test_several_rewards_become_reward_and_metrics(tmp_path):
    test = 'mkdir -p /logs/verifier; echo \'{"reward": 0.25, "style": 0.5}\' >/logs/verifier/reward.json'
    result = await graded(write_task(tmp_path / "plank", test=test))
    assert result.reward == 0.25
    assert result.metrics["style"] == 0.5


@needs_bubblewrap
@pytest.mark.parametrize(
    ("written", "reward", "metrics"),
    [
        ('{"reward": 0.25, "style": null, "notes": "fine", "lines": 3}', 0.25, {"lines": 3.0}),
        ('{"lines": 3, "words": 9}', 1.0, {"lines": 3.0, "words": 9.0}),
        ('{"reward": null, "lines": 3}', 1.0, {"lines": 3.0}),
    ],
)
async def test_named_numbers_take_precedence_over_the_number_alone(tmp_path, written, reward, metrics):
    test = f"cd /logs/verifier; echo 1 >reward.txt; echo '{written}' >reward.json"
    result = await graded(write_task(tmp_path / "plank", test=test))
    assert (result.status, result.reward) == (SessionStatus.COMPLETED, reward)
    assert metrics.items() <= result.metrics.items()
    assert not result.metrics.keys() & {"style", "notes", "reward"}


@needs_bubblewrap
@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("echo pytest: not found >&2; exit 1", "wrote neither reward.json nor reward.txt.*pytest: not found"),
        ("echo broken; echo '{' >/logs/verifier/reward.json; echo 1 >/logs/verifier/reward.txt", "broken"),
        ("echo '{\"reward\": null}' >/logs/verifier/reward.json", "no finite reward in .*null"),
        ("echo 0 >/logs/verifier/reward.txt; sleep 100", "was killed: it ran longer than 1 s"),
    ],
)
async def test_tests_that_did_not_run_fail_the_session_with_their_output(tmp_path, test, reason):
    settings = SETTINGS.replace("timeout_sec = 100.0", "timeout_sec = 1.0")
    result = await graded(write_task(tmp_path / "plank", test=test, settings=settings), "true")
    assert result.status is SessionStatus.FAILED_ENVIRONMENT
    assert re.search(reason, result.info["error"]["message"])


@needs_bubblewrap
async def test_variables_and_working_folder_apply_to_model_tests_and_health_check(tmp_path):
    settings = (
        SETTINGS
        + """
workdir = "/home/agent/shop/floor"
env = { WOOD = "oak", UNIT = "inch" }
[environment.healthcheck]
command = 'test "$WOOD" = oak && pwd >checked'
"""
    )
    test = 'echo "{\\"reward\\": $([ $WOOD = oak ] && [ $UNIT = cm ] && [ -e checked ] && echo 1)}"'
    folder = write_task(tmp_path / "plank", settings=settings, test=f"{test} >/logs/verifier/reward.json")
    async with EnvClient.local(f"harbor:{folder}") as client:
        session = await client.open("plank", split="train", index=0)
        shown = await session.step(shell("echo $WOOD $UNIT; cat checked; pwd"))
        folder = "/home/agent/shop/floor"
        assert shown.messages[0].content == f"oak inch\n{folder}\n{folder}"
        assert (await session.step(ToolCall.of("submit"))).reward == 1.0


@needs_bubblewrap
async def test_working_folder_that_cannot_be_made_fails_the_session(tmp_path):
    write_task(tmp_path / "plank", settings=SETTINGS + "workdir = '/proc/shop'\n")
    async with EnvClient.local(f"harbor:{tmp_path}") as client:
        with pytest.raises(EnvironmentFailed, match=r"cannot create environment\.workdir /proc/shop"):
            await client.open()


@needs_bubblewrap
@pytest.mark.parametrize(
    ("settings", "query", "model", "tests"),
    [
        (SETTINGS.replace("false", "true"), "?network=false", False, True),
        (SETTINGS.replace("false", "true"), "", True, True),
        (SETTINGS, "", False, False),
        (SETTINGS.replace("[environment]", "network_mode = 'public'\n[environment]"), "", False, True),
        (SETTINGS.replace("false", "true\nnetwork_mode = 'no-network'"), "", False, False),
        (
            SETTINGS.replace("[verifier]", "network_mode = 'no-network'\n[verifier]").replace(
                "false", "true"
            ),
            "",
            False,
            True,
        ),
    ],
)
async def test_tests_keep_the_network_of_their_task_if_the_model_has_none(
    tmp_path, settings, query, model, tests
):
    own = os.readlink("/proc/self/ns/net")
    test = 'echo "{\\"reward\\": 1, \\"namespace\\": $(readlink /proc/self/ns/net | tr -dc 0-9)}"'
    folder = write_task(tmp_path / "plank", settings=settings, test=f"{test} >/logs/verifier/reward.json")
    async with EnvClient.local(f"harbor:{folder}{query}") as client:
        session = await client.open("plank", split="train", index=0)
        shown = await session.step(shell("readlink /proc/self/ns/net"))
        assert (shown.messages[0].content == own) is model
        result = await session.step(ToolCall.of("submit"))
        assert (result.metrics["namespace"] == float(own.strip("net:[]"))) is tests


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"1\n", (1.0, {})),
        (b"0.5", (0.5, {})),
        (b'{"reward": 1, "a": 2}', (1.0, {"a": 2.0})),
        (b'{"correct": 1}', (1.0, {})),
        (b'{"reward": 1, "a": null, "b": true, "c": NaN, "d": [1]}', (1.0, {})),
    ],
)
def test_rewards_are_a_number_or_named_numbers(text, expected):
    assert rewards(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"yes", b"NaN", b"[1]", b"true", b"{}", b"1" + b"0" * 400),
        *(b'{"a": 1, "b": 2}', b'{"reward": "x"}', b'{"reward": null, "a": 1}'),
    ],
)
def test_other_rewards_are_rejected(text):
    with pytest.raises(ValueError, match=r"no finite reward|JSON|Expecting"):
        rewards(text)


def test_folders_of_splits_are_splits(tmp_path):
    for split, name in [("train", "a"), ("train", "deep/b"), ("test", "c")]:
        write_task(tmp_path / split / name)
    found = load(f"{tmp_path}?max_turns=7&network=false")
    assert found.splits == ("train", "test")
    assert [one["task"] for one in found.samples("train")] == ["a", "b"]
    assert (found.max_turns, found.network) == (7, False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"files": {"tests/test.sh": None}, "test": None}, "no tests/test.sh"),
        ({"settings": SETTINGS + "[[steps]]\nname = 'one'\n"}, "steps requires several steps"),
        ({"settings": SETTINGS + "gpus = 1\n"}, "GPUs"),
        ({"settings": SETTINGS + "network_mode = 'allowlist'\n"}, "network_mode = 'allowlist'"),
        (
            {"settings": SETTINGS.replace("[verifier]", '[verifier]\nenvironment_mode = "separate"')},
            "verifier.environment_mode requires an environment of its own for the tests",
        ),
        (
            {"settings": SETTINGS + "[verifier.environment]\ncpus = 2\n"},
            "verifier.environment requires an environment of its own for the tests",
        ),
        (
            {"settings": SETTINGS + "[[verifier.collect]]\ncommand = 'git diff >/logs/artifacts/patch'\n"},
            "verifier.collect = [{'command':",
        ),
        ({"settings": 'artifacts = ["/app/out"]\n' + SETTINGS}, "artifacts requires files"),
        ({"settings": SETTINGS + "skills_dir = '/skills'\n"}, "environment.skills_dir = '/skills' is not"),
        ({"settings": SETTINGS + "os = 'windows'\n"}, "environment.os = 'windows' is not supported"),
        (
            {"settings": SETTINGS + "workdir = 'shop'\n"},
            "environment.workdir = 'shop' is not an absolute path",
        ),
        (
            {"settings": SETTINGS.replace("= false", "= 'no'")},
            "allow_internet = 'no' is neither true nor false",
        ),
        ({"settings": "shuffle_tests = true\n" + SETTINGS}, "shuffle_tests = True is not supported"),
        (
            {"settings": SETTINGS.replace("[verifier]", "network_mode = 'allowlist'\n[verifier]")},
            "agent.network_mode = 'allowlist' is not supported",
        ),
        ({"files": {"tests/Dockerfile": "FROM scratch"}}, "tests/Dockerfile requires an image of its own"),
        ({"files": {"environment/docker-compose.yaml": "services: {}"}}, "several containers"),
        ({"settings": "this is not TOML"}, "cannot read it"),
        ({"settings": SETTINGS.replace("cpus = 1", "cpus = -1")}, "cpus = -1 is not a positive number"),
        ({"settings": SETTINGS.replace('"256M"', '"much"')}, "'much' is not a size"),
        ({"settings": "[verifier]\nenv = ['UNIT=cm']\n"}, "task.toml: 'list' object"),
        ({"settings": "[environment]\nmemory_mb = inf\n"}, "cannot convert float infinity"),
        (
            {"settings": SETTINGS.replace('"cm"', '"${NO_SUCH_UNIT}"')},
            "needs the environment variable NO_SUCH_UNIT",
        ),
    ],
)
def test_unsupported_task_is_omitted_with_the_reason(tmp_path, caplog, change, reason):
    write_task(tmp_path / "bad", **change)
    with pytest.raises(TargetError, match="nothing to serve") as error:
        load(str(tmp_path))
    assert reason in str(error.value)
    write_task(tmp_path / "good")
    assert load(str(tmp_path)).samples("train") == [{"task": "good"}]
    assert reason in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        {"settings": SETTINGS.replace("[verifier]", '[verifier]\nenvironment_mode = "separate"')},
        {"files": {"tests/Dockerfile": "FROM scratch"}},
        {"settings": 'artifacts = ["/app/out"]\n' + SETTINGS},
    ],
)
def test_task_with_tests_in_an_environment_of_their_own_is_left_to_harbor(tmp_path, caplog, change):
    write_task(tmp_path / "separate", **change)
    write_task(tmp_path / "shared")
    assert load(str(tmp_path)).samples("train") == [{"task": "shared"}]
    (warning,) = caplog.messages
    assert str(tmp_path / "separate") in warning
    assert warning.endswith("which is not supported; play this task with Harbor itself")


@pytest.mark.parametrize("target", ["no/such/folder", "?x=1", "{}?turns=3", "{}?max_turns=0", "{}"])
def test_target_without_task_folders_is_rejected(tmp_path, target):
    with pytest.raises(TargetError, match="harbor:"):
        load(target.format(tmp_path))


def test_health_check_and_user_are_read(tmp_path):
    check = "[environment.healthcheck]\ncommand = 'true'\nretries = 2\ninterval_sec = 1\n"
    settings = SETTINGS.replace("timeout_sec = 120.0", "timeout_sec = 120.0\nuser = 'model'", 1) + check
    image = {"environment/Dockerfile": "FROM scratch\n"}
    task = HarborTask.read(write_task(tmp_path / "plank", settings=settings, files=image))
    assert (task.user, task.check.command, task.check_s) == ("model", "true", 62.0)
    with pytest.raises(Unusable, match="requires an image"):
        HarborTask.read(write_task(tmp_path / "plain", settings=settings))
    bad = write_task(tmp_path / "bad", settings=settings.replace("command = 'true'", ""), files=image)
    with pytest.raises(Unusable, match="command"):
        HarborTask.read(bad)


@needs_bubblewrap
async def test_failed_health_check_fails_the_session(tmp_path):
    check = "[environment.healthcheck]\ncommand = 'echo no disk; exit 1'\nretries = 2\ninterval_sec = 0\n"
    write_task(tmp_path / "plank", settings=SETTINGS + check)
    async with EnvClient.local(f"harbor:{tmp_path}") as client:
        with pytest.raises(EnvironmentFailed, match="health check of the machine failed: no disk"):
            await client.open()


def test_settings_are_read(tmp_path, monkeypatch):
    monkeypatch.setenv("UNIT_OF_LENGTH", "inch")
    settings = SETTINGS.replace('"cm"', '"${UNIT_OF_LENGTH}"').replace('memory = "256M"', "memory_mb = 512")
    task = HarborTask.read(write_task(tmp_path / "plank", settings=settings))
    assert (task.memory, task.disk, task.network) == (512 << 20, 128 << 20, False)
    assert HarborTask.read(write_task(tmp_path / "open", settings=SETTINGS.replace("false", "true"))).network
    assert (task.agent_s, task.verifier_s, task.verifier_env) == (120.0, 100.0, {"UNIT": "inch"})
    assert task.image is None
    assert not task.needs_image
    assert json.dumps(task.files("environment")["plank.txt"].decode()) == '"12 cm\\n"'
