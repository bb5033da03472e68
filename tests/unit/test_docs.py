"""Docs that fail when they lie.

Methods, fields, errors, settings, verbs and dependencies are asserted to be written down, links to lead somewhere,
examples to run and to print what the page shows.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
import types
import typing
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import msgspec
import pytest
import typer

from holdfast.cli import VERBS
from holdfast.cli.support.exit_codes import NO_SERVER
from holdfast.cli.verbs.inside import serve
from holdfast.config import ExecServerConfig
from holdfast.errors import HoldfastError, error_classes
from holdfast.wire.table import methods, notifications

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("changelog.d/*.md")])
PROTOCOL = (DOCS / "protocol.md").read_text()

#: Pages with examples that are run; those of the rest are compiled.
EXECUTED = [ROOT / "README.md", DOCS / "quickstart.md"]
#: Pages with recorded terminal sessions that are replayed.
RECORDED = [ROOT / "README.md", DOCS / "quickstart.md", DOCS / "command-line.md"]


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def sections(text: str) -> dict[str, str]:
    """The body under each heading, by the heading's text without its backticks."""
    parts = re.split(r"^#{1,6} +(.+)$", without_code(text), flags=re.MULTILINE)
    return {title.replace("`", ""): body for title, body in zip(parts[1::2], parts[2::2], strict=True)}


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """The fenced blocks of one language, with their line numbers."""
    text = page.read_text()
    pattern = re.compile(rf"^```{language}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start()) + 2, match[1]) for match in pattern.finditer(text)]


def rows(text: str) -> dict[str, list[str]]:
    """Table rows by the text of their first cell without backticks."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("|"):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            found[cells[0].strip("`")] = cells[1:]
    return found


# --- the protocol ----------------------------------------------------------------------------------------------


def structs_in(kind: object) -> Iterator[type[msgspec.Struct]]:
    """The Structs that a field's type mentions."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
    elif isinstance(kind, types.UnionType) or typing.get_origin(kind) is not None:
        for part in typing.get_args(kind):
            yield from structs_in(part)


def nested_structs(kind: type[msgspec.Struct]) -> dict[type[msgspec.Struct], None]:
    # In an order: test ids must be the same in every process that collects them.
    found: dict[type[msgspec.Struct], None] = {}
    pending = [part for field in msgspec.structs.fields(kind) for part in structs_in(field.type)]
    while pending:
        part = pending.pop()
        if part not in found:
            found[part] = None
            pending += [inner for field in msgspec.structs.fields(part) for inner in structs_in(field.type)]
    return found


def shape(kind: object) -> type[msgspec.Struct]:
    assert isinstance(kind, type)
    assert issubclass(kind, msgspec.Struct)
    return kind


def wire_default(field: msgspec.structs.FieldInfo) -> str:
    """The default in the table's third column for a parameter that is left out."""
    if field.required:
        return "required"
    default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    return f"`{json.dumps(msgspec.to_builtins(default))}`"


PARAMETERS = {
    **{name: shape(method.params) for name, method in methods().items()},
    **{name: shape(notification.params) for name, notification in notifications().items()},
}
RESULTS = {name: shape(method.result) for name, method in methods().items()}
#: Objects with a section of their own: what other messages are made of, and the nouns of the model.
SHAPES = {
    kind.__name__: kind
    for kind in [
        *(part for whole in [*PARAMETERS.values(), *RESULTS.values()] for part in nested_structs(whole)),
        *(result for result in RESULTS.values() if result.__module__.startswith("holdfast.types.")),
    ]
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_parameter_is_documented_with_its_default(name: str) -> None:
    table = rows(sections(PROTOCOL)[name])
    for field in msgspec.structs.fields(PARAMETERS[name]):
        assert field.encode_name in table, f"{name}: parameter {field.encode_name} has no row"
        assert table[field.encode_name][1] == wire_default(field), f"{name}: default of {field.encode_name}"


@pytest.mark.parametrize("name", RESULTS)
def test_every_result_field_is_documented(name: str) -> None:
    result = RESULTS[name]
    section = sections(PROTOCOL)[name]
    if result.__name__ in SHAPES:
        assert f"`{result.__name__}`" in section, f"{name}: the result's shape is not named"
        return
    for field in msgspec.structs.fields(result):
        assert f"`{field.encode_name}`" in section, f"{name}: result field {field.encode_name}"


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_documented(name: str) -> None:
    table = rows(sections(PROTOCOL)[name])
    assert {field.encode_name for field in msgspec.structs.fields(SHAPES[name])} <= set(table)


def test_the_protocol_has_no_section_for_a_method_that_is_not_there() -> None:
    titles = {title for title in sections(PROTOCOL) if re.fullmatch(r"[a-z]+/[A-Za-z]+|exec_remote_\w+", title)}
    assert titles <= set(PARAMETERS)


@pytest.mark.parametrize("cls", error_classes().values(), ids=lambda cls: cls.__name__)
def test_every_error_is_documented(cls: type[HoldfastError]) -> None:
    row = rows((DOCS / "errors.md").read_text())[str(cls.code)]
    assert row[:2] == [f"`{cls.__name__}`", cls.fault]


def json_examples() -> list[tuple[int, str]]:
    return [
        (line + at, message)
        for line, block in blocks(DOCS / "protocol.md", "json")
        for at, message in enumerate(block.splitlines())
        if message.strip()
    ]


@pytest.mark.parametrize(("line", "message"), json_examples(), ids=lambda value: str(value)[:40])
def test_every_json_example_is_a_message_of_the_protocol(line: int, message: str) -> None:
    """Requests and notifications decode by the method table; replies are at least JSON-RPC."""
    envelope = json.loads(re.sub(r"^[→←] ", "", message))
    if "method" in envelope:
        msgspec.convert(envelope.get("params", {}), PARAMETERS[envelope["method"]])
    else:
        assert envelope.keys() & {"result", "error"}, f"line {line}"


# --- settings, verbs, dependencies -----------------------------------------------------------------------------


@pytest.mark.parametrize("field", msgspec.structs.fields(ExecServerConfig), ids=lambda field: field.name)
def test_every_setting_is_documented_with_its_default(field: msgspec.structs.FieldInfo) -> None:
    row = rows((DOCS / "settings.md").read_text())[field.name]
    assert row[0].split(" (")[0] == f"`{json.dumps(field.default)}`"


def test_settings_names_no_setting_that_is_not_there() -> None:
    names = {name for name in rows((DOCS / "settings.md").read_text()) if re.fullmatch(r"[a-z]+(_[a-z]+)+", name)}
    assert names <= set(ExecServerConfig.__struct_fields__)


def typed_options(verb: str) -> list[str]:
    """The options of a verb that typer reads."""
    app = typer.Typer(add_completion=False)
    app.command()(importlib.import_module(f"holdfast.cli.verbs.{VERBS[verb].module}").command)
    parameters = typer.main.get_command(app).params
    return [
        option
        for parameter in parameters
        for option in [*parameter.opts, *parameter.secondary_opts]
        if option.startswith("-")
    ]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_documented_with_its_options(verb: str) -> None:
    page = sections((DOCS / "command-line.md").read_text())
    assert verb in page
    if verb == "serve":
        of_settings = {"--" + name.replace("_", "-") for name in ExecServerConfig.__struct_fields__}
        actions = serve.parser()._option_string_actions
        options = [option for option in actions if option not in of_settings | {"-h", "--help"}]
    else:
        options = [] if VERBS[verb].plain else typed_options(verb)
    missing = [option for option in options if not re.search(rf"`{option}[` =]|[\[ ]{option}[ \]]", page[verb])]
    assert missing == []


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *(name for extra in project["project"]["optional-dependencies"].values() for name in extra),
    ]
    names = {re.split(r"[\[<>=!~ ]", requirement)[0] for requirement in wanted} - {"holdfast"}
    assert names == set(rows((DOCS / "dependencies.md").read_text())) & names


def test_the_bridge_with_a_function_needs_no_extra() -> None:
    """The README's example runs after the README's installation: its host's side, and the proxy inside."""
    base = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    installed = {"holdfast", *(re.split(r"[\[<>=!~; ]", requirement)[0] for requirement in base)}
    absent = dict.fromkeys(set(packages_distributions()) - installed - sys.stdlib_module_names)
    # None in `sys.modules` makes an import fail as that of a package that is not installed.
    code = f"""
import sys
sys.modules.update({absent!r})
import holdfast.bridge.agent_bridge, holdfast.bridge.function_model
import holdfast.proxies.model.proxy, holdfast.proxies.egress.proxy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- security ----------------------------------------------------------------------------------------------------


def test_every_threat_has_a_wall_and_tests_that_exist() -> None:
    """The table of docs/security.md: threat, wall, tests as `FILE::NAME`."""
    text = (DOCS / "security.md").read_text().partition("\n## Threats, walls and tests\n")[2]
    found = [cells for threat, cells in rows(text).items() if threat not in ("threat", "---")]
    assert len(found) == text.count("\n| ") - text.count("\n| threat |")
    for wall, tests in found:
        assert wall
        names = re.findall(r"`([^`]+)`", tests)
        assert names
        for name in names:
            file, _, function = name.partition("::")
            source = ROOT / file
            assert source.is_file(), name
            assert re.search(rf"^(async )?def {function}\(", source.read_text(), re.MULTILINE), name


# --- pages -----------------------------------------------------------------------------------------------------


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-")


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), link
        if anchor:
            assert anchor in {slug(title) for title in sections(file.read_text())}, link


def test_every_path_in_the_architecture_exists() -> None:
    """Every file and folder that the page names exists, relative to the repository or to the package."""
    text = without_code((DOCS / "architecture.md").read_text())
    named = set(re.findall(r"`((?:\.?[\w-]+/)+|(?:[\w-]+/)*[\w-]+\.py|[\w-]+/[\w/.-]+\.md)`", text))
    roots = (ROOT, ROOT / "src" / "holdfast")
    assert len(named) > 100
    assert sorted(path for path in named if not any((root / path).exists() for root in roots)) == []


def test_every_page_is_linked_from_another() -> None:
    linked = {(page.parent / link.partition("#")[0]).resolve() for page in PAGES for link in links(page)}
    assert [page_id(page) for page in DOCS.rglob("*.md") if page not in linked] == []


def test_every_decision_is_in_the_list() -> None:
    decisions = DOCS / "decisions"
    listed = set(links(decisions / "README.md"))
    assert {page.name for page in decisions.glob("[0-9]*.md")} <= listed


PYTHON_BLOCKS = [
    pytest.param(page, line, code, id=f"{page_id(page)}:{line}")
    for page in PAGES
    for line, code in blocks(page, "python")
]


@pytest.mark.parametrize(("page", "line", "code"), PYTHON_BLOCKS)
def test_python_examples_compile(page: Path, line: int, code: str) -> None:
    tree = compile(code, f"{page_id(page)}:{line}", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    assert isinstance(tree, ast.Module)
    assert tree.body


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """Variables for a local server of its own, which is stopped at the end; `holdfast` is the one under test."""
    with tempfile.TemporaryDirectory(prefix="holdfast-docs-") as directory:
        program = Path(directory) / "holdfast"
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m holdfast "$@"\n')
        program.chmod(0o700)
        environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")},
            "PATH": f"{directory}:{os.environ['PATH']}",
            "HOLDFAST_DIRECTORY": directory,
            "HOLDFAST_FLEET_DIRECTORY": f"{directory}/fleet",
            # Should the server be too broken to be stopped, it still does not stay for ever.
            "HOLDFAST_IDLE_SHUTDOWN_SECONDS": "60",
        }
        yield environ
        stopped = subprocess.run([program, "stop"], env=environ, capture_output=True, timeout=60, check=False)
        assert stopped.returncode in (0, NO_SERVER), stopped.stderr


@pytest.mark.parametrize(
    ("page", "line", "code"), [block for block in PYTHON_BLOCKS if block.values[0] in EXECUTED]
)
def test_python_examples_run(page: Path, line: int, code: str, environment: dict[str, str]) -> None:
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, ""), f"{page_id(page)}:{line}"


RECORDINGS = [
    pytest.param(page, line, text, id=f"{page_id(page)}:{line}")
    for page in RECORDED
    for line, text in blocks(page, "console")
]


@pytest.mark.parametrize(("page", "line", "text"), RECORDINGS)
def test_recorded_sessions_print_what_the_page_shows(
    page: Path, line: int, text: str, environment: dict[str, str]
) -> None:
    """All `$` lines of one block run in one shell.

    In the recorded output `…` stands for anything on its line, and a run of spaces for any other run of spaces.
    """
    steps = re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]
    mark = f"--- end of step {os.getpid()} ---"
    script = "exec 2>&1\n" + "\n".join(f"{step.partition(chr(10))[0]}\nprintf '%s\\n' '{mark}'" for step in steps)
    done = subprocess.run(
        ["sh", "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    printed = done.stdout.split(f"{mark}\n")
    for step, output in zip(steps, printed, strict=False):
        command, _, recorded = step.partition("\n")
        pattern = re.sub(r"(\\ )+", " +", re.escape(recorded.strip("\n"))).replace("…", ".*")
        assert re.fullmatch(pattern, output.strip("\n")), f"{page_id(page)}:{line}: {command}\n{output}"
    assert len(printed) == len(steps) + 1, done.stdout
