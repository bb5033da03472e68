"""`holdfast bridge`: runs an agent in a sandbox with a bridge to a model, and exits with the agent's code.

The provider's key is read from a variable and removed from our environment at once, so that no child inherits it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Final, Literal

import typer
from msgspec.structs import replace

from holdfast.bridge.agent_bridge import DEFAULT_PORT, Bridge, sandbox_agent_bridge
from holdfast.bridge.limits import Limits, Price
from holdfast.bridge.record import CallRecord, RecordFile
from holdfast.bridge.upstream import Upstream
from holdfast.cli.support.command_request import STDERR, STDIN, STDOUT, environment, forwards_stdin, generated_id
from holdfast.cli.support.exit_codes import OURS
from holdfast.cli.support.foreground import ClientDetached, Foreground, SignalQueue
from holdfast.cli.support.own_terminal import terminal_size
from holdfast.cli.support.sandbox_option import LOCAL, SandboxOption, is_this_machine
from holdfast.cli.support.text import complain
from holdfast.cli.support.typed_verb import run_async
from holdfast.client.opening import connect
from holdfast.client.sandbox import Sandbox
from holdfast.errors import InvalidParams
from holdfast.service.client.service_client import ServiceClient
from holdfast.service.problems import Problem
from holdfast.types import EnvPolicy, ProcessSpec, TerminalSize

#: Variables with keys that the providers' clients prefer to those of the bridge.
_OTHER_KEYS: Final = ("GOOGLE_API_KEY", "ANTHROPIC_AUTH_TOKEN", "AZURE_OPENAI_API_KEY", "OPENROUTER_API_KEY")


def command(
    argv: Annotated[list[str], typer.Argument(metavar="CMD...", help="The agent and its arguments.")],
    upstream: Annotated[
        str, typer.Option(metavar="URL", help="The provider: https://api.openai.com/v1, http://127.0.0.1:8000 ...")
    ],
    sandbox: SandboxOption = LOCAL,
    key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="The variable here that holds the provider's key.")
    ] = None,
    auth: Annotated[
        Literal["auto", "bearer", "x-api-key", "x-goog-api-key"],
        typer.Option(help="The header that carries the key (auto: as the provider's own clients do)."),
    ] = "auto",
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Request this model from the provider, whichever the agent requests."),
    ] = None,
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="The port inside; 0 chooses a free one.")
    ] = DEFAULT_PORT,
    allow_model: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Allow only these models; * stands for any text.")
    ] = None,
    max_requests: Annotated[int | None, typer.Option(metavar="N", min=0, help="Requests in all.")] = None,
    max_tokens: Annotated[int | None, typer.Option(metavar="N", min=0, help="Tokens in all.")] = None,
    max_money: Annotated[float | None, typer.Option(metavar="X", min=0, help="Money in all, by --price.")] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL=IN/OUT", help="The price of a million tokens in and out; * stands for any text."
        ),
    ] = None,
    record: Annotated[
        str | None, typer.Option(metavar="FILE", help="Append a line of JSON for each call, without keys.")
    ] = None,
    session: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="Record model, tokens and cost of each call in this session of the service "
            "(HOLDFAST_SERVICE_ADDRESS, HOLDFAST_SERVICE_TOKEN).",
        ),
    ] = None,
    tty: Annotated[bool, typer.Option("--tty", "-t", help="Give the agent a terminal.")] = False,
    cwd: Annotated[
        str | None, typer.Option(metavar="DIR", help="Working directory (default here: the current one).")
    ] = None,
    env: Annotated[list[str] | None, typer.Option("--env", "-e", metavar="K=V", help="Set a variable.")] = None,
    user: Annotated[str | None, typer.Option(metavar="USER", help="Run the agent as this user.")] = None,
    timeout: Annotated[
        float | None, typer.Option(metavar="S", min=0, help="End the agent after S seconds; exit code 124.")
    ] = None,
) -> int:
    """Run an agent in a sandbox, with a bridge to a model.

    OPENAI_BASE_URL, ANTHROPIC_BASE_URL and GOOGLE_GEMINI_BASE_URL lead the agent to the bridge; it needs neither
    network nor key. When the agent or this command ends, so do the bridge and everything the agent started. The
    exit code is the agent's, and that of `holdfast run` otherwise.
    """
    provider = Upstream(upstream, _take_key(key_env), model=model, auth=auth)
    limits = Limits(
        models=tuple(allow_model) if allow_model else None,
        requests=max_requests,
        tokens=max_tokens,
        money=max_money,
        prices=dict(map(_price, price or [])),
    )
    here = is_this_machine(sandbox)
    spec = ProcessSpec(
        process_id=generated_id(argv[0]),
        argv=tuple(argv),
        cwd=cwd if cwd is not None else os.getcwd() if here else None,
        env=environment(env or [], here=here, tty=tty),
        env_policy=None if here else EnvPolicy(ignore_default_excludes=True),
        tty=tty,
        size=(terminal_size(STDIN, STDOUT, STDERR) or TerminalSize()) if tty else None,
        pipe_stdin=forwards_stdin(None, tty=tty),
        user=user,
        overflow="block",
        # The agent cannot work without its bridge: it ends with this program, however that ends.
        lifetime="connection",
        start_id=secrets.token_hex(8),
    )
    set_by_hand = {assignment.partition("=")[0] for assignment in env or []}
    with _recording(record) as recorded:
        return run_async(_run(sandbox, spec, set_by_hand, provider, limits, port, recorded, session, timeout))


async def _run(
    sandbox: str,
    spec: ProcessSpec,
    set_by_hand: set[str],
    provider: Upstream,
    limits: Limits,
    port: int,
    recorded: RecordFile | None,
    session: str | None,
    timeout: float | None,
) -> int:
    def on_call(call: CallRecord) -> None:
        if recorded is not None:
            recorded.write(call)
        report(call)

    signals = SignalQueue()
    with signals.listening():
        async with (
            _reporting(session) as report,
            connect(sandbox) as box,
            sandbox_agent_bridge(box, provider, port, limits=limits, on_call=on_call) as bridge,
        ):
            return await _agent(box, bridge, spec, set_by_hand, signals, timeout)


def agent_environment(ours: dict[str, str], bridges: dict[str, str], set_by_hand: set[str]) -> dict[str, str]:
    """Return our environment without keys of providers, the bridge's variables over it, and --env over both."""
    kept = {name: value for name, value in ours.items() if name in set_by_hand or name not in _OTHER_KEYS}
    return kept | {name: value for name, value in bridges.items() if name not in set_by_hand}


