"""The fuzz targets, driven by Hypothesis: bytes of any kind, and seeds that were damaged. `make fuzz` goes further.

Findings of fuzzing are below, each with the input that showed it.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import h11
import pytest
from hypothesis import given, settings, strategies as st

from fuzz.target import Target
from fuzz.targets import targets
from holdfast.client.screen.asciicast import read_cast
from holdfast.config import parse_settings
from holdfast.errors import InvalidParams, SandboxError
from holdfast.proxies.egress.proxy import RequestRefused, requested_host
from holdfast.proxies.egress.rules import parse_pattern
from holdfast.runtime.durability import records as r
from holdfast.runtime.durability.keeper import read_packet
from holdfast.runtime.durability.replay import Replay
from holdfast.runtime.terminal.mark_filter import MARK_BYTES, MarkFilter
from holdfast.runtime.tree.process_table import mark_in_environment
from holdfast.service.positions import Position, read_token, write_token
from holdfast.service.problems import BadToken
from holdfast.types import ProcessSpec, ShellSpec

ROOT = Path(__file__).parents[2]
TARGETS = targets()
#: `make fuzz` makes millions of inputs; these show that the targets run, and find what lies at the surface.
EXAMPLES = 60
NONCE = "0123456789abcdef0123456789abcdef"


@st.composite
def damaged(draw: st.DrawFn, seeds: tuple[bytes, ...]) -> bytes:
    """A seed with a few of its bytes changed, taken out or repeated, and perhaps cut; or two of them in a row."""
    data = bytearray(draw(st.sampled_from(seeds)) + draw(st.sampled_from((b"", *seeds))))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(["change", "take out", "repeat", "put in"])):
            case "change":
                data[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case "take out":
                del data[at : at + draw(st.integers(1, 8))]
            case "repeat":
                data[at:at] = data[at : at + draw(st.integers(1, 64))]
            case _:
                data[at:at] = draw(st.binary(max_size=8))
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_seeds_keep_every_promise(target: Target) -> None:
    assert target.seeds
    for seed in (*target.seeds, b""):
        target.run(seed)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_bytes_of_any_kind_keep_every_promise(target: Target) -> None:
    tried = 0

    @settings(max_examples=EXAMPLES)
    @given(st.one_of(st.binary(max_size=200), damaged(target.seeds)))
    def holds(data: bytes) -> None:
        nonlocal tried
        tried += 1
        target.run(data)

    holds()
    assert tried >= EXAMPLES


def test_an_input_is_repeated_without_atheris(tmp_path: Path) -> None:
    kept = tmp_path / "input"
    kept.write_bytes(TARGETS["keys"].seeds[0])
    reported = subprocess.run(
        [sys.executable, "-m", "fuzz", "keys", "--repeat", str(kept)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert reported.stdout == f"keys: every promise holds for {kept}\n"


# --- what was found -----------------------------------------------------------------------------------------------


def test_a_mark_is_no_longer_than_what_is_held_back_for_one() -> None:
    """Else it would be found or not, depending on where the stream was cut."""
    for digits in (MARK_BYTES, 10):
        mark = f"\x1b]133;D;{'9' * digits};{NONCE}\x07".encode()
        whole, apart = MarkFilter(NONCE), MarkFilter(NONCE)
        clean = b"".join(apart.feed(mark[at : at + 1])[0] for at in range(len(mark))) + apart.release()
        assert clean == whole.feed(mark)[0] + whole.release() == (b"" if digits == 10 else mark)


def test_a_number_of_thousands_of_digits_is_no_mark() -> None:
    assert mark_in_environment(b"HOLDFAST_MARK=" + b"9" * 5_000) is None
    assert mark_in_environment(b"HOLDFAST_MARK=4611686018427387911") == 4611686018427387911


@pytest.mark.parametrize("value", ["1" * 5_000, "[" * 2_000, "nan", "-nan"])
def test_settings_that_are_hard_to_read_are_refused(value: str) -> None:
    with pytest.raises(InvalidParams, match="settings"):
        parse_settings(f"detached_session_seconds = {value}".encode(), "x.toml")


@pytest.mark.parametrize("port", ["9" * 5_000, "٤٤٣", "0", "65536", ""])
def test_a_port_that_is_none_is_refused_by_the_proxy(port: str) -> None:
    """`int` raises for thousands of digits, and the request was answered with nothing."""
    target = f"a.example:{port}".encode("ascii", "replace")
    with pytest.raises(RequestRefused, match="not HOST:PORT") as refused:
        requested_host(h11.Request(method="CONNECT", target=target, headers=[("host", "x")]))
    assert refused.value.status == 400
    if port:
        with pytest.raises(InvalidParams, match="is no port"):
            parse_pattern(f"a.example:{port}")


@pytest.mark.parametrize("digit", ["(", " ", "+", "_", "A", "٣"])
def test_a_position_with_a_right_check_and_wrong_digits_is_refused(digit: str) -> None:
    """Any caller can compute the check; `int` raised, which was reported as a bug of the service."""
    digits = digit + write_token("s", Position())[1:-8]
    check = hashlib.blake2b(f"s:{digits}".encode(), digest_size=4).hexdigest()
    with pytest.raises(BadToken):
        read_token("s", digits + check)


def test_a_recording_nested_deeply_is_refused() -> None:
    header = '{"version": 2, "width": 1, "height": 1, "theme": ' + "[" * 100_000
    with pytest.raises(InvalidParams, match="line 1"):
        read_cast([header])


@pytest.mark.parametrize("size", ["9" * 5_000 + "x1", "0x0", "1x", "+1x1"])
def test_a_size_that_no_terminal_has_is_none(size: str) -> None:
    recording = read_cast(['{"version": 2, "width": 1, "height": 1}', f'[1, "r", "{size}"]'])
    assert [event.size for event in recording.events] == [None]


@pytest.mark.parametrize(
    "record",
    [
        r.OutputPrinted(1, 0, 0, -1),
        r.OutputPrinted(1, 3, 0, 1),
        r.OutputPrinted(1, -1, 0, 1),
        r.OutputPrinted(1, 0, 0, 1 << 62),
        r.JournalCheckpoint(1, (1, b"", b"", b"", b"", 0)),
        r.JournalCheckpoint(1, (0, b"", b"\x00" * 16, b"", b"", 0)),
        r.JournalCheckpoint(1, (1, b"\x09", b"\x00" * 32, b"", b"", 0)),
    ],
)
@pytest.mark.parametrize(
    "begun",
    [
        r.ProcessBegun(1, ProcessSpec("p", ("true",)), 7, b"/", False),
        r.ShellOpening(1, ShellSpec("sh"), "/bin/sh", "/bin/sh", "/spool/s1", 1.5),
    ],
    ids=["process", "shell"],
)
def test_a_ledger_that_tells_what_cannot_be_is_refused(begun: r.LedgerRecord, record: r.LedgerRecord) -> None:
    memory = Replay(max_chunks=16, max_events=4)
    with pytest.raises(SandboxError, match="the ledger has a wrong record of 1"):
        memory.apply([begun, record])


def test_a_damaged_ledger_is_refused_with_its_place() -> None:
    good = r.encode_records([r.JobForgotten(1)])
    with pytest.raises(SandboxError, match=f"the ledger is damaged at byte {len(good)}"):
        list(r.decode_records(good + (3).to_bytes(4, "little") + b"\xff\xff\xff"))


@pytest.mark.parametrize("packet", [b"", b"(", b"\xff", b"u\x02\x00\x00\x00UP", b"(\x00\x00\x00\x00", b"N"])
def test_what_is_no_packet_does_not_end_the_keeper(packet: bytes) -> None:
    with pytest.raises(ValueError, match="bytes"):
        read_packet(packet)
