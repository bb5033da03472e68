"""Schema migrations. A released migration is never changed; a further one is added.

The database records its version. Replicas that start at once wait for each other, and one of them runs the
migrations; a database with a version newer than this program's is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from sqlalchemy import func, insert, inspect, select, text

from holdfast import __version__
from holdfast.service.problems import NotNow
from holdfast.service.store.database.connection import StoreConnection
from holdfast.service.store.database.schema import VERSIONS

#: Advisory lock during migrations (PostgreSQL; SQLite has one writer anyway). Any number that no other program uses
#: on the same database.
MIGRATION_LOCK: Final = 0x686F6C64_6D696772


class Migration(NamedTuple):
    """One version: statements that are valid on SQLite and PostgreSQL."""

    version: int
    statements: Sequence[str]


# SQLite derives the affinity from the type's name: BIGINT is an integer, DOUBLE a real, BYTEA accepts anything.
_FIRST: Final = (
    "CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    """
    CREATE TABLE sessions (
        session_id TEXT PRIMARY KEY, agent_id TEXT NOT NULL, kind TEXT NOT NULL, sandbox TEXT NOT NULL,
        policy TEXT NOT NULL, created_at DOUBLE PRECISION NOT NULL, last_activity_at DOUBLE PRECISION NOT NULL,
        initial_cwd TEXT NOT NULL, state TEXT NOT NULL, shell TEXT NOT NULL, environment TEXT NOT NULL,
        labels TEXT NOT NULL, cols BIGINT NOT NULL, rows BIGINT NOT NULL, enforced TEXT NOT NULL,
        unenforced TEXT NOT NULL, closed_at DOUBLE PRECISION, close_reason TEXT NOT NULL, summary TEXT NOT NULL,
        request_id TEXT NOT NULL, audited_token BIGINT NOT NULL, commands_run BIGINT NOT NULL,
        warned_at DOUBLE PRECISION, lease_owner TEXT NOT NULL DEFAULT '',
        lease_expires DOUBLE PRECISION NOT NULL DEFAULT 0, lease_epoch BIGINT NOT NULL DEFAULT 0
    )
    """,
    "CREATE UNIQUE INDEX sessions_by_request ON sessions (agent_id, request_id) WHERE request_id <> ''",
    "CREATE INDEX sessions_open ON sessions (agent_id) WHERE state NOT IN ('CLOSED', 'ERROR')",
    "CREATE INDEX sessions_by_age ON sessions (created_at, session_id)",
    "CREATE INDEX sessions_by_close ON sessions (closed_at) WHERE closed_at IS NOT NULL",
    """
    CREATE TABLE session_labels (
        session_id TEXT NOT NULL REFERENCES sessions (session_id) ON DELETE CASCADE,
        name TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (session_id, name)
    )
    """,
    "CREATE INDEX session_labels_by_value ON session_labels (name, value)",
    """
    CREATE TABLE audit_streams (
        session_id TEXT PRIMARY KEY, last_seq BIGINT NOT NULL, last_hash TEXT NOT NULL, size BIGINT NOT NULL,
        base_seq BIGINT NOT NULL, base_hash TEXT NOT NULL, opened_seq BIGINT NOT NULL, marked_seq BIGINT NOT NULL,
        removed_seq BIGINT NOT NULL, closed BOOLEAN NOT NULL
    )
    """,
    "CREATE INDEX audit_streams_by_opening ON audit_streams (opened_seq)",
    """
    CREATE TABLE audit_rows (
        session_id TEXT NOT NULL, seq BIGINT NOT NULL, at DOUBLE PRECISION NOT NULL, agent_id TEXT NOT NULL,
        kind TEXT NOT NULL, command_id TEXT NOT NULL, body TEXT NOT NULL, previous TEXT NOT NULL,
        hash TEXT NOT NULL, PRIMARY KEY (session_id, seq)
    )
    """,
    "CREATE INDEX audit_rows_by_time ON audit_rows (at, session_id, seq)",
    "CREATE INDEX audit_rows_by_agent ON audit_rows (agent_id, at, session_id, seq)",
    "CREATE INDEX audit_rows_by_command ON audit_rows (command_id) WHERE command_id <> ''",
    """
    CREATE TABLE approvals (
        approval_id TEXT PRIMARY KEY, session_id TEXT NOT NULL, agent_id TEXT NOT NULL, command TEXT NOT NULL,
        reason TEXT NOT NULL, asked_at DOUBLE PRECISION NOT NULL, expires_at DOUBLE PRECISION NOT NULL,
        command_id TEXT NOT NULL, data BYTEA NOT NULL, outcome TEXT NOT NULL, answered_by TEXT NOT NULL,
        comment TEXT NOT NULL
    )
    """,
    "CREATE INDEX approvals_open ON approvals (expires_at) WHERE outcome = ''",
    "CREATE INDEX approvals_by_session ON approvals (session_id)",
    """
    CREATE TABLE agents (
        agent_id TEXT PRIMARY KEY, role TEXT NOT NULL, token_hash TEXT NOT NULL UNIQUE,
        created_at DOUBLE PRECISION NOT NULL, limits TEXT NOT NULL, disabled BOOLEAN NOT NULL,
        token_at DOUBLE PRECISION NOT NULL
    )
    """,
)

#: Replicas of the previous version can run beside this one: they write neither the columns nor the table.
_SECOND: Final = (
    "ALTER TABLE approvals ADD COLUMN caller TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE approvals ADD COLUMN caller_expires DOUBLE PRECISION NOT NULL DEFAULT 0",
    """
    CREATE TABLE session_usage (
        session_id TEXT PRIMARY KEY REFERENCES sessions (session_id) ON DELETE CASCADE,
        sampled_at DOUBLE PRECISION NOT NULL, usage TEXT NOT NULL
    )
    """,
)

#: Replicas of the previous version can run beside this one: they run sessions as their own user.
_THIRD: Final = (
    """
    CREATE TABLE session_users (
        agent_id TEXT PRIMARY KEY, uid BIGINT NOT NULL UNIQUE, made_at DOUBLE PRECISION NOT NULL
    )
    """,
)

#: Replicas of the previous version can run beside this one: they make no sandboxes. A session that such a replica
#: closes has its sandbox removed by the next replica of this version.
_FOURTH: Final = (
    """
    CREATE TABLE session_sandboxes (
        session_id TEXT PRIMARY KEY, agent_id TEXT NOT NULL, sandbox TEXT NOT NULL UNIQUE,
        made_at DOUBLE PRECISION NOT NULL, removing_until DOUBLE PRECISION NOT NULL
    )
    """,
)

MIGRATIONS: Final = (Migration(1, _FIRST), Migration(2, _SECOND), Migration(3, _THIRD), Migration(4, _FOURTH))


async def migrate(
    connection: StoreConnection,
    now: float,
    steps: Sequence[Migration] = MIGRATIONS,
    location: str = "the database",
) -> list[int]:
    """Run the missing migrations in the open transaction; return their versions. `location` is for errors."""
    if connection.dialect.name == "postgresql":
        await connection.execute(select(func.pg_advisory_xact_lock(MIGRATION_LOCK)))
    await connection.execute(
        text(
            "CREATE TABLE IF NOT EXISTS holdfast_versions "
            "(version BIGINT PRIMARY KEY, applied_at DOUBLE PRECISION NOT NULL)"
        )
    )
    had = await _version(connection)
    _refuse_newer(had, steps, location)
    made = []
    for step in steps:
        if step.version > had:
            for statement in step.statements:
                await connection.execute(text(statement))
            await connection.execute(insert(VERSIONS).values(version=step.version, applied_at=now))
            made.append(step.version)
    return made


async def check_version(
    connection: StoreConnection, steps: Sequence[Migration] = MIGRATIONS, location: str = "the database"
) -> None:
    """Check the schema version for read-only use. `location` is for errors."""
    has_tables = await connection.run_sync(lambda each: inspect(each).has_table(VERSIONS.name))
    had = await _version(connection) if has_tables else 0
    _refuse_newer(had, steps, location)
    if not had:
        raise NotNow(
            f"{location} holds no session service: start `holdfast service` on it first", reason="STORE_EMPTY"
        )
    if had < steps[-1].version:
        raise NotNow(
            f"{location} has schema version {had}, and holdfast {__version__} needs {steps[-1].version}: "
            "start `holdfast service` of this version, which migrates it",
            reason="STORE_OLDER",
        )


async def _version(connection: StoreConnection) -> int:
    return int((await connection.execute(select(func.max(VERSIONS.c.version)))).scalar() or 0)


def _refuse_newer(had: int, steps: Sequence[Migration], location: str) -> None:
    if had > steps[-1].version:
        raise NotNow(
            f"{location} has schema version {had}, and holdfast {__version__} supports versions up to "
            f"{steps[-1].version}: use the Holdfast version that migrated it or a later one, or restore the backup "
            "from before the upgrade",
            reason="STORE_NEWER",
        )
