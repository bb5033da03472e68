"""docs/policy.md: its examples are rules, and it has every key with its default."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.service.policy.profiles import DENIED_VARIABLES, AgentRules, CommandRule, Profile
from holdfast.service.policy.rules import load_rules
from holdfast.service.rules_file import read_rules

PAGE = (Path(__file__).parents[3] / "docs" / "policy.md").read_text()
EXAMPLES = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.M | re.S)
ROWS = {
    match[1]: [cell.strip() for cell in re.split(r"(?<!\\)\|", match[2])]
    for match in re.finditer(r"^\| `([\w.]+)` \|(.*)\|$", PAGE, re.M)
}


def profile_keys() -> dict[str, Any]:
    """Every key of a profile with its default."""
    found: dict[str, Any] = {"description": ""}
    for section in msgspec.structs.fields(Profile):
        value = section.default
        if isinstance(value, msgspec.Struct):
            for field in msgspec.structs.fields(value):
                found[f"{section.name}.{field.name}"] = getattr(value, field.name)
    return found


KEYS = profile_keys()


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_is_a_file_of_rules(example: str) -> None:
    assert load_rules(example, "policy.md").profiles


@pytest.mark.parametrize("key", KEYS)
def test_every_key_of_a_profile_is_on_the_page_with_its_default(key: str) -> None:
    default = ROWS[key][0]
    if key == "environment.deny":
        assert all(f"`{pattern}`" in PAGE for pattern in DENIED_VARIABLES)
        return
    if key == "commands.unknown":
        assert default == "the strictest verdict of the section"
        return
    written = default.strip("`")
    if key == "environment.set":
        assert written == "{}"
        return
    text = f"[profiles.p]\n{key} = {written}\n"
    loaded: Any = load_rules(text, "policy.md").profile("p")
    for part in key.split("."):
        loaded = getattr(loaded, part)
    assert loaded == KEYS[key]


def test_every_key_of_an_agent_and_of_a_rule_is_on_the_page() -> None:
    agent = {field.name: field.default for field in msgspec.structs.fields(AgentRules) if field.name != "locations"}
    assert agent.keys() <= ROWS.keys()
    for name, default in agent.items():
        assert ROWS[name][0] == ("" if default is None else f"`{json.dumps(default)}`".replace("()", "[]"))
    assert set(CommandRule.__struct_fields__) <= ROWS.keys()
    assert {"workspaces", "profiles", "agents", "extends"} <= ROWS.keys()


def test_the_page_has_no_key_that_is_not_there() -> None:
    sections = {key.partition(".")[0] for key in KEYS}
    assert {key for key in ROWS if key.partition(".")[0] in sections and "." in key} <= KEYS.keys()


def test_the_default_workspaces_are_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ROWS["workspaces"][0] == (
        "`holdfast/workspaces` in `$XDG_STATE_HOME`, else in `~/.local/state`; "
        "for root, if neither exists, `/var/lib/holdfast/workspaces`"
    )
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert read_rules("").workspaces == "/state/holdfast/workspaces"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/anna")
    locations = {1000: "/home/anna/.local/state/holdfast/workspaces", 0: "/var/lib/holdfast/workspaces"}
    for uid, expected in locations.items():
        monkeypatch.setattr(os, "geteuid", lambda uid=uid: uid)
        assert read_rules("").workspaces == expected
