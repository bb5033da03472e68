"""Composes the service: settings, store, rules, sessions, monitor, fronts, signals. The only place where they meet.

Nothing here decides anything; it wires, waits for the word to stop, and takes apart in the reverse order. Sessions are
not part of what is taken apart: they live in their sandboxes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Final

from holdfast.errors import InvalidParams
from holdfast.service import agents
from holdfast.service.access import Access, AccessSettings
from holdfast.service.admission import Admission
from holdfast.service.clock import Clock, SystemClock
from holdfast.service.grpc_front import GrpcFront, GrpcSettings
from holdfast.service.handler import Handler
from holdfast.service.housekeeping import Housekeeping
from holdfast.service.http_front import HttpFront, HttpSettings
from holdfast.service.listening import TlsFiles
from holdfast.service.model import Struct
from holdfast.service.places import store_url
from holdfast.service.problems import Problem
from holdfast.service.rates import Rates, RateSettings
from holdfast.service.readiness import Readiness
from holdfast.service.settings import ServiceSettings
from holdfast.service.store import Store

#: How long calls that are under way have to finish when the service stops. `docker stop` waits 10 s in all.
STOP_SECONDS: Final = 5.0

_log = logging.getLogger("holdfast.service")


class Started(Struct, frozen=True):
    """What whoever started the service wants to know."""

    grpc: str
    http: str
    store: str
    rules: str
    sandbox: str
    #: Of an operator that was made just now.
    operator_token: str = ""
