"""The rules in force, from their file or built in: read at the start, and again when somebody says so.

Reads one file. What is wrong with it is a `Problem` with file, line and key; rules that were in force stay then.
"""

from __future__ import annotations

import os
from typing import Any, Final

from holdfast.service.policy.command_rules import warnings
from holdfast.service.policy.profiles import PolicyRules
from holdfast.service.policy.rules import default_rules, load_rules
from holdfast.service.problems import Invalid
from holdfast.service.state_directory import default_store_path

FOR_ROOT: Final = "/var/lib/holdfast/workspaces"


def workspaces() -> str:
    """Where agents have their workspaces if the rules do not say: beside the database, which is this user's.

    The sessions of root run as other users, to which the home directory of root is closed: then in /var/lib, unless
    there are workspaces already.
    """
    beside = os.path.join(os.path.dirname(default_store_path()), "workspaces")
    if os.geteuid() == 0 and not os.environ.get("XDG_STATE_HOME") and not os.path.isdir(beside):
        return FOR_ROOT
    return beside


def read_rules(path: str) -> PolicyRules:
    """The rules of a file; built-in ones without."""
    if not path:
        return default_rules(workspaces())
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise Invalid(f"rules {path}: {why}", reason="RULES_INVALID") from None
    return load_rules(text, path, workspaces=workspaces())


def shown_rules(rules: PolicyRules) -> dict[str, Any]:
    """What is in them, for somebody who checks."""
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
        "workspaces": rules.workspaces,
        "warnings": [warning for profile in rules.profiles.values() for warning in warnings(profile)],
    }
