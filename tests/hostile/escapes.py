"""Commands that try to escape from a sandbox by reading, writing, connecting or holding memory.

Canaries are placed around the sandbox. A canary in an answer, a new file on the host, a connection, and
processes or memory that remain are breaches.
"""

# ruff: noqa: E501  -- a command is easier to read, and to run by hand, on one line

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

from agentrl_env import ToolCall
from agentrl_env.errors import AgentRLError
from tests.docker.base_image import import_base_image
from tests.docker.daemon import NoDaemon, running_daemon
from tests.hostile.site import TASKS_FILE, Attack, Ground, Kind, Site, Skipped, shells
from tests.hostile.tasks import PRIVATE, Shell

IMAGE = "python:3.11-slim"
USER = 65534
"""An ordinary user without its own cgroups."""
MEMORY_MB = int(Shell.limits["memory"].rstrip("m"))  # type: ignore[attr-defined]
SLACK = 1.5
"""Factor by which a limit can be exceeded before it counts."""
LEFT = "987654.3"
"""Argument that identifies processes that were left behind."""
FOLDERS = (
    "/",
    "/tmp",
    "/var/tmp",
    "/dev/shm",
    "/etc",
    "/root",
    "/home",
    "/usr/local/bin",
    "/usr/bin",
    "/run",
)
FOLDERS += ("/sys/fs/cgroup", "/opt", "/var/lib", "/dev")
END_S = 20.0

