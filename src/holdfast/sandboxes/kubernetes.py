"""Pods, reached through `kubectl exec`; which cluster is kubectl's own to know."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from holdfast.errors import InvalidParams
from holdfast.sandboxes.injection import Injection, What
from holdfast.sandboxes.place import CommandPlace, Signs


class Pod(CommandPlace):
    """A container of a pod that runs: `kubernetes:NAMESPACE/POD` or `kubernetes:NAMESPACE/POD/CONTAINER`."""

    gone_signs: ClassVar[Signs] = (
        (re.compile(r"\(NotFound\)|container .* is not valid for pod"), "there is no such pod or container"),
        (re.compile(r"completed pod|container not found|is not running"), "the pod does not run"),
    )

    def __init__(
        self,
        namespace: str,
        pod: str,
        container: str | None = None,
        *,
        context: str | None = None,
        directory: str | None = None,
        bundle: What = True,
    ) -> None:
        names = [namespace, pod, *([] if container is None else [container])]
        if not all(re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", name) for name in names):
            raise InvalidParams(
                f"kubernetes:{'/'.join(names)}: NAMESPACE/POD or NAMESPACE/POD/CONTAINER, in small letters"
            )
        super().__init__(f"kubernetes:{'/'.join(names)}", Injection(directory=directory, bundle=bundle))
        self.namespace = namespace
        self.pod = pod
        self.container = container
        self.context = context

    def command(self, argv: Sequence[str]) -> list[str]:
        context = [] if self.context is None else ["--context", self.context]
        container = [] if self.container is None else ["--container", self.container]
        pod = ["--namespace", self.namespace, self.pod]
        return ["kubectl", *context, "exec", "--stdin", "--quiet", *pod, *container, "--", *argv]
