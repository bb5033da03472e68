"""Every setting of `holdfast service`, with its default and the reason for the number. Reads one file.

A setting comes from (last wins): the default here, the TOML file, the environment (`HOLDFAST_SERVICE_` and the name
in upper case), a flag of `holdfast service`. docs/service.md lists them all, and a test asserts that it does.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from holdfast.config import checked, gathered
from holdfast.errors import InvalidParams
from holdfast.service.access.session_users import parse_uids

PREFIX: Final = "HOLDFAST_SERVICE_"
MIB: Final = 1024 * 1024


class ServiceSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of one replica. Sizes are bytes, times are seconds."""

    # --- ports -----------------------------------------------------------------------------------------------
    #: `HOST:PORT` or `unix:PATH`; empty disables the port. Loopback: an operator opens it to others, with TLS.
    listen_grpc: str = "127.0.0.1:7400"
    listen_http: str = "127.0.0.1:7401"
    #: Files of the certificate, its key and, if clients must have one, the authority that signs theirs.
    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    #: Listen on other addresses than loopback without TLS, behind a proxy that has it.
    allow_plaintext: bool = False
    #: Host names of the HTTP port, as patterns (`*.example.com`), for a proxy that passes its clients' `Host` on.
    #: On loopback, other names with a dot are refused: a web page whose name resolves to 127.0.0.1 (DNS rebinding)
    #: could read pages that need no token. Beyond loopback every name is allowed until one is given.
    allowed_hosts: tuple[str, ...] = ()
    #: Whether `/` of the HTTP port is the console. The page has no secrets: its calls need a token.
    console: bool = True
    #: Whether gRPC reflection and the health service answer without a token: tools expect that.
    open_reflection: bool = True

    #: `HOST:PORT` of previews of sessions' ports; empty is none. A port of its own, because the pages of a preview
    #: are those of a sandbox: their origin must not be that of the console.
    listen_preview: str = ""
    #: The URL at which browsers reach that port, `https://previews.example.com`; empty is `http://localhost:PORT`.
    #: Each preview has a name below its host name, which needs a wildcard in the DNS and in the certificate;
    #: browsers resolve names below `localhost` themselves. At an IP address, previews have a path only.
    preview_url: str = ""
    #: The longest life of a preview: a working session in front of a browser.
    preview_seconds: float = 3_600.0
    #: Previews that one replica and one session may have open: a page or two of each of some hundred sessions.
    max_previews: int = 1_000
    previews_per_session: int = 16
    #: Connections of that port at a time, from one address, and requests and WebSockets of one preview. Each takes
    #: three descriptors. A browser opens six connections to a host, and some WebSockets.
    preview_connections: int = 512
    preview_connections_per_address: int = 256
    connections_per_preview: int = 32
    #: The largest request to a preview, such as an upload, and the largest message of a WebSocket, which is held in
    #: memory.
    preview_request_bytes: int = 64 * MIB
    preview_message_bytes: int = 1 * MIB
    #: How long a client may be silent in the middle of a request, and a server in a sandbox before it answers.
    preview_idle_seconds: float = 60.0
    preview_answer_seconds: float = 300.0

    #: Connections of each port at a time, and from one address. A connection is a descriptor and some kilobytes;
    #: each long poll and each stream over HTTP is one. Agents behind one proxy share its address; half of the total
    #: stays for others.
    max_connections: int = 4_096
    connections_per_address: int = 2_048
    #: Connections of the HTTP port that have not completed a request head yet; the oldest makes room for the next.
    half_open_connections: int = 512
    #: How long a TLS handshake, a request head or the preface of HTTP/2 may take: 16 KiB at 20 kbit/s.
    head_seconds: float = 10.0
    #: Descriptors that connections never take, for the database and for sandboxes: up to four for each of the 256
    #: of `max_sandboxes`. Where `ulimit -n` is too low for all connections, there are fewer of them.
    reserved_descriptors: int = 1_024

    # --- storage ---------------------------------------------------------------------------------------------
    #: `sqlite:///PATH` or `postgresql://...`; empty is SQLite in the user's state directory.
    store: str = ""
    #: The rules file; empty is the built-in rules.
    rules: str = ""
    #: A file with the key of the audit chain's HMAC; empty is a plain SHA-256 chain.
    audit_key_file: str = ""
    #: Rows of closed sessions are removed after so many days; 0 keeps them. Reviews cover a quarter.
    audit_retention_days: float = 90.0
    #: And, oldest first, above so many bytes of rows; 0 is no such limit. A gigabyte is millions of commands.
    audit_retention_bytes: int = 1024 * MIB
    #: The interval of the retention run: an hour more of ninety days does not matter.
    audit_retention_interval: float = 3_600.0
    #: Bytes of a command's output in its audit row, which also has the length of the output. Enough for an error
    #: message, too little for the contents of a file.
    audit_excerpt_bytes: int = 1_024
    #: Bytes of the input of one call in its audit row.
    audit_input_bytes: int = 4_096
    #: More patterns of secrets, which are not written to the audit log, as regular expressions.
    redact: tuple[str, ...] = ()

    # --- sandboxes -------------------------------------------------------------------------------------------
    #: The sandbox of sessions that name none.
    sandbox: str = "local"
    #: Addresses that sessions may name, as patterns (`docker:*`); the default one is always allowed.
    allowed_sandboxes: tuple[str, ...] = ()
    #: Sandboxes that one replica is connected to at a time. Each is a connection, and for some a child process.
    max_sandboxes: int = 256
    #: How long an unused connection stays open: a reconnect to a container takes some hundred milliseconds.
    sandbox_idle_seconds: float = 300.0
    #: How long calls wait for a broken connection before they fail. Agents do not wait longer.
    reconnect_seconds: float = 10.0

    #: How long a sandbox for a session may take until it is made: an image may have to be pulled first.
    sandbox_seconds: float = 600.0
    #: Between two searches for sandboxes of ended sessions and for expired ones, which crashed replicas left.
    sandbox_prune_interval: float = 60.0

    #: `FIRST-LAST`: uids for sessions in sandboxes whose server is root, one for each agent. By default 65,536 of
    #: those that no distribution gives to accounts, containers or services: above systemd's for containers, which
    #: end at 1,879,048,191, and far above the usual ones of /etc/subuid.
    session_uids: str = "1900000000-1900065535"

    # --- sessions --------------------------------------------------------------------------------------------
    #: Sessions that may be open at a time, in all replicas. The monitor's cost is measured up to this many.
    max_sessions: int = 1_000
    #: How long a new session waits for its first prompt; after that the session is open and RUNNING.
    prompt_seconds: float = 10.0
    #: How long a creation may take before another replica marks it as failed: longer than any start.
    creation_seconds: float = 120.0
    #: Between TERM or `exit`, and KILL, when a session is closed.
    close_grace: float = 5.0
    #: How long `CloseSession` waits for the replica that writes the last rows.
    close_wait: float = 10.0
    #: How long input may wait for the terminal (a program that does not read) before the call fails. Accepted input
    #: stays typed.
    input_seconds: float = 30.0
    #: In a session whose rules guard commands: how long input after an interrupt waits for the prompt, and an
    #: interrupt for the line before it to begin, before the call is refused. A shell takes milliseconds for either.
    interrupt_seconds: float = 2.0
    #: The longest wait and the largest result of `ReadOutput`.
    max_wait_seconds: float = 60.0
    max_read_bytes: int = 4 * MIB
    #: The largest `SendInput`. Files are not typed.
    max_input_bytes: int = 1 * MIB
    #: How long `ReadOutput` waits, after output without a line end, for a program to read input: the kernel shows
    #: the read a moment after the prompt is printed.
    settle_seconds: float = 0.1
    #: The default timeout of `RunCommand`.
    command_seconds: float = 600.0
    #: Metadata (last activity, counts) is written to the database after this delay, many changes at once.
    metadata_seconds: float = 1.0

    # --- replicas --------------------------------------------------------------------------------------------
    #: The name of this replica; empty generates one. Replicas that run at once need different names.
    replica: str = ""
    #: Another replica can take a lease after so long without renewal. Renewed every third of this time.
    lease_seconds: float = 15.0
    #: Sessions claimed at a time, so that one replica of several does not take all at a start.
    claim_batch: int = 200
    #: How long one read of the follower waits in the sandbox's server. It returns at once when something happens;
    #: the wait is as long as that, so that idle sessions cost nothing.
    follow_seconds: float = 600.0
    #: Events within so many seconds are written to the log together: a short command needs one write, not two, and
    #: the input of the next command does not wait for it.
    gather_seconds: float = 0.05
    #: The size of one read of the follower.
    follow_bytes: int = 256 * 1024

    # --- callers ---------------------------------------------------------------------------------------------
    #: Calls a second of one agent on one replica, on average and at once; 0 is no limit. A replica answers some
    #: thousands of small calls a second on a core; one agent should not get them all.
    calls_per_second: float = 500.0
    calls_burst: int = 1_000
    #: The same for new sessions: each is processes in a sandbox, tens of milliseconds of work there.
    creates_per_second: float = 10.0
    creates_burst: int = 50
    #: Calls of one agent that may be open at a time; long polls count, one for each session and some beside them.
    concurrent_calls: int = 256
    #: Streams of one agent: each holds a connection to the sandbox's output while it is open.
    concurrent_streams: int = 128
    #: How long a token is cached: a removed token stops working within this time.
    token_cache_seconds: float = 5.0
    #: Queries of tokens that are not cached, from one address: on average and at once; 0 is no limit. Each is one
    #: read by an index. Agents behind one proxy share its address, and some hundred may start at a time.
    token_lookups_per_second: float = 100.0
    token_lookups_burst: int = 200

    # --- monitoring ------------------------------------------------------------------------------------------
    #: The interval of the monitor. A shorter one costs more and shows little more.
    monitor_interval: float = 5.0
    #: A command that runs longer sets `long_running_flag`.
    long_running_seconds: float = 300.0
    #: The share of a limit at which the owner is warned.
    resource_warning: float = 0.8
    #: The format of logs on stderr: `auto` is text on a terminal, else JSON.
    log_format: Literal["auto", "json", "text"] = "auto"
    #: Successful calls are logged at `debug`.
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    def allows_sandbox(self, address: str) -> bool:
        return address == self.sandbox or any(
            fnmatch.fnmatchcase(address, pattern) for pattern in self.allowed_sandboxes
        )


