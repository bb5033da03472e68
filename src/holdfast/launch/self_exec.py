"""The command line that starts this package again: the running interpreter with its options, and its scripts.

In a bundle or a package that was put into a sandbox, plain `sys.executable` does not work: it has no loader, or
does not find the package. An `-X` option on the command line marks these cases, so that no environment gets a
variable of this package. Standard library only: the stateless `holdfast exec` imports this module.
"""

from __future__ import annotations

import os
import sys

#: The `-X` option of every interpreter that runs from a bundle, and of every one that runs an unpacked package.
BUNDLE_OPTION = "holdfast_bundle"
PACKAGE_OPTION = "holdfast_package"
#: The LC_CTYPE from before Python set it, for child interpreters; without a value it was not set.
_LOCALE_OPTION = "holdfast_lc_ctype"

#: Paths in a bundle. The loader is named holdfast, because `ps` shows its name.
LOADER = "libexec/holdfast"
LIBRARIES = "lib"
INTERPRETER = "bin/python3"


def is_injected() -> bool:
    """Whether this program runs from an injected bundle or package, and not from an installation."""
    return BUNDLE_OPTION in sys._xoptions or PACKAGE_OPTION in sys._xoptions


def command() -> list[str]:
    """Return the running interpreter; the caller adds a script or `-c`. The first part is the file to execute."""
    if BUNDLE_OPTION in sys._xoptions:
        return [*in_bundle(os.path.dirname(os.path.dirname(sys.executable))), *_locale()]
    if PACKAGE_OPTION in sys._xoptions:
        return [sys.executable, "-I", "-X", PACKAGE_OPTION, *_locale()]
    return [sys.executable]


def holdfast() -> list[str]:
    """Return the `holdfast` command; the caller adds the verb."""
    if PACKAGE_OPTION in sys._xoptions:
        return [*command(), os.path.dirname(package_directory())]
    return [*command(), "-m", "holdfast"]


def package_directory() -> str:
    """Return the directory of the package itself."""
    return os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def in_bundle(directory: str) -> list[str]:
    """Return the interpreter of the bundle that is unpacked in `directory`.

    Its own loader runs it and searches libraries in the bundle first: the sandbox may have another C library, or
    none. `-I -S` ignores the variables and the files of the sandbox's Python.
    """
    python = os.path.join(directory, INTERPRETER)
    return [*loader_in_bundle(directory), python, "-I", "-S", "-X", "utf8", "-X", BUNDLE_OPTION]


def loader_in_bundle(directory: str) -> list[str]:
    """The command of the loader of the bundle in `directory`; the caller appends a program that needs only libc."""
    return [os.path.join(directory, LOADER), "--library-path", os.path.join(directory, LIBRARIES)]


def script(module_file: str, name: str) -> str:
    """Return the path of the script `name` beside a module: a source file here, a compiled file in a bundle."""
    directory, file = os.path.split(os.path.abspath(module_file))
    return os.path.join(directory, name + os.path.splitext(file)[1])


def restore_environment() -> None:
    """Undo Python's change of the environment, which all child processes inherit.

    Where the locale is C or unknown, as most are in a bundle, Python sets LC_CTYPE at its start (PEP 538), and no
    option prevents it. The first interpreter reads the original in /proc; an option passes it to the next ones.
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
    option = sys._xoptions.get(_LOCALE_OPTION, False)
    if option is not False:
        return None if option is True else option
    try:
        with open("/proc/self/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:
        # Without /proc the original is unknown; the server reports that when it starts.
        return os.environ.get("LC_CTYPE")
    return next((os.fsdecode(each[9:]) for each in variables if each.startswith(b"LC_CTYPE=")), None)
