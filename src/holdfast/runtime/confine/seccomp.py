"""Seccomp filters as bytes: a small BPF assembler, and the list of system calls that are refused.

Pure. Refused calls fail with EPERM, so that programs which do not depend on them continue; `clone3` and `openat2`
fail with ENOSYS, because their flags are behind a pointer, and callers fall back to `clone` and `openat`. For
programs of another architecture (32 bits, x32) every call is refused: their call numbers have other meanings.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

# linux/filter.h, linux/seccomp.h
_LOAD: Final = 0x20  # BPF_LD | BPF_W | BPF_ABS
_JUMP_EQUAL: Final = 0x15
_JUMP_AT_LEAST: Final = 0x35
_JUMP_ANY_BIT: Final = 0x45
_RETURN: Final = 0x06
_ALLOW: Final = 0x7FFF0000
_ERRNO: Final = 0x00050000
_INSTRUCTION: Final = struct.Struct("=HBBI")

#: Offsets in `struct seccomp_data`. Arguments have 64 bits; the lower half comes first on both architectures.
_NUMBER: Final = 0
_ARCHITECTURE: Final = 4
_ARGUMENTS: Final = 16

#: CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
_NEW_NAMESPACES: Final = 0x7E020000
_X32: Final = 0x40000000
_TIOCSTI: Final = 0x5412
_TIOCLINUX: Final = 0x541C
_PTRACE_ATTACH: Final = 16
_PTRACE_SEIZE: Final = 0x4206
#: S_ISUID and S_ISGID. A file with one of them runs with its owner's rights for every user of the machine.
_SET_ID: Final = 0o6000
#: O_CREAT and the bit of O_TMPFILE: without either of them the kernel ignores the mode, and its register may hold
#: anything.
_CREATING: Final = 0x40 | 0x400000

AF_UNIX: Final = 1
AF_INET: Final = 2
AF_INET6: Final = 10
AF_NETLINK: Final = 16


class Architecture(NamedTuple):
    """The numbers of one architecture."""

    audit: int
    calls: dict[str, int]


def _numbers(table: str) -> dict[str, int]:
    """Parse a table of names, each followed by its number."""
    words = table.split()
    return {name: int(number) for name, number in zip(words[::2], words[1::2], strict=True)}


#: The numbers that all architectures share, since Linux 5.
_SHARED: Final = _numbers("""
    pidfd_getfd 438 io_uring_setup 425 io_uring_enter 426 io_uring_register 427 open_tree 428 move_mount 429
    fsopen 430 fsconfig 431 fsmount 432 fspick 433 clone3 435 openat2 437 mount_setattr 442 quotactl_fd 443
    fchmodat2 452 open_tree_attr 467
""")
_X86_64: Final = _numbers("""
    open 2 ioctl 16 socket 41 clone 56 mkdir 83 creat 85 chmod 90 fchmod 91 ptrace 101 syslog 103 mknod 133
    uselib 134 vhangup 153 modify_ldt 154 pivot_root 155 adjtimex 159 chroot 161 acct 163 settimeofday 164
    mount 165 umount2 166 swapon 167 swapoff 168 reboot 169 sethostname 170 setdomainname 171 iopl 172
    ioperm 173 init_module 175 delete_module 176 quotactl 179 nfsservctl 180 lookup_dcookie 212
    clock_settime 227 kexec_load 246 add_key 248 request_key 249 keyctl 250 openat 257 mkdirat 258 mknodat 259
    fchmodat 268 unshare 272 move_pages 279 perf_event_open 298 fanotify_init 300 name_to_handle_at 303
    open_by_handle_at 304 clock_adjtime 305 prlimit64 302 setns 308 process_vm_readv 310 process_vm_writev 311
    kcmp 312 finit_module 313 kexec_file_load 320 bpf 321 userfaultfd 323
""")
_AARCH64: Final = _numbers("""
    lookup_dcookie 18 ioctl 29 mknodat 33 mkdirat 34 umount2 39 mount 40 pivot_root 41 nfsservctl 42 chroot 51
    fchmod 52 fchmodat 53 openat 56 vhangup 58 quotactl 60 acct 89 unshare 97 kexec_load 104 init_module 105
    delete_module 106 clock_settime 112 syslog 116 ptrace 117 reboot 142 sethostname 161 setdomainname 162
    settimeofday 170 adjtimex 171 socket 198 add_key 217 request_key 218 keyctl 219 clone 220 swapon 224
    swapoff 225 move_pages 239 perf_event_open 241 fanotify_init 262 name_to_handle_at 264 open_by_handle_at 265
    clock_adjtime 266 prlimit64 261 setns 268 process_vm_readv 270 process_vm_writev 271 kcmp 272
    finit_module 273 bpf 280 userfaultfd 282 kexec_file_load 294
