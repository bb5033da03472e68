"""Containers of Docker: `create` makes one for a `with` block; see `holdfast.sandboxes.containers`."""

from __future__ import annotations

from functools import partial

from holdfast.sandboxes import containers

create = partial(containers.create, engine="docker")
