"""Sandboxes in real bubblewrap: commands, limits, isolation, files, snapshots, cleanup."""

import asyncio
import gc
import io
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl_env import sandbox
from agentrl_env.errors import SandboxFailed, SandboxUnavailable
from agentrl_env.sandbox import HOME, cgroups, open_sandbox, seccomp
from agentrl_env.sandbox.bubblewrap import check_available
from agentrl_env.sandbox.orphans import PREFIX, is_orphan, resource_name
from agentrl_env.sandbox.sandbox import Stream, absolute, as_text, tar_archive
from tests.processes import alive, until, until_dead

try:
    check_available()
    REASON = ""
except SandboxUnavailable as error:
    REASON = str(error)
needs_bubblewrap = pytest.mark.skipif(bool(REASON), reason=REASON or "bubblewrap works")


def small(**options):
    return open_sandbox(
        "bubblewrap", **{"memory": "64m", "disk": "16m", "pids": 32, "timeout": 5.0, **options}
    )


@pytest.fixture(scope="module")
def box():
    """Share one sandbox between tests that do not change it."""
    with small(files={"notes.txt": "buy milk\n", "a/b.txt": b"\xff"}) as box:
        yield box


@pytest.fixture
def own():
    with small() as box:
        yield box


def processes(box):
    """Return the host pids of a sandbox: its monitor and all descendants."""
    children = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, new = set(), [box._process.pid]
    while new:
        found.update(new)
        new = [child for parent in new for child in children.get(parent, [])]
    return found


def groups():
    """Return the existing cgroups of this process."""
    return {f for base in set(cgroups.find().values()) for f in base.glob(f"{PREFIX}*-{os.getpid()}-*")}


