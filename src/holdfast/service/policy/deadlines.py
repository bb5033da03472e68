"""Computes the next deadline of a session: idle warning and close, lifetime warning and end; pure.

The timers compute it again after each action, and after each activity of the session.
"""

from __future__ import annotations

from typing import Final, Literal

from holdfast.service.types import ServiceStruct, SessionRecord

Due = Literal["idle_warning", "idle_close", "lifetime_warning", "lifetime_end"]
#: Precedence at the same time: an end makes a warning unnecessary.
_ORDER: Final[dict[Due, int]] = {"lifetime_end": 0, "idle_close": 1, "idle_warning": 2, "lifetime_warning": 3}


class Deadline(ServiceStruct, frozen=True):
    """An action and its time; a time in the past is due at once."""

    when: float
    what: Due


def next_deadline(record: SessionRecord, now: float, *, lifetime_warned: bool = False) -> Deadline | None:
    """Return the next deadline; None for a session that is over.

    A session with a running command is not idle, unless its policy counts it as such. Activity after a warning
    cancels the warning.
    """
    if record.over or record.state == "CLOSING":
        return None
    policy = record.policy
    due = [Deadline(record.expires_at, "lifetime_end")]
    warn_at = record.expires_at - policy.lifetime_warning
    # A session with a lifetime shorter than the warning period gets no warning in its first second.
    if not lifetime_warned and now < record.expires_at and warn_at > record.created_at:
        due.append(Deadline(warn_at, "lifetime_warning"))
    if record.state != "BUSY" or policy.idle_while_running:
        warned = record.warned_at
        if warned is not None and warned >= record.last_activity_at:
            due.append(Deadline(warned + policy.idle_grace, "idle_close"))
        else:
            due.append(Deadline(record.last_activity_at + policy.idle_timeout, "idle_warning"))
    # Overdue actions by precedence: after a long suspension a session is closed without a warning first.
    return min(due, key=lambda each: (max(each.when, now), _ORDER[each.what]))
