"""Reads the rules file, or returns the built-in rules.

An error in the file is a `Problem` with file, line and key.
"""

from __future__ import annotations

import os
from typing import Any, Final

from holdfast.service.policy.command_rules import warnings
from holdfast.service.policy.profiles import PolicyRules
from holdfast.service.policy.rules import default_rules, load_rules
from holdfast.service.problems import Invalid
from holdfast.service.settings import default_store_path

FOR_ROOT: Final = "/var/lib/holdfast/workspaces"


def workspaces() -> str:
    """Return the default directory of the agents' workspaces, beside the default database.

    For root it is in /var/lib, unless workspaces exist already: the sessions of root run as other users, which have
    no access to root's home directory.
    """
    beside = os.path.join(os.path.dirname(default_store_path()), "workspaces")
    if os.geteuid() == 0 and not os.environ.get("XDG_STATE_HOME") and not os.path.isdir(beside):
        return FOR_ROOT
    return beside


def read_rules(path: str) -> PolicyRules:
    """Return the rules in a file; the built-in rules for an empty path."""
    if not path:
        return default_rules(workspaces())
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise Invalid(f"rules {path}: {why}", reason="RULES_INVALID") from None
    return load_rules(text, path, workspaces=workspaces())


def shown_rules(rules: PolicyRules) -> dict[str, Any]:
    """Return a summary of the rules, for `holdfast service rules`."""
    return {
        "name": rules.name,
        "profiles": {
            name: {
                "description": profile.description,
                "commandRules": len(profile.commands.rules),
                "default": profile.commands.default,
                "network": profile.network.mode,
                "sandbox": profile.sandbox.mode,
                "require": list(profile.sandbox.require),
            }
            for name, profile in rules.profiles.items()
        },
        "agents": {name: agent.profile for name, agent in rules.agents.items()},
        "templates": {name: each.engine or "any engine" for name, each in rules.templates.items()},
        "pools": {
            name: {"engine": each.engine, "template": each.template, "warm": each.warm, "max": each.max}
            for name, each in rules.pools.items()
        },
        "workspaces": rules.workspaces,
        "warnings": [warning for profile in rules.profiles.values() for warning in warnings(profile)],
    }