async def _agent(
    box: Sandbox,
    bridge: Bridge,
    spec: ProcessSpec,
    set_by_hand: set[str],
    signals: SignalQueue,
    timeout: float | None,
) -> int:
    await box.api.start(replace(spec, env=agent_environment(spec.env or {}, bridge.env, set_by_hand)))
    foreground = Foreground(box.api, spec.process_id, tty=spec.tty, signals=signals)
    try:
        return await foreground.follow(forward_input=spec.pipe_stdin or spec.tty, timeout=timeout)
    except ClientDetached:
        complain("the agent was ended: it cannot run without its bridge")
        return OURS
    finally:
        # Also the processes that the agent left running.
        await asyncio.shield(box.api.terminate(spec.process_id, force=True))


def _take_key(name: str | None) -> str | None:
    if name is None:
        return None
    key = os.environ.pop(name, "")
    if not key:
        raise InvalidParams(f"--key-env {name}: not set here")
    return key


def _price(text: str) -> tuple[str, Price]:
    model, _, prices = text.rpartition("=")
    paid, _, given = prices.partition("/")
    try:
        return model, Price(float(paid), float(given))
    except ValueError:
        raise InvalidParams(f"--price {text!r}: write MODEL=IN/OUT, the price of a million tokens") from None


@contextlib.asynccontextmanager
async def _reporting(session: str | None) -> AsyncIterator[Callable[[CallRecord], None]]:
    if session is None:
        yield lambda _: None
        return
    try:
        async with ServiceClient() as service, service.recording_model_calls(session) as report:
            yield report
    except Problem as problem:
        # The agent has ended, and its exit code is that of this program.
        complain(f"not all model calls were recorded in {session}: {problem.message}")


@contextlib.contextmanager
def _recording(path: str | None) -> Iterator[RecordFile | None]:
    if path is None:
        yield None
        return
    file = RecordFile(path)
    try:
        yield file
    finally:
        file.close()
