"""A system call filter: denies calls that commands do not need and that have had kernel bugs."""

from __future__ import annotations

import errno
import platform
import struct

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
_REFUSED_EVERYWHERE = (*range(425, 434), 438, 440, 442, 443, 447, 448)
"""io_uring_*, the mount calls, pidfd_getfd, process_madvise, mount_setattr,
quotactl_fd, memfd_secret, process_mrelease: the same number on all architectures."""
_REFUSED = {
    # ptrace, syslog, personality, pivot_root, acct, clocks, mount, umount2, swap, reboot, host names, ports,
    # modules, quotas, kexec, keys, memory policies, unshare, setns, perf_event_open, file handles,
    # process_vm_*, kcmp, bpf, userfaultfd
    "x86_64": (
        *(101, 103, 135, 136, 155, 156, 159, 163, 164, 165, 166, 167, 168, 169, 170, 171, 172, 173),
        *(174, 175, 176, 177, 178, 179, 180, 212, 227, 237, 238, 239, 246, 248, 249, 250, 256, 272),
        *(279, 298, 303, 304, 305, 308, 310, 311, 312, 313, 320, 321, 323),
    ),
    "aarch64": (
        *(18, 39, 40, 41, 42, 60, 89, 92, 97, 104, 105, 106, 112, 116, 117, 142, 161, 162, 170, 171, 217),
        *(218, 219, 224, 225, 235, 236, 237, 238, 239, 241, 264, 265, 266, 268, 270, 271, 272, 273),
        *(280, 282, 294),
    ),
}


def program(machine: str | None = None) -> bytes | None:
    """Return the filter as ``struct sock_filter[]``; None for architectures without a list of calls."""
    machine = machine or platform.machine()
    if machine not in _MACHINES:
        return None
    refused = sorted({*_REFUSED[machine], *_REFUSED_EVERYWHERE})
    special = _SPECIAL[machine]
    lines = [
        (_LOAD, 0, 0, _MACHINE),
        (_EQUAL, 1, 0, _MACHINES[machine]),
        (_RETURN, 0, 0, _REFUSE | errno.ENOSYS),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _REFUSE | errno.ENOSYS),
    ]
    for number in refused:
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE | errno.EPERM)]
    # clone3 passes its flags in memory, which a filter cannot read; the C library falls back to clone.
    lines += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _REFUSE | errno.ENOSYS)]
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
