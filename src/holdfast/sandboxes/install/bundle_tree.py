"""What goes into a bundle: the running Python with the part of its library that our in-sandbox part imports.

Reads this machine's Python, msgspec, h11 if it is installed, and our own sources, and writes nothing. What is
needed is found by asking: our sources are searched for imports, also those inside functions, and a fresh
interpreter imports them and tells what it has loaded.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import marshal
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from holdfast.errors import SandboxError
from holdfast.launch import self_exec
from holdfast.sandboxes.install import elf

#: Where our search for imports begins: the command, which imports its verbs, and what is run by path.
_ROOTS: Final = (
    "holdfast.__main__",
    "holdfast.fleet.jail_zygote",
    "holdfast.runtime.durability.keeper",
    "holdfast.runtime.process.launcher",
)
#: Where it ends: the verbs that people type, which are not for sandboxes.
_FOR_PEOPLE: Final = ("holdfast.cli.support.typed_verb", "holdfast.cli.verbs.process.quick")
#: Loaded by name or late, by the library itself. The codecs are what a stream or a socket asks for.
_MORE_MODULES: Final = (
    "asyncio.unix_events",
    "concurrent.futures.thread",
    "encodings.ascii",
    "encodings.idna",
    "encodings.latin_1",
    "encodings.utf_16",
    "encodings.utf_32",
    "encodings.utf_8",
    "encodings.utf_8_sig",
    "hashlib",
    "json",
    "runpy",
    "shutil",
    "tempfile",
    "tomllib",
    "traceback",
    "unicodedata",
)
#: The library does without them where they are missing. OpenSSL alone would be as large as all the rest.
_LEFT_OUT: Final = (
    "_bz2",
    "_hashlib",
    "_lzma",
    "_ssl",
    "bz2",
    "lzma",
    "readline",
    "ssl",
    "typing_extensions",
    "websockets",
)
#: Parts of the C library that it loads itself when /etc/nsswitch.conf names them. They must be of its own version,
#: and before glibc 2.34 even /etc/passwd is read by one.
_NAME_SERVICES: Final = ("libnss_files.so.2", "libnss_compat.so.2")

#: Runs in a fresh interpreter: imports what it is told, and tells each module's file.
_TRACE: Final = """
import importlib, importlib.machinery, json, sys
orders = json.load(sys.stdin)
sys.path[:] = orders["path"]
for name in orders["without"]:
    sys.modules[name] = None
for name in orders["names"]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in orders["without"]:
            raise
specs = [getattr(module, "__spec__", None) for module in sys.modules.values()]
for name, module in sys.modules.items():
    parent = getattr(sys.modules.get(name.rpartition(".")[0]), "__path__", None)
    if module is not None and parent is not None and module.__spec__.name != name:
        # It put another module in its place, as `collections.abc` does, and is loaded for that.
        specs.append(importlib.machinery.PathFinder.find_spec(name, parent))
