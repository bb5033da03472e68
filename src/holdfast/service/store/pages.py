"""Positions in long answers: a page goes on after the last row of the one before it, whatever came since; pure."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, literal, tuple_

from holdfast.service.problems import Invalid
from holdfast.service.store.types import MAX_PAGE_SIZE, PAGE_SIZE, Page


def page_size(page: Page) -> int:
    return min(page.size or PAGE_SIZE, MAX_PAGE_SIZE)


def encode_token(*position: float | str) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(position)).decode().rstrip("=")


def decode_token(token: str, *kinds: type) -> tuple[Any, ...]:
    """The position; what we never gave out is refused."""
    try:
        position = msgspec.json.decode(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)), type=list[Any])
        return msgspec.convert(position, tuple[kinds], strict=False)  # type: ignore[valid-type]
    except (binascii.Error, UnicodeError, ValueError, msgspec.MsgspecError):
        raise Invalid(f"page_token {token[:40]!r} is none that was given out", reason="BAD_PAGE_TOKEN") from None


def after(
    columns: list[ColumnElement[Any]], position: tuple[Any, ...], *, backwards: bool = False
) -> ColumnElement[bool]:
    """Rows that come after this position when ordered by the columns."""
    here = tuple_(*(literal(value, column.type) for column, value in zip(columns, position, strict=True)))
    return tuple_(*columns) < here if backwards else tuple_(*columns) > here
