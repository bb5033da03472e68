"""Sessions as this replica last saw them, for a second: every call names one, and most change nothing of it.

What this replica writes is known at once, and what another one writes is forgotten when its notice is heard; the
second is for notices that do not come. Pure but for the clock.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

from holdfast.service.model import SessionRecord

#: How old a record may be. A session that another replica closes is refused by its sandbox anyway.
KNOWN_SECONDS: Final = 1.0
#: Records that are kept, some 2 KB each; as many as sessions may be open by default, and some that just ended.
MOST_KNOWN: Final = 2_000


class _Known(NamedTuple):
    record: SessionRecord
    until: float


class KnownSessions:
    """Records by their session's id."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: OrderedDict[str, _Known] = OrderedDict()
        #: Counts what was changed or forgotten: what was read before one of these may be older than it.
        self.changes = 0

    def get(self, session_id: str) -> SessionRecord | None:
        known = self._known.get(session_id)
        return known.record if known is not None and self._clock() < known.until else None

    def read(self, record: SessionRecord, changes: int) -> None:
        """It was read from the database, begun when there were so many changes."""
        if changes == self.changes:
            self._keep(record)

    def changed(self, record: SessionRecord) -> None:
        """This replica changed it, and this is how it is now."""
        self.changes += 1
        self._keep(record)

    def forget(self, session_id: str) -> None:
        self.changes += 1
        self._known.pop(session_id, None)

    def forget_all(self) -> None:
        self.changes += 1
        self._known.clear()

    def _keep(self, record: SessionRecord) -> None:
        self._known[record.session_id] = _Known(record, self._clock() + KNOWN_SECONDS)
        self._known.move_to_end(record.session_id)
        while len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
