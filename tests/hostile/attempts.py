"""An operator that tries what a sandbox refuses, each attempt once: `hostile::attempt(Tensor x, int number)`.

Attempts work on the files `FILES` in the directory `TRIED`, and print how they ended.
"""

import ctypes
import errno
import fcntl
import os
import resource
import signal
import socket
import subprocess
import termios
import threading
from collections.abc import Callable
from multiprocessing import shared_memory
from pathlib import Path

import torch

FILES = ("old", "removed", "renamed")
TRIED = Path(os.environ.get("TRIED", "."))


def shared() -> None:
    memory = shared_memory.SharedMemory(create=True, size=8)
    memory.close()
    memory.unlink()


def in_a_thread() -> None:
    errors: list[OSError] = []

    def write() -> None:
        try:
            (TRIED / "by_thread").write_text("x")
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def program_without_a_name() -> None:
    program = os.memfd_create("program", 0)
    os.write(program, Path("/bin/true").read_bytes())
    os.waitpid(os.posix_spawn(f"/proc/self/fd/{program}", ["true"], {}), 0)


def queue_of_the_kernel() -> None:
    # Without its arguments it fails with EFAULT where it is allowed.
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(425, 1, None) < 0 and ctypes.get_errno() == 1:
        raise PermissionError("io_uring")


def call_of_another_convention() -> None:
    # `getpid` by the numbers of x32, which has sockets and programs too; ENOSYS where the kernel lacks it.
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(0x40000000 | 39) < 0 and ctypes.get_errno() == 1:
        raise PermissionError("x32")


def typed_into_a_terminal() -> None:
    # A pipe is none, and ENOTTY says so where the call is allowed.
    try:
        fcntl.ioctl(os.pipe()[0], termios.TIOCSTI, b"x")
    except OSError as error:
        if error.errno == errno.EPERM:
            raise


def call_to(number: int, *arguments: int | bytes | None) -> Callable[[], None]:
    """Return a call of the system that fails in another way where it is allowed."""

    def act() -> None:
        library = ctypes.CDLL(None, use_errno=True)
        if library.syscall(number, *arguments) < 0 and ctypes.get_errno() == errno.EPERM:
            raise PermissionError(number)

    return act


def child_in_a_namespace_of_its_own() -> None:
    library = ctypes.CDLL(None, use_errno=True)
    found = library.syscall(56, 0x10000000 | signal.SIGCHLD, None, None, None, None)
    if found < 0:
        raise OSError(ctypes.get_errno(), "clone")
    if not found:
        os._exit(0)
    os.waitpid(found, 0)


def flags_of_a_file() -> None:
    try:
        fcntl.ioctl(os.pipe()[0], 0x40086602, b"\0" * 8)
    except OSError as error:
        if error.errno == errno.EPERM:
            raise


ATTEMPTS: dict[str, Callable[[], object]] = {
    "write": lambda: (TRIED / "new").write_text("x"),
    "append": lambda: (TRIED / "old").open("a").close(),
    "truncate": lambda: os.truncate(TRIED / "old", 0),
    "change_modes": lambda: (TRIED / "old").chmod(0o600),
    "change_times": lambda: os.utime(TRIED / "old", (0, 0)),
    "read_elsewhere": lambda: (TRIED / "old").read_bytes(),
    "rename": lambda: (TRIED / "renamed").rename(TRIED / "other"),
    "remove": lambda: (TRIED / "removed").unlink(),
    "make_directory": lambda: (TRIED / "directory").mkdir(),
    "link": lambda: (TRIED / "link").symlink_to("old"),
    "write_in_a_thread": in_a_thread,
    "share_memory": shared,
    "open_a_socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM).close(),
    "open_a_local_socket": lambda: socket.socket(socket.AF_UNIX).close(),
    "run_a_program": lambda: subprocess.run(["/bin/true"], check=True),
    "run_a_program_without_a_name": program_without_a_name,
    "read_the_environment_of_another_process": lambda: Path(f"/proc/{os.getppid()}/environ").read_bytes(),
    "type_into_a_terminal": typed_into_a_terminal,
    "queue_of_the_kernel": queue_of_the_kernel,
    "call_of_another_convention": call_of_another_convention,
    "read_where_it_was_started": lambda: Path("pyproject.toml").read_bytes(),
    "limit_another_process": lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CPU),
    "bind_another_process": lambda: os.sched_setaffinity(os.getppid(), os.sched_getaffinity(0)),
    "priority_of_another_process": lambda: os.setpriority(os.PRIO_PROCESS, os.getppid(), 0),
    "remove_shared_memory": call_to(31, -1, 0, None),
    "remove_semaphores": call_to(66, -1, 0, 0),
    "remove_a_queue": call_to(71, -1, 0, None),
    "remove_a_named_queue": call_to(241, b"none"),
    "read_memory_of_another_process": call_to(310, 0, None, 0, None, 0, 0),
    "change_flags_of_a_file": flags_of_a_file,
    "namespace_of_its_own": child_in_a_namespace_of_its_own,
    "signal_to_another_process": lambda: os.kill(os.getppid(), signal.SIGCONT),
}
_tried = set[int]()


def attempt(x: torch.Tensor, number: int) -> torch.Tensor:
    """Try once; print `name: done`, or the error that refuses."""
    if number not in _tried:
        _tried.add(number)
        name, act = list(ATTEMPTS.items())[number]
        try:
            act()
            print(f"{name}: done")
        except OSError as error:
            print(f"{name}: {'refused' if isinstance(error, PermissionError) else error}")
    return x.clone()


LIBRARY = torch.library.Library("hostile", "DEF")
LIBRARY.define("attempt(Tensor x, int number) -> Tensor")
LIBRARY.impl("attempt", attempt, "CompositeExplicitAutograd")