json.dump({spec.name: spec.origin for spec in specs if getattr(spec, "has_location", False)}, sys.stdout)
"""

_LAUNCHER: Final = """#!/bin/sh
bin=${{0%/*}}
exec {command} -m holdfast "$@"
"""


class File(NamedTuple):
    """One file of a tree."""

    content: bytes
    executable: bool = False


def bundle_files() -> dict[str, File]:
    """The whole tree: path below its root, and content."""
    program = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    content = _read(program)
    loader = elf.loader_of(content, program)
    modules = loaded_modules()
    library = f"{sys.platlibdir}/{os.path.basename(sysconfig.get_path('stdlib'))}"
    files = {
        "bin/holdfast": File(_launcher(), executable=True),
        self_exec.INTERPRETER: File(elf.relocatable(content, program), executable=True),
        self_exec.LOADER: File(elf.relocatable(_read(loader), loader), executable=True),
        # Python takes its prefix from where these two are.
        f"{library}/lib-dynload/": File(b""),
        **dict(_module_files(modules, library)),
    }
    needing = [program, *(origin for origin in modules.values() if _is_extension(origin))]
    for name, path in _shared_libraries(loader, needing).items():
        files[f"{self_exec.LIBRARIES}/{name}"] = File(elf.relocatable(_read(path), path))
    return files


def package_files(*, msgspec: bool) -> dict[str, File]:
    """Our in-sandbox part as sources, for a sandbox that has a Python; with this machine's msgspec if asked.

    Files and not a zip: extension modules cannot be imported from one, and the keeper and the launcher are run by
    path. `python -I DIRECTORY` runs it.
    """
    files = {
        "__main__.py": File(b"from holdfast.__main__ import main\n\nraise SystemExit(main())\n"),
        **{_place(name, path, ".py"): File(_read(path)) for name, path in our_modules().items()},
    }
    if msgspec:
        for path in inputs_of_msgspec():
            files[f"msgspec/{os.path.basename(path)}"] = File(_read(path))
    # Pure Python, and for the model proxy alone: it goes along wherever we have it.
    for path in inputs_of_h11():
        files[f"h11/{os.path.basename(path)}"] = File(_read(path))
    return files


def our_modules() -> dict[str, str]:
    """The modules of the in-sandbox part, each with its file."""
    return {name: path for name, path, _ in _search()}


def inputs_of_msgspec() -> list[str]:
    """Every file of the msgspec that we use ourselves."""
    found = importlib.util.find_spec("msgspec")
    if found is None or not found.submodule_search_locations:
        raise SandboxError("msgspec is not installed as a directory of files here: no bundle can be made of it")
    directory = found.submodule_search_locations[0]
    return sorted(
        entry.path for entry in os.scandir(directory) if entry.is_file() and entry.name.endswith((".py", ".so"))
    )


def inputs_of_h11() -> list[str]:
    """Every file of h11; none if it is not installed here: then `model_proxy` says inside that it lacks it."""
    found = importlib.util.find_spec("h11")
    places = [] if found is None else list(found.submodule_search_locations or ())
    return sorted(
        entry.path
        for place in places
        for entry in os.scandir(place)
        if entry.is_file() and entry.name.endswith(".py")
    )


def loaded_modules() -> dict[str, str]:
    """Every module that the in-sandbox part may load, each with its file."""
    names: dict[str, None] = dict.fromkeys(_MORE_MODULES)
    found: dict[str, str] = {}
    for name, path, imports in _search():
        found[name] = path
        names[name] = None
        names.update(dict.fromkeys(imports))
    without = _LEFT_OUT if inputs_of_h11() else (*_LEFT_OUT, "h11")
    orders = {"path": sys.path, "names": list(names), "without": without}
    done = subprocess.run(
        # Modules that are frozen into the interpreter have no files, and some files it looks for at its start.
        [sys.executable, "-I", "-S", "-X", "frozen_modules=off", "-c", _TRACE],
        input=json.dumps(orders),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SandboxError(
            f"the modules for a bundle cannot be imported by {sys.executable}:\n{done.stderr.strip()}"
        )
    found.update(json.loads(done.stdout))
    for path in inputs_of_msgspec():
        stem = os.path.basename(path).partition(".")[0]
        found.setdefault("msgspec" if stem == "__init__" else f"msgspec.{stem}", path)
    return found


def _search() -> Iterator[tuple[str, str, list[str]]]:
    """Each module of our in-sandbox part with its file, and what it imports of others that are allowed there."""
    pending = [*_ROOTS]
    seen = {*_FOR_PEOPLE}
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        path = _source_of(name)
        if path is None:
            continue  # a name inside a module, not a module
        parent = name.rpartition(".")[0]
        if parent:
            pending.append(parent)
        imports = list(_imports(ast.parse(_read(path), path).body))
        pending += [each for each in imports if each.partition(".")[0] == "holdfast"]
        yield name, path, [each for each in imports if _is_allowed(each)]


def _is_allowed(name: str) -> bool:
    top = name.partition(".")[0]
    return (top in ("msgspec", "h11") or top in sys.stdlib_module_names) and name not in _LEFT_OUT


def _imports(body: Iterable[ast.AST]) -> Iterator[str]:
    """The modules that the statements import at run time; of ours also `package.name`, which may be a module."""
    for node in body:
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield from _imports(node.orelse)
            case ast.Import():
                yield from (each.name for each in node.names)
            case ast.ImportFrom(module=str(module)):
                yield module
                if module.partition(".")[0] == "holdfast":
                    yield from (f"{module}.{each.name}" for each in node.names)
            case _:
                yield from _imports(ast.iter_child_nodes(node))


def _source_of(name: str) -> str | None:
    root = self_exec.package_directory()
    path = os.path.join(root, *name.split(".")[1:])
    for candidate in (os.path.join(path, "__init__.py"), path + ".py"):
        if os.path.isfile(candidate):
            return candidate
    return None


def _module_files(modules: Mapping[str, str], library: str) -> Iterator[tuple[str, File]]:
    for name, origin in modules.items():
        if _is_extension(origin):
            directory = library if "." in name else f"{library}/lib-dynload"
            place = f"{directory}/{'/'.join([*name.split('.')[:-1], os.path.basename(origin)])}"
            yield place, File(elf.relocatable(_read(origin), origin))
        else:
            yield f"{library}/{_place(name, origin, '.pyc')}", File(_compiled(name, origin))


def _compiled(name: str, origin: str) -> bytes:
    """The module as Python loads it where there is no source; the same bytes whoever makes them.

    Version 2 of the format has no references, whose presence depends on what else the compiling process holds. The
    library goes without its documentation; our own part keeps its assertions.
    """
    ours = name.partition(".")[0] == "holdfast"
    shown = _place(name, origin, ".py")
    code: Any = compile(_read(origin), shown, "exec", dont_inherit=True, optimize=0 if ours else 2)
    return importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code, 2)


def _place(name: str, path: str, ending: str) -> str:
    """Where a module lies below the directory in which Python looks."""
    parts = name.split(".")
    if os.path.basename(path) == "__init__.py":
        parts.append("__init__")
    return "/".join(parts) + ending


def _shared_libraries(loader: str, needing: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in needing:
        for name, file in elf.libraries(loader, path).items():
            found.setdefault(name, file)
    directory = os.path.dirname(found.get("libc.so.6", ""))
    for name in _NAME_SERVICES:
        path = os.path.join(directory, name)
        if directory and os.path.exists(path):
            found.setdefault(name, path)
    return found


def _launcher() -> bytes:
    # `$bin` is replaced by the shell, the rest is as in every other start of ours.
    words = [f'"{each}"' if "$" in each else each for each in self_exec.in_bundle("$bin/..")]
    words[words.index(f'"$bin/../{self_exec.INTERPRETER}"')] = '"$bin/python3"'
    return _LAUNCHER.format(command=" ".join(words)).encode()


def _is_extension(path: str) -> bool:
    return path.endswith(".so")


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
