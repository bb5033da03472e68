"""Rules from TOML: parsing, inheritance, and the texts of errors."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from holdfast.service.policy.profiles import DENIED_VARIABLES, MIB
from holdfast.service.policy.rules import RulesInvalid, default_rules, load_rules
from holdfast.service.policy.toml_lines import lines_of
from holdfast.service.problems import Denied, Invalid

FILE = """\
workspaces = "/srv/agents"

[profiles.careful]
description = "asks before it pushes"
network = { mode = "allow-list", hosts = ["pypi.org", "*.example.com", "localhost:8080"] }
idle.timeout = "10m"

[profiles.careful.commands]
default = "allow"

[[profiles.careful.commands.rules]]
verdict = "ask"
program = "git"
arguments = ["push"]

[[profiles.careful.commands.rules]]
verdict = "deny"
program = ["shutdown", "reboot"]
reason = "the machine belongs to all"

[profiles.ci]
extends = "careful"
network.mode = "none"
environment.deny = ["CI_*"]
environment.allow = ["*", "CI_JOB"]
resources.memory_bytes = "512MiB"
resources.processes = "unlimited"

[[profiles.ci.commands.rules]]
verdict = "deny"
pattern = "--force"

[agents.builder]
profile = "ci"
profiles = ["careful"]
sessions = 3
lifetime = "1h"