READ = {
    "files": "cat {canary} /proc/1/root{canary} /proc/self/root{canary} /root/.* /etc/shadow; ls -la / /root /tmp",
    "environments": "cat /proc/*/environ /proc/*/task/*/environ | tr '\\0' '\\n'; env",
    "command_lines": "cat /proc/*/cmdline | tr '\\0' ' '; ps aux",
    "descriptors": "ls -l /proc/*/fd; cat /proc/1/fd/* /proc/self/fd/[3-9]* 2>/dev/null </dev/null | head -c 9999",
    "links": "ln -s {canary} a; ln {canary} b; cat a b; cat /proc/*/cwd{canary} /proc/*/map_files/* | head -c 9999",
    "dots": "cat ../../../../../..{canary} /../..{canary} /tmp/../..{canary} //{canary}",
    "chroot": "mkdir -p x; chroot x; unshare -r chroot /proc/1/root cat {canary}; nsenter -t 1 -a cat {canary}",
    "overlay": "cat /sys/layers/root{canary} /dev/layers/root{canary}; ls -laR /sys/layers /dev/layers | head -50",
    "neighbours": "grep -rs neighbour- /home /tmp /dev/shm /var /proc/*/root/home /opt /sys/fs | grep -v {own} | head",
    "mounts": "unshare -Urm sh -c 'mount --bind / /mnt; cat /mnt{canary}'; mount -t proc p /mnt; mount --rbind / /mnt",
    "devices": "for d in /dev/sda /dev/vda /dev/mem /dev/kmsg /dev/loop0; do head -c 99 $d; done; mknod x b 8 0",
    "setuid": "su -c 'cat {canary}' </dev/null; sudo -n cat {canary}; find / -perm -4000 -exec {{}} cat {canary} ';'",
    "docker": "curl -s --unix-socket /var/run/docker.sock http://x/info; ls -l /var/run/docker.sock {docker}",
    "keys": "python3 -c 'import ctypes; print(ctypes.CDLL(None).syscall(250,1,-4,0))'; cat /proc/keys /proc/kallsyms",
    "ptrace": "python3 -c 'import ctypes; l=ctypes.CDLL(None)\nfor p in range(1,99): l.ptrace(16,p,0,0)'; "
    "cat /proc/1/mem /proc/1/maps | head -c 99",
}
"""Commands that search for canaries."""
WRITE = {
    "places": "for d in {folders}; do echo x >$d/{proof}; done; touch /proc/1/root/tmp/{proof} /proc/1/cwd/{proof}",
    "core_pattern": "echo '|/bin/touch /tmp/{proof}' >/proc/sys/kernel/core_pattern; ulimit -c unlimited; kill -11 $$",
    "sysctl": "echo 1 >/proc/sys/kernel/sysrq; echo b >/proc/sysrq-trigger; echo /tmp/{proof} >/proc/sys/kernel/modprobe",
    "release_agent": "mkdir -p /tmp/c; mount -t cgroup -o memory c /tmp/c; echo /tmp/{proof} >/tmp/c/release_agent; "
    "echo 1 >/sys/fs/cgroup/cgroup.procs; mkdir /sys/fs/cgroup/{proof}",
    "links_out": "ln -s / out; echo x >out/tmp/{proof}; ln -sf /proc/1/root r; echo x >r/tmp/{proof}",
    "modules": 'insmod x.ko; python3 -c \'import ctypes; ctypes.CDLL(None).syscall(175, b"x", 1, b"")\'',
    "profiles": "echo 'touch /tmp/{proof}' | tee /etc/profile.d/x.sh /root/.bashrc /usr/local/bin/python3 /etc/cron.d/x",
    "tar": "cd /; tar xf - --absolute-names </dev/null; cp /bin/true ../../../../tmp/{proof}; mv mine.txt /tmp/../../{proof}",
    "shm_files": "python3 -c \"from multiprocessing import shared_memory as s; s.SharedMemory('{proof}',True,99)\"",
}
"""Commands that try to leave a file on the host."""
REACH = {
    "tcp": "import socket\nfor h in ['127.0.0.1','localhost','::1','0.0.0.0','10.0.2.2','172.17.0.1']:\n"
    " try: socket.create_connection((h,{port}),1).send(b'x')\n except OSError as e: print(e)",
    "udp": "import socket\ns=socket.socket(socket.AF_INET,socket.SOCK_DGRAM)\ns.sendto(b'x',('127.0.0.1',{port}))",
    "abstract": "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0{abstract}')",
    "unix": "import socket\nsocket.socket(socket.AF_UNIX).connect('{path}')",
    "inherited": "import os,socket\nfor n in range(3,300):\n try:\n  s=socket.socket(fileno=os.dup(n)); "
    "s.settimeout(1); s.send(b'{{\"op\":\"run\"}}\\n'); print('REACHED',n,s.recv(99))\n except OSError: pass",
    "vsock": "import socket\ns=socket.socket(40,1); print('REACHED vsock')",
    "raw": "import socket\ns=socket.socket(2,3,1); print('REACHED raw')",
    "packet": "import socket\ns=socket.socket(17,3,3); print('REACHED packet')",
    "io_uring": "import ctypes\nb=ctypes.create_string_buffer(120)\n"
    "r=ctypes.CDLL(None).syscall(425,4,b)\nif r>=0: print('REACHED io_uring')",
    "bpf": "import ctypes\nb=ctypes.create_string_buffer(b'\\x02\\0\\0\\0\\x04\\0\\0\\0\\x08\\0\\0\\0\\x01\\0\\0\\0',120)\n"
    "if ctypes.CDLL(None).syscall(321,0,b,72)>=0: print('REACHED bpf')",
    "userfaultfd": "import ctypes\nif ctypes.CDLL(None).syscall(323,0)>=0: print('REACHED userfaultfd')",
    "perf": "import ctypes\nb=ctypes.create_string_buffer(b'\\1\\0\\0\\0\\x70',120)\n"
    "if ctypes.CDLL(None).syscall(298,b,0,-1,-1,0)>=0: print('REACHED perf_event_open')",
    "namespaces": "import ctypes\nif ctypes.CDLL(None).unshare(0x10000000)==0: print('REACHED a user namespace')",
    "typing": "import fcntl,os\nfor n in ('/dev/tty','/dev/console','/dev/pts/0'):\n"
    " try: fcntl.ioctl(os.open(n,2),0x5412,b'x'); print('REACHED',n)\n except OSError: pass",
}
"""Python programs that try to reach the host or the kernel. ``REACHED`` in the output is a breach."""
HOLD = {
    "processes": "import os,time\nheld=[]\nfor i in range(8):\n r,w=os.pipe()\n if (p:=os.fork())==0:\n"
    "  try: b=bytearray({mb}<<20); b[::4096]=b'x'*len(b[::4096])\n  except MemoryError: os._exit(1)\n"
    "  os.write(w,b'x'); time.sleep(9); os._exit(0)\n os.close(w); os.set_blocking(r,False); held.append((p,r))\n"
    "time.sleep(4)\nfor p,r in held:\n try: full=os.read(r,1)\n except BlockingIOError: full=b''\n"
    " if full and os.waitpid(p,os.WNOHANG)==(0,0): os.write(1,b'HELD {mb}\\n')",
    "memory_files": "import os,time\nfor i in range(40):\n f=os.memfd_create('x')\n for n in range({mb}):\n"
    "  os.write(f,b'x'*(1<<20))\n  os.write(1,b'HELD 1\\n')",
    "shared_memory": "import ctypes,os,time\nl=ctypes.CDLL(None); l.shmat.restype=ctypes.c_void_p\nfor i in range(8):\n"
    " n=l.shmget({key}+i,{mb}<<20,0o1666)\n if n<0: break\n a=l.shmat(n,None,0)\n ctypes.memset(a,1,{mb}<<20)\n"
    " os.write(1,b'HELD {mb}\\n')",
    "pipes": "import os,fcntl\nfor i in range(400):\n r,w=os.pipe()\n try: n=fcntl.fcntl(w,1031,1<<20)\n except OSError: n=65536\n"
    " os.set_blocking(w,False); os.write(w,b'x'*n)\n os.write(1,b'HELD %d\\n'%(n>>20))",
    "disk": "import os\nf=open('/home/agent/big','wb')\nfor i in range(200): f.write(b'x'*(1<<20)); f.flush(); os.write(1,b'HELD 1\\n')",
    "tmpfs": "import os\nfor d in ['/tmp','/dev/shm','/var/tmp','/run','/dev','/usr/local/bin']:\n try:\n  f=open(d+'/big','wb')\n"
    "  for i in range(200): f.write(b'x'*(1<<20)); f.flush(); os.write(1,b'HELD 1\\n')\n except OSError: pass",
}
"""Python programs that print HELD and the megabytes that they hold. They run concurrently."""
BREAK = {
    "fork_bomb": ":(){{ :|:& }};:",
    "kill_all": "kill -9 1; kill -9 -1; kill -9 $PPID",
    "background": "sleep {left} & setsid nohup sleep {left} >/dev/null 2>&1 & disown",
    "daemon": "python3 -c \"import os; os.fork() or (os.setsid(), os.fork() or os.execlp('sleep','sleep','{left}'))\"",
    "stop": "kill -STOP $PPID; kill -STOP 1; kill -STOP $$",
    "output": "yes",
    "threads": 'python3 -c "import threading,time\nwhile 1: threading.Thread(target=time.sleep,args=(9,)).start()"',
    "inodes": "seq 1000000 | xargs touch; mkdir -p $(seq -s/ 1 900)",
    "deep_output": "head -c 5000000 /dev/urandom; printf '\\033]0;x\\007\\0\\377'",
    "semaphores": 'python3 -c "import ctypes\nwhile ctypes.CDLL(None).semget(0,250,0o1666)>=0: pass"; ipcs',
    "suicide": 'exec python3 -c "import os; [os.close(n) for n in range(999) if n>2]; os.kill(os.getppid(), 9)"',
}
"""Commands that try to harm the server or outlive their session."""


