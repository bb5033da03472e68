"""The surroundings of a process: variables by policy, users by name and number, directories by path and URI."""

from __future__ import annotations

import os
import pwd

import pytest
from hypothesis import given, strategies as st

from holdfast.errors import CallerError, HoldfastError, InvalidParams, PermissionRefused, UnknownUser
from holdfast.runtime.process.environment import Account, apply_policy, build_environment, resolve_cwd, resolve_user
from holdfast.types import EnvPolicy, ProcessSpec

BASE = {"PATH": "/bin", "HOME": "/root", "API_KEY": "k", "my_token": "t", "EDITOR": "vi", "DB_SECRET_NAME": "s"}
NOBODY = Account("nobody", 65534, 65534, (65534,), "/nonexistent", "/bin/sh")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


def spec(**fields: object) -> ProcessSpec:
    return ProcessSpec("web", ("true",), **fields)  # type: ignore[arg-type]


def test_without_env_and_policy_the_servers_own() -> None:
    assert build_environment(spec(), BASE) == BASE


@pytest.mark.parametrize("env", [{}, {"A": "1"}])
def test_env_alone_is_exact(env: dict[str, str]) -> None:
    assert build_environment(spec(env=env, tty=True), BASE, NOBODY) == env


def test_secrets_are_left_out_by_default_and_kept_when_asked() -> None:
    assert apply_policy(EnvPolicy(), BASE) == {"PATH": "/bin", "HOME": "/root", "EDITOR": "vi"}
    assert apply_policy(EnvPolicy(ignore_default_excludes=True), BASE) == BASE


def test_core_is_what_a_login_would_set() -> None:
    assert apply_policy(EnvPolicy(inherit="core"), BASE) == {"PATH": "/bin", "HOME": "/root"}


def test_the_policy_applies_in_its_order() -> None:
    policy = EnvPolicy(exclude=("edit*",), set={"EDITOR": "ed", "NEW_TOKEN": "n"}, include_only=("PATH", "*O*"))
    assert apply_policy(policy, BASE) == {"PATH": "/bin", "HOME": "/root", "EDITOR": "ed", "NEW_TOKEN": "n"}


def test_env_is_laid_over_a_policy() -> None:
    made = build_environment(
        spec(env={"A_TOKEN": "x", "PATH": "/usr/bin"}, env_policy=EnvPolicy(inherit="none")), BASE
    )
    assert made == {"A_TOKEN": "x", "PATH": "/usr/bin"}


def test_a_terminal_gets_a_name_unless_there_is_one() -> None:
    assert build_environment(spec(tty=True), BASE)["TERM"] == "xterm-256color"
    assert build_environment(spec(tty=True), {**BASE, "TERM": "vt100"})["TERM"] == "vt100"


def test_another_user_gets_its_own_home() -> None:
    made = build_environment(spec(), {**BASE, "USER": "root"}, NOBODY)
    assert (made["HOME"], made["USER"], made["LOGNAME"]) == ("/nonexistent", "nobody", "nobody")


@given(st.dictionaries(st.text(max_size=8), st.text(max_size=4)), st.lists(st.text(max_size=4)))
def test_what_is_excluded_is_never_there(base: dict[str, str], patterns: list[str]) -> None:
    made = apply_policy(EnvPolicy(exclude=tuple(patterns)), base)
    assert made.items() <= base.items()
    assert not {name for name in made if name.upper() in {p.upper() for p in patterns if p.isalnum()}}


def test_the_base_is_not_changed() -> None:
    before = dict(BASE)
    build_environment(spec(tty=True, env={"B": "2"}, env_policy=EnvPolicy(set={"A": "1"})), BASE, NOBODY)
    build_environment(spec(tty=True), BASE, NOBODY)
    assert before == BASE


def test_the_own_user_by_name_and_number() -> None:
    own = pwd.getpwuid(os.geteuid())
    for user in (own.pw_name, str(own.pw_uid)):
        account = resolve_user(user)
        assert (account.name, account.uid, account.gid, account.home) == (
            own.pw_name,
            own.pw_uid,
            own.pw_gid,
            own.pw_dir,
        )


@as_root
def test_a_number_needs_no_entry_and_a_group_may_be_given() -> None:
    assert resolve_user("54321") == Account("54321", 54321, 54321, (54321,), "/", "/bin/sh", listed=False)
    account = resolve_user("54321:users")
    assert account.gid == 100
    assert account.groups == (100,)


@pytest.mark.parametrize("user", ["", "no-such-user", ":5", "0:no-such-group", "-1", "a\0b", "\ud800", "0:a\0b"])
def test_an_unknown_user_is_named(user: str) -> None:
    with pytest.raises(UnknownUser, match="unknown"):
        resolve_user(user)


@pytest.mark.parametrize("user", ["4294967295", "0:4294967295", "99999999999", "0:99999999999", "9" * 5000])
def test_a_number_that_is_no_id_is_refused(user: str) -> None:
    """To the kernel 4294967295 is -1, "leave it as it is": the process would run as us."""
    with pytest.raises((UnknownUser, InvalidParams)):
        resolve_user(user)


def test_who_is_not_root_stays_who_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(PermissionRefused, match="nobody"):
        resolve_user("nobody")


@pytest.mark.parametrize(
    ("cwd", "path"),
    [
        ("/tmp", "/tmp"),
        ("relative", "relative"),
        ("file:///a%20b/c", "/a b/c"),
        ("file://localhost/x", "/x"),
        ("file:/x", "/x"),
    ],
)
def test_a_directory_by_path_or_uri(cwd: str, path: str) -> None:
    assert resolve_cwd(cwd) == path


def test_no_directory_is_our_own() -> None:
    assert resolve_cwd(None) == os.getcwd()


@pytest.mark.parametrize("cwd", ["file://elsewhere/x", "/a\0b", "file:///a%00b", "file://[bad", ""])
def test_what_is_no_directory_of_this_machine_is_refused(cwd: str) -> None:
    with pytest.raises(CallerError, match="cwd"):
        resolve_cwd(cwd)


@given(st.text(max_size=20))
def test_any_text_is_a_directory_or_refused(cwd: str) -> None:
    for text in (cwd, f"file:{cwd}", f"file://{cwd}"):
        try:
            outcome = f"cwd {resolve_cwd(text)}"
        except HoldfastError as error:
            outcome = str(error)
        assert "cwd" in outcome
