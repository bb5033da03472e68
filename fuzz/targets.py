"""Properties of each parser for any bytes: one function a parser, which raises if the property does not hold.

A target returns for input that is refused in the promised way. Its seeds are made here, by the code that writes
what the parser reads, so that they cannot grow old. Touches nothing but memory.
"""

from __future__ import annotations

import io
import marshal
import shlex
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from fuzz import agent_targets, bridge_targets, e2b_targets, edge_targets, redaction_targets
from fuzz.target import Target, cut_at, places_of, target
from holdfast.client.screen.asciicast import CastEvent, read_cast, resize_event, write_cast
from holdfast.config import parse_settings
from holdfast.errors import HoldfastError, InvalidParams, InvalidRequest, ParseError, SandboxError
from holdfast.runtime.durability import records as r
from holdfast.runtime.durability.keeper import read_packet
from holdfast.runtime.durability.replay import Replay
from holdfast.runtime.output.journal import Journal
from holdfast.runtime.process.environment import apply_policy
from holdfast.runtime.terminal.input_wait import fd_set_members, polled_for_input
from holdfast.runtime.terminal.keys import encode_keys, key_names
from holdfast.runtime.terminal.mark_filter import MARK_BYTES, MarkFilter, PromptMark
from holdfast.runtime.tree.process_table import mark_in_environment, mark_in_limits, stat_fields
from holdfast.server.client_session_records import ClientSessionReplay, SessionOpened, SessionStarted
from holdfast.service.policy.command_line import read_command_line
from holdfast.service.policy.engine import decide_command
from holdfast.service.policy.profiles import CommandRule, Commands, Profile
from holdfast.service.policy.rules import RulesInvalid, load_rules
from holdfast.service.policy.typed_lines import LineBuffer, decide_input
from holdfast.types import CommandSpec, EnvPolicy, ProcessSpec, ShellSpec, TerminalSize, TerminalSpec
from holdfast.wire.codec import Codec
from holdfast.wire.framing import LENGTH_BYTES, FrameReader, Oversized, frame_length, frame_line
from holdfast.wire.messages import PING, Empty, Encoding, ReadParams, WriteParams
from holdfast.wire.peer import IncomingRequest, Peer
from holdfast.wire.table import methods, notifications


def targets() -> dict[str, Target]:
    """Every target by its name, those of the other modules too."""
    own = {each.name: each for each in globals().values() if isinstance(each, Target)}
    others = (agent_targets, bridge_targets, e2b_targets, edge_targets, redaction_targets)
    return own | {name: each for module in others for name, each in module.targets().items()}


# --- the wire -----------------------------------------------------------------------------------------------------

_LIMIT: Final = 64


@target(
    b"\x02\x05\x09" + frame_line(b'{"id":1}') + frame_line(b"x" * 70) + frame_line(b'{"id":2}'),
    b"\x00\n\n \n",
)
def framing_lines(data: bytes) -> None:
    """Any cut of the stream gives the same messages, none over the limit, and no more than that is held."""
    _framing(data, by_length=False)


@target(
    b"\x02\x05\x09" + frame_length(b"one") + frame_length(b"x" * 70) + frame_length(b""),
    b"\x01\x02" + b"\xff\xff\xff\xff",
)
def framing_lengths(data: bytes) -> None:
    """The same behind lengths."""
    _framing(data, by_length=True)


def _framing(data: bytes, *, by_length: bool) -> None:
    locations, stream = places_of(data)
    whole = _messages([stream], by_length)
    assert _messages(cut_at(stream, locations), by_length) == whole
    assert _messages([stream[at : at + 1] for at in range(len(stream))], by_length) == whole


def _messages(pieces: list[bytes], by_length: bool) -> list[bytes | int]:
    reader = FrameReader(_LIMIT)
    if by_length:
        reader.use_lengths()
    found: list[bytes | int] = []
    for piece in pieces:
        for message in reader.feed(piece):
            assert isinstance(message, Oversized) or len(message) <= _LIMIT
            found.append(message.size if isinstance(message, Oversized) else message)
        assert reader.buffered <= _LIMIT + LENGTH_BYTES
    return found


def _wire_seeds(encoding: Encoding) -> tuple[bytes, ...]:
    codec = Codec(encoding)
    return (
        codec.request(1, "process/read", ReadParams("p", 3, 4, 5)),
        codec.request(2, "process/write", WriteParams("p", b"\x00\xff", "w")),
        codec.notification("initialized", Empty()),
        codec.result(1, Empty()),
        codec.failure(1, InvalidParams("no", key="value")),
    )


