"""Sandboxes of pools for sessions: real services over bubblewrap, killed and restarted, alone and as replicas."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import InvalidParams
from holdfast.fleet.fleet import Fleet
from holdfast.fleet.pool import Pool
from holdfast.fleet.record import SandboxRef
from holdfast.fleet.template import Template
from holdfast.service.policy.made_sandbox import check_made_sandbox, find_made_sandbox
from holdfast.service.policy.rules import RulesInvalid, load_rules
from holdfast.service.problems import Denied, Invalid
from holdfast.service.sandboxes.session_pools import PREFIX, SessionPools
from tests.service.running_service import RunningService, ServiceHome, new_home, running_service, until
from tests.support.parts import require

RULES = """
[profiles.default]
sandbox.mode = "none"
network.mode = "host"
directories.writable = ["/tmp"]
sandbox.pools = ["jails"]

[profiles.closed]
sandbox.pools = []

[templates.marked]
env = { MARK = "from-the-template" }
setup = ["echo prepared > /root/flag"]
lifetime = "1h"

[pools.jails]
engine = "bwrap"
template = "marked"
warm = 1
max = 2

[agents.bob]
profile = "closed"
"""
LEASE_SECONDS = 2.0


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[ServiceHome]:
    with new_home() as made:
        fleet = Path(made.directory, "f")
        fleet.mkdir(mode=0o711)
        made.environ["HOLDFAST_FLEET_DIRECTORY"] = str(fleet)
        monkeypatch.setenv("HOLDFAST_FLEET_DIRECTORY", str(fleet))
        Path(made.directory, "rules.toml").write_text(RULES)
        yield made
        assert jails() == [], "sandboxes are left"
        assert [path.name for path in fleet.glob("pools/*/*")] == [], "marks are left"


def jails() -> list[SandboxRef]:
    async def listed() -> list[SandboxRef]:
        async with Fleet("bwrap") as fleet:
            return await fleet.list()

    return asyncio.run(listed())


def rules_of(home: ServiceHome) -> tuple[str, str]:
    return "--rules", str(Path(home.directory, "rules.toml"))


def opened(service: RunningService, token: str) -> tuple[str, str]:
    """Open a session in the pool; its id and the id of its sandbox."""
    made = service.call("CreateSession", token, kind="SHELL", sandbox="pool:jails")
    session_id = made["sessionId"]
    sandbox = service.call("GetSession", token, sessionId=session_id)["metadata"]["sandbox"]
    return session_id, sandbox.removeprefix("bwrap:")


def printed(service: RunningService, token: str, session_id: str, command: str) -> str:
    ran = service.call("RunCommand", token, sessionId=session_id, command=command)
    return base64.b64decode(ran["stdout"]).decode().strip()


def close(service: RunningService, token: str, session_id: str) -> None:
    until(lambda: service.post("CloseSession", token, sessionId=session_id)[0] == 200)


def metric(service: RunningService, line: str) -> float:
    _, text = service.get("/metrics")
    values = [each.rpartition(" ")[2] for each in text.splitlines() if each.startswith(line)]
    return float(values[0]) if values else -1.0


# --- rules -----------------------------------------------------------------------------------------------------


def test_a_profile_names_the_pools_of_its_sessions() -> None:
    rules = load_rules(RULES, "rules")
    made = find_made_sandbox(rules, "pool:jails")
    assert made is not None
    assert (made.engine, made.template_name, made.placement) == ("bwrap", "marked", "bwrap:new")
    check_made_sandbox(rules, rules.profile("default"), made)
    with pytest.raises(Denied, match=r"profiles\.closed\.sandbox\.pools"):
        check_made_sandbox(rules, rules.profile("closed"), made)
    with pytest.raises(Invalid, match="no such pool"):
        find_made_sandbox(rules, "pool:other")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[pools.p]\nwarm = 1", "rules:1: pools.p.engine: a pool needs an engine"),
        ('[pools.p]\nengine = "xen"', "rules:2: pools.p.engine: 'xen' is not one of"),
        ('[pools.p]\nengine = "bwrap"\nwarm = 3\nmax = 2', "rules:3: pools.p.warm: 3 is more than max"),
        ('[pools.p]\nengine = "bwrap"\ntemplate = "t"', "rules:3: pools.p.template: 't' is not one of"),
        ('[pools.p]\nengine = "bwrap"\nreuse = "reset"', "rules:3: pools.p.reuse: no such key"),
        ('[pools.p]\nengine = "bwrap"\nmax = 0', "rules:3: pools.p.max: 0 is not a whole number above 0"),
        ('[profiles.p]\nsandbox.pools = ["q"]', "rules:2: profiles.p.sandbox.pools.0: 'q' is not one of"),
        (
            '[templates.t]\nengine = "docker"\n[pools.p]\nengine = "bwrap"\ntemplate = "t"',
            "rules:4: pools.p.engine: template 't' is for engine 'docker'",
        ),
    ],
)
def test_a_mistake_in_a_pool_refuses_the_file(text: str, complaint: str) -> None:
    with pytest.raises(RulesInvalid) as refused:
        load_rules(text, "rules")
    assert refused.value.complaints[0].startswith(complaint)


# --- one service -------------------------------------------------------------------------------------------------


def test_a_session_has_a_sandbox_of_a_pool_also_after_the_service_was_killed(home: ServiceHome) -> None:
    require("bwrap")
    with running_service(home, *rules_of(home)) as service:
        token = service.operator
        until(lambda: metric(service, 'holdfast_pool_sandboxes{pool="jails",state="warm"}') == 1)
        (warm,) = jails()
        status, reply = service.post("CreateSession", token, sandbox=f"bwrap:{warm.id}")
        assert (status, reply["code"]) == (403, "permission_denied"), reply
        session_id, taken = opened(service, token)
        assert taken == warm.id
        assert printed(service, token, session_id, "cat /root/flag; echo $MARK") == "prepared\nfrom-the-template"
        assert metric(service, 'holdfast_pool_take_seconds_count{pool="jails"}') == 1
        second_id, _ = opened(service, token)
        # Both are in use, and a third one is not made.
        assert metric(service, 'holdfast_pool_sandboxes{pool="jails",state="in_use"}') == 2
        close(service, token, second_id)
        until(lambda: metric(service, 'holdfast_pool_sandboxes{pool="jails",state="warm"}') == 1)
        service.process.kill()
        service.process.wait(60)
    with running_service(home, *rules_of(home)) as service:
        # The session goes on in its sandbox, and the pool counts the sandbox.
        assert printed(service, token, session_id, "cat /root/flag") == "prepared"
        until(lambda: metric(service, 'holdfast_pool_sandboxes{pool="jails",state="in_use"}') == 1)
        until(lambda: metric(service, 'holdfast_pool_sandboxes{pool="jails",state="warm"}') == 1)
        rows = service.call("ListAudit", token, sessionId=session_id, pageSize=1000)["records"]
        (made,) = [json.loads(row["body"]) for row in rows if row["kind"] == "sandbox_made"]
        assert (made["sandbox"], made["pool"]) == (f"bwrap:{taken}", "jails")
        close(service, token, session_id)
        until(lambda: taken not in {ref.id for ref in jails()})


def test_another_replica_removes_the_sandbox_of_a_session_whose_replica_was_killed(
    home: ServiceHome, postgres_url: str
) -> None:
    require("bwrap")
    settings = {"HOLDFAST_SERVICE_LEASE_SECONDS": str(LEASE_SECONDS)}
    arguments = (*rules_of(home), "--store", postgres_url)
    with (
        running_service(home, *arguments, **settings) as first,
        running_service(home, *arguments, **settings) as second,
    ):
        token = first.operator or second.operator
        session_id, taken = opened(first, token)
        # Each replica has a pool of its own.
        for service in (first, second):
            until(lambda service=service: metric(service, 'holdfast_pool_made_total{pool="jails"}') >= 1)  # type: ignore[misc]
        assert {ref.record.pool for ref in jails()} == {f"{PREFIX}jails"}
        first.process.kill()
        first.process.wait(60)
        assert printed(second, token, session_id, "cat /root/flag") == "prepared"
        close(second, token, session_id)
        until(lambda: taken not in {ref.id for ref in jails()})

    # The warm sandbox of the killed replica has a lease; the next pool of this machine takes it over or removes it.
    async def take_over() -> None:
        async with Pool("bwrap", Template(), name=f"{PREFIX}jails", warm=0, max=1):
            pass

    asyncio.run(take_over())


async def test_pools_follow_the_rules_and_name_the_error_of_their_engine(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path_factory.mktemp("f")  # the path of a socket has 107 bytes
    monkeypatch.setenv("HOLDFAST_FLEET_DIRECTORY", str(directory))
    text = RULES.replace('engine = "bwrap"', 'engine = "local"').replace('"echo prepared > /root/flag"', '"true"')
    pools = SessionPools()
    pools.apply(load_rules(text, "rules"))
    pool, box = await pools.take("jails", 30.0)
    await pool.keep(box, 600.0)
    assert pools.has(box.ref.id)
    pools.apply(load_rules(text.replace("max = 2", "max = 1"), "rules"))
    with pytest.raises(Invalid, match="no such pool"):
        await pools.take("others", 1.0)
    # The sandbox of a session outlives its pool, and every other one is removed with it.
    await asyncio.wait(set(pools._closing))
    other, second = await pools.take("jails", 30.0)
    assert other is not pool
    assert {ref.id for ref in await pool.fleet.list()} == {box.ref.id, second.ref.id}
    broken = text.replace("lifetime", "image = 'x'\nlifetime")
    pools.apply(load_rules(broken, "rules"))
    with pytest.raises(InvalidParams, match="engine local: image"):
        await pools.take("jails", 1.0)
    await asyncio.wait(set(pools._closing))
    assert [ref.id for ref in await pool.fleet.list()] == [box.ref.id]
    await pool.give_back(box)
    await pools.stop()
    assert list(directory.glob("*/holdfast-*")) == []
