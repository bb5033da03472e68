"""Every field of a spec and of a result survives a server: the ledger holds the Structs of `holdfast.types`.

The values are made from the definition of each Struct, so a new field is tested as soon as it exists.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from msgspec import inspect

from holdfast.config import ExecServerConfig
from holdfast.runtime.durability.durability import Durability
from holdfast.runtime.durability.keeper_link import NullKeeperLink
from holdfast.runtime.durability.ledger import Ledger, read_ledger
from holdfast.runtime.durability.replay import Replay
from holdfast.runtime.durability.shell_recorder import command_end_record
from holdfast.runtime.durability.shell_recovery import command_ended
from holdfast.runtime.output.output_log import Spool
from holdfast.runtime.shell.dialect import Answer
from holdfast.types import CommandEnded, CommandSpec, ExitStatus, ProcessSpec, ShellSpec

StructT = TypeVar("StructT", bound=msgspec.Struct)
ANSWER = Answer(0, "", "", None, "/", "/", {})


def filled(struct: type[StructT]) -> StructT:
    """An instance in which no field has its default."""
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    made = struct(**{field.name: value_of(field.type, field.default) for field in info.fields})
    for field in info.fields:
        assert getattr(made, field.name) != field.default, f"{struct.__name__}.{field.name}"
    return made


def value_of(kind: inspect.Type, default: Any) -> Any:
    match kind:
        case inspect.UnionType():
            return value_of(next(each for each in kind.types if not isinstance(each, inspect.NoneType)), default)
        case inspect.LiteralType():
            return next(value for value in kind.values if value != default)
        case inspect.StructType():
            return filled(kind.cls)
        case inspect.VarTupleType():
            return (value_of(kind.item_type, None),)
        case inspect.DictType():
            return {value_of(kind.key_type, None): value_of(kind.value_type, None)}
        case inspect.BoolType():
            return not default
    plain: dict[type[inspect.Type], Any] = {
        inspect.StrType: "text",
        inspect.IntType: 7,
        inspect.FloatType: 1.5,
        inspect.BytesType: b"bytes",
    }
    return plain[type(kind)]


@pytest.fixture
def durability(tmp_path: Path) -> Iterator[Durability]:
    spool = Spool(str(tmp_path))
    ledger = Ledger(f"{spool.path}/ledger")
    made = Durability(NullKeeperLink(), ledger, spool, ExecServerConfig())
    yield made
    assert made.reads is not None
    made.reads.close()
    ledger.close()
    spool.remove()


Replayed = Callable[[], Replay]


@pytest.fixture(params=["as written", "compacted"])
def replayed(durability: Durability, request: pytest.FixtureRequest) -> Replayed:
    """The state that the next server has of the ledger."""

    def replay() -> Replay:
        state = Replay(max_chunks=10, max_events=10)
        state.apply(read_ledger(f"{durability.spool.path}/ledger")[1])
        if request.param == "compacted":
            records, state = list(state.records()), Replay(max_chunks=10, max_events=10)
            state.apply(records)
        return state

    return replay


def test_a_process_and_its_exit(durability: Durability, replayed: Replayed) -> None:
    spec, status = filled(ProcessSpec), filled(ExitStatus)
    recorder = durability.begin(spec, 1, "/caf\udce9", {}, -1, internal=False)
    recorder.reap(os.posix_spawn("/bin/true", ["true"], {}), 2.5, lambda _: status)
    (state,) = replayed().processes.values()
    # The environment may hold secrets and is not needed again; the directory is recorded as the kernel has it.
    assert state.begun.spec == msgspec.structs.replace(spec, env=None, env_policy=None, cwd=None)
    assert os.fsdecode(state.begun.cwd) == "/caf\udce9"
    assert state.past.status == status


def test_a_shell_and_its_commands(durability: Durability, replayed: Replayed) -> None:
    shell_spec, spec, ended = filled(ShellSpec), filled(CommandSpec), filled(CommandEnded)
    ended = msgspec.structs.replace(ended, cwd="/caf\udce9")
    shell = durability.shell()
    shell.opening(shell_spec, "/bin/sh", "/bin/sh", 1.5)
    over, waits = shell.command(), shell.command()
    over.began(spec, 1, 1.5, (0, 1), 0, armed=False)
    over.over(lambda: command_end_record(ended, ANSWER, stopped=False, trapped=None, back=None), 10)
    waits.queued(spec)
    shell.closes("closed", filled(ExitStatus), refuses=False)
    state = replayed().shells
    assert state.shells[shell.key].opening.spec == shell_spec
    assert state.commands[waits.key].spec == spec
    # The input is in a file of the shell.
    assert state.commands[over.key].spec == msgspec.structs.replace(spec, input=None)
    end, closed = state.commands[over.key].end, state.shells[shell.key].end
    assert end is not None
    assert command_ended(end) == ended
    assert closed is not None
    assert closed.status == filled(ExitStatus)