@target(*_wire_seeds("json"), b'{"id":null,"method":"ping","params":null}', b'{"method":' + b"[" * 2000)
def messages_json(data: bytes) -> None:
    """A message is understood or refused by name; what is understood can be sent again."""
    _messages_of(data, "json")


@target(*_wire_seeds("msgpack"), b"\x81\xa6method" + b"\x91" * 2000)
def messages_msgpack(data: bytes) -> None:
    """The same in MessagePack."""
    _messages_of(data, "msgpack")


def _messages_of(data: bytes, encoding: Encoding) -> None:
    peer = Peer(Codec(encoding))
    replies: list[object] = []
    peer.call(PING, Empty(), lambda result, error: replies.append(error or result))
    try:
        message = peer.receive(data)
    except (ParseError, InvalidRequest) as error:
        assert peer.codec.failure(None, error)
        return
    if message is None:
        assert len(replies) + peer.pending == 1
        for reply in replies:
            assert isinstance(reply, Empty | HoldfastError)
        return
    rows: dict[str, Any] = {**methods(), **notifications()}
    # The body of an unknown method is tried as the body of each method.
    chosen = [rows[message.method]] if message.method in rows else rows.values()
    for row in chosen:
        try:
            params = peer.codec.decode_body(message.params, row.params, "params")
        except (ParseError, InvalidParams) as error:
            assert peer.codec.failure(None, error)
            continue
        sent = peer.codec.request(1, row.name, params)
        again = Peer(Codec(encoding)).receive(sent)
        assert isinstance(again, IncomingRequest)
        read = peer.codec.decode_body(again.params, row.params, "params")
        # As bytes: a NaN is not equal to itself.
        assert peer.codec.request(1, row.name, read) == sent


# --- what survives a server ---------------------------------------------------------------------------------------


def _ledger_seeds() -> Iterator[bytes]:
    journal = Journal(10)
    journal.add_output(0, 100_000)
    records: list[r.LedgerRecord] = [
        r.TerminalOpening(TerminalSpec("p"), ("bash",), "bash", "nonce", "/spool/t"),
        r.ProcessBegun(1, ProcessSpec("p", ("true",)), 7, b"/", False),
        r.ProcessStarted(1, 42, 1.5),
        r.TerminalOutputStored(1, 1, 0, 5, 2.5),
        r.OutputPrinted(1, 0, 0, 5),
        r.TerminalEventRecord(1, 3, 1.0, "prompt", "IDLE", b"", None, "$ ", None, ""),
        r.EventsDropped(1, 3, 9),
        r.InputAccepted(1, "w", 3),
        r.OutputLost(1, 0, 1, 3),
        r.SignalSent(1, "s"),
        r.TerminalResized(1, 5, 6),
        r.JournalCheckpoint(1, journal.state()),
        r.InputClosed(1),
        r.JobEnded(1, 1, None, 4.5),
        r.JobClosed(1, 5.5),
        SessionOpened("s", "client"),
        SessionStarted("s", "p", True),
        r.RunTyped("p", "r", "true", 3, 1, 1.5, None, 100),
        r.ShellOpening(2, ShellSpec("sh"), "/bin/sh", "/bin/sh", "/spool/s1", 1.5),
        r.CommandQueued(3, 2, CommandSpec("c", "true")),
        r.CommandBegan(3, 2, None, 10, 2.5, 0, 9, 1, False),
        r.OutputPrinted(3, 0, 0, 5),
        r.AnswerPart(2, b"0 "),
        r.CommandStopping(3, True),
        r.ShellClosing(2, False, 5.0),
        r.ShellGone(2),
        r.JobForgotten(1),
    ]
    for end in range(1, len(records) + 1):
        yield r.encode_records(records[:end])
    yield r.encode_records(records[:10])[:-3]
    wrong: list[r.LedgerRecord] = [
        r.OutputPrinted(1, 0, 0, -1),
        r.OutputPrinted(1, 9, 0, 1),
        r.OutputPrinted(1, -1, -9, 1),
        r.OutputPrinted(1, 0, 0, 1 << 62),
        r.JournalCheckpoint(1, (1, b"", b"", b"", b"", 0)),
        r.JournalCheckpoint(1, (-9, b"\x00", b"\x00" * 7, b"", b"", 0)),
        r.JournalCheckpoint(1, (1, b"\x09", b"\x00" * 32, b"\x00", b"", 9)),
    ]
    for each in wrong:
        yield r.encode_records([*records[1:3], each, r.OutputPrinted(1, 0, 0, 7), r.JobEnded(1, 1, None, 4.5)])


