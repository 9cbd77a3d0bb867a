"""Processes that can read but change nothing, enforced by the kernel (Linux, seccomp).

A sealed process and all that it starts keep every file, process, socket and setting of the machine
as it is, also as root:

* A file that is opened to be written, created, truncated or appended to is not opened.  The call
  returns 0, which is the process's standard input: it is opened for writing, too, on ``/dev/null``,
  and cannot be closed.  So a redirection succeeds and its output goes nowhere.
* What would change the file system (``mkdir``, ``rename``, ``chmod`` ...), a lock, a limit or a
  priority returns 0 and does nothing.
* Signals find no process.  Sockets are refused, and so is every other call: the filter lists what a
  process may do, because a list of what it may not do would miss calls that a kernel adds.
* Sealed processes cannot leave their process group, so one signal ends all of them.

Reading is real: what is read from a named pipe or a device has been read.  A file that a script
writes and then reads has its old contents.

A filter needs no privileges, works in containers and cannot be taken off.  The numbers are those of
``asm/unistd_64.h`` (x86_64) and ``asm-generic/unistd.h`` (aarch64; read, not run).
"""

import ctypes
import errno
import os
import platform
import resource
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from commfuse_npu.runtime.child_process import die_with_parent
from commfuse_npu.tools.launch_script import UsageError

