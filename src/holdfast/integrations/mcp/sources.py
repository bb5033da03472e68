"""The origin of a connection's sandbox: an address that exists, or a template from which the fleet makes one.

Both are opened as context managers, and closed when the connection ends; a sandbox that was made is then removed.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final, Protocol

from holdfast.client.opening import connect
from holdfast.client.sandbox import Sandbox
from holdfast.errors import InvalidParams
from holdfast.fleet.fleet import Fleet, FleetSandbox
from holdfast.fleet.template import Template, make_template
from holdfast.sandboxes.registry import check_address

#: How long a call waits for a broken connection to a sandbox: a client gives up after 60 s.
RECONNECT_SECONDS: Final = 30.0


class SandboxSource(Protocol):
    """Opens sandboxes. `makes` is whether each `open` makes a new one."""

    @property
    def makes(self) -> bool: ...

    def open(self) -> AbstractAsyncContextManager[Sandbox]: ...

    def fork(self, box: Sandbox) -> AbstractAsyncContextManager[Sandbox]: ...

    async def aclose(self) -> None: ...


class ExistingSandbox:
    """The sandbox at an address, which other clients may use as well."""

    makes = False

    def __init__(self, address: str, cwd: str | None = None) -> None:
        """On this machine commands begin in `cwd` or the current directory, as in `holdfast run`."""
        check_address(address)
        self.address = address
        self._cwd = cwd if cwd is not None or address not in ("local", "inprocess") else os.getcwd()

    def open(self) -> AbstractAsyncContextManager[Sandbox]:
        return connect(self.address, cwd=self._cwd, reconnect_deadline=RECONNECT_SECONDS)

    def fork(self, box: Sandbox) -> AbstractAsyncContextManager[Sandbox]:
        raise InvalidParams(f"sandbox {self.address!r}: it was not made for this connection, and cannot be forked")

    async def aclose(self) -> None:
        pass


class FleetSource:
    """Sandboxes that the fleet makes from one template, each for the life of its connection."""

    makes = True

    def __init__(self, engine: str, template: Template | None = None, **fields: Any) -> None:
        """Keywords are fields of `Template`. An unknown engine or field is an error at once."""
        self._template = make_template(template, fields)
        self._fleet = Fleet(engine)

    def open(self) -> AbstractAsyncContextManager[Sandbox]:
        return self._fleet.block(self._template)

    @asynccontextmanager
    async def fork(self, box: Sandbox) -> AsyncIterator[Sandbox]:
        assert isinstance(box, FleetSandbox)
        async with self._fleet.forked(box.ref.id) as made:
            yield made

    async def aclose(self) -> None:
        await self._fleet.aclose()
