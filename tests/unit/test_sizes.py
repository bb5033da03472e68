"""One grammar of sizes, in the rules of the service and on the command line."""

from __future__ import annotations

import pytest

from holdfast.cli.verbs.process.run import limits
from holdfast.errors import InvalidParams
from holdfast.service.policy.rules import RulesInvalid, load_rules
from holdfast.sizes import parse_size

SIZES = {
    "4096": 4096,
    "64B": 64,
    "300K": 300 * 2**10,
    "300kb": 300 * 2**10,
    "512M": 512 * 2**20,
    "512MB": 512 * 2**20,
    "512MiB": 512 * 2**20,
    "512 MiB": 512 * 2**20,
    "1.5G": 3 * 2**29,
    "4GiB": 4 * 2**30,
    "2T": 2**41,
    "9007199254740993": 2**53 + 1,
}
WRONG = ["", "lots", "M", "5X", "5iB", "1.G", "0x10", "1e9", "5MM", " 5M", "5M ", "٣M", "1_000"]


@pytest.mark.parametrize(("text", "size"), SIZES.items())
def test_a_size_is_the_same_in_rules_and_on_the_command_line(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert limits([f"memory_bytes={text}"]).memory_bytes == size
    names = ("memory_bytes", "output_bytes", "file_size_bytes")
    lines = "".join(f"resources.{name} = {text!r}\n" for name in names)
    found = load_rules(f"[profiles.p]\n{lines}", "r").profiles["p"].resources
    assert [getattr(found, name) for name in names] == [size] * 3


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_size_is_refused_in_both(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number of bytes"):
        parse_size(text)
    with pytest.raises(InvalidParams, match="--limit memory_bytes="):
        limits([f"memory_bytes={text}"])
    with pytest.raises(RulesInvalid, match="memory_bytes"):
        load_rules(f"[profiles.p]\nresources.memory_bytes = {text!r}\n", "r")
