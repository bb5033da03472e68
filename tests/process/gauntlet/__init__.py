"""The commands that break session shells, as data: what is typed, and exactly what must come back, byte by byte.

Each module has the cases of one kind; `case` defines a case. Pure: nothing here runs anything.
"""

from __future__ import annotations

from tests.process.gauntlet.case import Case
from tests.process.gauntlet.control import CONTROL
from tests.process.gauntlet.descriptors import DESCRIPTORS
from tests.process.gauntlet.directories import DIRECTORIES
from tests.process.gauntlet.endings import ENDINGS
from tests.process.gauntlet.environment import ENVIRONMENT
from tests.process.gauntlet.exit_codes import EXIT_CODES
from tests.process.gauntlet.input import INPUT, LARGE
from tests.process.gauntlet.jobs import JOBS
from tests.process.gauntlet.names import NAMES
from tests.process.gauntlet.options import OPTIONS
from tests.process.gauntlet.output import OUTPUT
from tests.process.gauntlet.parsing import PARSING
from tests.process.gauntlet.private import PRIVATE
from tests.process.gauntlet.readme import README
from tests.process.gauntlet.state import STATE
from tests.process.gauntlet.syntax import HERE_DOCUMENTS, SYNTAX
from tests.process.gauntlet.traps import TRAPS

CASES: tuple[Case, ...] = (
    *OUTPUT,
    *EXIT_CODES,
    *PARSING,
    *SYNTAX,
    *HERE_DOCUMENTS,
    *INPUT,
    *LARGE,
    *STATE,
    *NAMES,
    *OPTIONS,
    *TRAPS,
    *CONTROL,
    *DESCRIPTORS,
    *JOBS,
    *DIRECTORIES,
    *ENVIRONMENT,
    *ENDINGS,
    *PRIVATE,
    *(each for cases in README.values() for each in cases),
)
