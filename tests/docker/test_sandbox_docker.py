"""Container sandboxes with a real daemon: isolation, limits, cleanup."""

import os
import subprocess
import sys
import tarfile
import threading

import pytest

from agentrl_env.errors import LaunchError, SandboxFailed, SandboxUnavailable
from agentrl_env.launch.docker import DockerServer
from agentrl_env.sandbox import HOME, open_sandbox
from agentrl_env.sandbox.bubblewrap import check_available
from agentrl_env.sandbox.docker import DockerSandbox
from tests.docker.conftest import ROOT
from tests.processes import until

KERNEL_MEMORY = (
    "echo 0 >/proc/self/oom_score_adj; for i in 1 2 3 4 5 6 7 8; do python3 -S -c '"
    "import socket; pairs = [socket.socketpair() for _ in range(500)]; "
    "[(a.setblocking(False), a.send(bytes(100000))) for a, b in pairs]' & done; wait"
)
"""Kernel memory that is charged to no process, held by small processes."""


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


def until_none(client):
    until(lambda: not containers(client), "no container is left")


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
        ("python3 -c 'x = bytearray(10**9)'", "memory"),
        ("python3 -c 'x = bytearray(10**9)'; echo still here", "memory"),
        ("kill -9 $$", None),
        ("for i in $(seq 1000); do sleep 1000 & done; wait", "any"),
        (KERNEL_MEMORY, "any"),
        ("for i in $(seq 64); do ipcmk -M 1048576; ipcmk -Q; ipcmk -S 32; done", None),
    ],
)
def test_sandbox_stays_usable_after_an_attack(box, command, killed_by):
    done = box.run(command, timeout=2.0 if killed_by == "timeout" else 20.0)
    if killed_by != "any":
        assert done.killed_by == killed_by
    if killed_by == "memory":
        assert done.note == "killed: out of memory, the limit is 64 MiB, files included"
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


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("socket(40, 1, 0)", "EAFNOSUPPORT"),  # AF_VSOCK
        ("socket(17, 3, 0)", "EAFNOSUPPORT"),  # AF_PACKET
        ("socket(38, 5, 0)", "EAFNOSUPPORT"),  # AF_ALG
        ("syscall(425, 1, bytes(120))", "EPERM"),  # io_uring_setup
        ("unshare(0x10000000)", "EPERM"),
        ("syscall(435, 0, 0)", "ENOSYS"),  # clone3
        ("syscall(56, 0x10000011, 0, 0, 0, 0)", "EPERM"),  # clone, in a new user namespace
        ("ptrace(0, 0, 0, 0)", "EPERM"),
        ("shmget(0, 16 << 20, 0o1600)", "ENOSPC"),
    ],
)
def test_system_calls_that_bubblewrap_denies_are_denied(box, call, error):
    code = "import ctypes, errno\nc = ctypes.CDLL(None, use_errno=True)\n"
    code += f"print(c.{call}, errno.errorcode[ctypes.get_errno()])"
    assert box.run(["python3", "-c", code]).stdout == f"-1 {error}\n"


@pytest.mark.parametrize("cwd", ["nowhere", "notes.txt", "a\0b"])
def test_command_without_its_folder_is_a_result(box, cwd):
    assert box.run("true", cwd=cwd).code not in (0, None)
    assert box.run("cat notes.txt").stdout == "buy milk\n"


def test_sandbox_ended_by_its_commands_returns_results_and_no_failure(client, box):
    box._kill_container("timeout")
    until_none(client)
    for _ in range(2):
        assert "the sandbox has ended" in box.run("true").note
    with pytest.raises(OSError, match="which ended the sandbox"):
        box.read("notes.txt")
    assert not box.alive


def test_limits_that_the_daemon_discards_are_rejected(client, base, monkeypatch, caplog):
    inspect = type(client.api).inspect_container

    def discarding(self, container):  # the answer of a daemon without cgroups
        found = inspect(self, container)
        found["HostConfig"].update(Memory=0, PidsLimit=None)
        return found

    monkeypatch.setattr(type(client.api), "inspect_container", discarding)
    with pytest.raises(SandboxFailed, match=r"limits of memory, processes; .*limits='best_effort'"):
        open_sandbox(image=base)
    with pytest.raises(LaunchError, match="limits of memory, processes; start the daemon with cgroups"):
        DockerServer(image=base).start()
    assert not containers(client)
    with open_sandbox(image=base, limits="best_effort") as box:
        assert box.run("echo x").stdout == "x\n"
    assert "best effort" in caplog.text


def test_files_are_written_and_read_and_symlinks_stay_inside(box):
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


@pytest.mark.parametrize("attempt", range(5))
def test_command_that_an_ending_container_does_not_run_raises_sandbox_failed(client, box, attempt):
    def run_until_it_fails():
        while True:
            result = box.run("echo 1")
            assert (result.code, result.stdout) == (0, "1\n")

    killer = threading.Thread(target=client.api.kill, args=(box._id,))
    killer.start()
    with pytest.raises(SandboxFailed):
        run_until_it_fails()
    killer.join()


def test_command_that_cannot_start_has_a_result(box):
    assert box.run("echo 1", cwd="/missing").code == 126
    assert box.run("echo 1").stdout == "1\n"


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


IN_A_CONTAINER = """
import logging, os, sys
sys.path.insert(0, {root!r})
from agentrl_env.errors import SandboxFailed, SandboxUnavailable
from agentrl_env.sandbox import open_sandbox
logging.basicConfig(stream=sys.stdout)
if {user}:
    import numpy.random  # an ordinary user may not be able to read root's Python
    os.setgroups([]), os.setgid({user}), os.setuid({user})
try:
    open_sandbox()
except (SandboxFailed, SandboxUnavailable) as error:
    print(type(error).__name__, error)
try:
    with open_sandbox(memory="96m", disk="16m", limits="best_effort") as box:
        hog = "python3 -c 'import time; x = bytearray(60 << 20); time.sleep(100)'"
        print(box.run(f"for i in 1 2 3 4; do {{hog}} & done; wait", timeout=60).text)
except SandboxUnavailable as error:
    print(error)
"""


@pytest.mark.parametrize("user", [0, 65534])
@pytest.mark.parametrize("nested", [True, False])
def test_bubblewrap_in_a_container_is_refused_or_logs_its_limits(client, base, user, nested):
    try:
        check_available()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    prefixes = {"/usr", str(ROOT), sys.prefix, os.path.realpath(sys.base_prefix)}
    options = {
        "network_mode": "none",
        "binds": [f"{folder}:{folder}:ro" for folder in prefixes],
        "security_opt": ["seccomp=unconfined", "apparmor=unconfined"] if nested else [],
    }
    host = client.api.create_host_config(**options)
    if nested:  # a container that can create namespaces but has no writable cgroup
        host.update(MaskedPaths=[], ReadonlyPaths=[])
    code = IN_A_CONTAINER.format(root=str(ROOT), user=user)
    made = client.api.create_container(base, [sys.executable, "-c", code], host_config=host)
    try:
        client.api.start(made)
        client.api.wait(made, timeout=120)
        output = client.api.logs(made).decode()
    finally:
        client.api.remove_container(made, force=True, v=True)
    if nested:
        assert "SandboxFailed this process may not create cgroups" in output, output
        assert output.count("sandbox limits are best effort") == 1
        assert "out of memory, the limit is 96 MiB" in output
    else:
        assert output.count("bubblewrap cannot be used") == 2
        assert "best effort" not in output


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