@needs_bubblewrap
class TestCommands:
    def test_text_is_run_by_a_shell_and_a_list_is_not(self, box):
        assert box.run("cat notes.txt | wc -w").stdout == "2\n"
        assert box.run(["echo", "$HOME;", "ls"]).stdout == "$HOME; ls\n"

    def test_exit_code_and_streams_are_separate(self, box):
        done = box.run("echo out; echo err >&2; exit 3")
        assert (done.code, done.stdout, done.stderr) == (3, "out\n", "err\n")
        assert done.text == "out\nerr\n(exit code 3)"
        assert done.killed_by is None

    def test_stdin_cwd_and_env_are_passed(self, box):
        assert box.run("cat", stdin="hello" * 100_000, max_output=10**6).stdout == "hello" * 100_000
        assert box.run("pwd; echo $COLOUR", cwd="a", env={"COLOUR": "red"}).stdout == f"{HOME}/a\nred\n"

    def test_files_persist_between_commands_and_processes_do_not(self, own):
        own.run("echo 1 >x; sleep 1000 & echo $! >pid")
        assert own.run("cat x; kill -0 $(cat pid) || echo gone").stdout == "1\ngone\n"
        assert len(processes(own)) == 2

    def test_background_processes_keep_running(self):
        with small(background=True) as box:
            assert box.run("(sleep 0.2; echo late >x) & echo now").stdout == "now\n"
            assert box.run("until [ -s x ]; do sleep 0.02; done; cat x").stdout == "late\n"

    @pytest.mark.parametrize(
        ("command", "message"),
        [
            ("x" * 200_000, "Argument list too long"),
            ("\0", "null byte"),
            (["no-such-program"], "cannot run no-such-program: No such file"),
            ([], "cannot run nothing"),
            ([""], "cannot run"),
        ],
    )
    def test_command_that_cannot_start_is_a_result(self, box, command, message):
        done = box.run(command)
        assert message in done.stderr
        assert done.code in (126, 127)

    @pytest.mark.parametrize("command", ["echo \ud800", "printf '\\xff\\0'", "", " ", "'", "\n\t", "%s%n{}"])
    def test_output_of_unusual_commands_is_valid_unicode(self, box, command):
        box.run(command).text.encode()

    def test_cwd_must_be_a_folder(self, box):
        assert "Not a directory" in box.run("ls", cwd="notes.txt").stderr
        done = box.run("ls", cwd="a\0b")
        assert (done.code, "names no file" in done.note) == (126, True)

    async def test_arun_does_not_block_the_event_loop(self, box):
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        assert (await box.arun("sleep 0.2; echo x", timeout=60)).stdout == "x\n"
        ticking.cancel()
        assert ticks > 10

    def test_concurrent_commands_run_one_at_a_time(self, own):
        results = []
        threads = [
            threading.Thread(
                target=lambda i=i: results.append(own.run(f"echo {i}; sleep 0.05; echo {i}").stdout)
            )
            for i in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(results) == [f"{i}\n{i}\n" for i in range(8)]


@needs_bubblewrap
class TestLimits:
    """A command that exceeds a limit is killed with a note, and the sandbox stays usable."""

    @pytest.fixture(autouse=True)
    def _stays_usable(self, own):
        yield
        assert own.run("echo fine").stdout == "fine\n"
        assert own.alive
        assert len(processes(own)) == 2

    def test_command_is_killed_at_its_timeout(self, own):
        done = own.run("trap '' TERM; echo begun; sleep 1000 & sleep 1000", timeout=0.3)
        assert (done.timed_out, done.killed_by, done.stdout, done.code) == (True, "timeout", "begun\n", None)
        assert "(killed: it ran longer than 0.3 s)" in done.text

    @pytest.mark.parametrize("command", ["yes", "cat /dev/zero", "cat /dev/urandom >&2", "yes & yes >&2"])
    def test_command_with_endless_output_is_killed(self, own, command):
        done = own.run(command, timeout=60.0)
        assert done.killed_by == "output"
        assert 1000 < max(len(done.stdout), len(done.stderr)) <= own.limits.max_output
        assert "endless output" in done.text

    def test_long_output_is_truncated_without_killing_the_command(self, own):
        done = own.run("seq 200000; touch end; ls end >&2", max_output=100)
        assert (done.code, done.truncated, len(done.stdout), done.stderr) == (0, True, 100, "end\n")
        assert "the first 100 bytes are shown" in done.text

    def test_command_that_exceeds_memory_is_killed(self, own):
        done = own.run("python3 -c 'x = bytearray(10**9)'")
        assert done.code != 0
        if cgroups.find():
            assert done.killed_by == "memory"
            assert "out of memory, the limit is 64 MiB" in done.text

    def test_memory_of_all_processes_is_limited_together(self, own):
        if not cgroups.find():
            pytest.skip("cannot create cgroups, so the memory limit is per process")
        hog = "python3 -c 'import time; x = bytearray(20 << 20); time.sleep(100)'"
        done = own.run(f"for i in 1 2 3 4 5 6 7 8; do {hog} & done; wait -n; echo $?")
        assert done.killed_by == "memory"

    @pytest.mark.parametrize(
        "call", ["shmget(0, 1 << 20, 0o1600)", "msgget(0, 0o1600)", "semget(0, 1, 0o1600)"]
    )
    def test_no_memory_outlives_the_processes(self, own, call):
        code = f"import ctypes; print(ctypes.CDLL(None).{call})"
        assert own.run(["python3", "-c", code]).stdout == "-1\n"

    def test_commands_cannot_make_the_kernel_kill_the_supervisor_before_them(self, own):
        if not cgroups.find():
            pytest.skip("no cgroups can be created here")
        done = own.run("echo 0 >/proc/self/oom_score_adj; cat /proc/self/oom_score_adj /proc/1/oom_score_adj")
        assert (done.stdout, "Read-only" in done.stderr) == ("1000\n0\n", True)
        # Kernel memory that is charged to no process, held by processes smaller than the supervisor.
        holder = (
            "import os, socket\nos.system('echo 0 2>/dev/null >/proc/%d/oom_score_adj' % os.getpid())\n"
            "while os.fork() == 0: pass\npairs = []\n"
            "while True:\n    pairs.append(socket.socketpair())\n    pairs[-1][0].setblocking(False)\n"
            "    try:\n        while True: pairs[-1][0].send(bytes(4096))\n    except BlockingIOError: pass\n"
        )
        for _ in range(3):
            assert own.run(["python3", "-S", "-c", holder], timeout=20.0).killed_by in ("memory", "timeout")
            own.write("x", "1")
            assert own.read("x") == b"1"

    def test_number_of_processes_is_limited(self, own):
        done = own.run(":(){ :|:& };:")
        assert "fork" in done.stderr or done.code == 0
        assert len(processes(own)) == 2
        done = own.run("for i in $(seq 100); do sleep 100 & done; wait", timeout=1.0)
        assert done.killed_by == "timeout" or "fork" in done.stderr

    def test_threads_count_as_processes(self, own):
        start = "threading.Thread(target=time.sleep, args=(1,), daemon=True).start()"
        code = f"import threading, time\nfor i in range(100): {start}"
        assert "can't start new thread" in own.run(["python3", "-c", code]).stderr

    @pytest.mark.parametrize("place", [".", "/tmp", "/dev/shm", "/usr/local/bin", "/"])
    def test_size_of_all_files_is_limited(self, own, place):
        done = own.run(f"dd if=/dev/zero of={place}/big bs=1M")
        assert "No space left on device" in done.stderr
        with pytest.raises(OSError, match="No space left"):
            own.write("more", b"x" * (1 << 20))
        own.run(f"rm -f {place}/big more")

    def test_number_of_files_is_limited(self, own):
        assert "No space left" in own.run("mkdir d; cd d; seq 100000 | xargs touch; rm -rf ../d").stderr

    def test_processor_time_is_limited(self):
        if "cpu" not in cgroups.find():
            pytest.skip("no cpu cgroups can be created here")
        burn = "import time\nend = time.time() + 1\nwhile time.time() < end: pass\nprint(time.process_time())"
        with small(cpus=0.2) as box:
            assert float(box.run(["python3", "-c", burn]).stdout) < 0.6


STANDARD = ("boot", "media", "mnt", "opt", "root", "run", "srv", "sys", "var")
"""Top-level folders of every Linux machine that commands can write."""


@needs_bubblewrap
class TestIsolation:
    @pytest.mark.parametrize(
        "folder",
        [*STANDARD, "var/log", "var/lib", "var/cache", "var/spool", "var/tmp", "var/run", "run/lock"],
    )
    def test_standard_folders_are_writable_and_belong_to_one_sandbox(self, own, folder):
        own.run(f"mkdir /{folder}/new && echo mine >/{folder}/new/file")
        assert own.run(f"cat /{folder}/new/file").stdout == "mine\n"
        with small() as other:
            assert other.run(f"ls -d /{folder}; ls /{folder}/new").stdout == f"/{folder}\n"
            other.restore(own.snapshot())
            assert other.run(f"cat /{folder}/new/file").stdout == "mine\n"

    def test_file_has_one_path_and_layers_are_hidden(self, own):
        for path in (
            "here.marker",
            "/var/there.marker",
            "/usr/local/bin/local.marker",
            "/dev/shm/shared.marker",
        ):
            own.write(path, "x")
        search = "find / -name '*.marker' 2>/dev/null | LC_ALL=C sort"
        found = own.run(search, timeout=300.0).stdout.split()  # a cold disk is slow
        assert found == [
            "/dev/shm/shared.marker",
            f"{HOME}/here.marker",
            "/usr/local/bin/local.marker",
            "/var/there.marker",
        ]
        search = "find / -name '*layers*' -not -path '/usr/*' 2>/dev/null"
        assert own.run(search, timeout=300.0).stdout == ""
        descriptors = own.run(["python3", "-c", "import os; print(*os.listdir('/proc/self/fd'))"]).stdout
        assert set(descriptors.split()) <= {"0", "1", "2", "3"}
        assert own.run("ls /proc/self/fd/3/root /proc/1/fd/").code != 0

    def test_host_files_are_invisible(self, box):
        seen = set(box.run("ls -a /").stdout.split())
        linked = {"bin", "lib", "lib32", "lib64", "libx32", "sbin"}
        assert seen - linked == {".", "..", "dev", "etc", "home", "proc", "tmp", "usr"} | set(STANDARD)
        assert box.run("ls -a /home /tmp").stdout == "/home:\n.\n..\nagent\n\n/tmp:\n.\n..\n"
        assert box.run(["ls", str(Path(__file__).parent)]).code != 0
        assert box.run("cat /etc/shadow").code != 0

    def test_server_environment_is_invisible(self, box, monkeypatch):
        monkeypatch.setenv("AGENTRL_TOKEN", "s3cret")
        with small() as fresh:
            assert set(fresh.run("env | cut -d= -f1").stdout.split()) <= {
                *("HOME", "LANG", "PATH", "PWD", "SHLVL", "TMPDIR", "USER", "_", "OLDPWD")
            }
            assert "s3cret" not in fresh.run("cat /proc/*/environ /proc/*/cmdline").stdout

    def test_host_processes_are_invisible(self, box):
        assert int(box.run("ls /proc | grep -c '^[0-9]'").stdout) < 6

    def test_supervisor_can_be_neither_killed_nor_read(self, box):
        box.run("kill -9 1; kill -STOP 1; kill -TERM 1; kill -CHLD 1; kill -9 -1")
        done = box.run("cat /proc/1/mem /proc/1/environ; ls -l /proc/1/fd/; readlink /proc/1/cwd; echo alive")
        assert done.stdout.endswith("alive\n")
        assert done.stderr.count("Permission denied") >= 2

    def test_user_has_no_privileges(self, box):
        assert box.run("id -u; id -g").stdout == "1000\n1000\n"
        status = box.run("grep -E 'CapEff|CapBnd|NoNewPrivs|Seccomp:' /proc/self/status").stdout.split()
        assert status == ["CapEff:", "0" * 16, "CapBnd:", "0" * 16, "NoNewPrivs:", "1", "Seccomp:", "2"]
        assert os.stat(f"/proc/{box._process.pid}").st_uid != 0 or os.geteuid() != 0

    def test_setuid_programs_grant_no_privileges(self, box):
        found = box.run("find /usr/bin /usr/sbin -perm -4000 2>/dev/null | head -n 1").stdout.strip()
        assert "nosuid" in box.run("grep ' /usr ' /proc/self/mountinfo").stdout
        if found.endswith(("su", "sudo", "mount")):
            assert box.run([found, "-c", "id"]).code != 0

    @pytest.mark.parametrize(
        "command",
        [
            "unshare -Ur true",
            "mount -t tmpfs x /tmp",
            "umount /proc",
            "/usr/sbin/chroot / true",
            "mknod x b 254 0",
            "hostname x",
            "echo x >/proc/sys/kernel/core_pattern",
            "echo x >/proc/sysrq-trigger",
            "dmesg",
            "nsenter -t 1 -m true",
            "python3 -c 'import socket; socket.socket(40, socket.SOCK_STREAM)'",
            "python3 -c 'import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)'",
            "python3 -c 'import ctypes, sys; sys.exit(ctypes.CDLL(None).syscall(250, 0, 0) < 0)'",
        ],
    )
    def test_privileged_system_calls_are_denied(self, box, command):
        done = box.run(command)
        assert done.code not in (0, 127), done

    def test_network_is_unreachable_by_default(self, box):
        code = "import socket; socket.create_connection(({!r}, {}), 2)"
        server = subprocess.Popen(
            [sys.executable, "-m", "http.server", "0", "--bind", "127.0.0.1"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        with server:
            port = int(server.stdout.readline().split("port ")[1].split()[0])
            for address in ("127.0.0.1", "::1", "10.0.0.1", "1.1.1.1"):
                done = box.run(["python3", "-c", code.format(address, port)])
                assert "unreachable" in done.stderr or "refused" in done.stderr
            with small(network=True) as open_box:
                assert open_box.run(["python3", "-c", code.format("127.0.0.1", port)]).code == 0
            server.kill()
        assert box.run("cat /proc/net/dev").stdout.count(":") == 1

    def test_written_files_are_invisible_outside(self, own):
        own.run("echo mine >/usr/local/bin/of-a-sandbox; echo mine >/opt/x; echo mine >/tmp/of-a-sandbox")
        assert own.run("cat /usr/local/bin/of-a-sandbox /opt/x /tmp/of-a-sandbox").stdout == "mine\n" * 3
        assert not Path("/usr/local/bin/of-a-sandbox").exists()
        assert not Path("/tmp/of-a-sandbox").exists()
        with small() as other:
            assert other.run("cat /usr/local/bin/of-a-sandbox /opt/x /tmp/of-a-sandbox").stdout == ""

    def test_host_programs_are_read_only(self, box):
        assert "Read-only" in box.run("touch /usr/x").stderr
        assert "Read-only" in box.run("rm -f /usr/bin/env").stderr


@needs_bubblewrap
class TestFiles:
    def test_files_are_written_and_read(self, own):
        own.write("deep/er/x.txt", "text")
        own.write("/tmp/y", b"\xff\0")
        assert own.read("deep/er/x.txt") == b"text"
        assert own.read(f"{HOME}/../../tmp/y") == b"\xff\0"
        assert own.read("/tmp/y", limit=1) == b"\xff"
        assert own.run("cat deep/er/x.txt").stdout == "text"

    def test_write_all_writes_many_files(self, own):
        own.write_all({f"d{i % 3}/f{i}": str(i) for i in range(300)})
        assert own.run("cat d*/f* | wc -c").stdout == "790\n"
        assert own.read("d2/f299") == b"299"

    @pytest.mark.parametrize(
        ("path", "error"),
        [
            ("nope", FileNotFoundError),
            (".", IsADirectoryError),
            ("/dev/zero", OSError),
            ("pipe", OSError),
            ("loop", OSError),
            ("/proc/1/mem", PermissionError),
            ("/proc/1/environ", PermissionError),
            ("x" * 300, OSError),
            ("", OSError),
            ("\0", OSError),
            ("a\0b", OSError),
            ("\ud800", OSError),
        ],
    )
    def test_invalid_paths_raise(self, own, path, error):
        own.run("mkfifo pipe; ln -s loop loop")
        with pytest.raises(error):
            own.read(path)
        with pytest.raises(OSError, match=r"\S"):
            own.write(path if error is not FileNotFoundError else ".", "x")

    def test_symlinks_do_not_lead_out_of_the_sandbox(self, own):
        secret = Path("/tmp", resource_name().replace("sandbox", "secret"))
        secret.write_text("s3cret")
        try:
            own.run(f"ln -s {secret} link; ln -s / root; ln -s ../../../../.. up; ln -s /proc/1/root proc")
            for path in ("link", f"root{secret}", f"up{secret}", f"../../..{secret}", f"proc{secret}"):
                with pytest.raises(OSError, match=r"No such file|denied"):
                    own.read(path)
            own.write("link", "mine")
            own.write(f"root{secret}-2", "mine")
            assert secret.read_text() == "s3cret"
            assert not Path(f"{secret}-2").exists()
        finally:
            secret.unlink()

    def test_read_is_independent_of_replaced_programs(self, own):
        own.write("x", "true")
        own.run("printf '#!/bin/sh\\necho forged\\n' >/usr/local/bin/cat; chmod +x /usr/local/bin/cat")
        assert own.run("cat x").stdout == "forged\n"
        assert own.read("x") == b"true"


@needs_bubblewrap
def test_snapshot_contains_changes_and_deletions(own):
    lower = next(e.name for e in Path("/usr/local").iterdir() if e.is_dir() and not e.is_symlink())
    own.write_all({"a/x": "1", "/opt/y": "2"})
    own.run(
        "ln -s a/x link; ln a/x hard; chmod 600 a/x; mkfifo pipe; mkdir a/empty; echo 3 >/usr/local/bin/z"
    )
    own.run(f"rm -rf /usr/local/{lower}; mkdir /usr/local/{lower}; touch /usr/local/{lower}/new")
    look = f"ls -lR --time-style=+ . /opt /usr/local/bin/z /usr/local/{lower} | grep -v -e pipe -e total"
    look += "; cat link hard /opt/y"
    state = own.snapshot()
    with small() as twin:
        twin.restore(state)
        assert twin.run(look).stdout == own.run(look).stdout
        assert twin.run("stat -c %h a/x").stdout == "2\n"
        twin.run("echo changed >a/x")
        assert own.read("a/x") == b"1"
        assert twin.snapshot() != state


@needs_bubblewrap
def test_invalid_snapshot_raises_sandbox_failed(own):
    with pytest.raises(SandboxFailed, match="cannot be restored"):
        own.restore(b"nonsense" * 100)


@needs_bubblewrap
class TestCleanup:
    def test_close_leaves_no_process_mount_or_cgroup(self):
        mounts, before = Path("/proc/self/mountinfo").read_text(), groups()
        box = small()
        box.run("mount; touch /tmp/x")
        pids = processes(box)
        assert len(pids) == 2
        assert Path("/proc/self/mountinfo").read_text() == mounts
        box.close()
        box.close()
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
        assert groups() == before
        assert not box.alive
        with pytest.raises(SandboxFailed, match="closed"):
            box.run("true")
        with pytest.raises(SandboxFailed, match="closed"):
            box.read("x")

    def test_garbage_collected_sandbox_is_closed(self):
        before = groups()
        box = small()
        pids = processes(box)
        del box
        gc.collect()
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
        assert groups() == before

    def test_close_ends_a_command_in_another_thread(self):
        box, errors = small(), []

        def wait():
            try:
                box.run("echo begun >x; sleep 1000", timeout=1000)
            except SandboxFailed as error:
                errors.append(str(error))

        thread = threading.Thread(target=wait)
        thread.start()
        until(lambda: len(processes(box)) > 2)
        box.close()
        thread.join(10)
        assert errors == ["the sandbox ended while it ran a command"]

    def test_dead_sandbox_raises_sandbox_failed(self, own):
        own._process.kill()
        own._process.wait()
        with pytest.raises(SandboxFailed, match=r"dead|ended"):
            own.run("true")
        assert not own.alive

    def test_sandbox_outlives_the_thread_that_opened_it(self):
        boxes = []
        thread = threading.Thread(target=lambda: boxes.append(small()))
        thread.start()
        thread.join()
        with boxes[0] as box:
            assert box.run("echo x").stdout == "x\n"

    def test_sandbox_ends_with_a_killed_owner_and_its_cgroups_are_removed_later(self):
        code = """
from agentrl_env.sandbox import open_sandbox
box = open_sandbox("bubblewrap", background=True)
box.run("sleep 1000 &")
print(box._process.pid, flush=True)
box.run("sleep 1000", timeout=1000)
"""
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
            monitor = int(process.stdout.readline())
            class_of = type("Found", (), {"_process": type("P", (), {"pid": monitor})})
            until(lambda: len(processes(class_of)) >= 4)
            pids = processes(class_of)
            process.kill()
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
        bases = cgroups.find()

        def left():
            cgroups.remove_orphans(bases)
            return [f for base in set(bases.values()) for f in base.glob(f"*-{process.pid}-*")]

        until(lambda: not left())


@needs_bubblewrap
def test_sandbox_killed_for_memory_by_its_commands_returns_results_and_no_failure(own):
    own.write("x", "1")
    supervisor = max(processes(own) - {own._process.pid})
    own._oom_kills = -1  # simulates another process of the group killed by the kernel
    os.kill(supervisor, 9)
    if not cgroups.find():
        pytest.skip("no cgroups can be created here")
    for _ in range(2):
        done = own.run("echo fine")
        assert (done.killed_by, done.stdout) == ("memory", "")
        assert done.note.endswith("files included; the sandbox has ended")
    for operation in (lambda: own.read("x"), lambda: own.write("x", "2")):
        with pytest.raises(OSError, match=r"exceeded a limit \(memory\), which ended the sandbox"):
            operation()
    assert not own.alive
    own.close()
    with pytest.raises(SandboxFailed, match="closed"):
        own.run("true")


def as_ordinary_user(code, cwd=None, **environment):
    """Run code as a user without permission to create cgroups. Return the finished process."""
    if os.geteuid() != 0:
        pytest.skip("only root can switch to a user without cgroups")
    # Import before dropping privileges, because an ordinary user might not be able to read root's Python.
    before = "import logging, os, sys, agentrl_env.sandbox.bubblewrap, numpy.random\n"
    before += "os.setgroups([]), os.setgid(65534), os.setuid(65534)\n"
    before += "from agentrl_env.sandbox import *\nfrom agentrl_env.sandbox import cgroups\n"
    before += "assert not cgroups.find()\nlogging.basicConfig()\n"
    return subprocess.run(
        [sys.executable, "-c", before + code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env={**os.environ, **environment} | ({"PYTHONPATH": str(cwd)} if cwd else {}),
    )


@needs_bubblewrap
def test_sandbox_without_cgroups_fails_with_the_remedies():
    done = as_ordinary_user("open_sandbox()")
    assert "SandboxFailed: this process may not create cgroups" in done.stderr
    for remedy in ("as root", "systemd-run --user --scope", "limits='best_effort'", "AGENTRL_SANDBOX_LIMITS"):
        assert remedy in done.stderr


@needs_bubblewrap
@pytest.mark.parametrize(
    ("options", "environment"),
    [
        ("limits='best_effort'", {}),
        ("", {"AGENTRL_SANDBOX_LIMITS": "best_effort"}),
        ("", {"AGENTRL_ALLOW_UNSAFE_SANDBOX": "1"}),
    ],
)
def test_best_effort_limits_are_opt_in_and_logged_once(options, environment):
    code = f"for _ in range(3): open_sandbox({options}).close()\n"
    code += f"print(open_sandbox({options}).run('id -u').stdout)"
    done = as_ordinary_user(code, **environment)
    assert done.stdout == "1000\n\n", done.stderr
    assert done.stderr.count("sandbox limits are best effort") == 1
    assert done.stderr.count("sandboxes use whole processors") == 1


@needs_bubblewrap
def test_sandbox_starts_if_its_user_can_no_longer_read_the_package(tmp_path):
    shutil.copytree(Path(sandbox.__file__).parents[1], tmp_path / "agentrl_env")
    tmp_path.chmod(0o700)
    code = f"print(os.access({str(tmp_path)!r}, os.R_OK), sys.modules['agentrl_env'].__file__)\n"
    code += "print(open_sandbox(limits='best_effort').run('echo x').stdout)"
    done = as_ordinary_user(code, cwd=tmp_path)
    assert done.stdout == f"False {tmp_path}/agentrl_env/__init__.py\nx\n\n", done.stderr


@needs_bubblewrap
def test_best_effort_limits_apply_for_an_ordinary_user():
    code = """
with open_sandbox("bubblewrap", memory="128m", disk="16m", pids=32, timeout=5, limits="best_effort") as box:
    print(box.run("python3 -c 'x = bytearray(10**9)'").stderr)
    box.run(":(){ :|:& };:")
    print(box.run("for i in $(seq 100); do sleep 100 & done; wait", timeout=1.0).stderr)
    print(box.run("dd if=/dev/zero of=x bs=1M").stderr)
    hog = "python3 -c 'import time; x = bytearray(60 << 20); time.sleep(100)'"
    print(box.run(f"for i in 1 2 3 4 5 6 7 8; do {hog} & done; wait", timeout=60).text)
    for call in ("memfd_create(b'x', 0)", "shmget(0, 4096, 0o1600)", "sched_setaffinity(0, 1, b'x')"):
        print(call, box.run(["python3", "-c", f"import ctypes; print(ctypes.CDLL(None).{call})"]).stdout)
    print("processors", box.run("nproc").stdout)
    print(box.run("echo fine").stdout)
with open_sandbox(memory="128m", disk="16m", background=True, timeout=5, limits="best_effort") as box:
    box.run(f"for i in 1 2 3 4 5 6 7 8; do {hog} >/dev/null 2>&1 & done")
    import time
    end = time.monotonic() + 30
    while "bytearray" in box.run("cat /proc/*/cmdline").stdout:
        assert time.monotonic() < end
    print("gone")
"""
    done = as_ordinary_user(code)
    assert done.returncode == 0, done.stderr
    for words in (
        "MemoryError",
        "fork",
        "No space left",
        "out of memory, the limit is 128 MiB",
        "fine",
        "gone",
    ):
        assert words in done.stdout
    for call in (
        "memfd_create(b'x', 0)",
        "shmget(0, 4096, 0o1600)",
        "sched_setaffinity(0, 1, b'x')",
    ):
        assert f"{call} -1\n" in done.stdout
    assert "processors 1\n" in done.stdout


class TestFactory:
    def test_without_a_sandbox_commands_run_only_if_allowed(self, monkeypatch):
        monkeypatch.setattr("shutil.which", lambda name: None)
        monkeypatch.delenv("AGENTRL_ALLOW_UNSAFE_SANDBOX", raising=False)
        from agentrl_env.sandbox import bubblewrap

        bubblewrap._unavailable.cache_clear()
        try:
            with pytest.raises(SandboxUnavailable, match=r"install the package bubblewrap.*UNSAFE_SANDBOX=1"):
                open_sandbox()
            with open_sandbox(allow_unsafe=True) as box:
                assert box.run("echo x").stdout == "x\n"
            monkeypatch.setenv("AGENTRL_ALLOW_UNSAFE_SANDBOX", "1")
            with open_sandbox() as box:
                assert box.run("echo x").stdout == "x\n"
        finally:
            bubblewrap._unavailable.cache_clear()

    def test_unsafe_must_be_allowed(self, monkeypatch):
        monkeypatch.delenv("AGENTRL_ALLOW_UNSAFE_SANDBOX", raising=False)
        with pytest.raises(SandboxUnavailable, match="without any protection"):
            open_sandbox("unsafe")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"memory": "64q"}, "'64q' is not a size"),
            ({"memory": "64m", "disk": "60m"}, "leave 24 MiB of memory"),
            ({"pids": 0}, "pids=0 must be positive"),
            ({"timeout": -1.0}, "must be positive"),
        ],
    )
    def test_invalid_limits_are_rejected(self, options, message):
        with pytest.raises(ValueError, match=message):
            open_sandbox(**options)

    def test_unknown_choice_of_limits_is_rejected(self):
        with pytest.raises(ValueError, match="limits='none' must be one of enforced, best_effort"):
            open_sandbox(limits="none")

    def test_image_without_a_daemon_is_never_replaced_silently(self, monkeypatch, caplog):
        monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
        monkeypatch.delenv("AGENTRL_ALLOW_UNSAFE_SANDBOX", raising=False)
        with pytest.raises(SandboxUnavailable, match=r"[Dd]ocker.*with this machine's programs instead"):
            open_sandbox(image="debian:12")
        with open_sandbox(image="debian:12", allow_unsafe=True) as box:
            assert box.run("echo x").stdout == "x\n"
        assert "not in debian:12" in caplog.text

    def test_image_must_fit_the_kind(self):
        with pytest.raises(SandboxUnavailable, match="needs image="):
            open_sandbox("docker")
        with pytest.raises(SandboxUnavailable, match="absolute path"):
            open_sandbox("bubblewrap", image="debian:12")


