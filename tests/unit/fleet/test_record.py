"""The record of a sandbox: round trip, ids, and whether its owner has ended."""

from __future__ import annotations

import math
import subprocess
import sys

import msgspec
import pytest

import holdfast
from holdfast.errors import InvalidParams
from holdfast.fleet.engine import make_ref
from holdfast.fleet.record import (
    check_id,
    decode_record,
    encode_record,
    has_ended,
    is_id,
    new_id,
    new_record,
    this_process,
)
from holdfast.fleet.template import Template

TEMPLATE = Template(files={"/secret": "x"}, setup=["make"], labels={"task": "17"}, memory="1GiB", lifetime=60)


def test_a_record_survives_its_text() -> None:
    record = new_record(TEMPLATE, now=1000.0, lifetime=60.0, bound=True, pool="p", fork_of=new_id())
    assert decode_record(encode_record(record)) == record
    assert (record.created_at, record.expires_at) == (1000.0, 1060.0)
    assert (record.template_hash, record.version) == (TEMPLATE.hash, holdfast.__version__)


def test_files_and_setup_commands_are_not_recorded() -> None:
    record = new_record(TEMPLATE, now=0.0, lifetime=math.inf)
    assert record.expires_at is None
    assert (record.template.files, record.template.setup) == ({}, ())
    assert record.template.memory == 2**30
    text = encode_record(record)
    assert "secret" not in text
    assert "make" not in text
    # The hash is that of the whole template: a pool must not take over sandboxes with another setup.
    assert record.template_hash != record.template.hash


@pytest.mark.parametrize("text", ["", "{}", "null", "[]", "nonsense", b"\xff"])
def test_another_text_is_no_record(text: str | bytes) -> None:
    assert decode_record(text) is None


def test_a_record_with_another_id_is_none() -> None:
    record = new_record(TEMPLATE, now=0.0, lifetime=60.0)
    assert decode_record(encode_record(msgspec.structs.replace(record, id="../../etc"))) is None


def test_ids() -> None:
    ids = {new_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(map(is_id, ids))
    wrong = ["", "holdfast-", "holdfast-" + "a" * 15, "holdfast-" + "a" * 17, "x-" + "a" * 16]
    wrong += [
        "holdfast-" + "A" * 16,
        "holdfast-../../aaaaaaaa",
        "holdfast-" + "ä" * 16,
        "holdfast-aaaaaaaaaaaaaaa\n",
    ]
    for text in wrong:
        assert not is_id(text), text
        with pytest.raises(InvalidParams):
            check_id(text)


def test_an_owner_has_ended_only_if_this_machine_can_know() -> None:
    owner = this_process()
    assert not has_ended(owner)
    assert str(owner) == f"{owner.user}@{owner.host}"
    code = (
        "from holdfast.fleet.record import *; import msgspec; print(msgspec.json.encode(this_process()).decode())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    ended = msgspec.json.decode(done.stdout, type=type(owner))
    assert has_ended(ended)
    # The pid was reused: another start time.
    assert has_ended(msgspec.structs.replace(owner, started=owner.started + 1))
    for elsewhere in ({"host": "other"}, {"boot": "other"}, {"namespace": "pid:[1]"}):
        assert not has_ended(msgspec.structs.replace(ended, **elsewhere))


def test_a_reference_has_the_fields_of_the_contract() -> None:
    record = new_record(TEMPLATE, now=1000.0, lifetime=60.0)
    ref = make_ref("local", "unix:/x", record, "running", expires_at=record.expires_at)
    assert (ref.id, ref.engine, ref.address, ref.labels) == (record.id, "local", "unix:/x", {"task": "17"})
    assert (ref.owner, ref.created_at, ref.expires_at) == (str(record.owner), 1000.0, 1060.0)
    assert make_ref("local", "unix:/x", record, "running", expires_at=2000.0).expires_at == 2000.0