@target(*_ledger_seeds())
def ledger(data: bytes) -> None:
    """A ledger is understood or refused as damaged; a cut end is passed over; compaction changes nothing."""
    try:
        records = list(_decode(data))
        if any(isinstance(record, r.OutputPrinted) and _SLOW_BYTES < record.end < 1 << 41 for record in records):
            return
        memory = _replayed(records)
    except SandboxError:
        return
    compacted = list(memory.records())
    again = list(_decode(r.encode_records(compacted)))
    assert again == compacted or _has_nan(compacted)
    assert r.encode_records(_replayed(again).records()) == r.encode_records(compacted)
    torn = r.encode_records(records)
    assert list(map(repr, _decode(torn + (1 << 20).to_bytes(4, "little") + b"torn"))) == list(map(repr, records))
    for cut in (1, 3, 5):
        assert len(list(_decode(torn[:-cut]))) == max(0, len(records) - 1)


#: That much output is millions of chunks: right, and too slow for an input.
_SLOW_BYTES: Final = 1 << 32


def _decode(data: bytes) -> Iterator[r.LedgerRecord]:
    return r.decode_records(data, ClientSessionReplay.KINDS)


def _replayed(records: list[r.LedgerRecord]) -> Replay:
    memory = Replay(max_chunks=16, max_events=4, extension=ClientSessionReplay)
    memory.apply(records)
    return memory


def _has_nan(records: list[r.LedgerRecord]) -> bool:
    return any("nan" in repr(record) for record in records)


