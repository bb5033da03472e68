"""`holdfast bundle`: makes the tar that is installed in sandboxes, unless it is cached, and prints its path."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

from holdfast.cli.support.sandbox_option import JsonOption
from holdfast.cli.support.text import amount
from holdfast.errors import InvalidParams


def command(
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="Also write it to this file."),
    ] = None,
    no_interpreter: Annotated[
        bool,
        typer.Option("--no-interpreter", help="Without a Python, for sandboxes that have one with msgspec."),
    ] = False,
    init_container: Annotated[
        str | None,
        typer.Option(
            "--init-container",
            metavar="IMAGE",
            help="Print the parts of a pod that copy the server from this image, where it is in /holdfast.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Make the tree that is installed in sandboxes without Python, as one compressed tar.

    It is made of the Python that runs this command, for machines of this kind, and stored in the user's cache.
    """
    # Imported here: `holdfast bundle --help` need not load it.
    from holdfast.sandboxes.install.bundle import make_bundle, make_package, write_atomically

    if init_container is not None and (no_interpreter or output is not None):
        raise InvalidParams("--init-container: not with --no-interpreter or --output")
    made = make_package(msgspec=False) if no_interpreter else make_bundle()
    if init_container is not None:
        from holdfast.fleet.kubernetes.manifest import server_parts

        # JSON is YAML.
        print(json.dumps(server_parts(init_container, f"/{made.name}", "IfNotPresent"), indent=2))
        return 0
    path = str(made.path)
    if output is not None:
        write_atomically(output, made.path.read_bytes())
        path = os.path.abspath(output)
    if as_json:
        shown = {"path": path, "size": made.size, "sha256": made.sha256, "machine": made.machine, "kind": made.kind}
        print(json.dumps(shown))
        return 0
    for name, value in (
        ("path", path),
        ("size", f"{amount(made.size)} ({made.size} bytes)"),
        ("sha256", made.sha256),
        ("machine", made.machine),
    ):
        print(f"{name:<8} {value}")
    return 0
