"""The tree of an image for Inspect's self-check, whose checks add a user by the programs of the image."""

from __future__ import annotations

from pathlib import Path

from tests.support.engines import debian_root

_PACKAGES = ("adduser", "findutils", "libpam-modules", "passwd", "perl-base", "procps")


def inspect_root(root: Path) -> Path:
    debian_root(root, *_PACKAGES)
    (root / "home").mkdir(exist_ok=True)
    (root / "etc/shadow").touch(mode=0o600)
    for kind in ("auth", "account", "password", "session"):
        (root / f"etc/pam.d/common-{kind}").write_text(f"{kind} required pam_permit.so\n")
    return root
