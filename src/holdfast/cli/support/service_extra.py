"""Says which extra is missing when a verb needs a package of the session service that is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.errors import InvalidParams


@contextmanager
def service_extra() -> Iterator[None]:
    """Around the imports that need it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "holdfast":
            raise  # a bug of ours
        raise InvalidParams(f"this needs {error.name}: pip install 'holdfast[service]'") from None
