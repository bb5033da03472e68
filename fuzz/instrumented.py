"""`python -m fuzz.instrumented NAME DIRECTORY [LIBFUZZER OPTIONS]`: one target in this process, under atheris.

libFuzzer ends the process itself, by a crash or when its time is over, so each target has a process of its own.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

#: By name, so that type checks do not want it: it is not installed for them.
atheris: Any = importlib.import_module("atheris")

# Modules imported here are instrumented: they record their branches.
with atheris.instrument_imports(include=["holdfast"]):
    from fuzz.targets import targets


def main() -> None:
    name, directory, *options = sys.argv[1:]
    target = targets()[name]
    seeds = Path(directory, "corpus")
    seeds.mkdir()
    for number, seed in enumerate(target.seeds):
        (seeds / f"seed-{number}").write_bytes(seed)
    atheris.Setup([sys.argv[0], *options, str(seeds)], target.run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
