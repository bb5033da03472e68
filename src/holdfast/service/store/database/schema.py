"""The tables for the statements of this package. `migrations` creates them; a test compares the two.

One schema for SQLite and PostgreSQL. Times are seconds since 1970; structured values are JSON in a text column.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import BigInteger, Boolean, Column, Double, ForeignKey, Index, LargeBinary, MetaData, Table, Text

METADATA: Final = MetaData()

VERSIONS: Final = Table(
    "holdfast_versions",
    METADATA,
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    Column("applied_at", Double, nullable=False),
)

#: Facts about the whole database, such as the id of its audit key.
FACTS: Final = Table(
    "facts", METADATA, Column("name", Text, primary_key=True), Column("value", Text, nullable=False)
)

SESSIONS: Final = Table(
    "sessions",
    METADATA,
    Column("session_id", Text, primary_key=True),
    Column("agent_id", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("sandbox", Text, nullable=False),
    Column("policy", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("last_activity_at", Double, nullable=False),
    Column("initial_cwd", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("shell", Text, nullable=False),
    Column("environment", Text, nullable=False),
    Column("labels", Text, nullable=False),
    Column("cols", BigInteger, nullable=False),
    Column("rows", BigInteger, nullable=False),
    Column("enforced", Text, nullable=False),
    Column("unenforced", Text, nullable=False),
    Column("closed_at", Double),
    Column("close_reason", Text, nullable=False),
    Column("summary", Text, nullable=False),
    Column("request_id", Text, nullable=False),
    Column("audited_token", BigInteger, nullable=False),
    Column("commands_run", BigInteger, nullable=False),
    Column("warned_at", Double),
    # The lease: the replica that runs the follower and timers, its expiry, and the number of changes.
    Column("lease_owner", Text, nullable=False, default="", server_default=""),
    Column("lease_expires", Double, nullable=False, default=0.0, server_default="0"),
    Column("lease_epoch", BigInteger, nullable=False, default=0, server_default="0"),
)

#: The labels, one in each row, so that either database can search by them.
SESSION_LABELS: Final = Table(
    "session_labels",
    METADATA,
    Column("session_id", Text, ForeignKey("sessions.session_id", ondelete="CASCADE"), primary_key=True),
    Column("name", Text, primary_key=True),
    Column("value", Text, nullable=False),
    Index("session_labels_by_value", "name", "value"),
)

#: The last usage sample of each session, written by the replica that holds the session's lease.
SESSION_USAGE: Final = Table(
    "session_usage",
    METADATA,
    Column("session_id", Text, ForeignKey("sessions.session_id", ondelete="CASCADE"), primary_key=True),
    Column("sampled_at", Double, nullable=False),
    Column("usage", Text, nullable=False),
)

#: Sandboxes that were made for sessions. No reference to the session: retention may remove the session first.
SESSION_SANDBOXES: Final = Table(
    "session_sandboxes",
    METADATA,
    Column("session_id", Text, primary_key=True),
    Column("agent_id", Text, nullable=False),
    Column("sandbox", Text, nullable=False, unique=True),
    Column("made_at", Double, nullable=False),
    # A replica removes the sandbox, until then; 0 is no such replica.
    Column("removing_until", Double, nullable=False),
)

STREAMS: Final = Table(
    "audit_streams",
    METADATA,
    Column("session_id", Text, primary_key=True),
    # The head: the last row, and the size.
    Column("last_seq", BigInteger, nullable=False),
    Column("last_hash", Text, nullable=False),
    Column("size", BigInteger, nullable=False),
    # Number and hash of the last row removed from the beginning.
    Column("base_seq", BigInteger, nullable=False),
    Column("base_hash", Text, nullable=False),
    # Rows of the service's own stream about this one; 0 is none.
    Column("opened_seq", BigInteger, nullable=False),
    Column("marked_seq", BigInteger, nullable=False),
    Column("removed_seq", BigInteger, nullable=False),
    # The session is over: each further row is marked in the service's own stream.
    Column("closed", Boolean, nullable=False),
)

ROWS: Final = Table(
    "audit_rows",
    METADATA,
    Column("session_id", Text, primary_key=True),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("at", Double, nullable=False),
    Column("agent_id", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("command_id", Text, nullable=False),
    Column("body", Text, nullable=False),
    Column("previous", Text, nullable=False),
    Column("hash", Text, nullable=False),
)

APPROVALS: Final = Table(
    "approvals",
    METADATA,
    Column("approval_id", Text, primary_key=True),
    Column("session_id", Text, nullable=False),
    Column("agent_id", Text, nullable=False),
    Column("command", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("asked_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("command_id", Text, nullable=False),
    Column("data", LargeBinary, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("answered_by", Text, nullable=False),
    Column("comment", Text, nullable=False),
    # The call that waits for the answer, and when it expires unless its replica renews it.
    Column("caller", Text, nullable=False, default="", server_default=""),
    Column("caller_expires", Double, nullable=False, default=0.0, server_default="0"),
)

#: The uid of an agent's sessions where the sandbox's server is root. Kept after the agent is removed.
SESSION_USERS: Final = Table(
    "session_users",
    METADATA,
    Column("agent_id", Text, primary_key=True),
    Column("uid", BigInteger, nullable=False, unique=True),
    Column("made_at", Double, nullable=False),
)

AGENTS: Final = Table(
    "agents",
    METADATA,
    Column("agent_id", Text, primary_key=True),
    Column("role", Text, nullable=False),
    Column("token_hash", Text, nullable=False, unique=True),
    Column("created_at", Double, nullable=False),
    Column("limits", Text, nullable=False),
    Column("disabled", Boolean, nullable=False),
    Column("token_at", Double, nullable=False),
)
