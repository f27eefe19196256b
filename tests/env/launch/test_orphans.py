"""Whose a leftover is, and numbers of bytes as people write them."""

import os
import subprocess

import pytest

from agentrl_env.launch.orphans import owner, owner_is_dead
from agentrl_env.launch.placement import Limits
from agentrl_env.launch.units import parse_size
from agentrl_env.sandbox import open_sandbox


def test_an_owner_is_alive_dead_or_of_elsewhere():
    assert owner_is_dead(owner()) is False
    with subprocess.Popen(["sleep", "60"]) as process:
        mark = owner(process.pid)
        assert owner_is_dead(mark) is False
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet reaped
        assert owner_is_dead(mark) is True
        assert owner(process.pid) == ""
    assert owner_is_dead(mark) is True


@pytest.mark.parametrize("name", ["", "-1-1", "0123456789ab-1-1", "another-boot/pid[1]:1:1"])
def test_of_an_owner_of_elsewhere_nobody_can_tell(name):
    assert owner_is_dead(name) is None


def test_a_number_that_is_used_again_is_another_owner():
    place, pid, began = owner().split("-")
    assert owner_is_dead(f"{place}-{pid}-{int(began) - 1}") is True


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (65536, 65536),
        ("65536", 65536),
        ("64m", 64 << 20),
        (" 64 MB ", 64 << 20),
        ("1.5g", 3 << 29),
        ("2GiB", 2 << 30),
        ("1t", 1 << 40),
        ("0.5k", 512),
    ],
)
def test_a_size_means_bytes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "m", "-1m", "1e9", "2 gigs", "1.m", "٣m", "1mm"])
def test_what_is_no_size_is_refused_in_one_sentence_everywhere(text):
    for read in (parse_size, lambda size: Limits(memory=size), lambda size: open_sandbox(memory=size)):
        with pytest.raises(ValueError, match="is no size; write bytes, or a number with k, m, g or t"):
            read(text)


def test_containers_and_sandboxes_read_the_same_sizes():
    assert Limits(memory="1.5 GiB").memory == parse_size("1.5 GiB")
    with open_sandbox("unsafe", memory="0.0625g", disk="16MiB", allow_unsafe=True) as box:
        assert (box.limits.memory, box.limits.disk) == (64 << 20, 16 << 20)
