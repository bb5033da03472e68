"""The files of a bundle: the running Python with the part of its library that the in-sandbox part imports.

Reads this machine's Python, msgspec, h11 if it is installed, and our own sources, and writes nothing. The needed
modules are found in two steps: our sources are searched for imports, also those inside functions, and a fresh
interpreter imports them and prints all that it loaded.
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

#: The search for imports begins with the command and the programs that are run by path; and with the modules of
#: this package, the verbs that run inside, which the command imports by name.
_ROOTS: Final = (
    "holdfast.__main__",
    "holdfast.fleet.containers.first_process",
    "holdfast.fleet.jails.zygote",
    "holdfast.runtime.durability.keeper",
    "holdfast.runtime.process.launcher",
)
_PLAIN_VERBS: Final = "holdfast.cli.verbs.inside"
#: The search ends at the verbs that are typed by hand, which are not for sandboxes.
_TYPED_VERBS: Final = ("holdfast.cli.support.typed_verb", "holdfast.cli.verbs.process.quick")
#: Modules that the library itself loads by name or late: codecs of streams and sockets, among others.
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
#: Modules that the library can do without. OpenSSL alone would be as large as all the rest.
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

#: Runs in a fresh interpreter: imports the modules named on stdin, and prints the file of each loaded module.
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
        # It replaced itself by another module, as `collections.abc` does, and is needed for that.
        specs.append(importlib.machinery.PathFinder.find_spec(name, parent))
json.dump({spec.name: spec.origin for spec in specs if getattr(spec, "has_location", False)}, sys.stdout)
"""

_LAUNCHER: Final = """#!/bin/sh
bin=${{0%/*}}
exec {command} -m holdfast "$@"
"""


class TreeFile(NamedTuple):
    """One file of a tree."""

    content: bytes
    executable: bool = False


def bundle_files() -> dict[str, TreeFile]:
    """Return the whole tree: the path of each file below its root, and its content."""
    program = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    content = _read(program)
    loader = elf.loader_of(content, program)
    modules = loaded_modules()
    library = f"{sys.platlibdir}/{os.path.basename(sysconfig.get_path('stdlib'))}"
    files = {
        "bin/holdfast": TreeFile(_launcher(), executable=True),
        self_exec.INTERPRETER: TreeFile(elf.relocatable(content, program), executable=True),
        self_exec.LOADER: TreeFile(elf.relocatable(_read(loader), loader), executable=True),
        # Python derives its prefix from these two.
        f"{library}/lib-dynload/": TreeFile(b""),
        **dict(_module_files(modules, library)),
    }
    needing = [program, *(origin for origin in modules.values() if _is_extension(origin))]
    for name, path in _shared_libraries(loader, needing).items():
        files[f"{self_exec.LIBRARIES}/{name}"] = TreeFile(elf.relocatable(_read(path), path))
    return files


def package_files(*, msgspec: bool) -> dict[str, TreeFile]:
    """Return the in-sandbox part as sources, for a sandbox with a Python; optionally with this machine's msgspec.

    Files and not a zip, because extension modules cannot be imported from a zip, and the keeper and the launcher
    are run by path. `python -I DIRECTORY` runs it.
    """
    files = {
        "__main__.py": TreeFile(b"from holdfast.__main__ import main\n\nraise SystemExit(main())\n"),
        **{_module_path(name, path, ".py"): TreeFile(_read(path)) for name, path in our_modules().items()},
    }
    if msgspec:
        for path in inputs_of_msgspec():
            files[f"msgspec/{os.path.basename(path)}"] = TreeFile(_read(path))
    # Pure Python, for the two proxies: included if it is installed here.
    for path in inputs_of_h11():
        files[f"h11/{os.path.basename(path)}"] = TreeFile(_read(path))
    return files


def our_modules() -> dict[str, str]:
    """Return the modules of the in-sandbox part, each with its file."""
    return {name: path for name, path, _ in _search()}


