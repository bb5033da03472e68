"""Model calls of bridges: rows of the audit log that a bridge's owner adds, and their sums.

A bridge runs beside an agent and not in the service, so the service does not see its calls. The owner of the
session reports them; a row has the name of its reporter, and is as reliable as that caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from holdfast.service.api import AuditFilter
from holdfast.service.clock import WallClock
from holdfast.service.sessions.following.events import audit_entry
from holdfast.service.store import Store
from holdfast.service.store.types import Page
from holdfast.service.types import AuditEntry, AuditRow, Caller, SessionRecord
from holdfast.service.view_api import ModelCall, ModelCalls, ModelTotal

KIND: Final = "model_call"
#: Calls that a reply lists, and calls that its sums are of: a long session of one agent has some thousand.
MOST_LISTED: Final = 100
MOST_SUMMED: Final = 10_000
_PAGE: Final = 1_000


async def record_model_calls(
    store: Store, clock: WallClock, caller: Caller, record: SessionRecord, calls: Sequence[ModelCall]
) -> None:
    """Append a row for each call that has none yet."""
    entries: list[AuditEntry] = []
    for call in {each.call_id: each for each in calls}.values():
        known = AuditFilter(session_id=record.session_id, command_id=call.call_id, kinds=(KIND,))
        if not (await store.rows(known, Page(1)))[0]:
            body = msgspec.structs.asdict(call)
            del body["call_id"], body["session_id"]
            body["by"] = caller.agent_id
            entries.append(audit_entry(record, clock.time(), KIND, call.call_id, **body))
    if entries:
        await store.append(entries)


async def list_model_calls(store: Store, session_id: str) -> ModelCalls:
    """Return the latest calls of a session, or of all sessions."""
    which = AuditFilter(session_id=session_id or None, kinds=(KIND,), newest_first=True)
    rows: list[AuditRow] = []
    token = ""
    while len(rows) < MOST_SUMMED:
        page, token = await store.rows(which, Page(_PAGE, token))
        rows += page
        if not token:
            break
    calls = [_call(row) for row in rows]
    return ModelCalls(tuple(calls[:MOST_LISTED]), totals_of(calls), more=bool(token))


def totals_of(calls: Sequence[ModelCall]) -> tuple[ModelTotal, ...]:
    """Return the sums by model, the most tokens first."""
    by_model: dict[str, list[ModelCall]] = {}
    for call in calls:
        by_model.setdefault(call.model, []).append(call)
    totals = [
        ModelTotal(
            model,
            len(each),
            sum(call.input_tokens for call in each),
            sum(call.output_tokens for call in each),
            sum(call.money for call in each),
            sum(not 200 <= call.status < 300 for call in each),
        )
        for model, each in by_model.items()
    ]
    return tuple(sorted(totals, key=lambda total: -(total.input_tokens + total.output_tokens)))


def _call(row: AuditRow) -> ModelCall:
    body = msgspec.json.decode(row.body)
    return msgspec.convert({**body, "call_id": row.command_id, "session_id": row.session_id}, ModelCall)
