"""When something is due for a session that nobody uses, or that has lived long enough; pure.

Whoever keeps the timers asks again after each thing that was done, and whenever the session was active.
"""

from __future__ import annotations

from typing import Final, Literal

from holdfast.service.types import SessionRecord, Struct

Due = Literal["idle_warning", "idle_close", "lifetime_warning", "lifetime_end"]
#: What goes before what at the same time: an end makes a warning needless.
_ORDER: Final[dict[Due, int]] = {"lifetime_end": 0, "idle_close": 1, "idle_warning": 2, "lifetime_warning": 3}


class Deadline(Struct, frozen=True):
    """What is due, and when; a time that has passed is due at once."""

    when: float
    what: Due


def next_deadline(record: SessionRecord, now: float, *, lifetime_warned: bool = False) -> Deadline | None:
    """The next thing; None for a session that is over.

    A session whose command runs is not idle, unless its policy says so. A warning that was given before the last
    activity counts no more.
    """
    if record.over or record.state == "CLOSING":
        return None
    policy = record.policy
    due = [Deadline(record.expires_at, "lifetime_end")]
    warn_at = record.expires_at - policy.lifetime_warning
    # A session that lives no longer than its warning takes is not warned in its first second.
    if not lifetime_warned and now < record.expires_at and warn_at > record.created_at:
        due.append(Deadline(warn_at, "lifetime_warning"))
    if record.state != "BUSY" or policy.idle_while_running:
        warned = record.warned_at
        if warned is not None and warned >= record.last_activity_at:
            due.append(Deadline(warned + policy.idle_grace, "idle_close"))
        else:
            due.append(Deadline(record.last_activity_at + policy.idle_timeout, "idle_warning"))
    # What is due already goes by its weight: after a long stop a session is closed, not warned first.
    return min(due, key=lambda each: (max(each.when, now), _ORDER[each.what]))
