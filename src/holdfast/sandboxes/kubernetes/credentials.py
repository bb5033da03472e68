"""The caller's credentials while a connection lasts: tokens that are read again, programs that print new ones, TLS.

Runs the credential programs of kubeconfig, and reads files; contacts no cluster.
"""

from __future__ import annotations

import asyncio
import base64
import datetime
import json
import os
import ssl
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from holdfast.errors import CommandNotFound, SandboxError
from holdfast.sandboxes.host_command import run_host_command
from holdfast.sandboxes.kubernetes.kubeconfig import ClusterConfig, ExecPlugin

#: A token file is read again after this time: the kubelet replaces a pod's token well before it expires.
TOKEN_SECONDS: Final = 60.0
#: A plugin's credentials are renewed this long before they expire, so that a request in flight is not refused.
EARLY_SECONDS: Final = 10.0
#: For one run of a plugin, which may contact an identity provider.
PLUGIN_SECONDS: Final = 60.0


class Credentials:
    """The headers and the TLS context of requests to one cluster."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self.tls = _tls(config)
        self.proxy = _proxy(config)
        self._token = config.token
        self._valid_until = 0.0 if config.token is None else float("inf")
        self._renewing = asyncio.Lock()

    async def headers(self) -> list[tuple[str, str]]:
        """The headers of the next request."""
        config = self._config
        if (config.token_file is not None or config.plugin is not None) and time.time() >= self._valid_until:
            async with self._renewing:
                if time.time() >= self._valid_until:
                    await self._renew()
        bearer = [] if self._token is None else [("Authorization", f"Bearer {self._token}")]
        return [*bearer, *config.headers]

    def refused(self) -> bool:
        """Note that the cluster refused the credentials; whether new ones can be had."""
        self._valid_until = 0.0 if self._config.token is None else self._valid_until
        return self._config.token_file is not None or self._config.plugin is not None

    async def _renew(self) -> None:
        if self._config.plugin is not None:
            await self._run_plugin(self._config.plugin)
            return
        assert self._config.token_file is not None
        try:
            self._token = Path(self._config.token_file).read_text().strip()  # noqa: ASYNC240 - a small local file
        except OSError as error:
            raise SandboxError(f"kubernetes: token {self._config.token_file}: {error.strerror}") from None
        self._valid_until = time.time() + TOKEN_SECONDS

    async def _run_plugin(self, plugin: ExecPlugin) -> None:
        spec: dict[str, Any] = {"interactive": False}
        if plugin.provide_cluster_info:
            spec["cluster"] = _cluster_info(self._config)
        request = {"apiVersion": plugin.api_version, "kind": "ExecCredential", "spec": spec}
        env = {**os.environ, **plugin.env, "KUBERNETES_EXEC_INFO": json.dumps(request)}
        try:
            done = await run_host_command([plugin.command, *plugin.args], seconds=PLUGIN_SECONDS, env=env)
        except CommandNotFound as missing:
            hint = f": {plugin.install_hint}" if plugin.install_hint else ""
            raise CommandNotFound(f"kubernetes: the credential plugin {missing}{hint}") from None
        if done.exit_code != 0:
            raise SandboxError(f"kubernetes: the credential plugin {plugin.command}: {done.summary}")
        try:
            credential = json.loads(done.stdout)
            if credential["apiVersion"] != plugin.api_version:
                raise ValueError(f"apiVersion is {credential['apiVersion']}, not {plugin.api_version}")
            status = credential["status"]
            expires = status.get("expirationTimestamp")
            until = float("inf") if expires is None else _seconds(expires) - EARLY_SECONDS
            certificate, key = status.get("clientCertificateData"), status.get("clientKeyData")
            if not status.get("token") and not (certificate and key):
                raise ValueError("there is neither a token nor a certificate with its key")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SandboxError(
                f"kubernetes: the credential plugin {plugin.command} printed no ExecCredential: {error}"
            ) from None
        self._token = status.get("token")
        if certificate and key:
            _load_pair(self.tls, certificate.encode(), key.encode())
        self._valid_until = until


def _seconds(text: str) -> float:
    return datetime.datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def _cluster_info(config: ClusterConfig) -> dict[str, Any]:
    info: dict[str, Any] = {"server": config.server, "config": config.plugin_config}
    info |= {"insecure-skip-tls-verify": not config.verify}
    if config.ca is not None:
        info["certificate-authority-data"] = base64.b64encode(config.ca).decode()
    for name, value in (("tls-server-name", config.tls_server_name), ("proxy-url", config.proxy)):
        info |= {} if value is None else {name: value}
    return info


def _tls(config: ClusterConfig) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cadata=None if config.ca is None else config.ca.decode())
    except (ssl.SSLError, UnicodeDecodeError) as error:
        raise SandboxError(f"kubernetes: certificate-authority: {error}") from None
    if not config.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if config.certificate is not None and config.key is not None:
        _load_pair(context, config.certificate, config.key)
    return context


def _load_pair(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """Python takes a certificate and its key from files only: they exist for a moment, readable for us alone."""
    with tempfile.TemporaryDirectory(prefix="holdfast-") as directory:
        path = os.path.join(directory, "pair")
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(certificate.rstrip() + b"\n" + key)
        try:
            context.load_cert_chain(path)
        except ssl.SSLError as error:
            raise SandboxError(f"kubernetes: client certificate and key: {error}") from None


def _proxy(config: ClusterConfig) -> str | None:
    """The proxy of kubeconfig, or that of the environment; loopback is reached directly, as kubectl does."""
    if config.proxy is not None:
        return config.proxy
    url = urlsplit(config.server)
    host = url.hostname or ""
    if host in ("localhost", "::1") or host.startswith("127.") or urllib.request.proxy_bypass(host):
        return None
    return urllib.request.getproxies().get(url.scheme)
