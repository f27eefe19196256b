"""The account of the attacks: its format, and its counts of findings."""

import json
import logging
import signal
from dataclasses import replace

import pytest

from agentrl_env.errors import CallTimeout
from tests.hostile import __main__ as program
from tests.hostile import framing
from tests.hostile.account import COUNTS, Account
from tests.hostile.agents import Reader
from tests.hostile.run import KINDS, run
from tests.hostile.site import Kind
from tests.hostile.tokens import refused

QUICK = replace(
    framing.KIND, name="quick", sites=("single",), attacks={"inside": framing.KIND.attacks["inside"]}
)


async def permitted(ground):
    async with ground.vaults() as (victim,):
        headers = [("authorization", f"Bearer {ground.site.token}")]
        await refused(ground, victim, headers, "the operator's token")


async def smuggled(ground):
    await framing.smuggle({"two requests": framing.INNER * 2})(ground)


async def read(ground):
    async with ground.vaults(2) as (own, other):
        shown = await ground.ask("GET", f"/v1/sessions/{own.id}", token=ground.site.token)
        Reader(ground, own, [other]).read(shown.content, "the operator's answer")


async def killed(ground):
    ready = ground.site.part("server").times_ready()
    ground.site.part("server").send(signal.SIGKILL)
    await ground.site.part("server").until_ready(ready + 1)


async def logged(ground):
    with ground.site.part("server").log.open("a") as log:
        log.write("Traceback (most recent call last):\n  File\nValueError: planted\n")


async def silent(ground):
    raise CallTimeout("an honest call was not answered")


PLANTED = {
    "permitted": (permitted, "breaches"),
    "smuggled": (smuggled, "breaches"),
    "read": (read, "answers_read"),
    "killed": (killed, "neighbours_lost"),
    "logged": (logged, "uncaught"),
    "silent": (silent, "hung"),
}


@pytest.mark.slow
async def test_planted_failures_are_counted():
    account = Account(7, quiet=True)
    kinds = [
        Kind(name=name, lane="planted", sites=("single",), share=1, attacks={name: attack})
        for name, (attack, _) in PLANTED.items()
    ]
    await run(account, 0.0, kinds)
    report = account.report()
    assert account.failed
    for name, (_, count) in PLANTED.items():
        assert report["by_kind"][name].get(count), (name, report)


@pytest.mark.extended
@pytest.mark.slow
def test_program_prints_one_account(monkeypatch, capsys):
    monkeypatch.setattr(program, "KINDS", (QUICK,))
    level = logging.getLogger().level
    try:
        assert program.main(["--seed", "3", "--seconds", "0", "--only", "quick"]) == 0
    finally:
        logging.getLogger().setLevel(level)
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert out.count("\n") == 1
    assert report["seed"] == 3
    assert report["attacks"] == 1
    assert report["neighbours_played"] > 0
    assert {count: report[count] for count in COUNTS} == dict.fromkeys(COUNTS, 0)
    assert report["by_kind"] == {"quick": {"attacks": 1}}
    assert report["skipped"] == {}
    assert "started single" in err


def test_run_without_neighbours_fails():
    assert Account(1).failed


def test_findings_name_the_run(capsys):
    account = Account(5)
    for _ in range(20):
        account.find("breaches", "a door\nis open", "doors", "push on single")
    err = capsys.readouterr().err
    assert err.count("a door is open (python -m tests.hostile --seed 5 --only doors)") == 5
    report = account.report()
    assert report["by_kind"] == {"doors": {"attacks": 0, "breaches": 20}}
    assert [sentence.startswith("breaches: doors, push on single") for sentence in report["findings"]] == [
        True
    ] * 5
    with pytest.raises(AssertionError):
        account.find("nothing", "", "", "")


def test_kinds_and_attacks_have_names():
    names = [kind.name for kind in KINDS]
    assert len(set(names)) == len(names)
    assert all(kind.attacks and kind.sites for kind in KINDS)