[agents."test-*"]
workspace = "/srv/tests/{agent}"
"""


def complaints(text: str) -> list[str]:
    with pytest.raises(RulesInvalid) as caught:
        load_rules(text, "rules.toml")
    assert isinstance(caught.value, Invalid)
    assert caught.value.reason == "RULES_INVALID"
    return list(caught.value.complaints)


def test_a_file_is_read() -> None:
    rules = load_rules(FILE, "rules.toml")
    careful = rules.profile("careful")
    assert careful.network.hosts == ("pypi.org", "*.example.com", "localhost:8080")
    assert careful.idle.timeout == 600
    assert careful.idle.grace == 60
    assert careful.location("network.mode") == "rules.toml:5"
    assert careful.location("idle.timeout") == "rules.toml:6"
    assert careful.location("commands.rules.1") == "rules.toml:16"
    assert careful.location("idle.grace") == "built-in"
    assert rules.name == "rules.toml"


def test_a_profile_inherits_what_it_does_not_say() -> None:
    ci = load_rules(FILE, "rules.toml").profile("ci")
    assert ci.network.mode == "none"
    assert ci.idle.timeout == 600
    assert ci.resources.memory_bytes == 512 * MIB
    assert ci.resources.processes is None
    assert [rule.verdict for rule in ci.commands.rules] == ["deny", "ask", "deny"]
    assert [ci.location(f"commands.rules.{n}") for n in range(3)] == [
        "rules.toml:29",
        "rules.toml:11",
        "rules.toml:16",
    ]
    assert set(ci.environment.deny) == {*DENIED_VARIABLES, "CI_*"}
    assert ci.location("idle.timeout") == "rules.toml:6"


def test_agents_are_found_by_name_then_by_pattern() -> None:
    rules = load_rules(FILE, "rules.toml")
    assert (rules.agent("builder").sessions, rules.agent("builder").lifetime) == (3, 3_600)
    assert rules.workspace("builder") == "/srv/agents/builder"
    assert rules.workspace("test-7") == "/srv/tests/test-7"
    assert rules.agent("test-7").profile == "default"
    assert rules.agent("other") == rules.agent("somebody")


def test_the_order_of_profiles_does_not_matter() -> None:
    rules = load_rules('[profiles.a]\nextends = "b"\n[profiles.b]\nnetwork.mode = "host"\n', "r")
    assert rules.profile("a").network.mode == "host"


def test_the_profile_named_default_is_changed_by_a_file() -> None:
    rules = load_rules('[profiles.default]\nnetwork.mode = "host"\n[profiles.b]\nextends = "default"\n', "r")
    assert rules.profile("b").network.mode == "host"
    assert rules.profile("default").sandbox.mode == "bubblewrap"


def test_without_a_file_there_are_rules() -> None:
    rules = default_rules("/home/me/agents")
    profile = rules.profile("default")
    assert (profile.network.mode, profile.sandbox.mode, profile.commands.default) == ("none", "bubblewrap", "allow")
    assert not profile.guarded
    assert rules.workspace("a") == "/home/me/agents/a"
    with pytest.raises(Denied):
        rules.profile("gone")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "[profiles.p.network]\nmode = 'lan'",
            "r:2: profiles.p.network.mode: 'lan' is not one of none, host, allow-list",
        ),
        (
            "[profiles.p]\nnetwork.mode = 'lan'",
            "r:2: profiles.p.network.mode: 'lan' is not one of none, host, allow-list",
        ),
        ("[profiles.p]\n\nnetwrk.mode = 1", "r:3: profiles.p.netwrk: no such key; did you mean 'network'?"),
        ("[profiles.p.idle]\ntimeoutt = 1", "r:2: profiles.p.idle.timeoutt: no such key; did you mean 'timeout'?"),
        ("[profile.ci]", "r:1: profile: no such key; did you mean 'profiles'?"),
        ("zzz = 1", "r:1: zzz: no such key; known keys: workspaces, profiles, agents, templates, pools"),
        ("profiles = 1", "r:1: profiles: 1 is not a table of tables"),
        ("[profiles]\np = 1", "r:2: profiles.p: 1 is not a table"),
        ("[profiles.p]\nidle = 5", "r:2: profiles.p.idle: 5 is not a table"),
        (
            "[profiles.p]\nidle.timeout = '5 weeks'",
            "r:2: profiles.p.idle.timeout: '5 weeks' is not seconds above 0, as a number or as "
            '"90s", "30m", "8h", "7d"',
        ),
        (
            "[profiles.p]\nresources.memory_bytes = -1",
            "r:2: profiles.p.resources.memory_bytes: -1 is not bytes above 0, as a number or as "
            '"512M", "512MiB", "4G", or "unlimited"',
        ),
        (
            "[profiles.p]\nresources.processes = 1.5",
            'r:2: profiles.p.resources.processes: 1.5 is not a whole number above 0, or "unlimited"',
        ),
        ("[agents.a]\nsessions = 0", "r:2: agents.a.sessions: 0 is not a whole number above 0"),
        ("[agents.a]\nsessions = 'unlimited'", "r:2: agents.a.sessions: 'unlimited' is not a whole number above 0"),
        ("[profiles.p]\nbackground.outlive = 1", "r:2: profiles.p.background.outlive: 1 is not true or false"),
        (
            "[profiles.p]\nbackground.start = true",
            "r:2: profiles.p.background.start: true is not one of allow, ask, deny",
        ),
        ("[profiles.p]\nsignals.allow = 'SIGHUP'", "r:2: profiles.p.signals.allow: 'SIGHUP' is not an array"),
        (
            "[profiles.p]\nsignals.allow = [\n'CTRL_C',\n'SIGHUP']",
            "r:4: profiles.p.signals.allow.1: 'SIGHUP' is not one of CTRL_C, CTRL_D, SIGINT, SIGTERM, SIGKILL",
        ),
        (
            "[profiles.p]\ndirectories.writable = ['{workspace}', 'tmp']",
            "r:2: profiles.p.directories.writable.1: 'tmp' is not an absolute path, nor one that begins "
            "with {workspace}",
        ),
        (
            "[profiles.p]\ndirectories.readable = ['/a/../b']",
            "r:2: profiles.p.directories.readable.0: '/a/../b' is not an absolute path, nor one that begins "
            "with {workspace}",
        ),
        (
            "[profiles.p]\ndirectories.writable = ['/x/{home}']",
            "r:2: profiles.p.directories.writable.0: {home} is not one of {workspace}, {agent}",
        ),
        (
            "[profiles.p]\nnetwork = {mode='allow-list', hosts=['a b']}",
            "r:2: profiles.p.network.hosts.0: 'a b' is not one of HOST, *.DOMAIN, HOST:PORT",
        ),
        (
            "[profiles.p]\nnetwork.hosts = ['a']",
            "r:2: profiles.p.network.hosts: the mode is 'none'; hosts belong to 'allow-list'",
        ),
        (
            "[[profiles.p.commands.rules]]\nprogram = 'a'",
            "r:1: profiles.p.commands.rules.0.verdict: a rule needs one of allow, ask, deny",
        ),
        (
            "[[profiles.p.commands.rules]]\nverdict = 'deny'",
            "r:1: profiles.p.commands.rules.0: a rule needs program, arguments or pattern; "
            "`default` is for all commands",
        ),
        (
            "[[profiles.p.commands.rules]]\nverdict = 'deny'\n\npattern = '('",
            "r:4: profiles.p.commands.rules.0.pattern: not a regular expression: missing ), "
            "unterminated subpattern at position 0",
        ),
        (
            "[profiles.p]\ncommands.rules = [\n{ verdict = 'deny', program = 'a' },\n"
            "{ verdict = 'no', program = 'b' },\n]",
            "r:4: profiles.p.commands.rules.1.verdict: 'no' is not one of allow, ask, deny",
        ),
        ("[profiles.p]\nextends = 'x'", "r:2: profiles.p.extends: 'x' is not one of default, p"),
        (
            "[profiles.a]\nextends = 'b'\n[profiles.b]\nextends = 'a'",
            "r:4: profiles.b.extends: a extends b extends a: a profile cannot extend itself",
        ),
        ("[profiles.a]\nextends = 'a'", "r:2: profiles.a.extends: a extends a: a profile cannot extend itself"),
        ("[agents.a]\nprofile = 'x'", "r:2: agents.a.profile: 'x' is not one of default"),
        ("[agents.a]\nworkspace = 'x'", "r:2: agents.a.workspace: 'x' is not an absolute path"),
        ("workspaces = 'x'", "r:1: workspaces: 'x' is not an absolute path"),
        ("[profiles.'a b']", "r:1: profiles.a b: a name has letters, digits, `.`, `_` and `-`, at most 64"),
        ("[profiles.p]\nenvironment.set = {A = 1}", "r:2: profiles.p.environment.set.A: 1 is not a string"),
        (
            "[profiles.p]\nenvironment.set.'A B' = 'x'",
            "r:2: profiles.p.environment.set.A B: 'A B' is not the name of a variable",
        ),
        (
            "[profiles.p]\nsandbox.mode = 2020-01-01",
            "r:2: profiles.p.sandbox.mode: datetime.date(2020, 1, 1) is not one of bubblewrap, landlock, none",
        ),
        ("a = 1\nb = = 2", "r:2: Invalid value"),
        ("a = '", 'r:1: Expected "\'", and the file ends'),
    ],
)
def test_a_complaint_has_the_file_the_line_the_key_and_what_is_expected(text: str, expected: str) -> None:
    with pytest.raises(RulesInvalid) as caught:
        load_rules(text, "r")
    assert expected in caught.value.complaints


def test_all_complaints_are_told_at_once() -> None:
    found = complaints(
        "[profiles.ci]\nnetwork.mode = 1\nidle.timeout = 'x'\nnonsense = 2\n[agents.a]\nprofile = 'y'\n"
    )
    assert len(found) == 4
    assert {each.split(":")[1] for each in found} == {"2", "3", "4", "6"}


TRICKY = '''\
a.b."c.d" = 1 # a comment = 2
"quoted # key" = """
[not.a.table]
x = 1
"""
lit = \'\'\'
[[neither]]
\'\'\'
array = [ # one
  1,
  { in = "x = [", more = [ {deep = 1},
     {deep = 2} ] },
  "]",
]

[ table . "sub\\u0041" ]
key = { a = 1, b.c = 2 }
[[many]]
n = 1
[many.below]
m = 2
[[many]]
n = 3
[[many.inner]]
o = 4
[[many.inner]]
o = 5
last = """one \\" two"""""
end = 'it'
'''


def test_lines_are_found_in_tricky_toml() -> None:
    lines = lines_of(TRICKY)
    expected: dict[tuple[str | int, ...], int] = {
        ("a", "b", "c.d"): 1,
        ("quoted # key",): 2,
        ("lit",): 6,
        ("array",): 9,
        ("array", 0): 10,
        ("array", 1, "in"): 11,
        ("array", 1, "more", 0, "deep"): 11,
        ("array", 1, "more", 1, "deep"): 12,
        ("array", 2): 13,
        ("table",): 16,
        ("table", "subA"): 16,
        ("table", "subA", "key", "a"): 17,
        ("table", "subA", "key", "b", "c"): 17,
        ("many", 0): 18,
        ("many", 0, "n"): 19,
        ("many", 0, "below"): 20,
        ("many", 0, "below", "m"): 21,
        ("many", 1): 22,
        ("many", 1, "n"): 23,
        ("many", 1, "inner", 0, "o"): 25,
        ("many", 1, "inner", 1): 26,
        ("many", 1, "inner", 1, "o"): 27,
        ("many", 1, "inner", 1, "end"): 29,
    }
    assert {path: lines.get(path) for path in expected} == expected
    assert ("neither",) not in lines


def paths_of(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every table, key and element that a text has."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += paths_of(inner, (*path, key))
    return found


@pytest.mark.parametrize("text", [FILE, TRICKY])
def test_every_key_that_tomllib_reads_has_a_line(text: str) -> None:
    lines = lines_of(text)
    assert [path for path in paths_of(tomllib.loads(text)) if path not in lines] == []


KEYS = st.sampled_from(["a", "b", '"c d"', "'e.f'", "a.b", '"x\\"y"'])
VALUES = st.recursive(
    st.sampled_from(
        ["1", "true", '"s # ="', "'l'", '"""m\n[x]\n"""', "'''n\n= 1'''", "1979-05-27T07:32:00Z", "-1.5e3"]
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda each: "[\n# c\n" + ",\n".join(each) + "]"),
        st.lists(
            st.tuples(st.sampled_from(["p", "q.r", "'s'"]), inner), max_size=3, unique_by=lambda pair: pair[0]
        ).map(lambda pairs: "{" + ", ".join(f"{key} = {value}" for key, value in pairs) + "}"),
    ),
    max_leaves=5,
)
STATEMENTS = st.one_of(
    st.tuples(KEYS, VALUES).map(lambda pair: f"{pair[0]} = {pair[1]} # c"),
    KEYS.map(lambda key: f"[ {key} ]"),
    KEYS.map(lambda key: f"[[{key}]] # c"),
    st.just(""),
)


@settings(max_examples=300)
@given(st.lists(STATEMENTS, max_size=6).map("\n".join))
def test_every_key_of_any_toml_has_a_line(text: str) -> None:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    lines = lines_of(text)
    assert [path for path in paths_of(values) if path not in lines] == []
    assert all(1 <= line <= text.count("\n") + 1 for line in lines.values())
