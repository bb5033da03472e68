"""Jobs of terminals and live shells: what one command leaves behind, the next one finds, whatever happens between.

State that does not survive a killed server yet must raise an error, and is named by a constant of `place`.
"""

from __future__ import annotations

import asyncio
import contextlib

from holdfast.client.shell import Shell
from holdfast.types import ExitStatus, TerminalSize

from .checking import Broken, Following, same
from .job_context import (
    LOST_LINE_SECONDS,
    PRELUDE,
    JobContext,
    follow,
    patiently,
    reported_unless_scarce,
    started,
)
from .jobs_on_pipes import write

# --- terminals ------------------------------------------------------------------------------------------------


async def pty(context: JobContext) -> None:
    """A process on a terminal that passes bytes as they are, in and out."""
    _, data = context.piece(1, context.rng.choice((200, 20_000, 200_000)))
    command, printed = context.piece(1, 100_000)
    script = f"stty raw -echo -opost; echo ready; {command} head -c {len(data)}; exit 9"
    size = TerminalSize(context.rng.randint(1, 100), context.rng.randint(1, 200))
    process = await context.box.start(context.sh(script), tty=size, overflow="block")
    async with started(context, process):
        following = Following(context.name, {"pty": b"ready\n" + printed + data}, ExitStatus(9))
        ready = asyncio.Event()

        async def read() -> None:
            async for event in process.events():
                following.take(event)
                if following.seen + following.lost >= len(b"ready\n"):
                    ready.set()
            ready.set()
            following.over()
            context.count(following)

        reading = asyncio.create_task(read())
        try:
            with reported_unless_scarce(context):
                async with asyncio.timeout(LOST_LINE_SECONDS):
                    await ready.wait()
            if context.gave_up:
                return
            await write(context, process, data)
            await reading
        finally:
            reading.cancel()
            await asyncio.wait((reading,))


async def terminal(context: JobContext) -> None:
    """Commands typed at the prompt, with their output and exit codes; the shell keeps its state."""
    handle = await context.box.terminal("bash", login=False)
    try:
        ran = 0
        for number in range(context.rng.randint(1, 5)):
            first, count = context.rng.randrange(100_000), context.rng.randint(1, 2_000)
            code = context.rng.randrange(100)
            pause = f"sleep {context.rng.uniform(0, 0.2):.3f}; " if context.rng.random() < 0.5 else ""
            command = f"n=$((n+1)); {pause}seq {first} {first + count - 1}; echo $n; (exit {code})"
            expected = b"".join(b"%d\r\n" % n for n in [*range(first, first + count), ran + 1])
            result = await handle.run(command)
            ran += 1
            if result.truncated and context.scarce:
                context.lost += 1
                continue
            same(f"{context.name}, command {number}", result.output_bytes, expected)
            if result.exit_code != code:
                raise Broken(f"{context.name}, command {number}: exit code {result.exit_code} instead of {code}")
            context.seen += len(result.output_bytes)
    finally:
        await patiently(context, lambda: handle.close("force"))
        process = await context.box.process(handle.id)
        await patiently(context, process.forget)


# --- live shells ----------------------------------------------------------------------------------------------


async def shell(context: JobContext) -> None:
    """Commands in a live shell; each has its own output and exit code, and finds the state of those before it."""
    handle = await context.box.shell(context.rng.choice(("bash", "sh")))
    try:
        await in_shell(context, handle)
    finally:
        await patiently(context, handle.close)


async def in_shell(context: JobContext, handle: Shell) -> None:
    await handle.run(
        f"o() {{ dd if={context.blob_path} iflag=skip_bytes,count_bytes skip=$1 count=$2 bs=64k status=none; }}"
    )
    for number in range(1, context.rng.randint(2, 8)):
        out, printed = context.piece(0, context.rng.choice((100, 100_000)))
        err, complained = context.piece(0, 1_000)
        code = context.rng.randrange(256)
        pause = f"sleep {context.rng.uniform(0, 0.2):.3f}; " if context.rng.random() < 0.3 else ""
        command = f"n=$((n+1)); {out}{pause}{err.replace(';', ' >&2;')} echo $n; (exit {code})"
        result = await handle.run(command)
        what = f"{context.name}, command {number}"
        if result.truncated and context.scarce:
            context.lost += 1
        else:
            same(f"{what}, stdout", result.stdout_bytes, printed + b"%d\n" % number)
            same(f"{what}, stderr", result.stderr_bytes, complained)
        if result.exit_code != code:
            raise Broken(f"{what}: exit code {result.exit_code} instead of {code}")
        context.seen += len(printed) + len(complained)


async def shell_job(context: JobContext) -> None:
    """A process started from a shell, with its state; it outlives the shell."""
    command, printed = context.piece(1, 50_000)
    async with contextlib.AsyncExitStack() as stack:
        handle = await context.box.shell("bash")
        try:
            await handle.run(
                f"set -- {context.blob_path}; word=hello; " + PRELUDE.replace('"$0"', context.blob_path)
            )
            process = await handle.start(f"echo $word; {command} exit 6")
            await stack.enter_async_context(started(context, process))
        finally:
            await patiently(context, handle.close)
        await follow(context, process, {"stdout": b"hello\n" + printed, "stderr": b""}, ExitStatus(6))
