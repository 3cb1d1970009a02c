"""Landlock of Linux: rules for files, which a process gives itself. Numbers are those of `linux/landlock.h`."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Iterable

from aotexport_runtime.errors import NotSupported
from aotexport_runtime.sandbox import call

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION = 1
_PATH_BENEATH = 1

_EXECUTE = 1 << 0
_WRITE_FILE = 1 << 1
_READ = 1 << 2 | 1 << 3
_WRITE_DIRECTORY = sum(1 << bit for bit in range(4, 13))
_REFER, _TRUNCATE, _IOCTL = 1 << 13, 1 << 14, 1 << 15
_WRITE = _WRITE_FILE | _WRITE_DIRECTORY | _REFER | _TRUNCATE
_OF_FILES = _EXECUTE | _WRITE_FILE | 1 << 2 | _TRUNCATE | _IOCTL
_ADDED_BY = {_REFER: 2, _TRUNCATE: 3, _IOCTL: 5}
"""Rights that later versions of Landlock know."""

_TCP, _TCP_SINCE = 1 << 0 | 1 << 1, 4
_SCOPES, _SCOPES_SINCE = 1 << 0 | 1 << 1, 6
"""Connections and signals to processes outside."""

_NO_NEW_PRIVILEGES = 38
_GET_CAPABILITIES, _SET_CAPABILITIES = 125, 126
_CAPABILITIES_VERSION = 0x20080522
_KEPT_CAPABILITIES = 1 << 1 | 1 << 2
"""To read and write files of others, as far as rules allow."""


def check() -> int:
    """Return the version of Landlock; a kernel without it is refused (`NotSupported`)."""
    try:
        return call(_CREATE_RULESET, None, 0, _VERSION)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
            raise
        raise NotSupported(
            f"the kernel has no Landlock ({os.strerror(error.errno)}): it needs Linux 5.13, with `landlock` among its "
            "security modules (`lsm=`); run the process in a container without network instead"
        ) from None


def restrict(paths: Iterable[tuple[str, bool]], *, reads: bool, version: int) -> None:
    """Refuse this thread, and those that it begins, to change files, and the rights of root but those to files.

    Args:
        paths: what may be read, with all below it, and whether it may be changed as well.
        reads: whether to refuse to read other files.
        version: of Landlock.
    """
    files = _EXECUTE | _WRITE | _IOCTL | (_READ if reads else 0)
    handled = sum(1 << bit for bit in range(16) if files >> bit & 1 and _ADDED_BY.get(1 << bit, 1) <= version)
    tcp, scopes = _TCP * (version >= _TCP_SINCE), _SCOPES * (version >= _SCOPES_SINCE)
    attributes = struct.pack("QQQ", handled, tcp, scopes)
    rules = call(_CREATE_RULESET, attributes, len(attributes), 0)
    try:
        for path, write in paths:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                rights = handled & (_READ | (_WRITE if write else 0))
                if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
                    rights &= _OF_FILES
                if rights:
                    call(_ADD_RULE, rules, _PATH_BENEATH, struct.pack("=Qi", rights, descriptor), 0)
            finally:
                os.close(descriptor)
        _give_up_rights()
        call(_RESTRICT_SELF, rules, 0)
    finally:
        os.close(rules)


def _give_up_rights() -> None:
    """Give up the rights of root but those to files, and those that programs with `setuid` would bring."""
    if ctypes.CDLL(None, use_errno=True).prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    header, held = struct.pack("Ii", _CAPABILITIES_VERSION, 0), ctypes.create_string_buffer(24)
    call(_GET_CAPABILITIES, header, ctypes.addressof(held))
    permitted = struct.unpack("6I", held.raw)[1] & _KEPT_CAPABILITIES
    call(_SET_CAPABILITIES, header, struct.pack("6I", permitted, permitted, 0, 0, 0, 0))
