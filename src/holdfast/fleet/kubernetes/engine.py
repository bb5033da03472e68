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
from collections.abc import AsyncIterator
from typing import Any, ClassVar, Final

import msgspec

from holdfast.client.sandbox import Sandbox
from holdfast.errors import HoldfastError, InvalidParams, SandboxError, SandboxGone
from holdfast.exec_api import ExecApi
from holdfast.fleet.engine import Engine, Progress, SandboxEnding, make_ref
from holdfast.fleet.kubernetes import manifest
from holdfast.fleet.kubernetes.claims import ClaimObject, Claims, check_claim
from holdfast.fleet.kubernetes.endings import watch_endings
from holdfast.fleet.kubernetes.manifest import CONTAINER, EXPIRY, ID_LABEL, MAKER_LABEL, RECORD, TREE
from holdfast.fleet.kubernetes.network_check import reaches_the_network
from holdfast.fleet.kubernetes.readiness import PodObject
from holdfast.fleet.kubernetes.watching import PodWatch
from holdfast.fleet.record import Record, Refs, SandboxRef, check_id, decode_record
from holdfast.fleet.template import Template
from holdfast.sandboxes.install.bundle import bundle
from holdfast.sandboxes.kubernetes.agent_sandbox import Mode
from holdfast.sandboxes.kubernetes.api import ApiError, ClusterApi, acquire, release
from holdfast.sandboxes.kubernetes.kubeconfig import is_configured
from holdfast.sandboxes.kubernetes.pod import Pod
from holdfast.sandboxes.opening import open_target

log = logging.getLogger(__name__)

#: A removed pod's programs get SIGKILL after this many seconds, instead of the grace period of the pod.
GRACE_SECONDS: Final = 1
#: A cluster that was seen to enforce the policy is checked again after this time.
CHECKED_SECONDS: Final = 3_600.0

#: When each namespace of a cluster was seen to enforce the policy; apart for pods of each warm pool, which got the
#: label after they had started.
_checked: dict[tuple[str, ...], float] = {}


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
        self._known_claims: Claims | None = None
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

    @property
    def _claims(self) -> Claims:
        if self._known_claims is None:
            self._known_claims = Claims(self.api, self.namespace)
        return self._known_claims

    def _path(self, id: str = "") -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods" + (f"/{id}" if id else "")

    async def aclose(self) -> None:
        if self._watch is not None:
            await self._watch.aclose()
            self._watch = None
        if self._shared is not None:
            api, self._shared, self._known_claims = self._shared, None, None
            await release(api)

    # --- making ------------------------------------------------------------------------------------------------

    async def check(self, template: Template) -> None:
        await super().check(template)
        options = manifest.read_options(template)
        if options.claim is not None:
            check_claim(template)
            return
        if template.image is None:
            self.refuse("image", "missing")
        if options.restricted and manifest.read_user(template.user).get("runAsUser") == 0:
            self.refuse("user", "0 is root, which `restricted` excludes")

    async def create(self, template: Template, record: Record, progress: Progress | None = None) -> SandboxRef:
        if template.options.get("claim") is not None:
            return await self._claim(template, record, progress)
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

    async def _claim(self, template: Template, record: Record, progress: Progress | None) -> SandboxRef:
        """Take a sandbox of a warm pool of agent-sandbox."""
        options = manifest.read_options(template)
        if template.network != "host":
            await self._ensure_policy()
        if progress is not None:
            progress(f"claiming a sandbox of {self.namespace}/{options.claim}", None)
        try:
            claim = await self._claims.make(template, record, self._maker, options.ready_timeout)
        except BaseException:
            await asyncio.shield(self._clean_up(record.id))
            raise
        return self._ref_of_claim(record, claim)

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
        refs = [*map(self._ref, pods), *map(self._claimed_ref, await self._claims.list())]
        return sorted((ref for ref in refs if ref is not None), key=lambda ref: ref.created_at)

    async def get(self, id: str) -> SandboxRef:
        try:
            ref = self._ref(await self._get(id))
        except SandboxGone:
            ref = await self._get_claimed(id)
        if ref is None:
            raise self._gone(id)
        return ref

    async def _get_claimed(self, id: str) -> SandboxRef | None:
        try:
            return self._claimed_ref(await self._claims.get(id))
        except ApiError:
            raise
        except SandboxError:  # no such claim, or a cluster without claims
            return None

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
        options = "" if self._context is None else f"?context={self._context}"
        address = f"kubernetes:{self.namespace}/{record.id}{options}"
        expires_at = _expiry(record, pod.metadata.annotations)
        return make_ref(self.name, address, record, pod.state, expires_at=expires_at)

    def _claimed_ref(self, claim: ClaimObject) -> SandboxRef | None:
        """None for a claim that is not ours, or that is being removed."""
        record = decode_record(claim.metadata.annotations.get(RECORD, ""))
        if record is None or record.id != claim.metadata.name or claim.metadata.deletion_timestamp is not None:
            return None
        return self._ref_of_claim(record, claim)

    def _ref_of_claim(self, record: Record, claim: ClaimObject) -> SandboxRef:
        options = "" if self._context is None else f"&context={self._context}"
        address = f"kubernetes:{self.namespace}?sandbox={claim.status.sandbox.name}{options}"
        expires_at = _expiry(record, claim.metadata.annotations)
        return make_ref(self.name, address, record, claim.state, expires_at=expires_at)

    async def open(self, ref: SandboxRef, *, reconnect_deadline: float) -> ExecApi:
        where: dict[str, Any] = {"context": self._context, "kubeconfig": self._kubeconfig, "via": "api"}
        if ref.record.template.options.get("claim") is not None:
            claim = await self._claims.get(ref.id)
            pod = Pod(self.namespace, sandbox=claim.status.sandbox.name, **where)
        else:
            pod = Pod(self.namespace, ref.id, CONTAINER, **where)
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
        pool = ref.record.template.options.get("claim") or ""
        key = (self.api.config.server, self.namespace, pool)
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
            if error.status != 404:
                raise
            if await self._get_claimed(id) is None:
                raise self._gone(id) from None
            await self._claims.patch(id, body)

    def can_pause(self, template: Template) -> bool:
        return template.options.get("claim") is not None

    async def pause(self, id: str) -> None:
        await self._set_mode(id, "pause", "Suspended")

    async def resume(self, id: str) -> None:
        await self._set_mode(id, "resume", "Running")

    async def _set_mode(self, id: str, what: str, mode: Mode) -> None:
        template = (await self.get(id)).record.template
        options = manifest.read_options(template)
        if options.claim is None:
            self.refuse(what, "only sandboxes of agents.x-k8s.io are suspended (options: claim), pods are not")
        await self._claims.set_mode(id, mode, options.ready_timeout)

    async def remove(self, id: str) -> None:
        self._uids.pop(id, None)
        options = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": GRACE_SECONDS}
        try:
            await self.api.request("DELETE", self._path(check_id(id)), body=options)
        except ApiError as error:
            if error.status != 404:
                raise
            await self._claims.remove(id)

    def endings(self) -> AsyncIterator[SandboxEnding]:
        return watch_endings(self.api, self._path(), ID_LABEL)


def _expiry(record: Record, annotations: dict[str, str]) -> float | None:
    """The expiry of the latest extension, or the record's."""
    text = annotations.get(EXPIRY)
    return record.expires_at if text is None else msgspec.json.decode(text, type=float | None)


async def _tree() -> str:
    """The directory inside into which an init container copies the server's files."""
    return f"/{(await bundle()).name}"