AUDIT_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The machines whose calls are listed, in the order of the columns."""

ALLOWED = """
read 0 63; write 1 64; pread64 17 67; pwrite64 18 68; readv 19 65; writev 20 66; preadv 295 69;
pwritev 296 70; preadv2 327 286; pwritev2 328 287; lseek 8 62; dup 32 23; dup2 33 -; dup3 292 24;
pipe 22 -; pipe2 293 59; stat 4 -; fstat 5 80; lstat 6 -; newfstatat 262 79; statx 332 291;
statfs 137 43; fstatfs 138 44; access 21 -; faccessat 269 48; faccessat2 439 439; readlink 89 -;
readlinkat 267 78; getdents 78 -; getdents64 217 61; getcwd 79 17; chdir 80 49; fchdir 81 50;
getxattr 191 8; lgetxattr 192 9; fgetxattr 193 10; listxattr 194 11; llistxattr 195 12;
flistxattr 196 13; umask 95 166; poll 7 -; ppoll 271 73; select 23 -;
pselect6 270 72; epoll_create 213 -; epoll_create1 291 20; epoll_ctl 233 21; epoll_wait 232 -;
epoll_pwait 281 22; eventfd 284 -; eventfd2 290 19; signalfd 282 -; signalfd4 289 74;
timerfd_create 283 85; timerfd_settime 286 86; timerfd_gettime 287 87; timer_create 222 107;
timer_settime 223 110; timer_gettime 224 108; timer_getoverrun 225 109; timer_delete 226 111;
alarm 37 -; getitimer 36 102; setitimer 38 103; nanosleep 35 101; clock_nanosleep 230 115;
clock_gettime 228 113; clock_getres 229 114; gettimeofday 96 169; time 201 -; times 100 153;
mmap 9 222; mprotect 10 226; munmap 11 215; mremap 25 216; brk 12 214; mincore 27 232;
membarrier 324 283; rt_sigaction 13 134; rt_sigprocmask 14 135; rt_sigreturn 15 139;
rt_sigpending 127 136; rt_sigtimedwait 128 137; rt_sigsuspend 130 133; sigaltstack 131 132;
pause 34 -; restart_syscall 219 128; fork 57 -; vfork 58 -; execve 59 221; execveat 322 281;
exit 60 93; exit_group 231 94; wait4 61 260; waitid 247 95; futex 202 98; set_robust_list 273 99;
get_robust_list 274 100; set_tid_address 218 96; rseq 334 293; arch_prctl 158 -;
sched_yield 24 124; getpid 39 172; getppid 110 173; gettid 186 178; getpgid 121 155; getpgrp 111 -;
getsid 124 156; getuid 102 174; geteuid 107 175; getgid 104 176; getegid 108 177;
getresuid 118 148; getresgid 120 150; getgroups 115 158; capget 125 90; getpriority 140 141;
ioprio_get 252 31; sched_getaffinity 204 123; sched_getscheduler 145 120; sched_getparam 143 121;
sched_getattr 315 275; sched_get_priority_max 146 125; sched_get_priority_min 147 126;
sched_rr_get_interval 148 127; getcpu 309 168; getrlimit 97 163; getrusage 98 165;
sysinfo 99 179; uname 63 160; getrandom 318 278
"""
"""Calls with their numbers on each machine: what a process does to itself, and reading."""

PRETENDED = """
creat 85 -; mkdir 83 -; mkdirat 258 34; rmdir 84 -; unlink 87 -; unlinkat 263 35; rename 82 -;
renameat 264 38; renameat2 316 276; link 86 -; linkat 265 37; symlink 88 -; symlinkat 266 36;
mknod 133 -; mknodat 259 33; chmod 90 -; fchmod 91 52; fchmodat 268 53; fchmodat2 452 452;
chown 92 -; fchown 93 55; lchown 94 -; fchownat 260 54; truncate 76 45; ftruncate 77 46;
fallocate 285 47; utime 132 -; utimes 235 -; futimesat 261 -; utimensat 280 88; setxattr 188 5;
lsetxattr 189 6; fsetxattr 190 7; removexattr 197 14; lremovexattr 198 15; fremovexattr 199 16;
flock 73 32; fsync 74 82; fdatasync 75 83; sync 162 81; syncfs 306 267; setsid 112 157;
setpgid 109 154; setpriority 141 140; ioprio_set 251 30; sched_setaffinity 203 122;
sched_setscheduler 144 119; sched_setparam 142 118; sched_setattr 314 274; setrlimit 160 164
"""
"""These return 0 and do nothing."""

SIGNALS = """
kill 62 129; tkill 200 130; tgkill 234 131; rt_sigqueueinfo 129 138; rt_tgsigqueueinfo 297 240;
pidfd_send_signal 424 424
"""

SOCKETS = "socket 41 198; socketpair 53 199; connect 42 203; bind 49 200; sendto 44 206"

CHECKED = """
open 2 -; openat 257 56; close 3 57; fcntl 72 25; ioctl 16 29; clone 56 220; madvise 28 233;
prlimit64 302 261
"""
"""These depend on an argument: see ``_checks``."""

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | 0o20000000
"""Flags of ``open``; the last one is ``__O_TMPFILE``."""
_FCNTL_OF_A_DESCRIPTOR = (0, 1, 2, 3, 4, 1030, 1032)
"""F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC, F_GETPIPE_SZ; not locks, owners."""
_IOCTL_QUERIES = (0x5401, 0x5413, 0x540F, 0x541B, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, TIOCGPGRP, FIONREAD, FIONCLEX, FIOCLEX."""
_CLONE_OUTSIDE = 0x7E028000
"""CLONE_PARENT, whose child belongs to the parent, and the flags of new namespaces."""
_MADVISE_HWPOISON = 100
"""This advice and the next take memory away from the machine."""

# ------------------------------------------------------------------- the filter as a program

_Instruction = tuple[int, int, int, int]
"""Code, jumps if true and if false, constant: ``struct sock_filter``."""
_LOAD = 0x20
_EQUAL = 0x15
_AT_LEAST = 0x35
_ANY_BIT = 0x45
_RETURN = 0x06
_ALLOW: _Instruction = (_RETURN, 0, 0, 0x7FFF0000)


def _fail(number: int) -> _Instruction:
    """The call is not carried out; it fails with an errno, or returns 0 for errno 0."""
    return (_RETURN, 0, 0, 0x00050000 | number)


_PRETEND = _fail(0)


def _load(offset: int) -> _Instruction:
    """Load a word of ``struct seccomp_data``: the number is at 0, the machine at 4."""
    return (_LOAD, 0, 0, offset)


def _when(test: int, value: int, *then: _Instruction) -> list[_Instruction]:
    """Continue with ``then``, which returns, if the loaded word passes; otherwise skip it."""
    return [(test, 0, len(then), value), *then]


