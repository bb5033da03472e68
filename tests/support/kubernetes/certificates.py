"""The certificates of a test cluster, made by openssl: one authority, and a pair for each identity."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import yaml

from tests.support.engines import run

_DAYS: Final = "7"


class Authority:
    """A certificate authority in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.certificate = directory / "ca.crt"
        self._key("ca")
        run(
            [
                *("openssl", "req", "-x509", "-new", "-key", directory / "ca.key", "-out", self.certificate),
                *(
                    "-days",
                    _DAYS,
                    "-subj",
                    "/CN=holdfast-tests",
                    "-addext",
                    "keyUsage=critical,keyCertSign,cRLSign",
                ),
            ]
        )

    def _key(self, name: str) -> Path:
        path = self.directory / f"{name}.key"
        run(["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", path])
        path.chmod(0o600)
        return path

    def key_pair(self, name: str) -> tuple[Path, Path]:
        """A private key and its public key, without a certificate."""
        key, public = self._key(name), self.directory / f"{name}.pub"
        run(["openssl", "ec", "-in", key, "-pubout", "-out", public])
        return key, public

    def pair(self, name: str, user: str, *, group: str = "", addresses: tuple[str, ...] = ()) -> tuple[Path, Path]:
        """A certificate and its key. `group` is the user's; with `addresses` it is also that of a server."""
        key, certificate = self._key(name), self.directory / f"{name}.crt"
        request, extensions = self.directory / f"{name}.csr", self.directory / f"{name}.ext"
        subject = (f"/O={group}" if group else "") + f"/CN={user}"
        run(["openssl", "req", "-new", "-key", key, "-out", request, "-subj", subject])
        names = ",".join(f"IP:{each}" if each[0].isdigit() else f"DNS:{each}" for each in addresses)
        extensions.write_text(
            "extendedKeyUsage=clientAuth,serverAuth\n" + (f"subjectAltName={names}\n" if names else "")
        )
        run(
            [
                *("openssl", "x509", "-req", "-in", request, "-out", certificate, "-days", _DAYS),
                *("-CA", self.certificate, "-CAkey", self.directory / "ca.key", "-CAcreateserial"),
                *("-extfile", extensions),
            ]
        )
        return certificate, key

    def kubeconfig(self, path: Path, server: str, user: Mapping[str, object]) -> Path:
        """A kubeconfig with one context; `user` is its entry of credentials."""
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "tests",
                    "contexts": [
                        {"name": "tests", "context": {"cluster": "c", "user": "u", "namespace": "default"}}
                    ],
                    "clusters": [
                        {"name": "c", "cluster": {"server": server, "certificate-authority": str(self.certificate)}}
                    ],
                    "users": [{"name": "u", "user": dict(user)}],
                }
            )
        )
        path.chmod(0o600)
        return path
