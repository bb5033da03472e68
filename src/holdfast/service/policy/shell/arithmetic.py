"""Shell arithmetic: decides whether evaluating an expression can run a command; pure.

bash evaluates the text of a variable again, and expands the index of an array once more: with `x='a[$(id)]'`,
`((x))` runs `id`. An expression is harmless only if everything in it is a number: digits, operators, and variables
that this text itself assigned a number. The word parser replaces an expansion by `NUMBER` or `TEXT`.
"""

from __future__ import annotations

import re
from collections.abc import Set as AbstractSet
from typing import Final

from holdfast.service.types import ServiceStruct

#: Placeholders of an expansion that yields a number (`$?`, `${#x}`, `$((...))`), and of any other one.
NUMBER: Final = "\x01"
TEXT: Final = "\x02"
_TOKEN: Final = re.compile(
    r"\s+|(?P<name>[A-Za-z_]\w*)|0[xX][0-9a-fA-F]+|[0-9]+(?:\#[0-9A-Za-z@_]+)?"
    rf"|(?<![\w#@]){NUMBER}(?![\w#@{NUMBER}])"
    r"|(?P<operator><<=|>>=|[-+*/%&^|]=|\+\+|--|==|!=|<=|>=|&&|\|\||<<|>>|\*\*|[-+*/%<>=!&|^~?:,()])",
    re.ASCII,
)
_CHANGES: Final = frozenset(["<<=", ">>=", "-=", "+=", "*=", "/=", "%=", "&=", "^=", "|=", "++", "--"])
#: A leading 0 makes a number octal, which may be an error, as may a number that is too long.
_DIGITS: Final = r"(?:0|[1-9][0-9]{0,17})"
#: An assignment that cannot fail. Others may leave the former value: `((x=1/0))`.
_CERTAIN: Final = re.compile(rf"\s*([A-Za-z_]\w*)\s*=\s*-?{_DIGITS}\s*", re.ASCII)
_NUMBER: Final = re.compile(rf"-?(?:{_DIGITS}|{NUMBER})", re.ASCII)


class ArithmeticEffect(ServiceStruct, frozen=True):
    """Effect of evaluating an expression."""

    #: No part of it can run a command.
    harmless: bool = True
    #: Variables that it may set.
    assigned: tuple[str, ...] = ()
    #: Variables that certainly hold a number afterwards.
    numbers: tuple[str, ...] = ()


def is_number(reduced: str) -> bool:
    """True if a word with its expansions replaced is one number."""
    return _NUMBER.fullmatch(reduced) is not None


def analyse_arithmetic(reduced: str, numbers: AbstractSet[str]) -> ArithmeticEffect:
    """Analyse an expression with its expansions replaced; `numbers` are the variables that hold numbers."""
    known = set(numbers)
    certain: list[str] = []
    assigned: list[str] = []
    harmless = True
    # The parts of a list are evaluated in order, unless there are parentheses or conditions.
    in_turn = not re.search(r"[()?&|]", reduced)
    for part in reduced.split(",") if in_turn else [reduced]:
        harmless = _part(part, known, assigned) and harmless
        if in_turn and (first := _CERTAIN.fullmatch(part)):
            known.add(first[1])
            certain.append(first[1])
    return ArithmeticEffect(harmless, tuple(assigned), tuple(certain))


def _part(text: str, known: AbstractSet[str], assigned: list[str]) -> bool:
    tokens = [match for match in _TOKEN.finditer(text) if not match[0].isspace()]
    harmless = "".join(match[0] for match in _TOKEN.finditer(text)) == text
    for index, token in enumerate(tokens):
        if token["name"] is None:
            continue
        before = tokens[index - 1][0] if index else ""
        after = tokens[index + 1][0] if index + 1 < len(tokens) else ""
        if after == "=" or after in _CHANGES or before in ("++", "--"):
            assigned.append(token[0])
        if token[0] not in known and not (after == "=" and before not in ("++", "--")):
            harmless = False
    return harmless
