"""Sandboxes that are pods. The record is an annotation of the pod, and an extension another one.

A sandbox costs the API server a request to make it, one for its channel and one to remove it: one watch reports the
start of all pods. Pods without a network are kept apart by a NetworkPolicy, and the first of them checks that the
cluster enforces it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import Any, ClassVar, Final

import msgspec

from holdfast.client.sandbox import Sandbox
from holdfast.errors import HoldfastError, InvalidParams, SandboxError, SandboxGone
from holdfast.exec_api import ExecApi
from holdfast.fleet.engine import Engine, Progress, make_ref
from holdfast.fleet.kubernetes import manifest
from holdfast.fleet.kubernetes.manifest import CONTAINER, EXPIRY, ID_LABEL, MAKER_LABEL, RECORD, TREE
from holdfast.fleet.kubernetes.network_check import reaches_the_network
from holdfast.fleet.kubernetes.readiness import PodObject
from holdfast.fleet.kubernetes.watching import PodWatch
from holdfast.fleet.record import Record, Refs, SandboxRef, check_id, decode_record
from holdfast.fleet.template import Template
from holdfast.sandboxes.install.bundle import bundle
from holdfast.sandboxes.kubernetes.api import ApiError, ClusterApi, acquire, release
from holdfast.sandboxes.kubernetes.kubeconfig import is_configured
from holdfast.sandboxes.kubernetes.pod import Pod
from holdfast.sandboxes.opening import open_target

log = logging.getLogger(__name__)

#: A removed pod's programs get SIGTERM, and SIGKILL after this many seconds.
GRACE_SECONDS: Final = 1
#: A cluster that was seen to enforce the policy is checked again after this time.
CHECKED_SECONDS: Final = 3_600.0

#: When each namespace of a cluster was seen to enforce the policy.
_checked: dict[tuple[str, str], float] = {}


class KubernetesEngine(Engine):
    """Pods of one namespace, that of kubeconfig's context unless it is named."""

    name: ClassVar[str] = "kubernetes"
    fields: ClassVar = frozenset({"image", "cpus", "memory", "disk", "network", "env", "user", "workdir"})
    options: ClassVar = frozenset(manifest.PodOptions.__struct_fields__)
    has_devices_without_network: ClassVar[bool] = True

    def __init__(
        self, *, namespace: str | None = None, context: str | None = None, kubeconfig: str | None = None
    ) -> None:
        self._given_namespace = namespace
        self._context, self._kubeconfig = context, kubeconfig
        #: Labels the pods of this object, so that its watch sees no others.
        self._maker = secrets.token_hex(8)
        self._shared: ClusterApi | None = None
        self._watch: PodWatch | None = None
        self._has_policy = False
        #: UIDs of pods that were made and not connected yet.
        self._uids: dict[str, str] = {}

    def is_installed(self) -> bool:
        return is_configured()

    @property
    def api(self) -> ClusterApi:
        if self._shared is None:
            self._shared = acquire(kubeconfig=self._kubeconfig, context=self._context)
        return self._shared

    @property
    def namespace(self) -> str:
        return self._given_namespace or self.api.config.namespace

    def _path(self, id: str = "") -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods" + (f"/{id}" if id else "")

    async def aclose(self) -> None:
        if self._watch is not None:
            await self._watch.aclose()
            self._watch = None
        if self._shared is not None:
            api, self._shared = self._shared, None
            await release(api)

    # --- making ------------------------------------------------------------------------------------------------

    async def check(self, template: Template) -> None:
        await super().check(template)
        if template.image is None:
            self.refuse("image", "missing")
        options = manifest.read_options(template)
        if options.restricted and manifest.read_user(template.user).get("runAsUser") == 0:
            self.refuse("user", "0 is root, which `restricted` excludes")

    async def create(self, template: Template, record: Record, progress: Progress | None = None) -> SandboxRef:
        tree = await _tree() if template.options.get("server_image") else ""
        pod = manifest.pod_manifest(template, record, maker=self._maker, tree=tree)
        if template.network != "host":
            await self._ensure_policy()
        if self._watch is None:
            self._watch = PodWatch(self.api, self._path(), f"{MAKER_LABEL}={self._maker}", CONTAINER)
        watch, seconds = self._watch, manifest.read_options(template).ready_timeout
        if progress is not None:
            progress(f"starting pod {self.namespace}/{record.id}", None)
        running = watch.expect(record.id)
        try:
            await self._post(pod, record)
            async with asyncio.timeout(seconds):
                found = await running
        except TimeoutError:
            reason = watch.forget(record.id)
            await self._clean_up(record.id)
            raise SandboxError(
                f"kubernetes:{self.namespace}/{record.id}: not ready after {seconds:g} s: {reason}"
            ) from None
        except BaseException as error:
            watch.forget(record.id)
            await asyncio.shield(self._clean_up(record.id))
            if isinstance(error, SandboxError) and not isinstance(error, ApiError):
                raise SandboxError(f"kubernetes:{self.namespace}/{record.id}: {error.message}") from None
            raise
        self._uids[record.id] = found.metadata.uid
        return self._ref_of(record, found)

    async def _clean_up(self, id: str) -> None:
        """Remove what a failed `create` may have made; the error of that is the one that matters."""
        try:
            await self.remove(id)
        except HoldfastError as error:
            log.warning("kubernetes:%s/%s: cannot be removed: %s", self.namespace, id, error)

    async def _post(self, pod: dict[str, Any], record: Record) -> None:
        try:
            await self.api.post(self._path(), pod)
        except ApiError as error:
            if error.status == 422:
                raise InvalidParams(f"engine kubernetes: {error.message}") from None
            # Ids are random: a pod of this name is our own, made by an attempt whose reply was lost.
            if error.status != 409 or error.reason != "AlreadyExists":
                raise SandboxError(error.message) from None

    async def _ensure_policy(self) -> None:
        if self._has_policy:
            return
        path = f"/apis/networking.k8s.io/v1/namespaces/{self.namespace}/networkpolicies"
        policy = manifest.no_network_policy()
        try:
            # Also when it exists already: a policy that was weakened by hand is made whole again.
            await self.api.request(
                "PATCH",
                f"{path}/{manifest.POLICY}",
                params={"fieldManager": "holdfast", "force": "true"},
                body=policy,
                content_type="application/apply-patch+yaml",
            )
        except ApiError as error:
            raise SandboxError(
                f"engine kubernetes: network: the policy {manifest.POLICY} cannot be made in namespace "
                f'{self.namespace}: {error.message}; network="host" needs none'
            ) from None
        self._has_policy = True

    # --- finding -----------------------------------------------------------------------------------------------

    async def list(self) -> Refs:
        pods, _ = await self.api.list(self._path(), PodObject, labelSelector=ID_LABEL)
        refs = (self._ref(pod) for pod in pods)
        return sorted((ref for ref in refs if ref is not None), key=lambda ref: ref.created_at)

    async def get(self, id: str) -> SandboxRef:
        ref = self._ref(await self._get(id))
        if ref is None:
            raise self._gone(id)
        return ref

    async def _get(self, id: str) -> PodObject:
        try:
            return await self.api.get(self._path(check_id(id)), PodObject)
        except ApiError as error:
            raise self._gone(id) if error.status == 404 else error from None

    def _gone(self, id: str) -> SandboxGone:
        return SandboxGone(f"kubernetes:{self.namespace}/{id}: there is no such sandbox", final=True)

    def _ref(self, pod: PodObject) -> SandboxRef | None:
        """None for a pod that is not ours, or that is being removed."""
        record = decode_record(pod.metadata.annotations.get(RECORD, ""))
        if record is None or record.id != pod.metadata.name or pod.metadata.deletion_timestamp is not None:
            return None
        return self._ref_of(record, pod)

    def _ref_of(self, record: Record, pod: PodObject) -> SandboxRef:
        text = pod.metadata.annotations.get(EXPIRY)
        expires_at = record.expires_at if text is None else msgspec.json.decode(text, type=float | None)
        options = "" if self._context is None else f"?context={self._context}"
        address = f"kubernetes:{self.namespace}/{record.id}{options}"
        return make_ref(self.name, address, record, pod.state, expires_at=expires_at)

    async def open(self, ref: SandboxRef, *, reconnect_deadline: float) -> ExecApi:
        pod = Pod(self.namespace, ref.id, CONTAINER, context=self._context, kubeconfig=self._kubeconfig, via="api")
        if (uid := self._uids.pop(ref.id, None)) is not None:
            pod.is_known(uid)
        tree = ""
        if ref.record.template.options.get("server_image"):
            tree = (await self._get(ref.id)).metadata.annotations[TREE] if uid is None else await _tree()
            pod.installation.copied_as(tree)
        api = await open_target(pod, reconnect_deadline=reconnect_deadline)
        try:
            if ref.record.template.network != "host":
                await self._check_network(api, ref, tree)
        except BaseException:
            await api.aclose()
            raise
        return api

    async def _check_network(self, api: ExecApi, ref: SandboxRef, tree: str) -> None:
        """Refuse a sandbox that reaches the network in spite of the policy."""
        key = (self.api.config.server, self.namespace)
        if time.monotonic() - _checked.get(key, -CHECKED_SECONDS) < CHECKED_SECONDS:
            return
        if await reaches_the_network(Sandbox(api), tree):
            raise SandboxError(
                f"kubernetes:{self.namespace}/{ref.id}: network: the sandbox reaches the network, because the "
                f'cluster\'s network plugin does not enforce NetworkPolicy {manifest.POLICY}; network="host" '
                "makes sandboxes with the network of pods"
            )
        _checked[key] = time.monotonic()

    # --- the rest of a life ------------------------------------------------------------------------------------

    async def extend(self, id: str, expires_at: float | None) -> None:
        body = {"metadata": {"annotations": {EXPIRY: msgspec.json.encode(expires_at).decode()}}}
        try:
            await self.api.patch(self._path(check_id(id)), body)
        except ApiError as error:
            raise self._gone(id) if error.status == 404 else error from None

    async def remove(self, id: str) -> None:
        self._uids.pop(id, None)
        await self.api.delete(self._path(check_id(id)), gracePeriodSeconds=GRACE_SECONDS)


async def _tree() -> str:
    """The directory inside into which an init container copies the server's files."""
    return f"/{(await bundle()).name}"