class TestUnsafe:
    @pytest.fixture
    def box(self):
        with open_sandbox("unsafe", allow_unsafe=True, timeout=5.0, files={"a/x": "1"}) as box:
            yield box

    def test_background_processes_run_until_close(self):
        with open_sandbox("unsafe", allow_unsafe=True, background=True, timeout=20.0) as box:
            started = box.run("sleep 1000 >/dev/null 2>&1 & echo $!")
            late = "(until [ -e go ]; do sleep 0.02; done; echo late >x) >/dev/null 2>&1 &"
            assert box.run(late).code == 0
            assert box.run("touch go; until [ -s x ]; do sleep 0.02; done; cat x").stdout == "late\n"
            until(
                lambda: box.run("true").code == 0 and len(box._running) == 1
            )  # only the first process remains
        until(lambda: not alive(int(started.stdout)))

    def test_commands_run_in_a_temporary_folder(self, box):
        assert box.run("cat a/x; echo $HOME >y").stdout == "1"
        folder = Path(box.read("y").decode().strip())
        assert folder.is_dir()
        state = box.snapshot()
        box.close()
        assert not folder.exists()
        with open_sandbox("unsafe", allow_unsafe=True) as twin:
            twin.restore(state)
            assert twin.read("a/x") == b"1"

    def test_time_output_and_background_processes_are_limited(self, box):
        assert box.run("sleep 1000 & sleep 1000", timeout=0.2).killed_by == "timeout"
        assert box.run("yes").killed_by == "output"
        pid = int(box.run("sleep 1000 >/dev/null & echo $!").stdout)
        until_dead(pid)

    @pytest.mark.parametrize("path", ["/etc/passwd", "../x", "link/passwd", "/home/agentx", "a/../../x"])
    def test_read_and_write_are_confined_to_the_folder(self, box, path):
        box.run("ln -s /etc link")
        with pytest.raises(PermissionError):
            box.read(path)
        with pytest.raises(PermissionError):
            box.write(path, "x")


