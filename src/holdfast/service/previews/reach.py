"""Decides whether a port that the sandbox's server dials is a port of the session, and of it alone; pure.

The server in a sandbox dials from its own network namespace. A session that is confined with another one is not
reachable there, and in a sandbox with the network of its machine, the port would be one of the machine.
"""

from __future__ import annotations

from typing import Final

from holdfast.fleet.template import Template
from holdfast.service.types import SessionRecord

#: Engines of the fleet whose sandboxes have a network namespace of their own.
_ISOLATING: Final = ("bwrap", "docker", "podman")


def why_unreachable(record: SessionRecord, template: Template | None) -> str:
    """Return why a preview would reach another port than the session's; empty if it would not.

    `template` is that of the sandbox that was made for this session; None if the session has another one.
    """
    sandbox, network = record.sandbox, record.policy.network
    engine = sandbox.partition(":")[0]
    if template is None:
        return (
            f"sandbox {sandbox!r} was not made for this session, so its ports can be those of its machine or of "
            "another session; previews need one of bwrap:new, docker:new, podman:new, or of a pool of these"
        )
    if engine not in _ISOLATING:
        return f"sandboxes of engine {engine!r} have the network of their machine, and so would the preview"
    if template.network == "host":
        return 'the template has network = "host": the preview would reach ports of the machine'
    if template.options.get("arguments"):
        # Further options of `docker run` can select any network.
        return "the template has options.arguments, which can select another network than the sandbox's own"
    if network != "host":
        return (
            f"the session has a network of its own inside the sandbox (network.mode = {network!r}), which the "
            'service does not reach; with "host" it has the network of the sandbox, which the template closes'
        )
    return ""
