"""The contract suite over pods of every kind, through the API, and over the channel of kubectl."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

import pytest
import pytest_asyncio

from holdfast import Sandbox, connect
from holdfast.errors import CommandNotFound
from holdfast.fleet.kubernetes.manifest import server_parts
from holdfast.sandboxes.install.bundle import make_bundle
from holdfast.sandboxes.kubernetes import Pod
from holdfast.testing import sandbox_suite
from holdfast.testing.sandbox_suite import Check, Subject
from tests.support.kubernetes import images

from .conftest import MakePod

_SIDE = {"name": "side", "image": images.BUSYBOX, "imagePullPolicy": "Never", "command": ["sleep", "100000"]}
_UNPRIVILEGED = {
    "runAsUser": 1000,
    "runAsNonRoot": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
_TMP = [{"name": "tmp", "mountPath": "/tmp"}]

_BUSYBOX = "/bin/busybox-alone"


def _no_shell() -> dict[str, Any]:
    """The documented way into a pod without a shell: `holdfast bundle --init-container` prints these parts."""
    parts = server_parts(images.SERVER, f"/{make_bundle().name}", "Never")
    container = {"command": [_BUSYBOX, "sleep", "100000"], "volumeMounts": parts.pop("volumeMounts")}
    return {"image": images.EMPTY, "container": container, **parts}


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "busybox": dict,
    "kubectl": dict,
    "debian": lambda: {"image": images.DEBIAN},
    "second-container": lambda: {"more_containers": [_SIDE]},
    "unprivileged": lambda: {"container": {"securityContext": _UNPRIVILEGED}},
    "read-only": lambda: {
        "container": {"securityContext": {"readOnlyRootFilesystem": True}, "volumeMounts": _TMP},
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    },
    "no-shell": _no_shell,
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def subject(kind: str, make_pod: MakePod) -> Subject:
    name = make_pod(f"contract-{kind}", **KINDS[kind]())

    def pod() -> Pod:
        made = Pod("default", name, "side" if kind == "second-container" else None, via=_via(kind))
        # The programs of the checks are in this pod after the first connection: no connection may use their shell.
        made.installation.has_shell = kind != "no-shell"
        return made

    return Subject(pod)


def _via(kind: str) -> Literal["api", "kubectl"]:
    return "kubectl" if kind == "kubectl" else "api"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box(kind: str, subject: Subject) -> AsyncIterator[Sandbox]:
    if kind == "no-shell":
        # As a user connects: that there is no shell is found out.
        async with connect(f"kubernetes:default/contract-{kind}", via="api") as first:
            with pytest.raises(CommandNotFound):
                await first.exec(["sh", "-c", "true"])
            assert (await first.exec([_BUSYBOX, "--install", "-s", "/bin"])).success
    async with subject.connect() as box:
        yield box


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("check", sandbox_suite.CHECKS, ids=lambda check: check.__name__)
async def test_contract(check: Check, box: Sandbox, subject: Subject) -> None:
    await check(box, subject)
