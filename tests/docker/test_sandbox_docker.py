"""Container sandboxes with a real daemon: isolation, limits, cleanup."""

import os
import subprocess
import sys
import tarfile
import threading
import time

import pytest

from agentrl_env.errors import SandboxFailed, SandboxUnavailable
from agentrl_env.sandbox import HOME, open_sandbox
from agentrl_env.sandbox.bubblewrap import check_available
from agentrl_env.sandbox.docker import DockerSandbox


@pytest.fixture
def box(base):
    with open_sandbox(
        image=base, memory="64m", disk="16m", pids=32, timeout=5.0, files={"notes.txt": "buy milk\n"}
    ) as box:
        assert isinstance(box, DockerSandbox)
        yield box


def containers(client):
    label = {"label": "org.agentrl.owner"}
    return [c.id for c in client.containers.list(all=True, filters=label, ignore_removed=True)]


def until_none(client, seconds=30.0):
    end = time.monotonic() + seconds
    while containers(client):
        assert time.monotonic() < end, "a container is left"
        time.sleep(0.05)


def test_output_of_a_quick_command_is_never_lost(box):
    assert {box.run("pwd").stdout for _ in range(40)} == {f"{HOME}\n"}


def test_commands_have_streams_and_persistent_files(box):
    done = box.run("wc -w <notes.txt; cat; echo err >&2; exit 3", stdin="hello\n", env={"COLOUR": "red"})
    assert (done.code, done.stdout, done.stderr) == (3, "2\nhello\n", "err\n")
    assert box.run(["echo", "$HOME;", "ls"]).stdout == "$HOME; ls\n"
    assert box.run("echo 1 >x; pwd").stdout == f"{HOME}\n"
    assert box.run("cat x").stdout == "1\n"
    assert box.run("cat | wc -c", stdin=b"x" * (4 << 20)).stdout == f"{4 << 20}\n"
    assert box.run("\0").code == 126
    assert box.run(["no-such-program"]).code == 127


@pytest.mark.parametrize(
    ("command", "killed_by"),
    [
        ("echo begun; trap '' TERM; sleep 1000 & sleep 1000", "timeout"),
        ("yes", "output"),
        ("cat /dev/zero", "output"),
        ("bash -c ':(){ :|:& };:'", None),
        ("dd if=/dev/zero of=big bs=1M", None),
        ("dd if=/dev/zero of=/tmp/big bs=1M", None),
        ("kill -9 1; kill -9 -1", None),
        ("sleep 1e9 & setsid sleep 1e9 &", None),
        ("python3 -c 'x = bytearray(10**9)'", "any"),
    ],
)
def test_sandbox_stays_usable_after_an_attack(box, command, killed_by):
    done = box.run(command, timeout=2.0 if killed_by == "timeout" else 20.0)
    if killed_by == "any":
        assert done.code == 137
    else:
        assert done.killed_by == killed_by
    assert box.run("rm -f big /tmp/big; cat notes.txt").stdout == "buy milk\n"
    assert int(box.run("ls /proc | grep -c '^[0-9]'").stdout) <= 7
    assert box.alive


def test_server_and_other_sandboxes_are_invisible(box, base, monkeypatch):
    monkeypatch.setenv("AGENTRL_TOKEN", "s3cret")
    with open_sandbox(image=base, memory="64m", disk="16m") as other:
        box.run("echo mine >/tmp/mine")
        assert other.run("cat /tmp/mine notes.txt").stdout == ""
        assert "s3cret" not in other.run("env; cat /proc/*/environ").stdout
        assert other.run("id -u; cat /proc/net/dev | grep -c :").stdout == "1000\n1\n"
        status = other.run("grep -E 'CapEff|CapBnd|NoNewPrivs|Seccomp:' /proc/self/status").stdout.split()
        assert status == ["CapEff:", "0" * 16, "CapBnd:", "0" * 16, "NoNewPrivs:", "1", "Seccomp:", "2"]
        assert "Read-only" in other.run("touch /usr/x /x /etc/x").stderr


def test_files_are_written_and_read_and_symlinks_do_not_lead_out(box):
    box.write("deep/er/x", b"\xff\0")
    assert box.read("deep/er/x", limit=1) == b"\xff"
    box.run("mkfifo pipe; ln -s /etc/shadow link")
    for path, error in [("nope", FileNotFoundError), ("pipe", OSError), ("link", OSError), (".", OSError)]:
        with pytest.raises(error):
            box.read(path)
    for path in ("pipe", ".", "/usr/x"):
        with pytest.raises(OSError, match=r"\S"):
            box.write(path, "x")


def test_snapshot_is_restored(box, base):
    box.run("mkdir d; echo 1 >d/x; ln -s d/x link; echo 2 >/tmp/y; chmod 600 d/x")
    with open_sandbox(image=base, memory="64m", disk="16m") as twin:
        twin.restore(box.snapshot())
        look = "ls -lR --time-style=+ .; cat link /tmp/y"
        assert twin.run(look).stdout == box.run(look).stdout


def test_close_removes_the_container_and_ends_commands(client, box):
    errors = []

    def wait():
        try:
            box.run("sleep 1000", timeout=60)
        except SandboxFailed as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    box.close()
    box.close()
    thread.join(30)
    assert not thread.is_alive()
    until_none(client)
    assert not box.alive
    with pytest.raises(SandboxFailed, match="closed"):
        box.run("true")


def test_removed_container_raises_sandbox_failed(client, box):
    client.api.remove_container(box._id, force=True)
    assert not box.alive
    with pytest.raises(SandboxFailed, match="Docker says"):
        box.run("true")


def test_container_ends_with_a_killed_owner(client, base):
    code = f"""
from agentrl_env.sandbox import open_sandbox
box = open_sandbox(image={base!r}, background=True)
box.run("sleep 1000 >/dev/null 2>&1 &")
print("begun", flush=True)
box.run("sleep 1000", timeout=1000)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "begun\n"
        assert containers(client)
        process.kill()
    until_none(client)


def test_missing_image_is_a_clear_error(base):
    with pytest.raises(SandboxUnavailable, match=r"no image 'no-such:image' on this machine"):
        open_sandbox("docker", image="no-such:image")


def test_missing_daemon_is_a_clear_error(base, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    with pytest.raises(SandboxUnavailable, match="no Docker daemon answers"):
        open_sandbox("docker", image=base)


def test_unpacked_image_is_a_root_folder_for_bubblewrap(client, base, tmp_path):
    try:
        check_available()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    container = client.containers.create(base)
    pieces, root = container.export(), tmp_path / "root"
    with (tmp_path / "root.tar").open("wb") as archive:
        for piece in pieces:
            archive.write(piece)
    container.remove()
    with tarfile.open(tmp_path / "root.tar") as tar:
        tar.extractall(root, filter="tar")
    (root / "only-here").write_text("mine")
    for folder in (tmp_path, *tmp_path.parents):
        if str(folder).startswith("/tmp/"):
            os.chmod(folder, 0o755)
    with open_sandbox("bubblewrap", image=str(root), files={"x": "1"}) as box:
        assert (
            box.run("cat /only-here x; touch /opt2 /usr2; rm -f /only-here; ls / | grep -c 2").stdout
            == "mine12\n"
        )
        state = box.snapshot()
        assert (root / "only-here").exists()
        with open_sandbox("bubblewrap", image=str(root)) as twin:
            twin.restore(state)
            assert twin.run("ls /only-here /opt2; cat x").stdout == "/opt2\n1"