def inputs_of_msgspec() -> list[str]:
    """Return every file of this machine's msgspec."""
    found = importlib.util.find_spec("msgspec")
    if found is None or not found.submodule_search_locations:
        raise SandboxError("msgspec is not installed as a directory of files here, which a bundle needs")
    directory = found.submodule_search_locations[0]
    return sorted(
        entry.path for entry in os.scandir(directory) if entry.is_file() and entry.name.endswith((".py", ".so"))
    )


def inputs_of_h11() -> list[str]:
    """Return every file of h11; none if it is not installed here, and the proxies inside then report that."""
    found = importlib.util.find_spec("h11")
    directories = [] if found is None else list(found.submodule_search_locations or ())
    return sorted(
        entry.path
        for directory in directories
        for entry in os.scandir(directory)
        if entry.is_file() and entry.name.endswith(".py")
    )


def loaded_modules() -> dict[str, str]:
    """Return every module that the in-sandbox part may load, each with its file."""
    names: dict[str, None] = dict.fromkeys(_MORE_MODULES)
    found: dict[str, str] = {}
    for name, path, imports in _search():
        found[name] = path
        names[name] = None
        names.update(dict.fromkeys(imports))
    without = _LEFT_OUT if inputs_of_h11() else (*_LEFT_OUT, "h11")
    orders = {"path": sys.path, "names": list(names), "without": without}
    done = subprocess.run(
        # Frozen modules would be reported without their files, some of which the interpreter reads at its start.
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
    """Yield each module of the in-sandbox part with its file and the modules of other packages that it imports."""
    verbs = os.path.dirname(_source_of(_PLAIN_VERBS) or "")
    inside = [f"{_PLAIN_VERBS}.{name[:-3]}" for name in sorted(os.listdir(verbs)) if name.endswith(".py")]
    pending = [*_ROOTS, *inside]
    seen = {*_TYPED_VERBS}
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
    """Yield the modules that statements import at run time; of ours also `package.name`, which may be a module."""
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


def _module_files(modules: Mapping[str, str], library: str) -> Iterator[tuple[str, TreeFile]]:
    for name, origin in modules.items():
        if _is_extension(origin):
            directory = library if "." in name else f"{library}/lib-dynload"
            path = f"{directory}/{'/'.join([*name.split('.')[:-1], os.path.basename(origin)])}"
            yield path, TreeFile(elf.relocatable(_read(origin), origin))
        else:
            yield f"{library}/{_module_path(name, origin, '.pyc')}", TreeFile(_compiled(name, origin))


def _compiled(name: str, origin: str) -> bytes:
    """Return the module as Python loads it without a source: the same bytes on every run.

    References in the format depend on the other objects of the compiling process. Version 2 has none, so a module
    that was loaded from version 2 has only references that follow from its source; with these the server's modules
    load a quarter faster. The exception is a string of at most one character: the process has one object for it,
    which other code may have interned, and the format says so.

    The library is compiled without docstrings and assertions; our own part keeps both.
    """
    ours = name.partition(".")[0] == "holdfast"
    shown = _module_path(name, origin, ".py")
    code: Any = compile(_read(origin), shown, "exec", dont_inherit=True, optimize=0 if ours else 2)
    for text in ("", *map(chr, range(256))):
        sys.intern(text)
    without_references = marshal.loads(marshal.dumps(code, 2))
    return importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(without_references)


def _module_path(name: str, path: str, ending: str) -> str:
    """Return the path of a module below a directory of `sys.path`."""
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
    # The shell replaces `$bin`; the rest is as in `self_exec`.
    text = [f'"{each}"' if "$" in each else each for each in self_exec.in_bundle("$bin/..")]
    text[text.index(f'"$bin/../{self_exec.INTERPRETER}"')] = '"$bin/python3"'
    return _LAUNCHER.format(command=" ".join(text)).encode()


def _is_extension(path: str) -> bool:
    return path.endswith(".so")


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
