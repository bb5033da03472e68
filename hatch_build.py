"""The build hook of the wheel: builds the console with Node.js, if the machine has it.

Without Node.js, or if its packages cannot be fetched, the wheel has the plain page alone. An editable install
builds nothing: `make console` does. The result is in `src/holdfast/console/built`, which is not in the repository.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

#: Fetching the packages and the build take half a minute; this only ends a hang.
SECONDS = 600


class ConsoleHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the built console to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        built = os.path.join(self.root, "src", "holdfast", "console", "built")
        if version == "editable" or self.target_name != "wheel":
            return
        if os.environ.get("HOLDFAST_CONSOLE") != "plain":
            self._build()
        if os.path.exists(os.path.join(built, "index.html")):
            build_data["artifacts"].append("src/holdfast/console/built")

    def _build(self) -> None:
        folder = os.path.join(self.root, "console")
        npm = shutil.which(
            "npm", path=os.pathsep.join([os.environ.get("PATH", ""), os.path.dirname(sys.executable)])
        )
        if npm is None or not os.path.isdir(folder):
            self.app.display_warning("no npm: the wheel has the plain console")
            return
        for command in (["ci", "--ignore-scripts"], ["run", "build"]):
            done = subprocess.run([npm, *command], cwd=folder, capture_output=True, text=True, timeout=SECONDS)
            if done.returncode != 0:
                self.app.display_warning(f"npm {command[0]} failed, the wheel has the plain console: {done.stderr}")
                return
