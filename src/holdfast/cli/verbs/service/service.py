"""`holdfast service`: runs the session service, and administers it on its own machine.

Agents are added and removed directly in the database, so that no service need run, and the first agent can be
added. The service's packages are an extra and are imported by the verb that needs them.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
import typer

from holdfast import __version__
from holdfast.cli.support.exit_codes import FAILED, NO_SERVER
from holdfast.cli.support.sandbox_option import JsonOption
from holdfast.cli.support.text import age, complain, show_table
from holdfast.cli.support.typed_verb import run_async, service_extra

if TYPE_CHECKING:
    from holdfast.service.assembly import StartupReport
    from holdfast.service.settings import ServiceSettings
    from holdfast.service.store import AgentRecord, Store

ConfigOption = Annotated[str | None, typer.Option("--config", metavar="FILE", help="A TOML file with settings.")]
StoreOption = Annotated[
    str | None,
    typer.Option("--store", metavar="URL", help="sqlite:///PATH or postgresql://...; by default SQLite."),
]
HttpOption = Annotated[
    str | None, typer.Option("--listen-http", metavar="ADDR", help="HOST:PORT for HTTP and metrics; - for none.")
]


def command(
    config: ConfigOption = None,
    listen_grpc: Annotated[
        str | None, typer.Option("--listen-grpc", metavar="ADDR", help="HOST:PORT for gRPC; - for none.")
    ] = None,
    listen_http: HttpOption = None,
    store: StoreOption = None,
    rules: Annotated[
        str | None, typer.Option(metavar="FILE", help="The rules; without one, built-in ones.")
    ] = None,
    sandbox: Annotated[
        str | None, typer.Option(metavar="ADDR", help="The sandbox of sessions that name none.")
    ] = None,
    tls_cert: Annotated[str | None, typer.Option(metavar="FILE", help="The certificate.")] = None,
    tls_key: Annotated[str | None, typer.Option(metavar="FILE", help="Its key.")] = None,
    tls_client_ca: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The authority of client certificates, which are then required."),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Run the session service until it is stopped.

    The first start adds an operator and prints its token, once. HUP reloads the rules and the TLS files; TERM and
    INT stop the service. Sessions continue in their sandboxes, and the next start resumes them.
    """
    settings = _settings(
        config,
        listen_grpc="" if listen_grpc == "-" else listen_grpc,
        listen_http="" if listen_http == "-" else listen_http,
        store=store,
        rules=rules,
        sandbox=sandbox,
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_client_ca=tls_client_ca,
        log_format="json" if as_json else None,
    )
    with service_extra():
        from holdfast.service.assembly import run_service
    return run_async(run_service(settings, _announce_json if as_json else announce))


def _settings(config: str | None, **flags: Any) -> ServiceSettings:
    from holdfast.service.settings import load_settings

    return load_settings(config, **flags)


def announce(started: StartupReport) -> None:
    print(f"holdfast service {__version__}")
    for name, value in _addresses(started):
        print(f"{name:<8} {value}")
    if started.operator_token:
        print(f"operator {started.operator_token}")
        print("         This is the token of an operator. It is not shown again.")
        if started.http:
            print("         Try:\n         " + _curl(started))
    sys.stdout.flush()


def _addresses(started: StartupReport) -> list[tuple[str, str]]:
    return [
        *([("gRPC", started.grpc)] if started.grpc else []),
        *([("HTTP", started.http)] if started.http else []),
        *([("previews", started.preview)] if started.preview else []),
        ("store", started.store),
        ("rules", started.rules or "built in"),
        ("sandbox", started.sandbox),
    ]


def _curl(started: StartupReport) -> str:
    url = started.http
    if url.startswith("unix:"):
        url = f"--unix-socket {shlex.quote(url.removeprefix('unix:'))} http://localhost"
    return (
        f"curl -s {url}/holdfast.session.v1.SessionService/RunCommand"
        f" -H 'Authorization: Bearer {started.operator_token}' -H 'Content-Type: application/json'"
        """ -d '{"command": "echo hello"}'"""
    )