PATHS = st.lists(st.sampled_from(["..", ".", "", "a", "link", "~", "\\", " ", "世", "-rf"]), max_size=8).map(
    "/".join
)


@given(PATHS, st.booleans())
def test_every_path_normalizes_below_the_root(path, rooted):
    path = f"/{path}" if rooted else path
    if path:
        parts = absolute(path).split("/")
        assert parts[0] == ""
        assert ".." not in parts
        assert all(parts[1:-1])


@given(st.integers(0, 50), st.lists(st.binary(max_size=40), max_size=8))
def test_stream_keeps_the_beginning_and_counts_the_rest(limit, pieces):
    stream = Stream(limit)
    for piece in pieces:
        stream.feed(piece)
    whole = b"".join(pieces)
    assert stream.data == whole[:limit]
    assert stream.dropped == len(whole) - len(stream.data)
    as_text(stream.data).encode()


@needs_bubblewrap
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=PATHS, data=st.binary(max_size=100))
def test_any_path_round_trips_or_raises(box, path, data):
    try:
        box.write(path, data)
    except OSError:
        return
    assert box.read(path) == data


@settings(max_examples=30)
@given(st.dictionaries(PATHS.filter(bool), st.binary(max_size=50), max_size=3))
def test_archive_has_no_path_outside_the_root(files):
    with tarfile.open(fileobj=io.BytesIO(tar_archive(files))) as tar:
        for name in tar.getnames():
            assert not name.startswith("/")
            assert ".." not in name.split("/")