class Canaries:
    """Places canaries around the sandbox and checks them.

    Args:
        ground: the site. Its folder holds the canary.
    """

    def __init__(self, ground: Ground) -> None:
        rng = ground.rng
        self._ground = ground
        self.content = f"canary-{rng.randbytes(12).hex()}"
        self.path = ground.site.folder / "canary"
        self.path.write_text(self.content)
        self.proof = f"proof-{rng.randbytes(8).hex()}"
        self.key = 0x41414141 + rng.randrange(1 << 20)
        self.own = f"own-{rng.randbytes(4).hex()}"
        self.connections = 0
        self.abstract = f"hostile-{rng.randbytes(8).hex()}"

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Listen on TCP, on a Unix socket and on an abstract socket."""

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.connections += 1
            writer.close()

        abstract = socket.socket(socket.AF_UNIX)
        abstract.bind(f"\0{self.abstract}")
        path = self._ground.site.folder / f"s{self._ground.rng.randrange(10**6)}"
        tcp = await asyncio.start_server(accept, "127.0.0.1", 0)
        unix = await asyncio.start_unix_server(accept, path)
        other = await asyncio.start_unix_server(accept, sock=abstract)
        self.socket, self.port = path, tcp.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            for server in (tcp, unix, other):
                server.close()

    def fill(self, command: str) -> str:
        """Insert the locations of the canaries into a command."""
        return command.format(
            canary=self.path,
            proof=self.proof,
            own=self.own,
            folders=" ".join((*FOLDERS, str(self.path.parent))),
            docker=os.environ.get("DOCKER_HOST", "").removeprefix("unix://"),
            port=self.port,
            abstract=self.abstract,
            path=self.socket,
            key=self.key,
            mb=MEMORY_MB // 3,
            left=LEFT,
        )

    def look(self, name: str, output: str) -> None:
        """Count the breaches of a command."""
        find = self._ground.find
        if self.content in output:
            find("breaches", f"{name} read a file of the host")
        if PRIVATE in output.replace(self.own, ""):
            find("answers_read", f"{name} read a file of another session: {output[:200]}")
        if self._ground.site.token in output:
            find("breaches", f"{name} read the server's token")
        if "REACHED" in output:
            find("breaches", f"{name}: {output[output.index('REACHED') :][:100]}")
        if self.connections:
            find("breaches", f"{name} reached a socket of the host")
            self.connections = 0
        for folder in (*FOLDERS, str(self.path.parent)):
            if os.path.lexists(f"{folder}/{self.proof}"):
                find("breaches", f"{name} left a file in {folder} of the host")
                with suppress(OSError):
                    os.unlink(f"{folder}/{self.proof}")
        held = sum(int(number) for number in re.findall(r"^HELD (\d+)$", output, re.MULTILINE))
        if held > SLACK * MEMORY_MB and not self._announced():
            find(
                "breaches",
                f"{name} held {held} MB; the limit is {MEMORY_MB}, and no log says that it does not hold",
            )

    def look_after(self, name: str) -> None:
        """Count the leftovers of a closed session."""
        keys = {int(line.split()[0]) for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]}
        if keys & set(range(self.key, self.key + 8)):
            self._ground.find("breaches", f"{name} left shared memory on the host")
        end = time.monotonic() + END_S
        while (left := _left_behind()) and time.monotonic() < end:
            time.sleep(0.1)
        for pid in left:
            self._ground.find("breaches", f"{name} left process {pid}")
            with suppress(OSError):
                os.kill(pid, 9)

    def _announced(self) -> bool:
        """Return True if the server's log reports that sandbox limits are not enforced."""
        log = self._ground.site.part("server").log.read_text(errors="replace")
        return re.search(r"(?i)(WARNING|ERROR).*(cgroup|memory)", log) is not None


