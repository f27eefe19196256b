"""A system call filter: denies calls that commands do not need and that have had kernel bugs.

Bubblewrap's filter (``program``) and the profile of containers (``docker_profile``) use the same list.
"""

from __future__ import annotations

import errno
import json
import platform
import struct
from collections.abc import Iterable

_RETURN, _LOAD, _EQUAL, _AT_LEAST, _ANY_BIT = 0x06, 0x20, 0x15, 0x35, 0x45
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000
_NUMBER, _MACHINE, _FIRST_ARGUMENT = 0, 4, 16
_NEW_NAMESPACES = 0x7E020080
"""CLONE_NEW*: TIME, NS, CGROUP, UTS, IPC, USER, PID and NET."""
_SOCKET_FAMILIES = (1, 2, 10, 16)
"""Unix, IPv4, IPv6 and netlink. Other families, such as vsock, bypass the network namespace."""
_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000
_SPECIAL = {"x86_64": {"socket": 41, "clone": 56}, "aarch64": {"socket": 198, "clone": 220}}
_CLONE3 = 435
_REFUSED = {
    # Debugging and other processes' memory.
    **{"ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271)},
    **{"kcmp": (312, 272), "pidfd_getfd": (438, 438), "process_madvise": (440, 440)},
    **{"process_mrelease": (448, 448), "perf_event_open": (298, 241), "bpf": (321, 280)},
    # Mounts and namespaces.
    **{"mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "unshare": (272, 97)},
    **{"setns": (308, 268), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430)},
    **{"fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442)},
    **{"name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "lookup_dcookie": (212, 18)},
    # The machine: clocks, names, swap, modules, quotas, ports, the log.
    **{"syslog": (103, 116), "adjtimex": (159, 171), "clock_adjtime": (305, 266), "acct": (163, 89)},
    **{"settimeofday": (164, 170), "clock_settime": (227, 112), "swapon": (167, 224), "swapoff": (168, 225)},
    **{"reboot": (169, 142), "sethostname": (170, 161), "setdomainname": (171, 162), "iopl": (172, None)},
    **{"ioperm": (173, None), "create_module": (174, None), "init_module": (175, 105)},
    **{"delete_module": (176, 106), "get_kernel_syms": (177, None), "query_module": (178, None)},
    **{"finit_module": (313, 273), "kexec_load": (246, 104), "kexec_file_load": (320, 294)},
    **{"quotactl": (179, 60), "quotactl_fd": (443, 443), "nfsservctl": (180, 42), "_sysctl": (156, None)},
    **{"ustat": (136, None), "personality": (135, 92)},
    # Keys, memory policies, and interfaces with a record of kernel bugs.
    **{"add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "mbind": (237, 235)},
    **{"set_mempolicy": (238, 237), "get_mempolicy": (239, 236), "migrate_pages": (256, 238)},
    **{"move_pages": (279, 239), "userfaultfd": (323, 282), "memfd_secret": (447, 447)},
    **{"io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427)},
}
"""Name -> its numbers on x86_64 and aarch64."""
_LASTING = {"shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190)}
"""System V IPC, whose memory belongs to no process and would outlive commands and their limits."""
UNCOUNTED = {"memfd_create": (319, 279), "sched_setaffinity": (203, 122)}
"""Calls that are refused unless a cgroup limits them: unaccounted memory and the choice of processors."""


def program(machine: str | None = None, *, uncounted: Iterable[str] = ()) -> bytes | None:
    """Return the filter as ``struct sock_filter[]``, or None for architectures without a list of calls.

    Args:
        machine: the architecture. By default this machine's.
        uncounted: names in ``UNCOUNTED`` that are refused too.
    """
    machine = machine or platform.machine()
    if machine not in _MACHINES:
        return None
    column = list(_MACHINES).index(machine)
    calls = [*_REFUSED.values(), *(UNCOUNTED[name] for name in uncounted)]
    special = _SPECIAL[machine]
    lines = [
        (_LOAD, 0, 0, _MACHINE),
        (_EQUAL, 1, 0, _MACHINES[machine]),
        (_RETURN, 0, 0, _REFUSE | errno.ENOSYS),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _REFUSE | errno.ENOSYS),
    ]
    for number in sorted(n for n in (numbers[column] for numbers in calls) if n is not None):
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE | errno.EPERM)]
    # clone3 passes its flags in memory, which a filter cannot read. The C library falls back to clone.
    for number in (_CLONE3, *(numbers[column] for numbers in _LASTING.values())):
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE | errno.ENOSYS)]
    lines += [
        (_EQUAL, 0, 4, special["clone"]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 0, 1, _NEW_NAMESPACES),
        (_RETURN, 0, 0, _REFUSE | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    lines += [(_EQUAL, 0, len(_SOCKET_FAMILIES) + 2, special["socket"]), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    for left, family in zip(range(len(_SOCKET_FAMILIES), 0, -1), _SOCKET_FAMILIES, strict=True):
        lines.append((_EQUAL, left, 0, family))
    lines += [(_RETURN, 0, 0, _REFUSE | errno.EAFNOSUPPORT), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def docker_profile() -> str:
    """Return the same filter as a seccomp profile of Docker.

    System V IPC is allowed, because the container's sysctls limit it.
    """

    def refuse(names: list[str], number: int, **argument: object) -> dict[str, object]:
        arguments = [{"index": 0, **argument}] if argument else []
        return {"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": number, "args": arguments}

    rules = [refuse(sorted(_REFUSED), errno.EPERM), refuse(["clone3"], errno.ENOSYS)]
    for bit in (1 << shift for shift in range(32) if _NEW_NAMESPACES >> shift & 1):
        rules.append(refuse(["clone"], errno.EPERM, value=bit, valueTwo=bit, op="SCMP_CMP_MASKED_EQ"))
    last = max(_SOCKET_FAMILIES)
    for family in sorted({*range(last)} - {*_SOCKET_FAMILIES}):
        rules.append(refuse(["socket"], errno.EAFNOSUPPORT, value=family, op="SCMP_CMP_EQ"))
    rules.append(refuse(["socket"], errno.EAFNOSUPPORT, value=last, op="SCMP_CMP_GT"))
    machines = [{"architecture": f"SCMP_ARCH_{name.upper()}"} for name in _MACHINES]
    return json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "archMap": machines, "syscalls": rules})
