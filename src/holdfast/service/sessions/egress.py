"""The filtering proxy of one session with an allow-list: `holdfast egress` in its sandbox, outside of its network.

It is started before the session and ended after it. What it let through and what it refused is counted by host for
the audit when it ends.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any, Final

import msgspec

from holdfast.errors import HoldfastError, UnknownProcess
from holdfast.exec_api import ExecApi
from holdfast.model import EnvironmentInfo, ProcessSpec
from holdfast.service.model import SessionRecord
from holdfast.service.problems import Unavailable

#: How long one read waits for it to say that it is ready; a Python program starts in less.
_READY_SECONDS: Final = 20.0
#: Hosts that are named in the audit row; of more, only their number is told.
_MAX_HOSTS: Final = 100


def is_needed(record: SessionRecord, info: EnvironmentInfo) -> bool:
    """Whether the session has an allow-list, and the sandbox can keep it."""
    return record.policy.network == "allow-list" and {"network", "egress"} <= set(info.features)


async def open_egress(api: ExecApi, record: SessionRecord, info: EnvironmentInfo) -> str:
    """Start it; returns the path of its socket."""
    session_id = record.session_id
    path = f"{_directory(session_id)}/proxy"
    # Nobody could know the name before the session was made, and nobody else gets in.
    await api.files.make_dir(_directory(session_id), exist_ok=False, mode=0o700, request_id=session_id)
    allowed = [word for host in record.policy.allowed_hosts for word in ("--allow", host)]
    argv = (*info.holdfast, "egress", "--socket", path, *allowed)
    await api.start(ProcessSpec(_process_id(session_id), argv, start_id=session_id))
    seq, printed = 0, b""
    while b'"ready"' not in printed:
        found = await api.read(_process_id(session_id), after_seq=seq, wait=_READY_SECONDS)
        if found.exited or found.next_seq == seq + 1:
            raise Unavailable(
                f"the filtering proxy of the allow-list did not start: {printed.decode(errors='replace')[-500:]}",
                reason="EGRESS_FAILED",
            )
        seq = found.next_seq - 1
        printed += b"".join(chunk.data for chunk in found.chunks)
    return path


async def close_egress(api: ExecApi, record: SessionRecord) -> dict[str, Any]:
    """End it, if it is there; returns what it decided, by host."""
    session_id = record.session_id
    if record.policy.network != "allow-list":
        return {}
    decided: dict[str, Any] = {}
    with contextlib.suppress(UnknownProcess):
        decided = _decisions((await api.snapshot(_process_id(session_id))).stdout)
        await api.terminate(_process_id(session_id))
    with contextlib.suppress(HoldfastError):  # what is left of it is an empty directory
        await api.files.remove(_directory(session_id), recursive=True, missing_ok=True)
    return decided


def _decisions(printed: bytes) -> dict[str, Any]:
    allowed: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for line in printed.splitlines():
        try:
            fact = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.MsgspecError:
            continue  # cut where the middle of its output was dropped
        if fact.get("event") == "decision":
            (allowed if fact.get("allowed") else refused)[f"{fact.get('host')}:{fact.get('port')}"] += 1
    if not allowed and not refused:
        return {}
    hosts = {"allowed": dict(allowed.most_common(_MAX_HOSTS)), "refused": dict(refused.most_common(_MAX_HOSTS))}
    return {**hosts, "hosts": len(allowed) + len(refused)}


def _process_id(session_id: str) -> str:
    return f"{session_id}.egress"


def _directory(session_id: str) -> str:
    return f"/tmp/hf-{session_id}"
