"""A process that gives up its rights before it reads what a stranger wrote: no files to write, no network, no programs.

Landlock of Linux refuses files, a filter of seccomp other calls of the system. Imports neither torch nor numpy.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import stat
import struct
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
    on a list of those that Python and torch make (`ALLOWED`). What is open already stays open, standard
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
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise NotSupported("the sandbox needs Linux on x86-64; run the process in a container without network instead")
    version = _landlock_version()
    _check_filters()
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
    _restrict_files([*usual, *given], reads=readable is not None, version=version)
    _restrict_calls()
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


# Landlock: rules for files, which a process gives itself. Numbers are those of `linux/landlock.h`.

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION = 1
_PATH_BENEATH = 1

_EXECUTE = 1 << 0
_WRITE_FILE = 1 << 1
_READ = 1 << 2 | 1 << 3
_WRITE_DIRECTORY = sum(1 << bit for bit in range(4, 13))
_REFER, _TRUNCATE, _DEVICE_IOCTL = 1 << 13, 1 << 14, 1 << 15
_WRITE = _WRITE_FILE | _WRITE_DIRECTORY | _REFER | _TRUNCATE
_OF_FILES = _EXECUTE | _WRITE_FILE | 1 << 2 | _TRUNCATE | _DEVICE_IOCTL
_ADDED_BY = {_REFER: 2, _TRUNCATE: 3, _DEVICE_IOCTL: 5}
"""Rights that later versions of Landlock know."""

_TCP, _TCP_SINCE = 1 << 0 | 1 << 1, 4
_SCOPES, _SCOPES_SINCE = 1 << 0 | 1 << 1, 6
"""Connections and signals to processes outside."""

_NO_NEW_PRIVILEGES = 38
_GET_CAPABILITIES, _SET_CAPABILITIES = 125, 126
_CAPABILITIES_VERSION = 0x20080522
_KEPT_CAPABILITIES = 1 << 1 | 1 << 2
"""To read and write files of others, as far as rules allow."""


def _landlock_version() -> int:
    """Return the version of Landlock; a kernel without it is refused (`NotSupported`)."""
    try:
        return call(_CREATE_RULESET, None, 0, _VERSION)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
            raise
        raise NotSupported(
            f"the kernel has no Landlock ({error.strerror}): it needs Linux 5.13, with `landlock` among its "
            "security modules (`lsm=`); run the process in a container without network instead"
        ) from None


def _restrict_files(paths: Iterable[tuple[str, bool]], *, reads: bool, version: int) -> None:
    """Refuse this thread, and those that it begins, to change files, and the rights of root but those to files.

    `paths`: what may be read, with all below it, and whether it may be changed; `reads`: refuse to read other files.
    """
    files = _EXECUTE | _WRITE | _DEVICE_IOCTL | (_READ if reads else 0)
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


# Seccomp for x86-64: the calls of the system, by the kernel's numbers, that are allowed. All others are refused: with
# EPERM, and those that are newer than the list with ENOSYS, as by a kernel without them. Landlock knows files by their
# paths; what it does not see is not on the list: sockets, programs, modes and times of files, and what changes other
# processes or objects of theirs.

_NAMES = """
0 read 1 write 2 open 3 close 4 stat 5 fstat 6 lstat 7 poll 8 lseek 9 mmap 10 mprotect 11 munmap 12 brk
13 rt_sigaction 14 rt_sigprocmask 15 rt_sigreturn 17 pread64 18 pwrite64 19 readv 20 writev 21 access 22 pipe 23 select
24 sched_yield 25 mremap 26 msync 27 mincore 28 madvise 32 dup 33 dup2 34 pause 35 nanosleep 36 getitimer 37 alarm
38 setitimer 39 getpid 40 sendfile 44 sendto 45 recvfrom 46 sendmsg 47 recvmsg 48 shutdown 51 getsockname
52 getpeername 53 socketpair 54 setsockopt 55 getsockopt 57 fork 58 vfork 60 exit 61 wait4 62 kill 63 uname 72 fcntl
73 flock 74 fsync 75 fdatasync 77 ftruncate 78 getdents 79 getcwd 80 chdir 81 fchdir 82 rename 83 mkdir 84 rmdir
85 creat 86 link 87 unlink 88 symlink 89 readlink 95 umask 96 gettimeofday 97 getrlimit 98 getrusage 99 sysinfo
100 times 102 getuid 104 getgid 107 geteuid 108 getegid 110 getppid 111 getpgrp 115 getgroups 118 getresuid
120 getresgid 121 getpgid 124 getsid 125 capget 127 rt_sigpending 128 rt_sigtimedwait 130 rt_sigsuspend 131 sigaltstack
137 statfs 138 fstatfs 140 getpriority 143 sched_getparam 145 sched_getscheduler 146 sched_get_priority_max
147 sched_get_priority_min 148 sched_rr_get_interval 149 mlock 150 munlock 151 mlockall 152 munlockall 157 prctl
158 arch_prctl 160 setrlimit 186 gettid 187 readahead 191 getxattr 192 lgetxattr 193 fgetxattr 194 listxattr
195 llistxattr 196 flistxattr 201 time 202 futex 204 sched_getaffinity 213 epoll_create 217 getdents64
218 set_tid_address 219 restart_syscall 221 fadvise64 222 timer_create 223 timer_settime 224 timer_gettime
225 timer_getoverrun 226 timer_delete 228 clock_gettime 229 clock_getres 230 clock_nanosleep 231 exit_group
232 epoll_wait 233 epoll_ctl 234 tgkill 237 mbind 238 set_mempolicy 239 get_mempolicy 247 waitid 257 openat
258 mkdirat 262 newfstatat 263 unlinkat 264 renameat 265 linkat 266 symlinkat 267 readlinkat 269 faccessat 270 pselect6
271 ppoll 273 set_robust_list 275 splice 276 tee 277 sync_file_range 281 epoll_pwait 282 signalfd 283 timerfd_create
284 eventfd 285 fallocate 286 timerfd_settime 287 timerfd_gettime 289 signalfd4 290 eventfd2 291 epoll_create1 292 dup3
293 pipe2 295 preadv 296 pwritev 309 getcpu 315 sched_getattr 316 renameat2 317 seccomp 318 getrandom 319 memfd_create
324 membarrier 325 mlock2 326 copy_file_range 327 preadv2 328 pwritev2 329 pkey_mprotect 330 pkey_alloc 331 pkey_free
332 statx 334 rseq 436 close_range 437 openat2 439 faccessat2 441 epoll_pwait2 444 landlock_create_ruleset
445 landlock_add_rule 446 landlock_restrict_self 449 futex_waitv 450 set_mempolicy_home_node 451 cachestat
453 map_shadow_stack 454 futex_wake 455 futex_wait 456 futex_requeue 462 mseal
"""
"""What Python, torch, numpy and the libraries below them call, with what only reads or changes the process alone."""
ALLOWED = {int(number): name for number, name in zip(*[iter(_NAMES.split())] * 2, strict=True)}
_KNOWN = 470
"""Numbers from here on are newer than the list."""

_CLONE, _CLONE3, _NAMESPACES = 56, 435, 0x7E020000
"""Processes and threads, but no new namespaces; of `clone3` a filter does not see the flags, and glibc does without."""
_IOCTL, _REQUESTS = 16, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x80086601, 0x802C542A)
"""`TCGETS`, `TIOCGWINSZ`, `FIONREAD`, `FIONBIO`, `FIONCLEX`, `FIOCLEX`, `FS_IOC_GETFLAGS`, `TCGETS2`."""
_OF_ITSELF = (203, 302)
"""`sched_setaffinity` and `prlimit64`, which name a process: 0, the one that calls."""

_SECCOMP, _SET_FILTER, _IS_AVAILABLE = 317, 1, 2
_ALLOW, _REFUSE, _MISSING = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
_X86_64, _X32 = 0xC000003E, 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _HAS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_AT_NUMBER, _AT_ARCHITECTURE, _AT_FIRST_ARGUMENT, _AT_SECOND_ARGUMENT = 0, 4, 16, 24


def _check_filters() -> None:
    """Refuse a kernel that has no filters, or does not let the process set one (`NotSupported`)."""
    try:
        call(_SECCOMP, _IS_AVAILABLE, 0, struct.pack("I", _REFUSE & ~0xFFFF))
    except OSError as error:
        raise NotSupported(
            f"the kernel has no filters of seccomp ({error.strerror}); run the process in a container without network "
            "instead"
        ) from None


def _restrict_calls() -> None:
    """Refuse all calls but those of the list in this thread, and in those that it begins."""
    program = ctypes.create_string_buffer(_program())
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(program))
    call(_SECCOMP, _SET_FILTER, 0, header)


def _program() -> bytes:
    """Return the filter: instructions of Berkeley's packet filter, of 8 bytes each."""
    allow, refuse, missing = ((_RETURN, 0, 0, value) for value in (_ALLOW, _REFUSE, _MISSING))
    steps = [(_LOAD, 0, 0, _AT_ARCHITECTURE), (_EQUAL, 1, 0, _X86_64), refuse, (_LOAD, 0, 0, _AT_NUMBER)]
    steps += [(_AT_LEAST, 0, 1, _X32), refuse, (_AT_LEAST, 0, 1, _KNOWN), missing, (_EQUAL, 0, 1, _CLONE3), missing]
    for number in ALLOWED:
        steps += [(_EQUAL, 0, 1, number), allow]
    steps += [(_EQUAL, 0, 4, _CLONE), (_LOAD, 0, 0, _AT_FIRST_ARGUMENT), (_HAS, 0, 1, _NAMESPACES), refuse, allow]
    for number in _OF_ITSELF:
        steps += [(_EQUAL, 0, 4, number), (_LOAD, 0, 0, _AT_FIRST_ARGUMENT), (_EQUAL, 0, 1, 0), allow, refuse]
    steps += [(_EQUAL, 0, 2 * len(_REQUESTS) + 1, _IOCTL), (_LOAD, 0, 0, _AT_SECOND_ARGUMENT)]
    for request in _REQUESTS:
        steps += [(_EQUAL, 0, 1, request), allow]
    return b"".join(struct.pack("HBBI", *step) for step in (*steps, refuse))