def _announce_json(started: StartupReport) -> None:
    print(json.dumps({"ready": True, "pid": os.getpid(), **msgspec.to_builtins(started)}), flush=True)


# --- agents ------------------------------------------------------------------------------------------------------


def agent(
    action: Annotated[Literal["add", "list", "rotate", "remove"], typer.Argument(metavar="add|list|rotate|remove")],
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="The agent.")] = None,
    role: Annotated[
        Literal["agent", "operator"],
        typer.Option(help="An operator sees all sessions and answers approval requests."),
    ] = "agent",
    profile: Annotated[str | None, typer.Option(metavar="P", help="Its profile of the rules.")] = None,
    config: ConfigOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> int:
    """Add, list, rotate or remove agents.

    `add` and `rotate` print the agent's new token, which is not stored. A rotated or removed token becomes invalid
    within seconds; the agent's sessions stay.
    """
    if (action == "list") == (name is not None):
        raise typer.BadParameter("list takes no name." if name else f"{action} needs the NAME of an agent.")
    settings = _settings(config, store=store)

    async def work(opened: Store) -> int:
        from holdfast.service.access import agents

        if action == "list":
            _show_agents(await agents.listed(opened), as_json)
            return 0
        assert name is not None
        if action == "remove":
            await agents.remove(opened, name)
            print(json.dumps({"agentId": name, "removed": True}) if as_json else name)
            return 0
        if action == "add":
            token = await agents.add(opened, name, role, profile or "")
        else:
            token = await agents.rotate(opened, name)
        print(json.dumps({"agentId": name, "token": token}) if as_json else token)
        return 0

    return run_async(_with_store(settings, work))


def _show_agents(agents: list[AgentRecord], as_json: bool) -> None:
    if as_json:
        shown = [
            {
                "agentId": agent.agent_id,
                "role": agent.role,
                "profile": agent.limits.get("profile", ""),
                "createdAt": agent.created_at,
                "tokenAt": agent.token_at,
                "disabled": agent.disabled,
            }
            for agent in agents
        ]
        print(json.dumps(shown))
        return
    now = time.time()
    rows = [
        [agent.agent_id, agent.role, str(agent.limits.get("profile", "-")), age(now - agent.token_at)]
        for agent in agents
    ]
    show_table(["NAME", "ROLE", "PROFILE", "TOKEN AGE"], rows)


async def _with_store(settings: ServiceSettings, work: Callable[[Store], Awaitable[int]]) -> int:
    with service_extra():
        from holdfast.service.store import open_store

    store = await open_store(settings)
    try:
        return await work(store)
    finally:
        await store.close()


# --- rules and state ---------------------------------------------------------------------------------------------


def check_rules(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A file with rules.")], as_json: JsonOption = False
) -> int:
    """Check a file of rules; print the position of an error, and what is expected there."""
    from holdfast.service.rules_file import read_rules, shown_rules

    shown = shown_rules(read_rules(file))
    if as_json:
        print(json.dumps(shown))
    else:
        print(f"{file}: {len(shown['profiles'])} profiles, {len(shown['agents'])} agents")
        for warning in shown["warnings"]:
            complain(f"warning: {warning}")
    return 0


def status(config: ConfigOption = None, listen_http: HttpOption = None, as_json: JsonOption = False) -> int:
    """Show the status of this machine's service, by HTTP; exit code 3 if none answers, 1 if it is not ready."""
    from holdfast.cli.verbs.service.service_status import NoAnswer, read_service_status

    settings = _settings(config, listen_http=listen_http)
    try:
        found = read_service_status(settings)
    except NoAnswer as error:
        if as_json:
            print(json.dumps({"running": False, "reason": str(error)}))
        else:
            complain(str(error))
        return NO_SERVER
    if as_json:
        print(json.dumps({"running": True, **msgspec.to_builtins(found)}))
    else:
        for name, value in found.rows():
            print(f"{name:<9} {value}")
    return 0 if found.ready else FAILED


SUB_VERBS: Final[dict[str, Callable[..., int]]] = {"agent": agent, "check-rules": check_rules, "status": status}
