"""Which shells and which uses of them get marks, and what is executed for them."""

from __future__ import annotations

import pytest

from holdfast.runtime.terminal.shell_integration import IntegratedShell, integrate

NONCE = "00112233445566778899aabbccddeeff"


def ask(path: str, *argv: str, login: bool = False, **environment: str) -> IntegratedShell | None:
    return integrate(path, argv, directory="/d x", nonce=NONCE, login=login, environment=environment)


@pytest.mark.parametrize(
    ("path", "argv"),
    [
        ("/bin/bash", ("bash", "-c", "true")),
        ("/bin/bash", ("bash", "script")),
        ("/bin/bash", ("bash", "--norc")),
        ("/bin/bash", ("bash", "-il")),
        ("/bin/rbash", ("rbash",)),
        ("/bin/dash", ("sh",)),
        ("/usr/bin/zsh", ("zsh", "-f")),
        ("/usr/bin/python3", ("bash",)),
        ("/bin/bash", ()),
    ],
)
def test_other_programs_and_uses_get_none(path: str, argv: tuple[str, ...]) -> None:
    assert ask(path, *argv) is None


def test_a_bash_in_posix_mode_gets_none() -> None:
    assert ask("/bin/bash", "bash", POSIXLY_CORRECT="") is None
    assert ask("/bin/bash", "bash", SHELLOPTS="emacs:posix") is None


@pytest.mark.parametrize(
    ("argv", "login", "executed"),
    [
        (("bash",), False, ("bash", "--rcfile", "/d x/rc", "+H")),
        (("bash", "-i"), False, ("bash", "--rcfile", "/d x/rc", "-i", "+H")),
        (("bash",), True, ("bash", "--posix", "--login")),
        (("bash", "-l", "-i"), False, ("bash", "--posix", "--login", "-i")),
        (("-bash",), False, ("-bash", "--posix")),
    ],
)
def test_bash_is_started_by_its_flags(argv: tuple[str, ...], login: bool, executed: tuple[str, ...]) -> None:
    how = ask("/usr/bin/bash", *argv, login=login)
    assert how is not None
    assert (how.kind, how.argv, list(how.files)) == ("bash", executed, ["rc"])
    assert how.env == ({"ENV": "$_hold_rc", "_hold_rc": "/d x/rc"} if "--posix" in executed else {})


@pytest.mark.parametrize(
    ("argv", "login", "executed"),
    [
        (("zsh",), False, ("zsh",)),
        (("zsh", "-i"), True, ("zsh", "-l", "-i")),
        (("zsh", "--login"), False, ("zsh", "-l")),
        (("-zsh",), True, ("-zsh",)),
    ],
)
def test_zsh_is_started_by_its_flags(argv: tuple[str, ...], login: bool, executed: tuple[str, ...]) -> None:
    how = ask("/usr/bin/zsh", *argv, login=login)
    assert how is not None
    assert how[:3] == ("zsh", executed, {"ZDOTDIR": "/d x"})
    assert list(how.files) == [".zshenv"]


def test_variables_come_back_as_they_were() -> None:
    bash = ask("/bin/bash", "bash", login=True, ENV="it's", HISTFILE="/h", MAILCHECK="5")
    assert bash is not None
    assert "export ENV='it'\"'\"'s'\n" in bash.files["rc"]
    assert "HISTFILE=" not in bash.files["rc"]
    assert "MAILCHECK=" not in bash.files["rc"]
    zsh = ask("/bin/zsh", "zsh", ZDOTDIR="/a b")
    assert zsh is not None
    assert "\nexport ZDOTDIR='/a b'\n" in zsh.files[".zshenv"]


def test_the_nonce_is_in_the_files_alone() -> None:
    for kind in ("bash", "zsh"):
        for login in (False, True):
            how = ask(f"/bin/{kind}", kind, login=login)
            assert how is not None
            assert NONCE not in str(how[:3])
            assert all(NONCE in text and "@NONCE@" not in text for text in how.files.values())
