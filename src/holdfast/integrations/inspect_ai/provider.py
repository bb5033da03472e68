"""The sandbox provider `holdfast`: a sandbox of the fleet for each sample.

Translates Inspect's calls to those of `Sandbox` and its errors to Inspect's. Calls of Inspect's injected tools that
Holdfast can answer itself (`exec_remote`) do not start a program in the sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import shlex
import stat
import time
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar, Final, Literal, overload

from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxConnection,
    SandboxEnvironment,
    SandboxEnvironmentConfigType,
    SandboxEnvironmentLimits,
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
    sandboxenv,
)
from inspect_ai.util._sandbox._cli import SANDBOX_CLI
from pydantic import BaseModel

from holdfast.client.command import oom_note
from holdfast.errors import (
    EXIT_NOT_FOUND,
    CommandNotFound,
    CwdNotFound,
    FileNotFound,
    PermissionRefused,
    SandboxError,
    SandboxGone,
    TimeoutError,
    TransportError,
    UnknownUser,
)
from holdfast.fleet.fleet import DEFAULT_LIFETIME, Fleet, FleetSandbox
from holdfast.fleet.record import new_record
from holdfast.fleet.template import make_template
from holdfast.integrations.inspect_ai.config import LABEL, Choice, Config, choose, complete, usable_engine
from holdfast.integrations.inspect_ai.remote_jobs import RemoteJobs

logger = logging.getLogger(__name__)

#: The engines whose sandboxes `inspect sandbox cleanup holdfast` lists.
ENGINES: Final = ("bwrap", "docker", "podman", "local")
#: Seconds between polls of Inspect's sandbox service for requests of programs in a sandbox. A poll is a command,
#: which takes a few milliseconds.
POLL_SECONDS: Final = 0.1
#: Characters of a label's value.
LABEL_CHARACTERS: Final = 60


class _Shared:
    """Shared by the samples of one event loop: a fleet for each engine, and the engine if a task names none."""

    def __init__(self) -> None:
        self.fleets: dict[str, Fleet] = {}
        self.default_engine: str | None = None


@sandboxenv(name="holdfast")
class HoldfastSandbox(SandboxEnvironment):
    """One sandbox of one sample."""

    #: By event loop. Inspect calls class methods only, and a fleet for each sample would prune for each.
    _shared: ClassVar[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Shared]] = weakref.WeakKeyDictionary()

    def __init__(self, fleet: Fleet, box: FleetSandbox) -> None:
        super().__init__()
        self._fleet = fleet
        self.box = box
        self._remote_jobs = RemoteJobs(box)

    # --- the life of a sandbox ---------------------------------------------------------------------------------

    @classmethod
    def config_files(cls) -> list[str]:
        return ["compose.yaml", "compose.yml", "docker-compose.yaml", "docker-compose.yml"]

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        return Config(**config)

    @classmethod
    def default_concurrency(cls) -> int | None:
        # A sandbox at rest costs memory and no processor; `max_sandboxes` of the task sets a bound.
        return None

    def default_polling_interval(self) -> float:
        return POLL_SECONDS

    @classmethod
    async def task_init(cls, task_name: str, config: SandboxEnvironmentConfigType | None) -> None:
        """Check the configuration before any sample runs, and remove what killed evaluations left."""
        fleet, chosen = await cls._choose(config)
        await fleet.engine.check(chosen.template)
        await fleet.prune()

    @classmethod
    async def _choose(cls, config: SandboxEnvironmentConfigType | None) -> tuple[Fleet, Choice]:
        """The configuration, complete, and the fleet of its engine, which all samples of an event loop share."""
        choice, shared = choose(config), cls._shared.setdefault(asyncio.get_running_loop(), _Shared())
        if choice.engine is None and shared.default_engine is None:
            shared.default_engine = await usable_engine()
        chosen = complete(choice, shared.default_engine or "")
        assert chosen.engine is not None
        fleet = shared.fleets.get(chosen.engine)
        if fleet is None:
            fleet = shared.fleets[chosen.engine] = Fleet(chosen.engine)
        return fleet, chosen

    @classmethod
    async def sample_init(
        cls, task_name: str, config: SandboxEnvironmentConfigType | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        fleet, chosen = await cls._choose(config)
        template = make_template(chosen.template, {"labels": {LABEL: task_name[-LABEL_CHARACTERS:]}})
        # Not bound to this process: `--no-sandbox-cleanup` keeps sandboxes. The lifetime covers a killed one.
        lifetime = template.lifetime or DEFAULT_LIFETIME
        box = await fleet.make(template, new_record(template, now=time.time(), lifetime=lifetime))
        try:
            if chosen.command:
                await box.start(chosen.command, id="command")
        except BaseException:
            await _remove(fleet, box)
            raise
        return {chosen.name: cls(fleet, box)}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        for environment in environments.values():
            made = environment.as_type(cls)
            await made._remote_jobs.aclose()
            await _remove(made._fleet, made.box)

    @classmethod
    async def task_cleanup(cls, task_name: str, config: SandboxEnvironmentConfigType | None, cleanup: bool) -> None:
        """Name the sandboxes that `--no-sandbox-cleanup` keeps."""
        if not cleanup:
            fleet, _ = await cls._choose(config)
            for ref in await fleet.list(labels={LABEL: task_name[-LABEL_CHARACTERS:]}):
                logger.warning("kept: %s; remove it: inspect sandbox cleanup holdfast %s", ref.address, ref.id)

    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:
        """Remove the sandboxes of evaluations, or the one with this id: `inspect sandbox cleanup holdfast`."""
        for name in ENGINES:
            async with Fleet(name) as fleet:
                if not fleet.engine.is_installed():
                    continue
                try:
                    refs = await fleet.list()
                except SandboxError as error:
                    logger.warning("engine %s: %s", name, error)
                    continue
                for ref in refs:
                    if LABEL in ref.labels and id in (None, ref.id):
                        await fleet.remove(ref.id)

    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        ref = self.box.ref
        argv = ["holdfast", "shell", "--sandbox", ref.address, *(["--user", user] if user else [])]
        container = ref.id if ref.engine in ("docker", "podman") else None
        return SandboxConnection(type="holdfast", command=shlex.join(argv), container=container)

    # --- commands ----------------------------------------------------------------------------------------------

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        with _translated():
            if cmd == [SANDBOX_CLI, "exec"] and input is not None:
                text = input if isinstance(input, str) else input.decode()
                reply = await self._remote_jobs.answer(text, timeout)
                if reply is not None:
                    return ExecResult(True, 0, reply, "")
            try:
                # Never a second time: a command that timed out was killed, and may have done half of its work.
                result = await self.box.exec(
                    cmd, input=input, cwd=cwd, env=env, user=user, timeout=timeout, concurrency=concurrency
                )
            except (CommandNotFound, CwdNotFound, UnknownUser) as error:
                return ExecResult(False, EXIT_NOT_FOUND, "", f"{error}\n")
            except PermissionRefused as error:
                if user is None:
                    raise
                raise SandboxUserUnsupportedError(str(error)) from error
        limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        if result.truncated or max(len(result.stdout_bytes), len(result.stderr_bytes)) > limit:
            shown = f"{result.stdout[-limit:]}{result.stderr[-limit:]}"
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, shown)
        stderr = result.stderr + oom_note(result.oom)
        return ExecResult(result.success, result.exit_code, result.stdout, stderr)

    # --- files -------------------------------------------------------------------------------------------------

    async def write_file(self, file: str, contents: str | bytes) -> None:
        with _translated():
            with contextlib.suppress(FileNotFound):
                await self._check_mode(file, stat.S_IWUSR)
            await self.box.write_file(file, contents)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        with _translated():
            size = await self._check_mode(file, stat.S_IRUSR)
            if size > SandboxEnvironmentLimits.MAX_READ_FILE_SIZE:
                raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
            contents = await self.box.read_file(file)
        return contents.decode() if text else contents

    async def _check_mode(self, file: str, bit: int) -> int:
        """The size of a file. One that its owner may not access is refused also to root, as Inspect expects."""
        info = await self.box.stat(file)
        if info.type == "directory":
            raise IsADirectoryError(errno.EISDIR, "Is a directory", file)
        if not info.mode & bit:
            raise PermissionError(errno.EACCES, "Permission denied", file)
        return info.size


async def _remove(fleet: Fleet, box: FleetSandbox) -> None:
    try:
        await box.aclose()
    finally:
        await fleet.remove(box.ref.id)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Raise Inspect's errors for those of Holdfast. Those of files and `NotExecutable` are Python's own already."""
    try:
        yield
    except (SandboxGone, TransportError) as error:
        raise SandboxUnavailableError(f"the sandbox does not reply: {error}") from error
    except TimeoutError as error:
        # Inspect passes it on with the tool's error.
        error.truncated_output = f"{error.stdout}{error.stderr}"  # type: ignore[attr-defined]
        raise