def _left_behind() -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdigit() and LEFT.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def escape(commands: dict[str, str], *, python: bool = False) -> Attack:
    """Return an attack that plays all commands in consecutive sessions."""

    async def attack(ground: Ground) -> None:
        canaries, names = Canaries(ground), list(commands)
        ground.rng.shuffle(names)
        async with canaries.listening(), ground.connect() as client:
            session = await client.open("shell", sample={"secret": canaries.own}, wait=20)
            for name in names:
                command = canaries.fill(commands[name])
                command = f"python3 - <<'END'\n{command}\nEND" if python else command
                ground.account.attacks[ground.site.running[0]] += 1
                output = ""
                try:
                    result = await session.step(ToolCall.of("run", command=command))
                    output = result.messages[-1].content if result.messages else ""
                    if result.status.value != "running":
                        what = f"{name} ended its session as {result.status.value}: {output[:200]}"
                        ground.find("breaches", f"an agent can void its episode: {what}")
                        await session.close()
                        session = await client.open("shell", sample={"secret": canaries.own}, wait=20)
                except AgentRLError as error:
                    ground.find("hung", f"{name}: {type(error).__name__}: {error}")
                    session = await client.open("shell", sample={"secret": canaries.own}, wait=20)
                canaries.look(name, str(output))
            await session.close()
        await asyncio.to_thread(canaries.look_after, ", ".join(names))
        ground.account.attacks[ground.site.running[0]] -= 1

    return attack


