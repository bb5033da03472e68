"""How to start ourselves again: the interpreter that runs us, with everything it needs, and our scripts.

In a bundle or a package that was put into a sandbox the plain `sys.executable` would not do: it has no loader, or
does not find us. What tells is an `-X` option on our own command line, so that no variable of ours gets into any
environment. Standard library only: the stateless `holdfast exec` imports this module.
"""

from __future__ import annotations

import os
import sys

#: The `-X` option of every interpreter that runs from a bundle, and of every one that runs an unpacked package.
BUNDLE_OPTION = "holdfast_bundle"
PACKAGE_OPTION = "holdfast_package"
#: What LC_CTYPE was before Python set it, for the interpreters that we start; without a value: it was not set.
_LOCALE_OPTION = "holdfast_lc_ctype"

#: Where things are in a bundle. The loader has our name, because that is what `ps` shows.
LOADER = "libexec/holdfast"
LIBRARIES = "lib"
INTERPRETER = "bin/python3"


def is_injected() -> bool:
    """Whether we run from a bundle or package that was put here, and not from an installation."""
    return BUNDLE_OPTION in sys._xoptions or PACKAGE_OPTION in sys._xoptions


def command() -> list[str]:
    """The interpreter that runs us; the caller adds a script or `-c`. The first part is the file to execute."""
    if BUNDLE_OPTION in sys._xoptions:
        return [*in_bundle(os.path.dirname(os.path.dirname(sys.executable))), *_locale()]
    if PACKAGE_OPTION in sys._xoptions:
        return [sys.executable, "-I", "-X", PACKAGE_OPTION, *_locale()]
    return [sys.executable]


def holdfast() -> list[str]:
    """The `holdfast` command; the caller adds the verb."""
    if PACKAGE_OPTION in sys._xoptions:
        return [*command(), os.path.dirname(package_directory())]
    return [*command(), "-m", "holdfast"]


def package_directory() -> str:
    """The directory of the package itself."""
    return os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def in_bundle(directory: str) -> list[str]:
    """The interpreter of the bundle that is unpacked in `directory`.

    It is run by its own loader, which looks for libraries beside it and nowhere else first: the sandbox may have
    another C library, or none. `-I -S`: neither variables nor files of the sandbox's Python have a say.
    """
    python = os.path.join(directory, INTERPRETER)
    return [*loader_in_bundle(directory), python, "-I", "-S", "-X", "utf8", "-X", BUNDLE_OPTION]


def loader_in_bundle(directory: str) -> list[str]:
    """The loader of the bundle in `directory`; the caller adds a program that needs the C library alone."""
    return [os.path.join(directory, LOADER), "--library-path", os.path.join(directory, LIBRARIES)]


def script(module_file: str, name: str) -> str:
    """The path of the script `name` beside a module of ours: sources here, compiled files in a bundle."""
    directory, file = os.path.split(os.path.abspath(module_file))
    return os.path.join(directory, name + os.path.splitext(file)[1])


def restore_environment() -> None:
    """Take back what Python did to our environment, which becomes that of everything that we start.

    Where the locale is C or unknown, and in a bundle most are, Python sets LC_CTYPE at its start (PEP 538), and no
    option hinders it. The first of us sees in /proc what it was; the interpreters that it starts are told.
    """
    if not is_injected() or "LC_CTYPE" not in os.environ:
        return
    before = _lc_ctype_before()
    if before is None:
        del os.environ["LC_CTYPE"]
    elif before != os.environ["LC_CTYPE"]:
        os.environ["LC_CTYPE"] = before


def _locale() -> list[str]:
    before = _lc_ctype_before()
    return ["-X", _LOCALE_OPTION if before is None else f"{_LOCALE_OPTION}={before}"]


def _lc_ctype_before() -> str | None:
    told = sys._xoptions.get(_LOCALE_OPTION, False)
    if told is not False:
        return None if told is True else told
    try:
        with open("/proc/self/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:
        # Without /proc nothing tells; the server says so when it starts.
        return os.environ.get("LC_CTYPE")
    return next((os.fsdecode(each[9:]) for each in variables if each.startswith(b"LC_CTYPE=")), None)