#: The home of defaults that the settings of single parts share.
DEFAULTS: Final = ServiceSettings()


def default_store_path(environ: Mapping[str, str] | None = None) -> str:
    """Return the path of the user's SQLite file, in the XDG state directory. Creates nothing."""
    state = (os.environ if environ is None else environ).get("XDG_STATE_HOME", "")
    # The XDG convention ignores a relative path.
    if not os.path.isabs(state):
        state = os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(state, "holdfast", "service.db")


def store_url(setting: str) -> str:
    """Return the URL in the setting `store`, or that of the default path."""
    return setting or f"sqlite:///{default_store_path()}"


def load_settings(
    path: str | None = None, environ: Mapping[str, str] | None = None, **flags: Any
) -> ServiceSettings:
    """Return the settings from file, environment and flags; an error names the setting and its source.

    Without a path, HOLDFAST_SERVICE_CONFIG names the file.
    """
    environ = os.environ if environ is None else environ
    file = path or environ.get(f"{PREFIX}CONFIG")
    values = gathered(ServiceSettings, PREFIX, file, environ, flags)
    # Only the values of the file are not checked yet.
    settings = checked(ServiceSettings, values, f"settings file {file}")
    if bool(settings.tls_cert) != bool(settings.tls_key):
        raise InvalidParams("settings: tls_cert and tls_key: give both, or none")
    if not settings.listen_grpc and not settings.listen_http:
        raise InvalidParams("settings: listen_grpc and listen_http are both empty: the service would have no port")
    parse_uids(settings.session_uids)
    if settings.lease_seconds < 1:
        raise InvalidParams(f"settings: lease_seconds is {settings.lease_seconds:g}: at least 1")
    return settings
