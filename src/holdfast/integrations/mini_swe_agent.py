"""mini-swe-agent: an environment whose commands run in a sandbox of the fleet.

`environment_class: holdfast.integrations.mini_swe_agent.Environment` in its configuration. Each command is a new
shell, as in mini-swe-agent's own environments.
"""

from __future__ import annotations

import contextlib
import platform
import weakref
from typing import Any, Literal

from minisweagent.environments.local import LocalEnvironment
from minisweagent.utils.serialize import recursive_merge
from pydantic import BaseModel

from holdfast.errors import HoldfastError, TimeoutError
from holdfast.fleet.template import Template
from holdfast.sync import Fleet


class Config(BaseModel, extra="forbid"):
    """The `environment` section of mini-swe-agent's configuration: an engine and fields of `Template`.

    Without an engine it is `docker` with an image and `bwrap` without.
    """

    engine: Literal["bwrap", "docker", "podman", "kubernetes", "local"] | None = None
    image: str | None = None
    cwd: str = ""
    env: dict[str, str] = {}
    #: Seconds for one command.
    timeout: int = 30
    #: Seconds without output after which a command is ended; None: no bound.
    silence: float | None = None
    interpreter: list[str] = ["bash", "-c"]
    root: str | None = None
    cpus: float | None = None
    memory: int | str | None = None
    disk: int | str | None = None
    processes: int | None = None
    network: str | list[str] | None = None
    user: str | None = None
    mounts: list[str] = []
    setup: list[str] = []
    lifetime: float | None = None
    options: dict[str, Any] = {}

    def template(self) -> Template:
        own = {"engine", "cwd", "timeout", "silence", "interpreter"}
        return Template(**self.model_dump(exclude=own, exclude_defaults=True), workdir=self.cwd or None)


class Environment(LocalEnvironment):
    """A sandbox that is made with this object, and removed by `cleanup`, with the object or at exit."""

    def __init__(self, *, config_class: type[Config] = Config, **kwargs: Any) -> None:
        super().__init__(config_class=config_class, **kwargs)
        engine = self.config.engine or ("bwrap" if self.config.image is None else "docker")
        with contextlib.ExitStack() as stack:
            fleet = stack.enter_context(Fleet(engine))
            self.box = stack.enter_context(fleet.block(self.config.template()))
            # Not `__del__`, which may run when the thread of the event loop no longer does.
            self._finalizer = weakref.finalize(self, stack.pop_all().close)

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        """Run the command of an action; an error of the sandbox or a timeout is a result, too."""
        command = str(action.get("command", ""))
        try:
            result = self.box.exec(
                [*self.config.interpreter, command],
                cwd=cwd or None,
                timeout=timeout or self.config.timeout,
                silence=self.config.silence,
                merge_stderr=True,
            )
            reason = "The command was killed: out of memory." if result.oom else ""
            output = {"output": result.stdout, "returncode": result.exit_code, "exception_info": reason}
        except HoldfastError as error:
            output = {
                "output": error.stdout if isinstance(error, TimeoutError) else "",
                "returncode": -1,
                "exception_info": f"An error occurred while executing the command: {error}",
                "extra": {"exception_type": type(error).__name__, "exception": str(error)},
            }
        self._check_finished(output)
        return output

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        """Variables for prompts: the configuration and the system, without the variables of this process."""
        merged: dict[str, Any] = recursive_merge(self.config.model_dump(), platform.uname()._asdict(), kwargs)
        return merged

    def cleanup(self) -> None:
        """Remove the sandbox."""
        self._finalizer()
