"""A filter of seccomp for x86-64: calls of the system, by the kernel's numbers, that are refused with EPERM.

Landlock knows files by their paths; what it does not see is here: sockets, programs in memory without a name, modes and
times of files, and interfaces of the kernel that no bundle needs.
"""

from __future__ import annotations

import ctypes
import errno
import struct

from aotexport_runtime.errors import NotSupported
from aotexport_runtime.sandbox.system import call

NETWORK = {"socket": 41, "connect": 42, "bind": 49, "listen": 50}
PROGRAMS = {"execve": 59, "execveat": 322}
FILES = {
    "truncate": 76,
    "chmod": 90,
    "fchmod": 91,
    "fchmodat": 268,
    "fchmodat2": 452,
    "chown": 92,
    "fchown": 93,
    "lchown": 94,
    "fchownat": 260,
    "setxattr": 188,
    "lsetxattr": 189,
    "fsetxattr": 190,
    "setxattrat": 463,
    "removexattr": 197,
    "lremovexattr": 198,
    "fremovexattr": 199,
    "removexattrat": 466,
    "utime": 132,
    "utimes": 235,
    "futimesat": 261,
    "utimensat": 280,
    "file_setattr": 469,
    "open_by_handle_at": 304,
    "quotactl": 179,
}
MEMORY_OF_OTHERS = {"shmget": 29, "shmat": 30, "semget": 64, "msgget": 68, "mq_open": 240, "pidfd_getfd": 438}
KERNEL = {
    "io_uring_setup": 425,
    "bpf": 321,
    "perf_event_open": 298,
    "userfaultfd": 323,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "unshare": 272,
    "setns": 308,
    "init_module": 175,
    "finit_module": 313,
    "delete_module": 176,
    "kexec_load": 246,
    "kexec_file_load": 320,
    "reboot": 169,
    "swapon": 167,
    "swapoff": 168,
    "acct": 163,
    "sethostname": 170,
    "setdomainname": 171,
    "settimeofday": 164,
    "clock_settime": 227,
    "adjtimex": 159,
    "clock_adjtime": 305,
    "iopl": 172,
    "ioperm": 173,
}
REFUSED = {**NETWORK, **PROGRAMS, **FILES, **MEMORY_OF_OTHERS, **KERNEL}

_IOCTL = 16
_INTO_TERMINALS = (0x5412, 0x541C)
"""`TIOCSTI` and `TIOCLINUX`: text as if the user had typed it."""

_SECCOMP, _SET_FILTER, _IS_AVAILABLE = 317, 1, 2
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
_X86_64, _X32 = 0xC000003E, 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_AT_NUMBER, _AT_ARCHITECTURE, _AT_SECOND_ARGUMENT = 0, 4, 24


def check() -> None:
    """Refuse a kernel without filters.

    Raises:
        NotSupported: it has none, or does not let the process set one.
    """
    try:
        call(_SECCOMP, _IS_AVAILABLE, 0, struct.pack("I", _REFUSE & ~0xFFFF))
    except OSError as error:
        raise NotSupported(
            f"the kernel has no filters of seccomp ({error.strerror}); run the process in a container without network "
            "instead"
        ) from None


def refuse() -> None:
    """Refuse the calls of `REFUSED` in this thread, and in those that it begins."""
    program = ctypes.create_string_buffer(_program())
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(program))
    call(_SECCOMP, _SET_FILTER, 0, header)


def _program() -> bytes:
    """Return the filter: instructions of Berkeley's packet filter, of 8 bytes each."""
    refuse = (_RETURN, 0, 0, _REFUSE)
    steps = [
        (_LOAD, 0, 0, _AT_ARCHITECTURE),
        (_EQUAL, 1, 0, _X86_64),
        refuse,
        (_LOAD, 0, 0, _AT_NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        refuse,
    ]
    for number in REFUSED.values():
        steps += [(_EQUAL, 0, 1, number), refuse]
    steps += [(_EQUAL, 0, 2 * len(_INTO_TERMINALS) + 1, _IOCTL), (_LOAD, 0, 0, _AT_SECOND_ARGUMENT)]
    for request in _INTO_TERMINALS:
        steps += [(_EQUAL, 0, 1, request), refuse]
    steps.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *step) for step in steps)
