"""Logging of the service: one line per event, JSON or readable text, to stderr.

`observer` binds `session_id`, `command_id`, `agent_id` and `request_id` to each call, and every line of that call
has them, also those of libraries that use the standard library's logging. Payloads are cut and secrets redacted
before anything is written. Changes the logging of this process; `configure_logs` returns a function that undoes it.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, Final, Literal, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from holdfast.secret_names import looks_secret
from holdfast.service.types import ServiceStruct

LogFormat = Literal["auto", "json", "text"]
#: Removes secrets from a text: `audit.redaction` builds one from the operator's patterns.
Redact = Callable[[str], str]

#: Our own tokens, and values after `Bearer`.
_SECRET_VALUES: Final = re.compile(r"\bhf_[A-Za-z0-9_-]{16,}|(?i:\bbearer\s+)\S+")
REDACTED: Final = "[redacted]"
#: The ids of the call that a task works for, in one variable: setting a variable costs as much as a dozen keys.
call_ids: Final[ContextVar[Mapping[str, str]]] = ContextVar("holdfast_call_ids")
#: Depth of lists and mappings that are redacted by parts; deeper values are converted to text.
_DEPTH: Final = 4


class LogSettings(ServiceStruct, frozen=True):
    """Settings of the log; `ServiceSettings` has the first two with the prefix `log_`."""

    #: `auto` is text where stderr is a terminal, else JSON.
    format: LogFormat = "auto"
    level: Literal["debug", "info", "warning", "error"] = "info"
    #: Characters of one value: enough to recognise a command, too few to hold a file's content.
    value_chars: int = 256


def no_secrets(text: str) -> str:
    """Remove secrets that are recognised without configured patterns."""
    return _SECRET_VALUES.sub(REDACTED, text)


def _add_call_ids(logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
    return {**call_ids.get({}), **event}


class SecretFilter:
    """A structlog processor that redacts every value and cuts long ones; binary values are shown as text."""

    def __init__(self, redact: Redact = no_secrets, value_chars: int = 256) -> None:
        self._redact = redact
        self._limit = value_chars

    def __call__(self, logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
        return {key: self._value(key, value, _DEPTH) for key, value in event.items()}

    def _value(self, key: str, value: Any, depth: int) -> Any:
        if value and looks_secret(key, alone=False):
            return REDACTED
        if value is None or isinstance(value, bool | int | float):
            return value
        if depth and isinstance(value, Mapping):
            return {str(inner): self._value(str(inner), each, depth - 1) for inner, each in value.items()}
        if depth and isinstance(value, list | tuple | set | frozenset):
            return [self._value("", each, depth - 1) for each in value]
        if isinstance(value, bytes | bytearray):
            value = value.decode("utf-8", "replace")
        text = value if isinstance(value, str) else repr(value)
        if key == "exception":
            return self._redact(no_secrets(text))  # a traceback has the error at its end
        # Redacted before it is cut: half a secret is not recognised, and still is one. Text far behind the cut is
        # skipped.
        near = self._redact(no_secrets(text[: 8 * self._limit]))
        over = len(near) - self._limit + max(0, len(text) - 8 * self._limit)
        return near if over <= 0 else f"{near[: self._limit]}… ({over} more)"


def configure_logs(
    settings: LogSettings | None = None, *, redact: Redact = no_secrets, stream: TextIO | None = None
) -> Callable[[], None]:
    """Log to `stream`, by default stderr, from now on: structlog's loggers and the standard library's."""
    settings, stream = settings or LogSettings(), stream or sys.stderr
    console = settings.format == "text" or (settings.format == "auto" and stream.isatty())
    shared: list[Processor] = [
        _add_call_ids,
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
        SecretFilter(redact, settings.value_chars),
    ]
    renderer: Processor
    if console:
        renderer = structlog.dev.ConsoleRenderer(colors=stream.isatty())
    else:
        renderer = structlog.processors.JSONRenderer(ensure_ascii=False)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.ExtraAdder(), *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = [handler]
    root.setLevel(settings.level.upper())
    before = structlog.get_config()
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.PositionalArgumentsFormatter(),
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        # A cached logger would keep its configuration when a test configures logging again.
        cache_logger_on_first_use=False,
    )

    def undo() -> None:
        root.handlers[:] = handlers
        root.setLevel(level)
        structlog.configure(**before)

    return undo