_FIRST = (16,)
_SECOND = (24,)
_THIRD = (32,)
_THIRD_OF_64_BITS = (32, 36)
"""Where the words of arguments are."""
_Check = tuple[tuple[int, ...], int, tuple[int, ...], _Instruction, _Instruction]
"""Words, test, constants, what follows if a word passes with one of them, and if none does."""
_OPENING = (_ANY_BIT, (_WRITES,), _PRETEND, _ALLOW)
_CHECKS: dict[str, _Check] = {
    "open": (_SECOND, *_OPENING),
    "openat": (_THIRD, *_OPENING),
    "close": (_FIRST, _EQUAL, (0,), _PRETEND, _ALLOW),
    "fcntl": (_SECOND, _EQUAL, _FCNTL_OF_A_DESCRIPTOR, _ALLOW, _PRETEND),
    "ioctl": (_SECOND, _EQUAL, _IOCTL_QUERIES, _ALLOW, _fail(errno.ENOTTY)),
    "clone": (_FIRST, _ANY_BIT, (_CLONE_OUTSIDE,), _fail(errno.EPERM), _ALLOW),
    "madvise": (_THIRD, _AT_LEAST, (_MADVISE_HWPOISON,), _fail(errno.EPERM), _ALLOW),
    # Limits are read if the pointer to new ones is null.
    "prlimit64": (_THIRD_OF_64_BITS, _AT_LEAST, (1,), _PRETEND, _ALLOW),
}
"""What decides on the calls of ``CHECKED``."""


def numbers(calls: str, machine: str) -> dict[str, int]:
    """The calls of a list that a machine has, with their numbers."""
    column = 1 + list(AUDIT_MACHINES).index(machine)
    rows = [call.split() for call in calls.split(";")]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def program(machine: str) -> bytes:
    """The filter for a machine.  It refuses calls of other machines (i386, x32), too."""
    # Callers use an older call where a new one does not exist.
    refused = _fail(errno.ENOSYS)
    steps = [_load(4), (_EQUAL, 1, 0, AUDIT_MACHINES[machine]), refused, _load(0)]
    lists = (
        (ALLOWED, _ALLOW),
        (PRETENDED, _PRETEND),
        (SIGNALS, _fail(errno.ESRCH)),
        (SOCKETS, _fail(errno.EACCES)),
    )
    for name, number in numbers(CHECKED, machine).items():
        words, test, constants, then, otherwise = _CHECKS[name]
        tests = [step for value in constants for step in _when(test, value, then)]
        check = [step for word in words for step in (_load(word), *tests)]
        steps += _when(_EQUAL, number, *check, otherwise)
    for calls, action in lists:
        for number in numbers(calls, machine).values():
            steps += _when(_EQUAL, number, action)
    return b"".join(struct.pack("HBBI", *step) for step in [*steps, refused])


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))


_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2


def filter_here() -> bytes:
    """The filter for this machine.

    Raises:
        UsageError: there is none.
    """
    machine = platform.machine()
    if not sys.platform.startswith("linux") or machine not in AUDIT_MACHINES:
        raise UsageError(_elsewhere(f"this is {sys.platform} on {machine}"))
    return program(machine)


def start_sealed(
    command: Sequence[str],
    steps: bytes,
    *,
    folder: Path,
    environment: Mapping[str, str],
    output: int,
    keep: int,
) -> subprocess.Popen[bytes]:
    """Start a command behind a filter, as the leader of a process group.

    Args:
        output: descriptor of its standard output and error.
        keep: descriptor that it inherits besides.

    Raises:
        UsageError: the kernel has no such filters.
    """
    filtered = _FilterProgram(len(steps) // 8, steps)
    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)

    def seal() -> None:
        die_with_parent()
        # The kernel itself would write a core file.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        refused = prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or prctl(
            _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(filtered), 0, 0
        )
        if refused:
            raise OSError

    with open(os.devnull, "r+b") as nothing:
        try:
            return subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=nothing,
                stdout=output,
                stderr=output,
                pass_fds=[keep],
                start_new_session=True,
                preexec_fn=seal,
            )
        except subprocess.SubprocessError as error:
            raise UsageError(_elsewhere("the kernel refuses it")) from error


def _elsewhere(why: str) -> str:
    return (
        "a script is read behind a filter of system calls, for Linux on x86_64 and aarch64 "
        f"({why}); give the command line of torchrun after --"
    )
