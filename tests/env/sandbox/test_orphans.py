"""Process identities and sizes given as text."""

import os
import subprocess

import pytest

from agentrl_env.launch.docker import ContainerLimits
from agentrl_env.sandbox import open_sandbox
from agentrl_env.sandbox.orphans import is_dead, process_identity
from agentrl_env.sandbox.sandbox import parse_size


def test_identity_shows_if_its_process_is_alive():
    assert is_dead(process_identity()) is False
    with subprocess.Popen(["sleep", "60"]) as process:
        identity = process_identity(process.pid)
        assert is_dead(identity) is False
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet reaped
        assert is_dead(identity) is True
        assert process_identity(process.pid) == ""
    assert is_dead(identity) is True


@pytest.mark.parametrize("name", ["", "-1-1", "0123456789ab-1-1", "another-boot/pid[1]:1:1"])
def test_foreign_or_malformed_identity_is_unknown(name):
    assert is_dead(name) is None


def test_reused_pid_is_another_identity():
    place, pid, began = process_identity().split("-")
    assert is_dead(f"{place}-{pid}-{int(began) - 1}") is True


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
def test_size_is_parsed_as_bytes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "m", "-1m", "1e9", "2 gigs", "1.m", "٣m", "1mm"])
def test_invalid_size_is_rejected_everywhere(text):
    for read in (
        parse_size,
        lambda size: ContainerLimits(memory=size),
        lambda size: open_sandbox(memory=size),
    ):
        with pytest.raises(ValueError, match="is not a size; write bytes, or a number with k, m, g or t"):
            read(text)


def test_containers_and_sandboxes_parse_the_same_sizes():
    assert ContainerLimits(memory="1.5 GiB").memory == parse_size("1.5 GiB")
    with open_sandbox("unsafe", memory="0.0625g", disk="16MiB", allow_unsafe=True) as box:
        assert (box.limits.memory, box.limits.disk) == (64 << 20, 16 << 20)
