"""Parses rules from a TOML text, checks them and resolves inheritance; pure.

Every error has the file, the line, the key and the expected value, and all errors are reported together. An unknown
key is an error: a misspelt rule must not be silently absent.
"""

from __future__ import annotations

import difflib
import re
import tomllib
import types
import typing
from collections.abc import Collection
from typing import Any, Final

import msgspec

from holdfast.errors import InvalidParams
from holdfast.fleet.template import Template, make_template
from holdfast.service.policy.ports import show_ports
from holdfast.service.policy.profiles import (
    MATCHERS,
    AgentRules,
    CommandRule,
    Commands,
    EngineName,
    Environment,
    PolicyRules,
    PoolRules,
    Profile,
    Seconds,
    TemplateRules,
)
from holdfast.service.policy.toml_lines import Path, lines_of
from holdfast.service.problems import Invalid
from holdfast.sizes import parse_size

#: Larger files are refused. A rule for each program of a machine takes a tenth.
MAX_BYTES: Final = 1024 * 1024
#: Errors that are reported together.
_MAX_COMPLAINTS: Final = 20
_TOP: Final = ("workspaces", "profiles", "agents", "templates", "pools")
_HIDDEN: Final = ("name", "locations")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_EXPECTED: Final = {
    "seconds": 'seconds above 0, as a number or as "90s", "30m", "8h", "7d"',
    "bytes": 'bytes above 0, as a number or as "512M", "512MiB", "4G", or "unlimited"',
    "count": 'a whole number above 0, or "unlimited"',
    "whole": "a whole number above 0",
    "cores": 'a number above 0, or "unlimited"',
    "ports": 'a port from 1 to 65535, or a range such as "9000-9100"',
}
_HOST: Final = re.compile(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*(:\d{1,5})?|\[[0-9a-fA-F:]+\](:\d{1,5})?")
_PROFILE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")


class RulesInvalid(Invalid):
    """Errors in a file of rules, one on each line."""

    def __init__(self, complaints: list[str]) -> None:
        super().__init__("\n".join(complaints[:_MAX_COMPLAINTS]), reason="RULES_INVALID")
        self.complaints = tuple(complaints)


def default_rules(workspaces: str = "") -> PolicyRules:
    """Return the rules without a file."""
    base = PolicyRules(profiles={"default": Profile()})
    return msgspec.structs.replace(base, workspaces=workspaces) if workspaces else base


def load_rules(text: str, name: str, *, workspaces: str = "") -> PolicyRules:
    """Parse a file of rules; `name` appears in errors, `workspaces` is used if the file has none."""
    if len(text) > MAX_BYTES:
        raise RulesInvalid([f"{name}:1: it has more than {MAX_BYTES:,} characters"])
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise RulesInvalid([_not_toml(text, name, error)]) from None
    return _Loader(values, lines_of(text), name).load(default_rules(workspaces))


def _not_toml(text: str, name: str, error: Exception) -> str:
    found = re.search(r"(.*) \(at line (\d+), column \d+\)$", str(error), re.S)
    if found:
        return f"{name}:{found[2]}: {found[1]}"
    at_end = re.search(r"(.*) \(at end of document\)$", str(error), re.S)
    if at_end:
        return f"{name}:{text.count(chr(10)) + 1}: {at_end[1]}, and the file ends"
    return f"{name}:1: {error or 'nested too deeply'}"


class _Complaint(Exception):
    """Error for one value."""


class _Loader:
    def __init__(self, values: dict[str, Any], lines: dict[Path, int], name: str) -> None:
        self._values = values
        self._lines = lines
        self._name = name
        self._complaints: list[str] = []
        self._made: dict[str, Profile] = {}

    def load(self, base: PolicyRules) -> PolicyRules:
        self._keys(self._values, _TOP, ())
        workspaces = self._values.get("workspaces", base.workspaces)
        if not isinstance(workspaces, str) or not _is_directory(workspaces):
            self._complain(("workspaces",), f"{_shown(workspaces)} is not an absolute path")
            workspaces = base.workspaces
        templates = {name: self._template(name, value) for name, value in self._tables("templates").items()}
        pools = {name: self._pool(name, value, templates) for name, value in self._tables("pools").items()}
        profiles = self._tables("profiles")
        for name in profiles:
            profile = self._profile(name, profiles, base, ())
            self._check_named(profile, "templates", templates)
            self._check_named(profile, "pools", pools)
        agents = {pattern: self._agent(pattern, value, base) for pattern, value in self._tables("agents").items()}
        if self._complaints:
            raise RulesInvalid(self._complaints)
        return PolicyRules(
            {**base.profiles, **self._made},
            agents,
            workspaces.rstrip("/"),
            self._name,
            names_workspaces="workspaces" in self._values,
            templates=templates,
            pools=pools,
        )

    # --- errors ----------------------------------------------------------------------------------------------

    def _location(self, path: Path) -> str:
        while path and path not in self._lines:
            path = path[:-1]
        return f"{self._name}:{self._lines.get(path, 1)}"

    def _complain(self, path: Path, what: str) -> None:
        self._complaints.append(f"{self._location(path)}: {_dotted(path)}: {what}")

    def _keys(self, values: dict[str, Any], known: tuple[str, ...], path: Path) -> None:
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(known)}"
                self._complain((*path, key), f"no such key{hint}")

    def _tables(self, key: str) -> dict[str, dict[str, Any]]:
        values = self._values.get(key, {})
        if not isinstance(values, dict):
            self._complain((key,), f"{_shown(values)} is not a table of tables")
            return {}
        found: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            if isinstance(value, dict):
                found[name] = value
            else:
                self._complain((key, name), f"{_shown(value)} is not a table")
        return found

    # --- profiles --------------------------------------------------------------------------------------------

    def _profile(
        self, name: str, tables: dict[str, dict[str, Any]], base: PolicyRules, below: tuple[str, ...]
    ) -> Profile:
        """Resolve a profile with its inheritance; `below`: the profiles that extend it."""
        if name in self._made:
            return self._made[name]
        if name not in tables:
            return base.profiles.get(name, Profile())
        values, path = tables[name], ("profiles", name)
        self._check_name(name, path)
        parent = self._parent(name, tables, base, below)
        sections = msgspec.structs.fields(Profile)
        self._keys(values, ("extends", *(each.name for each in sections if each.name not in _HIDDEN)), path)
        made: dict[str, Any] = {"name": name, "locations": dict(parent.locations)}
        for section in sections:
            if section.name in _HIDDEN or section.name not in values:
                continue
            value, at = values[section.name], (*path, section.name)
            if section.name == "description":
                made["description"] = self._value(value, section.type, at, "")
            elif not isinstance(value, dict):
                self._complain(at, f"{_shown(value)} is not a table")
            else:
                inherited = getattr(parent, section.name)
                made[section.name] = self._section(value, inherited, at, made["locations"])
        self._made[name] = msgspec.structs.replace(parent, **made)
        self._check_profile(self._made[name], path)
        return self._made[name]

    def _parent(self, name: str, tables: dict[str, Any], base: PolicyRules, below: tuple[str, ...]) -> Profile:
        extends = tables[name].get("extends")
        path = ("profiles", name, "extends")
        known = {*tables, *base.profiles}
        if extends is None:
            return base.profiles["default"]
        if not isinstance(extends, str) or extends not in known:
            self._complain(path, f"{_shown(extends)} is not one of {', '.join(sorted(known))}")
        elif extends == name and name in base.profiles:
            return base.profiles[name]
        elif extends in (name, *below):
            self._complain(path, f"{' extends '.join([*below, name, extends])}: a profile cannot extend itself")
        elif len(below) >= 20:
            self._complain(path, "more than 20 profiles extend each other")
        else:
            return self._profile(extends, tables, base, (*below, name))
        return base.profiles["default"]

    def _section(self, values: dict[str, Any], inherited: Any, path: Path, locations: dict[str, str]) -> Any:
        fields = msgspec.structs.fields(inherited)
        self._keys(values, tuple(each.name for each in fields), path)
        given: dict[str, Any] = {}
        for field in fields:
            if field.name not in values:
                continue
            at = (*path, field.name)
            key = _dotted(at[2:])
            if isinstance(inherited, Commands) and field.name == "rules":
                given["rules"] = (*self._command_rules(values["rules"], at, locations), *inherited.rules)
                continue
            given[field.name] = self._value(values[field.name], field.type, at, getattr(inherited, field.name))
            locations[key] = self._location(at)
        if isinstance(inherited, Environment) and "deny" in given:
            given["deny"] = tuple(dict.fromkeys([*inherited.deny, *given["deny"]]))
        return msgspec.structs.replace(inherited, **given)

    def _command_rules(self, values: Any, path: Path, locations: dict[str, str]) -> list[CommandRule]:
        """Parse the rules of a profile, which precede the inherited ones and shift their locations."""
        if not isinstance(values, list):
            self._complain(path, f"{_shown(values)} is not an array of tables")
            return []
        inherited = {key: locations.pop(key) for key in list(locations) if key.startswith("commands.rules.")}
        for key, location in inherited.items():
            locations[f"commands.rules.{int(key.rpartition('.')[2]) + len(values)}"] = location
        return [self._command_rule(value, (*path, index), locations) for index, value in enumerate(values)]

    def _command_rule(self, value: Any, path: Path, locations: dict[str, str]) -> CommandRule:
        locations[f"commands.rules.{path[-1]}"] = self._location(path)
        rule = CommandRule("deny")
        if not isinstance(value, dict):
            self._complain(path, f"{_shown(value)} is not a table")
            return rule
        fields = msgspec.structs.fields(CommandRule)
        self._keys(value, tuple(each.name for each in fields), path)
        if "verdict" not in value:
            self._complain((*path, "verdict"), "a rule needs one of allow, ask, deny")
        if value.keys().isdisjoint(MATCHERS):
            keys = f"{', '.join(MATCHERS[:-1])} or {MATCHERS[-1]}"
            self._complain(path, f"a rule needs {keys}; `default` is for all commands")
        given: dict[str, Any] = {}
        for field in fields:
            if field.name in value:
                # A single program needs no brackets.
                single = field.name == "program" and isinstance(value[field.name], str)
                item = [value[field.name]] if single else value[field.name]
                at = (*path, field.name)
                given[field.name] = self._value(item, field.type, at, getattr(rule, field.name))
        made = msgspec.structs.replace(rule, **given)
        if "program" in value and (not made.program or "" in made.program):
            self._complain((*path, "program"), "a program name must not be empty")
        try:
            re.compile(made.pattern)
        except (re.error, OverflowError, RecursionError) as error:
            self._complain((*path, "pattern"), f"not a regular expression: {error}")
        return made

    def _check_profile(self, profile: Profile, path: Path) -> None:
        for kind in ("writable", "readable"):
            for index, directory in enumerate(getattr(profile.directories, kind)):
                at = (*path, "directories", kind, index)
                if at in self._lines and (complaint := _directory_complaint(directory)):
                    self._complain(at, complaint)
        for index, host in enumerate(profile.network.hosts):
            at = (*path, "network", "hosts", index)
            if at in self._lines and not _HOST.fullmatch(host):
                self._complain(at, f"{host!r} is not one of HOST, *.DOMAIN, HOST:PORT")
        hosts = (*path, "network", "hosts")
        if hosts in self._lines and profile.network.hosts and profile.network.mode != "allow-list":
            self._complain(hosts, f"the mode is {profile.network.mode!r}; hosts belong to 'allow-list'")
        for variable in profile.environment.set:
            at = (*path, "environment", "set", variable)
            if at in self._lines and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
                self._complain(at, f"{variable!r} is not the name of a variable")

    # --- agents ----------------------------------------------------------------------------------------------

    def _agent(self, pattern: str, values: dict[str, Any], base: PolicyRules) -> AgentRules:
        path: Path = ("agents", pattern)
        fields = [each for each in msgspec.structs.fields(AgentRules) if each.name not in _HIDDEN]
        self._keys(values, tuple(each.name for each in fields), path)
        locations = {"": self._location(path)}
        given: dict[str, Any] = {"locations": locations}
        for field in fields:
            if field.name in values:
                at = (*path, field.name)
                given[field.name] = self._value(values[field.name], field.type, at, field.default)
                locations[field.name] = self._location(at)
        agent = AgentRules(**given)
        known = {*self._made, *base.profiles}
        named = [("profile", agent.profile), *(("profiles", each) for each in agent.profiles)]
        for key, name in named:
            if name not in known:
                self._complain((*path, key), f"{name!r} is not one of {', '.join(sorted(known))}")
        if agent.workspace and not _is_directory(agent.workspace.replace("{agent}", "agent")):
            self._complain((*path, "workspace"), f"{agent.workspace!r} is not an absolute path")
        return agent

    # --- sandboxes -------------------------------------------------------------------------------------------

    def _template(self, name: str, values: dict[str, Any]) -> TemplateRules:
        """Parse a template: the fields of `holdfast.Template`, and the engine that it is for."""
        path: Path = ("templates", name)
        self._check_name(name, path)
        self._keys(values, ("engine", *Template.__struct_fields__), path)
        fields = {key: value for key, value in values.items() if key in Template.__struct_fields__}
        for key in ("lifetime", "idle"):
            if key in fields:
                fields[key] = self._value(fields[key], Seconds, (*path, key), 1.0)
        template = Template()
        for key, value in fields.items():
            try:
                template = make_template(template, {key: value})
            except InvalidParams as error:
                self._complain((*path, key), error.message.removeprefix(f"template: {key}: "))
        engine = self._value(values["engine"], EngineName, (*path, "engine"), None) if "engine" in values else None
        return TemplateRules(template, engine)

    def _check_name(self, name: str, path: Path) -> None:
        if not _PROFILE_NAME.fullmatch(name):
            self._complain(path, "a name has letters, digits, `.`, `_` and `-`, at most 64")

    def _pool(self, name: str, values: dict[str, Any], templates: dict[str, TemplateRules]) -> PoolRules:
        path: Path = ("pools", name)
        self._check_name(name, path)
        fields = msgspec.structs.fields(PoolRules)
        self._keys(values, tuple(each.name for each in fields), path)
        given = {
            each.name: self._value(values[each.name], each.type, (*path, each.name), each.default)
            for each in fields
            if each.name in values
        }
        template = given.get("template", "")
        if template and template not in templates:
            known = ", ".join(sorted(templates)) or "the templates of this file: there are none"
            self._complain((*path, "template"), f"{template!r} is not one of {known}")
        engine = templates[template].engine if template in templates else None
        if "engine" not in given and engine is None:
            self._complain((*path, "engine"), "a pool needs an engine, its own or that of its template")
        elif engine is not None and given.setdefault("engine", engine) != engine:
            self._complain((*path, "engine"), f"template {template!r} is for engine {engine!r}")
        pool = PoolRules(**given)
        if pool.warm > pool.max:
            self._complain((*path, "warm"), f"{pool.warm} is more than max, which is {pool.max}")
        return pool

    def _check_named(self, profile: Profile, key: str, named: Collection[str]) -> None:
        """Report templates or pools of a profile that the file does not have."""
        for index, name in enumerate(getattr(profile.sandbox, key)):
            at = ("profiles", profile.name, "sandbox", key, index)
            if at in self._lines and name not in named:
                known = ", ".join(sorted(named)) or f"the {key} of this file: there are none"
                self._complain(at, f"{name!r} is not one of {known}")

    # --- values ----------------------------------------------------------------------------------------------

    def _value(self, value: Any, kind: Any, path: Path, fallback: Any) -> Any:
        """Convert a value to its type, or report an error and return the fallback."""
        try:
            return self._converted(value, kind, path)
        except _Complaint as complaint:
            self._complain(path, str(complaint))
            return fallback

    def _converted(self, value: Any, kind: Any, path: Path) -> Any:
        if typing.get_origin(kind) is typing.Annotated:
            return _measured(value, typing.get_args(kind)[1].extra["unit"])
        if typing.get_origin(kind) in (typing.Union, types.UnionType):
            kind = next(each for each in typing.get_args(kind) if each is not type(None))
        if typing.get_origin(kind) is tuple:
            if not isinstance(value, list):
                raise _Complaint(f"{_shown(value)} is not an array")
            element = typing.get_args(kind)[0]
            return tuple(self._value(each, element, (*path, index), "") for index, each in enumerate(value))
        if typing.get_origin(kind) is dict:
            if not isinstance(value, dict):
                raise _Complaint(f"{_shown(value)} is not a table")
            return {key: self._value(each, str, (*path, key), "") for key, each in value.items()}
        if choices := typing.get_args(kind):
            if value not in choices or not isinstance(value, str):
                raise _Complaint(f"{_shown(value)} is not one of {', '.join(choices)}")
            return value
        if not isinstance(value, kind):
            raise _Complaint(f"{_shown(value)} is not {'true or false' if kind is bool else 'a string'}")
        if isinstance(value, str) and "\0" in value:
            raise _Complaint("it must not contain NUL")
        return value


