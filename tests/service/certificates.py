"""Certificates for a test, made by openssl: an authority, a server and a client that it signed."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

from tests.support.parts import require


class Certificates(NamedTuple):
    authority: Path
    certificate: Path
    key: Path
    client_certificate: Path
    client_key: Path


def make_certificates(directory: Path) -> Certificates:
    require("openssl")
    directory.mkdir()
    made = Certificates(*(directory / name for name in ("ca.pem", "server.pem", "server.key", "me.pem", "me.key")))
    authority_key = directory / "ca.key"
    _openssl("req", "-x509", *_new_key(authority_key), "-days", "2", "-subj", "/CN=test CA", "-out", made.authority)
    for certificate, key, name in (
        (made.certificate, made.key, "server"),
        (made.client_certificate, made.client_key, "client"),
    ):
        request = directory / f"{name}.csr"
        names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
        _openssl("req", "-new", *_new_key(key), "-subj", f"/CN={name}", "-addext", names, "-out", request)
        _openssl(
            "x509", "-req", "-in", request, "-CA", made.authority, "-CAkey", authority_key, "-CAcreateserial",
            "-days", "2", "-copy_extensions", "copyall", "-out", certificate,
        )  # fmt: skip
    return made


def _new_key(path: Path) -> tuple[str | Path, ...]:
    return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", path)


def _openssl(*arguments: str | Path) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
