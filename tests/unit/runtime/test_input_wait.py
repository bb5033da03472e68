"""The kernel's formats that `awaiting` reads, for both machines: lines of /proc, fd_sets, arrays of pollfd."""

from __future__ import annotations

import os
import select
import struct

import pytest
from hypothesis import given, strategies as st

from holdfast.runtime.terminal.input_wait import (
    CALLS,
    epoll_targets,
    fd_set_members,
    parse_call,
    polled_for_input,
    tty_number,
)

KINDS = ("read", "poll", "select", "epoll", "restart", "ring")
LINES = {
    # machine: call: a line of /proc/PID/syscall
    "x86_64": {
        "read": b"0 0x0 0x7f4fd6c45000 0x20000 0x7f4fd6cd8b60 0xffffffff 0x0 0x7fff75deb718 0x7f4fd6dc12ad\n",
        "poll": b"7 0x7ffd6e0f4a20 0x2 0xffffffff 0x0 0x0 0x0 0x7ffd6e0f49f8 0x7f1d5e5189bd\n",
        "select": b"270 0x1 0x7ffe6a3c7d10 0x0 0x0 0x0 0x7ffe6a3c7c80 0x7ffe6a3c7c40 0x7f0e8b7a4f6b\n",
        "epoll": b"232 0x3 0x7f3d2c000b60 0x400 0xffffffff 0x0 0x0 0x7ffc1b2f3a48 0x7f3d31d1ae9e\n",
        "restart": b"219 0x7ffd6e0f4a20 0x1 0xf4240 0x0 0x0 0x0 0x7ffd6e0f49f8 0x7f1d5e5189bd\n",
        "ring": b"426 0x3 0x0 0x1 0x1 0x0 0x8 0x7ffd6e0f49f8 0x7f1d5e5189bd\n",
    },
    "aarch64": {
        "read": b"63 0x0 0xffff9c3d0000 0x20000 0x0 0x0 0x0 0xffffd1b6d2c0 0xffff9c2e1b4c\n",
        "poll": b"73 0xffffeb2a1d48 0x1 0x0 0x0 0x8 0x0 0xffffeb2a1cc0 0xffffa3c5d2f8\n",
        "select": b"72 0x1 0xffffcf6a7e10 0x0 0x0 0x0 0xffffcf6a7d88 0xffffcf6a7d40 0xffffb1e4c9d4\n",
        "epoll": b"22 0x3 0xaaaae3c41f20 0x400 0xffffffffffffffff 0x0 0x8 0xffffd8f1c2b0 0xffff8d6be7c8\n",
        "restart": b"128 0xffffeb2a1d48 0x1 0x3e8 0x0 0x8 0x0 0xffffeb2a1cc0 0xffffa3c5d2f8\n",
        "ring": b"426 0x3 0x0 0x1 0x1 0x0 0x8 0xffffeb2a1cc0 0xffffa3c5d2f8\n",
    },
}


@pytest.mark.parametrize("machine", LINES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_blocked_call_is_known_by_its_number(machine: str, kind: str) -> None:
    call = parse_call(LINES[machine][kind])
    assert call is not None
    assert CALLS[machine][call.number] == kind
    assert len(call.arguments) == 6
    assert not call.narrow


def test_arguments_come_in_order() -> None:
    call = parse_call(LINES["aarch64"]["epoll"])
    assert call is not None
    assert call.arguments == (3, 0xAAAAE3C41F20, 0x400, 0xFFFFFFFFFFFFFFFF, 0, 8)


@pytest.mark.parametrize("line", [b"running\n", b"-1 0x7ffd6e0f49f8 0x55d0c8a4b1a9\n", b"-1 0x0 0x0\n", b""])
def test_a_thread_outside_of_a_call_waits_for_nothing(line: bytes) -> None:
    assert parse_call(line) is None


def test_a_program_of_32_bits_is_told_apart() -> None:
    # Its read is number 3, which is close() for the others.
    call = parse_call(b"3 0x0 0x5663a1b0 0x1000 0x0 0x0 0xffd2a3f8 0xffd2a3c0 0xf7f4b579\n")
    assert call is not None
    assert call.narrow


def test_a_program_linked_at_a_fixed_low_address_has_64_bits() -> None:
    call = parse_call(b"0 0x0 0x4c9000 0x1000 0x0 0x0 0x0 0x7ffd6e0f49f8 0x4521ab\n")
    assert call is not None
    assert not call.narrow


def test_both_machines_know_each_way_to_wait() -> None:
    assert {machine: set(calls.values()) for machine, calls in CALLS.items()} == {
        machine: set(KINDS) for machine in ("x86_64", "aarch64")
    }


@pytest.mark.parametrize(
    ("events", "counts"),
    [
        (select.POLLIN, True),
        (select.POLLRDNORM, True),
        (select.POLLIN | select.POLLPRI | select.POLLHUP, True),
        (select.POLLOUT, False),
        (select.POLLPRI, False),
        (0, False),
    ],
)
def test_pollfds_count_if_they_ask_for_input(events: int, counts: bool) -> None:
    array = struct.pack("=ihh", 5, events, 0)
    assert list(polled_for_input(array)) == ([5] if counts else [])


def test_an_array_of_pollfds() -> None:
    entries = [(-1, select.POLLIN), (0, select.POLLIN), (4, select.POLLOUT), (1000, select.POLLRDNORM)]
    array = b"".join(struct.pack("=ihh", fd, events, 0x7FFF) for fd, events in entries)
    assert list(polled_for_input(array)) == [0, 1000]
    assert list(polled_for_input(array + b"\0\0\0")) == [0, 1000]
    assert list(polled_for_input(b"")) == []


@given(st.sets(st.integers(0, 1023)), st.integers(0, 1024))
def test_an_fd_set_gives_its_members_below_the_count(members: set[int], count: int) -> None:
    longs = [0] * 16
    for fd in members:
        longs[fd // 64] |= 1 << fd % 64
    bits = struct.pack("<16Q", *longs)
    assert list(fd_set_members(bits, count)) == sorted(fd for fd in members if fd < count)


def test_epoll_targets_are_those_watched_for_input() -> None:
    fdinfo = (
        b"pos:\t0\nflags:\t02000002\nmnt_id:\t15\nino:\t1057\n"
        b"tfd:        0 events:       19 data:                0  pos:0 ino:8 sdev:18\n"
        b"tfd:       12 events: 80000001 data: ffffffff0000000c  pos:0 ino:8a2 sdev:9\n"
        b"tfd:        7 events:        4 data:                7  pos:0 ino:8a3 sdev:9\n"
        b"tfd:        9 events: 40000000 data:                9  pos:0 ino:8a4 sdev:9\n"
        b"tfd:        5 events:       40 data:                5  pos:0 ino:8a5 sdev:9\n"
    )
    assert epoll_targets(fdinfo) == [0, 12, 5]


def test_any_other_file_has_no_epoll_targets() -> None:
    assert epoll_targets(b"pos:\t0\nflags:\t0100002\nmnt_id:\t24\nino:\t3\n") == []


@pytest.mark.parametrize(
    ("major", "minor", "number"),
    [(136, 0, 0x8800), (136, 255, 0x88FF), (136, 256, 0x108800), (136, 0xFFFFF, 0xFFF088FF), (5, 0, 0x500)],
)
def test_device_numbers_as_stat_has_them(major: int, minor: int, number: int) -> None:
    assert tty_number(os.makedev(major, minor)) == number
