"""The handlers of the server against the method table, by their annotations."""

from __future__ import annotations

import inspect

import pytest

from holdfast.client.files.remote import METHODS
from holdfast.runtime.durability.ledger import NullLedger
from holdfast.runtime.local import LocalExec
from holdfast.server.clients import ClientRegistry
from holdfast.server.dispatch import Dispatcher
from holdfast.server.methods.files import FileMethods
from holdfast.wire.messages import INITIALIZE, Empty
from holdfast.wire.table import methods

#: Those without a handler of their own: `test_remote_files` compares their rows with `FileApi`.
DERIVED = {row.name for name, row in METHODS.items() if name not in vars(FileMethods)}


@pytest.mark.parametrize("name", sorted(set(methods()) - {INITIALIZE.name} - DERIVED))
async def test_a_handler_has_the_types_of_its_method(name: str) -> None:
    exec_ = LocalExec()
    try:
        clients = ClientRegistry(exec_, NullLedger())
        method, handler = Dispatcher(exec_, clients, listening=lambda: (), shutdown=None).methods[name]
    finally:
        await exec_.aclose()
    annotations = inspect.get_annotations(handler)
    assert annotations["params"].split(".")[-1] == method.params.__name__
    returned = annotations["return"]
    result = "None" if method.result is Empty else method.result.__name__
    assert result in returned or returned in ("DeferredReply", "_ShellRunReply")
