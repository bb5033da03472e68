"""The templates that clients can name: a TOML file with one table for each, and the built-in ones.

A table has the fields of `holdfast.Template`. The operator's template is the most that a sandbox can get: a request
can restrict its network, and cannot extend it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Final

import msgspec

from holdfast.errors import InvalidParams
from holdfast.fleet.template import Template, make_template

#: The template of `Sandbox.create()`, and the one of the code interpreter's SDK.
BASE: Final = "base"
CODE_INTERPRETER: Final = "code-interpreter-v1"
#: A file of templates is written by hand; anything larger is another file.
MAX_FILE_BYTES: Final = 1024 * 1024
#: Set by the server for each sandbox.
_RESERVED: Final = frozenset({"labels", "lifetime"})


def load_templates(path: str | None) -> dict[str, Template]:
    """The templates of a file, with `base` and the code interpreter's template if the file has none."""
    templates = {} if path is None else _read(path)
    templates.setdefault(BASE, Template())
    templates.setdefault(CODE_INTERPRETER, templates[BASE])
    return templates


def _read(path: str) -> dict[str, Template]:
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidParams(f"{path}: cannot read the templates: {error.strerror}") from error
    if len(text) > MAX_FILE_BYTES:
        raise InvalidParams(f"{path}: larger than {MAX_FILE_BYTES} bytes")
    return parse_templates(text, path)


def parse_templates(text: bytes, source: str) -> dict[str, Template]:
    """The templates in the text of a TOML file; an error names the template and the field."""
    try:
        tables = tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidParams(f"{source}: not TOML: {error}") from None
    templates = {}
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise InvalidParams(f"{source}: {name}: not a table; a template is [{name}] with fields below it")
        if reserved := sorted(_RESERVED & table.keys()):
            raise InvalidParams(f"{source}: {name}: {', '.join(reserved)}: set by the client for each sandbox")
        try:
            templates[name] = make_template(None, dict(table))
        except (InvalidParams, TypeError, msgspec.ValidationError) as error:
            raise InvalidParams(f"{source}: {name}: {error}") from None
    return templates
