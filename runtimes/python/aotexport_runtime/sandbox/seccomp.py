"""A filter of seccomp for x86-64: the calls of the system, by the kernel's numbers, that are allowed.

All others are refused: with EPERM, and those that are newer than the list with ENOSYS, as by a kernel without them.
Landlock knows files by their paths; what it does not see is not on the list: sockets, programs, modes and times of
files, and what changes other processes or objects of theirs.
"""

from __future__ import annotations

import ctypes
import errno
import struct

from aotexport_runtime.errors import NotSupported
from aotexport_runtime.sandbox import call

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


def check() -> None:
    """Refuse a kernel that has no filters, or does not let the process set one (`NotSupported`)."""
    try:
        call(_SECCOMP, _IS_AVAILABLE, 0, struct.pack("I", _REFUSE & ~0xFFFF))
    except OSError as error:
        raise NotSupported(
            f"the kernel has no filters of seccomp ({error.strerror}); run the process in a container without network "
            "instead"
        ) from None


def refuse() -> None:
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
