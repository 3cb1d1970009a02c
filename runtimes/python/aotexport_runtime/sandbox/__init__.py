"""A process that gives up its rights before it reads what a stranger wrote: no files to write, no network, no programs.

Imports neither torch nor numpy: a process enters before it has threads.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import sysconfig
from collections.abc import Iterable

from aotexport_runtime.errors import ArgumentInvalid, NotSupported

_OF_THE_SYSTEM = (
    *("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"),
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo"),
    *("/etc/ld.so.cache", "/etc/localtime", "/proc", "/sys/devices/system"),
)

Path = str | os.PathLike[str]


def enter(*, readable: Iterable[Path] | None = None, writable: Iterable[Path] = ()) -> None:
    """Take rights from this process, its later threads and its children; nothing gives them back.

    What is refused from here on, with `PermissionError`: to write, make, rename or remove files, or change their modes,
    owners and times; to read memory and environment of other processes, or to change their limits, priorities and
    queues; to open sockets and to connect or bind them; to run programs; and every other call of the system that is not
    on a list of those that Python and torch make (`sandbox/seccomp.py`). What is open already stays open, standard
    output above all. `PATH` is empty from here on: builds of torch with CUDA, when they are
    imported, let Python ask a compiler that it finds there for a library, through a temporary file.

    Call it first: before torch and numpy are imported, which begin threads, and before a bundle is opened.

    Args:
        readable: files and directories that may be read, beside Python, its installed packages, this one, libraries of
            the system and `/proc`; None: all that the user may read. Of `sys.path`, the directory of the script and the
            current one are left out.
        writable: files and directories that may be written and read nevertheless.

    Raises:
        ArgumentInvalid: a path does not exist.
        NotSupported: the system is no Linux on x86-64 with Landlock and seccomp, or the process has several threads.
            Nothing has changed then.
    """
    from aotexport_runtime.sandbox import landlock, seccomp

    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise NotSupported("the sandbox needs Linux on x86-64; run the process in a container without network instead")

    version = landlock.check()
    seccomp.check()
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise NotSupported(
            f"the process has {threads} threads, and only the one that calls would enter the sandbox; call "
            "`sandbox.enter` first, before torch and numpy are imported"
        )
    given = [(os.fspath(path), False) for path in readable or ()] + [(os.fspath(path), True) for path in writable]
    for path, _ in given:
        if not os.path.exists(path):
            raise ArgumentInvalid(f"no file or directory `{path}`")
    usual = [(path, path == "/dev/null") for path in (*_OF_THE_SYSTEM, *_of_python()) if os.path.exists(path)]
    landlock.restrict([*usual, *given], reads=readable is not None, version=version)
    seccomp.refuse()
    os.environ["PATH"] = ""


def _of_python() -> Iterable[str]:
    """Yield where the interpreter and installed packages are, and this package."""
    yield from (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    for prefix in {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}:
        yield from (os.path.join(prefix, name) for name in ("lib", "lib64", "pyvenv.cfg"))
    main = getattr(sys.modules.get("__main__"), "__file__", None) or os.curdir
    started = {os.getcwd(), os.path.dirname(os.path.abspath(main))}
    if not sys.flags.safe_path:
        started.add(os.path.abspath(sys.path[0]))
    yield from (path for path in map(os.path.abspath, filter(None, sys.path)) if path not in started)
    yield os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def call(number: int, *arguments: bytes | int | None) -> int:
    """Return what a call of the system returns, by its number, or raise the `OSError` that it fails with.

    Arguments are integers, and memory that the call reads; None: a null pointer.
    """
    passed = [ctypes.c_long(each) if isinstance(each, int) else ctypes.c_char_p(each) for each in arguments]
    found = ctypes.CDLL(None, use_errno=True).syscall(number, *passed)
    if found < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return found


__all__ = ["call", "enter"]
