"""Pods, reached through the cluster's API, or through `kubectl exec` where the extra `kubernetes` is not installed.

A pod is not its name: its containers are restarted, and another pod may get the name. So the pod is read before
each channel, and its UID identifies it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Self

from holdfast.errors import ConnectionLost, InvalidParams, SandboxError, SandboxGone
from holdfast.sandboxes.host_command import KEPT_BYTES, SECONDS, Outcome, run_host_command
from holdfast.sandboxes.install.installation import BundleChoice, Installation
from holdfast.sandboxes.kubernetes.status import PodStatus, read_status
from holdfast.sandboxes.target import CommandTarget, Signs, environment
from holdfast.transport.channel import Channel, Receiver
from holdfast.transport.preamble import Reply

if TYPE_CHECKING:
    from holdfast.sandboxes.kubernetes.api import ApiError, ClusterApi
    from holdfast.sandboxes.kubernetes.exec_socket import ExecSocket

log = logging.getLogger(__name__)

Via = Literal["api", "kubectl"]

#: The limit for one `kubectl get`.
_GET_SECONDS: Final = 30.0
#: Between two reads of a pod that is not ready yet: doubling from the first to the second.
_POLL_SECONDS: Final = (0.2, 2.0)
#: Bytes of a file that are read and sent at a time.
_CHUNK_BYTES: Final = 256 * 1024
#: containerd and CRI-O report a program that is not in the image as an error of their own, with exit code 1.
_NO_PROGRAM: Final = re.compile(
    r"executable file not found|exec: \"?[^\s:]*: (stat .*: )?no such file or directory"
)


def has_client() -> bool:
    """Whether the packages of the extra `kubernetes` are installed."""
    return all(find_spec(name) is not None for name in ("httpx", "websockets", "yaml"))


class Pod(CommandTarget):
    """A container of a pod: `kubernetes:NAMESPACE/POD` or `kubernetes:NAMESPACE/POD/CONTAINER`.

    `sandbox` names a Sandbox of agents.x-k8s.io instead of a pod: `kubernetes:NAMESPACE?sandbox=NAME`.

    `wait_ready` is how many seconds the first connection waits for the container to run and be ready. `via` is
    `api` or `kubectl`; by default the API, if the extra `kubernetes` is installed.
    """

    gone_signs: ClassVar[Signs] = (
        (
            re.compile(r"\(NotFound\)|container .* is not valid for pod|container \S+ not found in pod"),
            "there is no such pod or container",
        ),
        (re.compile(r"completed pod"), "the pod has ended"),
    )

    def __init__(
        self,
        namespace: str,
        pod: str = "",
        container: str | None = None,
        *,
        sandbox: str | None = None,
        context: str | None = None,
        directory: str | None = None,
        bundle: BundleChoice = True,
        wait_ready: float = 0.0,
        via: Via | None = None,
        kubeconfig: str | None = None,
    ) -> None:
        if sandbox is not None and pod:
            raise InvalidParams(f"kubernetes:{namespace}/{pod}: sandbox={sandbox}: a pod or a Sandbox, not both")
        names = [namespace, sandbox or pod, *([] if container is None else [container])]
        if not all(re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", name) for name in names):
            raise InvalidParams(
                f"kubernetes:{'/'.join(names)}: NAMESPACE/POD or NAMESPACE/POD/CONTAINER, in small letters"
            )
        address = (
            f"kubernetes:{'/'.join(names)}" if sandbox is None else f"kubernetes:{namespace}?sandbox={sandbox}"
        )
        super().__init__(address, Installation(directory=directory, bundle=bundle))
        if not (math.isfinite(wait_ready) and wait_ready >= 0):
            raise InvalidParams(f"{self.address}: wait_ready={wait_ready}: not a number of seconds")
        if via not in (None, "api", "kubectl"):
            raise InvalidParams(f"{self.address}: via={via}: api or kubectl")
        if via == "api" and not has_client():
            raise InvalidParams(f"{self.address}: via=api: the extra `kubernetes` is not installed")
        if sandbox is not None and (via == "kubectl" or not has_client()):
            raise InvalidParams(
                f"{self.address}: a Sandbox is resolved through the API: extra `kubernetes`, via=api"
            )
        self.via: Via = via or ("api" if has_client() else "kubectl")
        self.namespace = namespace
        self.pod = pod
        #: A Sandbox of agents.x-k8s.io, whose pod is resolved by `open`.
        self.sandbox = sandbox
        self.container = container
        self.context = context
        self.wait_ready = wait_ready
        self.kubeconfig = kubeconfig
        self._api: ClusterApi | None = None
        #: The UID of the pod that was connected first.
        self._uid: str | None = None
        #: Whether a channel was open already.
        self._dialled = False
        #: Whether `open` has just read the pod.
        self._was_read = False

    @classmethod
    def from_address(cls, scheme: str, rest: str, **options: Any) -> Self:
        namespace, _, rest = rest.partition("/")
        pod, slash, container = rest.partition("/")
        return cls(namespace, pod, container if slash else None, **options)

    def command(self, argv: Sequence[str]) -> list[str]:
        container = [] if self.container is None else ["--container", self.container]
        pod = ["--namespace", self.namespace, self.pod]
        return [*self._kubectl(), "exec", "--stdin", "--quiet", *pod, *container, "--", *argv]

    def _kubectl(self) -> list[str]:
        config = [] if self.kubeconfig is None else ["--kubeconfig", self.kubeconfig]
        return ["kubectl", *config, *([] if self.context is None else ["--context", self.context])]

    def lacks_program(self, exit_code: int, text: str) -> bool:
        return super().lacks_program(exit_code, text) or (exit_code != 0 and bool(_NO_PROGRAM.search(text)))

    def cannot_copy(self, why: str) -> SandboxError:
        return SandboxError(
            f"{self.address}: the server cannot be installed: {why}; only programs of the image can write "
            "files in a pod: use an image that has sh and tar, name another container of the pod, or add what "
            "`holdfast bundle --init-container IMAGE` prints (docs/kubernetes.md)"
        )

    # --- through the API ---------------------------------------------------------------------------------------

    @property
    def api(self) -> ClusterApi:
        """The client of the cluster, shared with other pods; `aclose` gives it back."""
        if self._api is None:
            from holdfast.sandboxes.kubernetes.api import acquire

            self._api = acquire(kubeconfig=self.kubeconfig, context=self.context)
        return self._api

    async def _exec(self, argv: Sequence[str]) -> ExecSocket:
        from holdfast.sandboxes.kubernetes.api import ApiError
        from holdfast.sandboxes.kubernetes.exec_socket import open_exec

        try:
            return await open_exec(self.api, self.namespace, self.pod, self.container, argv)
        except ApiError as error:
            raise self._refused(error) from None
        except ConnectionLost as lost:
            raise ConnectionLost(f"{self.address}: {lost.message}") from None

    def _refused(self, error: ApiError) -> Exception:
        """`SandboxGone` for what a retry does not change: no such pod, no permission."""
        if (gone := self.explain(error.message)) is not None:
            return gone
        if error.status in (401, 403):
            return SandboxGone(f"{self.address}: the cluster denies access: {error.message}", final=True)
        return ConnectionLost(f"{self.address}: {error.message}", exit_code=1, words=error.message)

    @property
    def installs_in_channel(self) -> bool:
        """False: the bytes of an exec may be lost with its connection, and a command of its own reports that."""
        return False

    async def start_channel(
        self,
        argv: Sequence[str],
        receiver: Receiver,
        report: bytes | None,
        reply: Reply | None = None,
    ) -> Channel:
        if self.via == "kubectl":
            return await super().start_channel(argv, receiver, report, reply)
        from holdfast.sandboxes.kubernetes.exec_channel import dial

        socket = await self._exec(argv)
        return await dial(socket, receiver, name=self.address, explain=self.channel_ended, report=report)

    async def run(self, argv: Sequence[str], *, stdin: Path | bytes = b"", seconds: float | None = None) -> Outcome:
        if self.via == "kubectl":
            return await super().run(argv, stdin=stdin, seconds=seconds)
        limit = SECONDS if seconds is None else seconds
        try:
            async with asyncio.timeout(limit):
                outcome = await self._run(argv, stdin)
        except TimeoutError:
            raise ConnectionLost(f"{self.address}: {argv[0]} …: no end in {limit:g} s") from None
        if outcome.exit_code != 0 and (gone := self.explain(outcome.error)) is not None:
            raise gone
        return outcome

    async def _run(self, argv: Sequence[str], stdin: Path | bytes) -> Outcome:
        socket = await self._exec(argv)
        feeding = asyncio.create_task(_feed(socket, stdin))
        kept = {1: bytearray(), 2: bytearray()}
        try:
            while (received := await socket.receive()) is not None:
                stream, data = received
                kept[stream] += data
                del kept[stream][:-KEPT_BYTES]
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
            await socket.close()
        ended = socket.ended
        assert ended is not None
        stdout, stderr = (kept[stream].decode(errors="replace") for stream in (1, 2))
        return Outcome(ended.exit_code, stdout, stderr + ended.message)

    async def aclose(self) -> None:
        if self._api is not None:
            from holdfast.sandboxes.kubernetes.api import release

            api, self._api = self._api, None
            await release(api)

    # --- its life --------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Read the pod, and wait until it is ready if `wait_ready` is set."""
        try:
            await self._prepare()
        except BaseException:
            await self.aclose()
            raise

    async def _prepare(self) -> None:
        if self.sandbox is not None:
            from holdfast.sandboxes.kubernetes.agent_sandbox import pod_of

            self.pod = await pod_of(self.api, self.namespace, self.sandbox)
        loop = asyncio.get_running_loop()
        deadline, pause = loop.time() + self.wait_ready, _POLL_SECONDS[0]
        while True:
            status, reason = await self._read()
            if status is None and not self.wait_ready:
                return  # `kubectl exec` fails with a better error, or succeeds
            if status is not None and status.container == "running" and (status.ready or not self.wait_ready):
                self._was_read = True
                return
            if status is not None:
                reason = status.why or "it is not ready"
            if not self.wait_ready:
                raise ConnectionLost(
                    f"{self.address}: the container does not run yet: {reason}; wait_ready=SECONDS waits for it"
                )
            if loop.time() + pause > deadline:
                raise ConnectionLost(f"{self.address}: not ready after {self.wait_ready:g} s: {reason}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS[1])

    async def dial(self, receiver: Receiver) -> Channel:
        if self._was_read:
            self._was_read = False
        else:
            status, reason = await self._read()
            if status is not None and status.container != "running":
                raise ConnectionLost(f"{self.address}: the container does not run: {status.why}")
            if status is None and self._uid is not None:
                # It may be another pod by now.
                raise ConnectionLost(f"{self.address}: {reason}")
        channel = await super().dial(receiver)
        if self._dialled:
            # The pod may have been replaced since it was read. If its UID is still the same, the channel is in it.
            try:
                await self._read()
            except BaseException:
                channel.close()
                raise
        self._dialled = True
        return channel

    def is_known(self, uid: str) -> None:
        """Note the pod's UID, which the caller has just read: the first channel needs no look at the pod."""
        self._uid, self._was_read = uid, True

    async def _read(self) -> tuple[PodStatus | None, str]:
        """Return the pod's status, or None and the reason. `SandboxGone` if it has ended or is another pod."""
        text, reason = await (self._get_by_kubectl() if self.via == "kubectl" else self._get())
        if text is None:
            return None, reason
        status = read_status(text, self.container)
        if status is None:
            log.debug("%s: the cluster returned no pod", self.address)
            return None, "the cluster returned no pod"
        if self._uid is not None and status.uid != self._uid:
            raise SandboxGone(
                f"{self.address}: another pod has this name now (UID {status.uid}); the pod that was connected "
                f"(UID {self._uid}) is gone",
                final=True,
            )
        if status.gone is not None:
            raise SandboxGone(f"{self.address}: {status.gone}", final=True)
        self._uid = status.uid
        return status, ""

    async def _get(self) -> tuple[bytes | None, str]:
        from holdfast.sandboxes.kubernetes.api import ApiError

        try:
            # Without retries: a dial that fails is repeated by the connection.
            path = f"/api/v1/namespaces/{self.namespace}/pods/{self.pod}"
            return await self.api.request("GET", path, retry_seconds=0.0), ""
        except ApiError as error:
            # A caller that may exec and not get pods can still connect.
            if error.status not in (401, 403) and (gone := self.explain(error.message)) is not None:
                raise gone from None
            return None, error.message
        except ConnectionLost as lost:
            return None, lost.message

    async def _get_by_kubectl(self) -> tuple[str | None, str]:
        query = ["get", "pod", "--namespace", self.namespace, self.pod, "--output", "json"]
        try:
            done = await run_host_command([*self._kubectl(), *query], seconds=_GET_SECONDS, env=environment())
        except ConnectionLost as late:
            return None, late.message
        if done.exit_code == 0:
            return done.stdout, ""
        if (gone := self.explain(done.error)) is not None:
            raise gone
        return None, done.summary


async def _feed(socket: ExecSocket, stdin: Path | bytes) -> None:
    """Send the whole input and its end."""
    if isinstance(stdin, bytes):
        if stdin:
            await socket.send(stdin)
    else:
        # A file of the local cache, which is in memory after the first pod.
        with open(stdin, "rb") as file:  # noqa: ASYNC230
            while data := file.read(_CHUNK_BYTES):
                await socket.send(data)
    await socket.close_input()