ATTACKS = {
    "read": escape(READ),
    "write": escape(WRITE),
    "reach": escape(REACH, python=True),
    "hold": escape(HOLD, python=True),
    "break": escape(BREAK),
}


def _probe(site: Site) -> Site:
    """Return a site if its sandbox opens. Raises Skipped with the reason if it does not."""
    part = site.part("server")
    words = part.command[: part.command.index(sys.executable)]
    code = "import sys; from tests.hostile.tasks import Shell; from agentrl_env.types import TaskSample\n"
    code += "s = Shell(); s.reset(TaskSample(task='shell'), None); print(s.run('echo works')); s.close()"
    environment = {**os.environ, **part.environment}
    done = subprocess.run(
        [*words, sys.executable, "-c", code], env=environment, cwd=TASKS_FILE.parents[2],
        capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    if "works" not in done.stdout:
        raise Skipped(f"no such sandbox here: {(done.stderr.strip() or done.stdout).splitlines()[-1:]}")
    return site


def as_root(folder: Path) -> Site:
    """Return a server with bubblewrap sandboxes that runs as the current user."""
    return _probe(shells(folder, "sandbox-root", kind="bubblewrap"))


def as_user(folder: Path) -> Site:
    """Return the same server, but run it as an ordinary user without cgroups."""
    # Memory limits cannot be enforced without cgroups. This mode is opt-in and logged.
    return _probe(shells(folder, "sandbox-user", kind="bubblewrap", user=USER, limits="best_effort"))


def in_docker(folder: Path) -> Site:
    """Return a server with sandboxes in containers of a private daemon."""
    daemon = _daemon()
    try:
        address = daemon.__enter__()
    except (NoDaemon, AssertionError) as error:
        raise Skipped(str(error)) from error
    site = shells(folder, "sandbox-docker", kind="docker", image=IMAGE, docker_host=address)
    site.closing.append(lambda: daemon.__exit__(None, None, None))
    return _probe(site)


@contextmanager
def _daemon():  # type: ignore[no-untyped-def]
    """Run a Docker daemon with the image."""
    import docker

    with running_daemon() as address:
        client = docker.DockerClient(base_url=address)
        import_base_image(client, IMAGE)
        client.close()
        yield address


LAYOUTS: dict[str, Callable[[Path], Site]] = {
    "sandbox-root": as_root,
    "sandbox-user": as_user,
    "sandbox-docker": in_docker,
}
KINDS = tuple(Kind(name=name, lane="sandboxes", sites=(name,), share=8, attacks=ATTACKS) for name in LAYOUTS)
