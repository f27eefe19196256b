"""The account of the fault runs finds every error and reports nothing else."""

import random
from dataclasses import replace

import pytest

from tests.chaos.account import Line, Step, left_open, opened_twice, read_ledgers, settle
from tests.chaos.faults import draw
from tests.chaos.proxy import Proxy


def told(nonce: str, seq: int = 1, outcome: str = "answered", text: str | None = None) -> Step:
    text = f"k {seq} {nonce}" if text is None else text
    return Step(nonce=nonce, session_id="s", seq=seq, outcome=outcome, text=text)


def done(nonce: str, count: int = 1, key: str = "k") -> Line:
    return Line(at=1.0, pid=7, what="step", key=key, words=(str(count), nonce))


def test_answered_steps_and_reported_losses_are_not_findings():
    steps = [told("a"), told("b", 2), told("c", 3, "SessionLost"), told("d", 4, "CallTimeout")]
    account = settle(steps, [done("a"), done("b", 2), done("c", 3)])
    assert (account.steps, account.applied_twice, account.lost_silently) == (2, 0, 0)
    assert account.reported == {"SessionLost": 1, "CallTimeout": 1}
    assert account.notes == []


def test_step_applied_twice_is_found_for_any_outcome():
    lines = [done("a"), done("a", 2), done("b"), done("b", 1, "other")]
    account = settle([told("a"), told("b", 1, "SessionLost")], lines)
    assert (account.applied_twice, account.lost_silently) == (2, 0)


@pytest.mark.parametrize(
    ("step", "lines"),
    [
        (told("a"), []),
        (told("a", text="k 1 b"), [done("a")]),
        (told("a", 2), [done("a", 1)]),
        (told("a", 2, text="k 1 a"), [done("a", 1)]),
        (told("a", outcome="ServerFull"), [done("a")]),
        (told("a", outcome="SeqConflict"), []),
        (told("a"), [done("a"), done("nobody", 2)]),
    ],
    ids=["invented", "shifted", "elsewhere", "behind", "denied", "forgotten", "unasked"],
)
def test_silent_loss_is_found(step, lines):
    account = settle([step], lines)
    assert account.lost_silently == 1
    assert len(account.notes) == 1


def test_leaked_sessions_and_duplicate_openings_are_found():
    first = Line(at=1.0, pid=7, what="open", key="k", words=("name",))
    second = Line(at=2.0, pid=8, what="open", key="l", words=("name",))
    closing = Line(at=5.0, pid=7, what="close", key="k")
    assert left_open([first, second, closing], frozenset()) == [second]
    assert left_open([first, second, closing], frozenset({8})) == []
    assert opened_twice([first, second, closing], frozenset(), patience_s=2.0) == ["name"]
    assert opened_twice([first, second, closing], frozenset(), patience_s=4.0) == []
    assert opened_twice([first, second], frozenset({7}), patience_s=0.0) == []
    late = Line(at=second.at + 0.1, pid=second.pid, what="close", key=second.key)
    assert opened_twice([first, second, late, closing], frozenset(), patience_s=1.0) == []
    assert opened_twice([replace(first, words=("-",)), second], frozenset(), patience_s=0.0) == []


def test_ledgers_are_merged_by_time(tmp_path):
    (tmp_path / "7.ledger").write_text("2.0 step k 1 a\n")
    (tmp_path / "8.ledger").write_text("1.0 open l name\n3.0 close l\n")
    assert [(line.pid, line.what, line.words) for line in read_ledgers(tmp_path)] == [
        (8, "open", ("name",)),
        (7, "step", ("1", "a")),
        (8, "close", ()),
    ]


def test_faults_are_a_function_of_the_seed():
    assert list(draw(1, 60)) == list(draw(1, 60))
    assert list(draw(1, 60)) != list(draw(2, 60))
    assert list(draw(1, 60)) == [fault for fault in draw(1, 120) if fault.at < 60]


async def test_cut_of_a_stopped_proxy_does_nothing():
    proxy = Proxy(1)
    proxy.cut(random.Random(0), 1.0)
    await proxy.stop()


def test_steps_after_the_last_answer_of_a_resumed_session_count_as_undone():
    went_on = Line(at=2.0, pid=8, what="restore", key="l", words=("k", "1"))
    lines = [done("a"), done("b", 2), went_on, done("b", 2, "l"), done("c", 3, "l")]
    steps = [told("a"), told("b", 2, text="l 2 b"), told("c", 3, text="l 3 c")]
    account = settle(steps, lines, resumed=True)
    assert (account.steps, account.moved, account.undone, account.notes) == (3, 1, 1, [])
    assert settle(steps, lines).applied_twice == 1
    undone = [told("a"), told("b", 2), told("c", 3, text="l 3 c")]
    assert settle(undone, lines, resumed=True).lost_silently == 1
    twice = settle(steps, [*lines, done("b", 2, "l")], resumed=True)
    assert twice.applied_twice == 1