V1 = "36 32 0:28 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n"
V1 += "37 32 0:29 /docker/x /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


def test_hierarchies_of_both_cgroup_versions_are_parsed():
    other = "22 30 0:20 / /proc rw,nosuid - proc proc rw\n"
    memory, cpu, unified = cgroups._hierarchies(other + V1 + V2)
    assert memory == (Path("/sys/fs/cgroup/memory"), "/", ["memory"])
    assert cpu == (Path("/sys/fs/cgroup/cpu,cpuacct"), "/docker/x", ["cpu", "cpuacct"])
    assert unified == (Path("/sys/fs/cgroup"), "/", [])
    assert cgroups._own_groups("5:cpu,cpuacct:/a:b\n0::/user.slice\n") == {
        "cpu": "/a:b",
        "cpuacct": "/a:b",
        "": "/user.slice",
    }


def test_delegated_folder_is_the_first_whose_children_get_controllers(tmp_path):
    own = tmp_path / "user" / "service"
    own.mkdir(parents=True)
    (own / "cgroup.subtree_control").write_text("")
    (own.parent / "cgroup.subtree_control").write_text("cpu memory pids\n")
    assert cgroups._delegated_controllers(own, tmp_path) == dict.fromkeys(
        ("cpu", "memory", "pids"), own.parent
    )
    (own.parent / "cgroup.subtree_control").write_text("memory\n")
    assert cgroups._delegated_controllers(own, tmp_path) == {}


def test_resource_names_show_if_their_owner_is_alive():
    name = resource_name()
    assert not is_orphan(name)
    prefix, pid, began, rest = name.rsplit("-", 3)
    assert is_orphan(f"{prefix}-{pid}-{int(began) + 1}-{rest}")
    assert not is_orphan(name.replace(prefix, f"{PREFIX}0123456789ab"))
    assert not is_orphan("something-else")


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_jump_of_the_seccomp_filter_is_in_range(machine):
    code = seccomp.program(machine)
    lines = [struct.unpack("HBBI", code[i : i + 8]) for i in range(0, len(code), 8)]
    assert len(lines) < 4096
    for number, (kind, yes, no, _) in enumerate(lines):
        if kind & 7 == 5:
            assert number + 1 + max(yes, no) < len(lines)
    assert lines[-1][0] == 6
    assert seccomp.program("vax") is None
