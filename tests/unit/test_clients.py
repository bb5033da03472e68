"""What the server keeps of a client does not grow with the processes that have ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from holdfast.runtime.durability.ledger import NullLedger
from holdfast.server.clients import PRUNED_IDS, ClientRegistry, ClientState, ResumePoint


def test_ended_processes_of_a_lasting_client_are_dropped() -> None:
    running = {f"lasting {number}" for number in range(3)}
    config = SimpleNamespace(max_processes_per_connection=10_000)
    exec_ = SimpleNamespace(config=config, processes=SimpleNamespace(is_running=running.__contains__))
    clients = ClientRegistry(cast(Any, exec_), NullLedger())
    client, _ = clients.open("client", None, ResumePoint)
    for process in sorted(running):
        clients.started(client, process, bound=True)
    for number in range(5 * PRUNED_IDS):
        clients.started(client, f"ended {number}", bound=True)
        assert len(client.bound) <= len(client.processes) <= PRUNED_IDS
        assert running <= client.bound


def test_running_processes_are_not_pruned_at_each_start() -> None:
    client, checks = ClientState("client"), 0

    def runs(_: str) -> bool:
        nonlocal checks
        checks += 1
        return True

    exec_ = SimpleNamespace(processes=SimpleNamespace(is_running=runs))
    clients = ClientRegistry(cast(Any, exec_), NullLedger())
    for number in range(8 * PRUNED_IDS):
        clients.started(client, f"{number}", bound=False)
    assert len(client.processes) == 8 * PRUNED_IDS
    assert checks < 2 * len(client.processes)