""")
ARCHITECTURES: Final = {
    "x86_64": Architecture(0xC000003E, _SHARED | _X86_64),
    "aarch64": Architecture(0xC00000B7, _SHARED | _AARCH64),
}
#: Their arguments are behind a pointer.
_UNREADABLE: Final = ("clone3", "openat2")
#: Calls that take a mode, and which of their arguments the mode is.
_MODES: Final = _numbers("chmod 1 fchmod 1 fchmodat 2 fchmodat2 2 creat 1 mkdir 1 mkdirat 2 mknod 1 mknodat 2")
#: Calls with a mode that applies only with some flags: the argument of the flags. The mode is the next one.
_OPENING: Final = {"open": 1, "openat": 2}
_BY_ARGUMENT: Final = frozenset(
    {"ioctl", "socket", "clone", "unshare", "ptrace", "prlimit64", *_UNREADABLE, *_MODES, *_OPENING}
)

Instruction = tuple[int, int, int, int]


def refused_calls(machine: str) -> list[str]:
    """The calls that are refused with any arguments."""
    return sorted(ARCHITECTURES[machine].calls.keys() - _BY_ARGUMENT)


def filter_program(machine: str, families: Iterable[int]) -> bytes:
    """The filter for a process on this architecture, as `struct sock_filter`s; sockets of `families` are allowed.

    `KeyError` for an unknown architecture.
    """
    audit, calls = ARCHITECTURES[machine]
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, audit),
        _refuse(),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        program += [(_JUMP_AT_LEAST, 0, 1, _X32), _refuse()]
    for name in _UNREADABLE:
        program += [(_JUMP_EQUAL, 0, 1, calls[name]), _refuse(errno.ENOSYS)]
    for name in refused_calls(machine):
        program += [(_JUMP_EQUAL, 0, 1, calls[name]), _refuse()]
    for name in ("clone", "unshare"):
        program += _when(calls[name], 0, [(_JUMP_ANY_BIT, 0, 1, _NEW_NAMESPACES), _refuse()])
    # Programs cannot type into their terminal, and can trace their own children only.
    program += _when(calls["ioctl"], 1, _refuse_values((_TIOCSTI, _TIOCLINUX)))
    program += _when(calls["ptrace"], 0, _refuse_values((_PTRACE_ATTACH, _PTRACE_SEIZE)))
    # For the caller (0) only: a limit of CPU time would kill another process of the same user.
    program += _when(calls["prlimit64"], 0, _refuse_others((0,)))
    program += _when(calls["socket"], 0, _refuse_others(tuple(families)))
    program += _refuse_set_id(calls)
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(_INSTRUCTION.pack(*each) for each in program)


def _refuse(number: int = errno.EPERM) -> Instruction:
    return (_RETURN, 0, 0, _ERRNO | number)


def _when(call: int, argument: int, body: list[Instruction]) -> list[Instruction]:
    """`body` for this call, with the lower half of an argument loaded; the call number is loaded again after it."""
    whole = [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument), *body, (_LOAD, 0, 0, _NUMBER)]
    return [(_JUMP_EQUAL, 0, len(whole), call), *whole]


def _refuse_set_id(calls: dict[str, int]) -> list[Instruction]:
    """Refuse set-id bits in every call that takes a mode. 64-bit ARM lacks the oldest of these calls."""
    program: list[Instruction] = []
    test: list[Instruction] = [(_JUMP_ANY_BIT, 0, 1, _SET_ID), _refuse()]
    for name, argument in _MODES.items():
        if name in calls:
            program += _when(calls[name], argument, test)
    for name, flags in _OPENING.items():
        if name in calls:
            # Without a flag that creates a file, jump over the load of the mode and its test.
            mode = (_LOAD, 0, 0, _ARGUMENTS + 8 * (flags + 1))
            program += _when(calls[name], flags, [(_JUMP_ANY_BIT, 0, 1 + len(test), _CREATING), mode, *test])
    return program


def _refuse_values(values: tuple[int, ...]) -> list[Instruction]:
    return [part for value in values for part in ((_JUMP_EQUAL, 0, 1, value), _refuse())]


def _refuse_others(values: tuple[int, ...]) -> list[Instruction]:
    """Refuse all values but these: each of them jumps over the following tests and the refusal."""
    return [*((_JUMP_EQUAL, len(values) - index, 0, value) for index, value in enumerate(values)), _refuse()]
