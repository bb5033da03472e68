"""The contract suite over pods of every kind, through the API; the channel of kubectl has tests of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from holdfast import Sandbox
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

KINDS: dict[str, dict[str, Any]] = {
    "busybox": {},
    "debian": {"image": images.DEBIAN},
    "second-container": {"more_containers": [_SIDE]},
    "unprivileged": {"container": {"securityContext": _UNPRIVILEGED}},
    "read-only": {
        "container": {"securityContext": {"readOnlyRootFilesystem": True}, "volumeMounts": _TMP},
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    },
}


@pytest.fixture(scope="module", params=KINDS)
def subject(request: pytest.FixtureRequest, make_pod: MakePod) -> Subject:
    name = make_pod(f"contract-{request.param}", **KINDS[request.param])
    container = "side" if request.param == "second-container" else None
    return Subject(lambda: Pod("default", name, container, via="api"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box(subject: Subject) -> AsyncIterator[Sandbox]:
    async with subject.connect() as box:
        yield box


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("check", sandbox_suite.CHECKS, ids=lambda check: check.__name__)
async def test_contract(check: Check, box: Sandbox, subject: Subject) -> None:
    await check(box, subject)