@target(
    b'\x00["KEEP", "k", ""]', b'\x05["LEAD", [1, 2]]', b'\x00["UP"]', b"\x00[]", b"\x00[1]", b"\x00{}", b"\x0b7"
)
def keeper_packet(data: bytes) -> None:
    """Bytes from the server, whole or cut, are a verb with arguments or refused by ValueError: the keeper lives on.

    Only the server can write to that socket, and it writes what `marshal` makes: other bytes do not come.
    """
    try:
        value = msgspec.json.decode(data[1:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    value = tuple(value) if isinstance(value, list) else value
    whole = marshal.dumps(value, 2)
    cut = data[0] % (len(whole) + 1)
    try:
        verb, arguments = read_packet(whole[: len(whole) - cut])
    except ValueError:
        return
    assert (verb, *arguments) == value


# --- terminals ----------------------------------------------------------------------------------------------------

_NONCE: Final = "0123456789abcdef0123456789abcdef"


def _mark(letter: str, argument: str = "") -> bytes:
    middle = f";{argument}" if argument else ""
    return f"\x1b]133;{letter}{middle};{_NONCE}\x07".encode()


@target(
    b"\x03\x05\x09\x30text" + _mark("A") + b"$ " + _mark("B") + b"ls\r\n" + _mark("C") + _mark("D", "130"),
    b"\x01\x20" + _mark("D", "9" * 60) + b"\x1b]133;A\x07" + b"\x1b",
    b"\x02\x06\x01\x1b]133;\x1b]133;A;" + _NONCE.encode(),
)
def marks(data: bytes) -> None:
    """Any cut of the stream gives the same output and the same marks; with the marks put back it is the stream."""
    locations, stream = places_of(data)
    whole = _filtered([stream])
    assert _filtered(cut_at(stream, locations)) == whole
    assert _filtered([stream[at : at + 1] for at in range(len(stream))]) == whole
    assert len(whole[0]) <= len(stream)


def _filtered(pieces: list[bytes]) -> tuple[bytes, list[PromptMark]]:
    filter = MarkFilter(_NONCE)
    clean, found = b"", []
    for piece in pieces:
        data, new = filter.feed(piece)
        found += [PromptMark(each.letter, each.argument, each.position + len(clean)) for each in new]
        clean += data
        assert len(filter.held) <= MARK_BYTES
    return clean + filter.release(), found


_CAST: Final = "".join(
    write_cast(
        [CastEvent(0.5, "o", b"text\r\n"), resize_event(1.0, TerminalSize(24, 80)), CastEvent(2.0, "m", b"mark")],
        width=80,
        height=24,
        timestamp=5,
        env={"TERM": "xterm"},
    )
).encode()


_BARE_CAST: Final = b'{"version": 2, "width": 1, "height": 1}\n'


@target(
    _CAST,
    _CAST[:-9],
    b'{"version": 2, "width": 1, "height": 1, "theme": {"a": [1]}}\n[1, "r", "1x2"]\n',
    b'{"version": 2, "width": 1, "height": 1, "theme": ' + b"[" * 2000,
    _BARE_CAST + b'[1, "r", "' + b"9" * 5000 + b'x1"]\n',
    _BARE_CAST + b'[1, "r", "0x0"]\n[2, "r", "' + "²x²".encode() + b'"]\n',
)
def asciicast(data: bytes) -> None:
    """A recording is read, or refused with the number of its line; what is read can be written and read again."""
    try:
        recording = read_cast(io.StringIO(data.decode(errors="surrogateescape"), newline="\n"))
        events = list(recording.events)
    except InvalidParams as error:
        assert error.message.startswith("line ")
        return
    for event in events:
        assert event.size is None or (event.size.rows > 0 and event.size.cols > 0)
    header = recording.header
    written = "".join(write_cast(events, width=header.width, height=header.height))
    again = read_cast(io.StringIO(written, newline="\n"))
    # An event of input or output without text is not written.
    value = [event for event in events if event.data or event.code not in ("o", "i")]
    assert [(event.code, event.data) for event in again.events] == [(event.code, event.data) for event in value]


@target(b"C-c", b"M-S-Up\0^A\0F13", "\0".join(key_names()).encode(), "S-ß".encode())
def keys(data: bytes) -> None:
    """Every list of strings is keys, or the first that is none is refused; keys are pressed one after the other."""
    names = data.decode(errors="surrogateescape").split("\0")
    for application_cursor in (False, True):
        try:
            pressed = encode_keys(names, application_cursor=application_cursor)
        except InvalidParams as error:
            assert error.message
            continue
        assert pressed == b"".join(encode_keys([name], application_cursor=application_cursor) for name in names)


# --- the machine --------------------------------------------------------------------------------------------------

_STAT: Final = b"S 17 18 19 34816 20 4194560 1 2 3 4 5 6 7 8 20 0 1 0 123456 1000 200 18446744073709551615"


@target(b"bash", b"a) R 1 2 3 (b", b") ", b"\n\xff(")
def process_stat(data: bytes) -> None:
    """Whatever name a program gives itself, its line of /proc is read right."""
    name = data.replace(b"\0", b"")[:64]
    fields = stat_fields(b"4711 (" + name + b") " + _STAT)
    assert (fields[0], int(fields[1]), int(fields[3]), fields[19]) == (b"S", 17, 19, b"123456")


@target(
    b"A=B\0HOLDFAST_MARK=4611686018427387911\0C=D\0",
    b"HOLDFAST_MARK=1\0HOLDFAST_MARK=\0",
    b"HOLDFAST_MARK=" + b"9" * 4301 + b"\0",
    b"Limit Soft Hard Units\nMax realtime timeout      4611686018427387911  unlimited  us\n",
)
def process_marks(data: bytes) -> None:
    """For any environment and any limits of a program there is a mark or none."""
    for mark in (mark_in_environment(data), mark_in_limits(data)):
        assert mark is None or 0 <= mark < 1 << 64


@target(b"\x03\x00\x00\x00\x01\x00\x00\x00" + b"\xff\xff\xff\xff\x01\x00\x00\x00", b"\x00\x80" * 9)
def memory_of_a_waiting_task(data: bytes) -> None:
    """The object that a task waits for is in the task's own memory, which the program can write."""
    assert all(fd >= 0 for fd in polled_for_input(data))
    assert all(0 <= fd < 1024 for fd in fd_set_members(data, 1024))


# --- settings -----------------------------------------------------------------------------------------------------


@target(
    b'keeper = true\nexited_retention_seconds = 1.5\nspool_directory = "/x"\n',
    b"max_shells = " + b"1" * 5000,
    b"max_shells = " + b"[" * 2000,
    b"detached_session_seconds = nan\n",
)
def settings(data: bytes) -> None:
    """A file of settings is taken, or refused with its name; no size is negative and no time is no number."""
    try:
        config = parse_settings(data, "holdfast.toml")
    except InvalidParams as error:
        assert "settings" in error.message
        return
    for name in config.__struct_fields__:
        value = getattr(config, name)
        assert name == "oom_score_adj" or not isinstance(value, int | float) or value >= 0


_VARIABLES: Final = {"PATH": "/bin", "HOME": "/root", "API_KEY": "k", "my_token": "t", "EDITOR": "vi", "Ünï": "ß"}


@target(
    msgspec.json.encode(EnvPolicy(exclude=("*A*",), set={"B": "C"}, include_only=("[!a]*", "?"))),
    b'{"exclude": ["[", "[]", "[z-a]", "*a*a*a*a*a*a*a*b"], "inherit": "core"}',
)
def environment_policy(data: bytes) -> None:
    """A policy gives variables of the base or of its own, and none that it excludes."""
    try:
        policy = msgspec.json.decode(data, type=EnvPolicy)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    made = apply_policy(policy, _VARIABLES)
    allowed = {**_VARIABLES, **policy.set}
    assert all(allowed[name] == value for name, value in made.items())
    if not policy.ignore_default_excludes:
        assert "API_KEY" not in made.keys() - policy.set.keys()
    for pattern in policy.exclude:
        assert pattern == "" or pattern not in made.keys() - policy.set.keys() or set(pattern) & set("*?[")


# --- the service's policy -----------------------------------------------------------------------------------------

_DENIES_RM: Final = Profile(commands=Commands(rules=(CommandRule("deny", ("rm",)),)))


@target(
    b'[profiles.ci]\nextends = "default"\nnetwork = { mode = "allow-list", hosts = ["a.example"] }\n',
    b'[[profiles.p.commands.rules]]\nverdict = "deny"\nprogram = ["rm"]\npattern = "x"\n[agents."a-*"]\n',
    b'[profiles.p]\nidle.timeout = "5m"\nresources.memory_bytes = "1GiB"\ndirectories.writable = ["{workspace}"]\n',
    b"workspaces = " + b"[" * 500,
    b"[profiles.p]\nidle.timeout = nan\nlifetime.limit = " + b"9" * 400,
)
def rules(data: bytes) -> None:
    """A file of rules is taken, or refused with its name and a line of it in every complaint."""
    text = data.decode(errors="replace")
    try:
        loaded = load_rules(text, "rules.toml")
    except RulesInvalid as error:
        for complaint in error.complaints:
            file, line, rest = complaint.split(":", 2)
            assert file == "rules.toml"
            assert 1 <= int(line) <= text.count("\n") + 1
            assert rest
        return
    assert "default" in loaded.profiles
    for profile in loaded.profiles.values():
        assert profile.idle.timeout > 0
        assert decide_command(profile, "ls").verdict in ("allow", "ask", "deny")


@target(
    b"a; b && c || d | e & f",
    b"env A=1 nohup sh -c 'rm x' <<E\n$(y)\nE\n",
    b"if a; then b; fi; case x in y) z;; esac; for i in 1; do j; done",
    b'f() { `rm` "$(rm)" ${x:-$(rm)} $((1)) <(rm); }; [[ a ]]; ((1)); x=(1 2)',
    b"find . -exec rm {} \\; | xargs -n1 rm $'\\x72m' !x",
    b"$(" * 100,
)
def command_line(data: bytes) -> None:
    """A command line has commands or reasons; behind a wrapper and in a script no program of it is hidden."""
    text = data.decode(errors="surrogateescape")
    for shell in ("bash", "sh"):
        line = read_command_line(text, shell=shell, interactive=True)
        assert all(command.program is not None for command in line.commands)
    line = read_command_line(text)
    denied = decide_command(_DENIES_RM, text, interactive=False)
    if "rm" in line.programs or line.unknown or line.incomplete:
        assert denied.verdict == "deny"
    if text[:1] not in ("-", "+"):
        inner = read_command_line(f"env bash -c {shlex.quote(text)}")
        assert set(line.programs) <= set(inner.programs) or inner.unknown
        assert bool(line.unknown or line.incomplete) <= bool(inner.unknown)


@target(
    b"\x01\x03rm x\x15ls\n",
    b"\x02\x01\x04\x1b[200~echo 'a\nb\x1b[201~\x7f\n",
    b"\x00cat <<E\nrm\nE\r\x03\x17\x1b[A",
)
def typed_line(data: bytes) -> None:
    """Any cut of the keys gives the same buffer, and is refused if the whole is."""
    locations, keys = places_of(data)
    whole = decide_input(_DENIES_RM, LineBuffer(), keys)
    buffer, refused = LineBuffer(), False
    for piece in cut_at(keys, locations):
        decided = decide_input(_DENIES_RM, buffer, piece)
        buffer, refused = decided.buffer, refused or not decided.decision.allowed
    assert refused or whole.decision.allowed
    assert buffer == whole.buffer