def _measured(value: Any, unit: str) -> int | float | str | None:
    expected = f"{_shown(value)} is not {_EXPECTED[unit]}"
    if unit == "ports":
        try:
            return show_ports(value)
        except ValueError:
            raise _Complaint(expected) from None
    if value == "unlimited" and unit in ("bytes", "count", "cores"):
        return None
    if isinstance(value, str):
        try:
            value = parse_size(value) if unit == "bytes" else _parse_seconds(value) if unit == "seconds" else None
        except ValueError:
            raise _Complaint(expected) from None
    # TOML has inf and nan; neither is a limit.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**63:
        raise _Complaint(expected)
    if unit in ("bytes", "count", "whole"):
        if value != int(value):
            raise _Complaint(expected)
        return int(value)
    return float(value)


def _parse_seconds(text: str) -> float:
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?) ?([smhd])", text)
    if match is None:
        raise ValueError(text)
    return float(match[1]) * _SECONDS[match[2]]


def _is_directory(path: str) -> bool:
    return path.startswith("/") and "\0" not in path and ".." not in path.split("/")


def _directory_complaint(directory: str) -> str:
    placeholders = set(re.findall(r"\{[^}]*\}", directory))
    if unknown := sorted(placeholders - {"{workspace}", "{agent}"}):
        return f"{unknown[0]} is not one of {{workspace}}, {{agent}}"
    filled = directory.replace("{workspace}", "/workspace", 1).replace("{agent}", "agent")
    if not _is_directory(filled) or "{workspace}" in directory[1:]:
        return f"{directory!r} is not an absolute path, nor one that begins with {{workspace}}"
    return ""


def _dotted(path: Path) -> str:
    return ".".join(str(part) for part in path)


def _shown(value: Any) -> str:
    text = repr(value) if not isinstance(value, bool) else str(value).lower()
    return text if len(text) <= 60 else text[:57] + "..."
