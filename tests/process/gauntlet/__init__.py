"""The commands that break session shells, as data: what is typed, and exactly what must come back, byte by byte.

Each module has the cases of one kind; `case` says what a case is. Pure: nothing here runs anything.
"""

from __future__ import annotations

from gauntlet.case import Case
from gauntlet.control import CONTROL
from gauntlet.descriptors import DESCRIPTORS
from gauntlet.endings import ENDINGS
from gauntlet.environment import ENVIRONMENT
from gauntlet.exit_codes import EXIT_CODES
from gauntlet.input import INPUT, LARGE
from gauntlet.jobs import JOBS
from gauntlet.names import NAMES
from gauntlet.options import OPTIONS
from gauntlet.output import OUTPUT
from gauntlet.parsing import PARSING
from gauntlet.places import PLACES
from gauntlet.private import PRIVATE
from gauntlet.state import STATE
from gauntlet.syntax import HERE_DOCUMENTS, SYNTAX
from gauntlet.traps import TRAPS

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
    *PLACES,
    *ENVIRONMENT,
    *ENDINGS,
    *PRIVATE,
)
