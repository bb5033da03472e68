"""A cluster of one node on this machine: etcd, API server, controllers, scheduler, kubelet, containerd, all real.

Everything runs in namespaces of its own: processes, mounts, and a network whose only way out is a cable to this
machine. All of it ends with the process that started it, even if that is killed. `kill` and `start` are for tests
of faults.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from tests.support import engines
from tests.support.engines import COMMAND_SECONDS, Missing
from tests.support.kubernetes import build, images
from tests.support.kubernetes.certificates import Authority
from tests.support.signalling import send_signal

START_SECONDS: Final = 120.0
NODE: Final = "node"
#: Of the kernel, which the kubelet would change for the whole machine: it gets ordinary files instead.
_SYSCTLS: Final = (
    *("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops"),
    *("kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes"),
)

#: The first process of the namespaces: reaps orphans until it is killed.
_FIRST: Final = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
print("ready", flush=True)
while signal.sigwait({signal.SIGCHLD}):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
"""


class Cluster:
    """A running cluster. `kubeconfig` is that of its administrator."""

    def __init__(self, directory: Path, subnet: int, first: int, cgroup: str, has_node: bool) -> None:
        self.directory = directory
        #: The node's end of the cable, and the addresses of services and pods behind it.
        self.host_address, self.address = f"10.211.{subnet}.1", f"10.211.{subnet}.2"
        self.service_address, self.pods = f"10.212.{subnet}.1", f"10.213.{subnet}.0/24"
        self.services = f"10.212.{subnet}.0/24"
        self.server = f"https://{self.address}:6443"
        self._first = first
        self._has_node = has_node
        self._cgroup = cgroup
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.programs = build.cache()
        self.authority = Authority(directory / "pki")
        self.kubeconfig = directory / "kubeconfig"
        self._commands = self._prepare()

    # --- its programs ------------------------------------------------------------------------------------------

    def enter(self, *command: str | Path) -> list[str]:
        """A command of this machine that runs in the namespaces of the cluster."""
        return ["nsenter", "--target", str(self._first), "--mount", "--pid", "--net", "--", *map(str, command)]

    def inside(self, *command: str | Path, stdin: bytes = b"") -> str:
        return engines.run(self.enter(*command), stdin=stdin)

    def start(self, name: str) -> None:
        """Start a program of the cluster."""
        with open(self.directory / f"{name}.log", "ab") as log:
            self._running[name] = subprocess.Popen(
                self.enter(*self._commands[name]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PATH": _path()},
                start_new_session=True,
            )

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Kill a program of the cluster, and wait for its end."""
        process = self._running.pop(name)
        for pid in _children(process.pid):
            send_signal(pid, number)
        process.wait(60)

    def pid(self, name: str) -> int:
        return _children(self._running[name].pid)[0]

    def is_running(self, name: str) -> bool:
        return name in self._running and self._running[name].poll() is None

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text(errors="replace")

    # --- its API -----------------------------------------------------------------------------------------------

    def kubectl(self, *arguments: str, stdin: bytes = b"") -> str:
        return engines.run([self.programs / "kubectl", "--kubeconfig", self.kubeconfig, *arguments], stdin=stdin)

    def apply(self, *objects: Mapping[str, Any]) -> None:
        self.kubectl(
            "apply",
            "--filename",
            "-",
            stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}).encode(),
        )

    def token(self, account: str, namespace: str = "default") -> str:
        return self.kubectl("create", "token", account, "--namespace", namespace)

    def load(self, archive: Path) -> None:
        """Import an image archive into the node."""
        self.inside(
            "ctr", "--address", self._containerd / "sock", "--namespace", "k8s.io", "images", "import", archive
        )

    def await_containerd(self) -> None:
        """Until containerd listens: a kubelet that does not reach it at its start ends."""
        deadline = time.monotonic() + START_SECONDS
        while not (self._containerd / "sock").exists():
            if time.monotonic() > deadline:
                raise Missing(f"containerd did not come up: {self.log('containerd')[-1500:]}")
            time.sleep(0.05)

    def await_api(self) -> None:
        """Until the API answers and namespaces can have pods."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self.kubectl("get", "--raw", "/readyz")
                break
            except Missing as not_yet:
                self._check_programs(not_yet, time.monotonic() > deadline)
            # Before it listens, nothing can be watched.
            time.sleep(0.2)
        self.await_object("serviceaccount/default", "create")

    def await_ready(self) -> None:
        """Until the API answers, the node is ready and pods can be made."""
        self.await_api()
        try:
            self.await_object(f"node/{NODE}", "create")
            self.await_object(f"node/{NODE}", "condition=Ready")
        except Missing as not_yet:
            self._check_programs(not_yet, True)

    def await_object(self, name: str, condition: str, *options: str) -> None:
        """Until an object has a condition of `kubectl wait`, which watches it."""
        self.kubectl("wait", f"--for={condition}", name, f"--timeout={COMMAND_SECONDS - 10:.0f}s", *options)

    def watch(self, *arguments: str) -> Iterator[Any]:
        """The objects of a `kubectl get --watch`: those that exist, then each change, for `START_SECONDS`."""
        command = [str(self.programs / "kubectl"), "--kubeconfig", str(self.kubeconfig), "get", *arguments]
        options = ["--watch", "--output", "json", f"--request-timeout={START_SECONDS:.0f}s"]
        decoder, text = json.JSONDecoder(), ""
        with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as watching:
            assert watching.stdout is not None
            try:
                # kubectl writes one object after another, each on several lines that end with a single brace.
                for line in watching.stdout:
                    text += line
                    if line == "}\n":
                        yield decoder.decode(text)
                        text = ""
            finally:
                watching.kill()

    def _check_programs(self, not_yet: Missing, is_late: bool) -> None:
        """`Missing` with the logs if a program has ended, or the time is over."""
        for name, process in self._running.items():
            if process.poll() is not None:
                raise Missing(f"{name} ended: {self.log(name)[-2000:]}")
        if is_late:
            logs = "\n".join(f"{name}: {self.log(name)[-1500:]}" for name in self._running)
            raise Missing(f"the cluster did not come up: {not_yet}\n{logs}")

    # --- what is written before it starts ----------------------------------------------------------------------

    def _prepare(self) -> dict[str, list[str | Path]]:
        home, bin, pki = self.directory, self.programs, self.authority
        admin = pki.pair("admin", "admin", group="system:masters")
        user = {"client-certificate": str(admin[0]), "client-key": str(admin[1])}
        pki.kubeconfig(self.kubeconfig, self.server, user)
        names = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost")
        server = pki.pair(
            "apiserver", "kube-apiserver", addresses=(self.address, self.service_address, "127.0.0.1", *names)
        )
        node = pki.pair("kubelet", f"system:node:{NODE}", group="system:nodes", addresses=(self.address,))
        pki.kubeconfig(
            home / "kubelet.conf", self.server, {"client-certificate": str(node[0]), "client-key": str(node[1])}
        )
        accounts = pki.key_pair("accounts")
        self._containerd = home / "containerd"
        for name in ("containerd", "cni", "cni-bin", "kubelet", "etcd"):
            (home / name).mkdir()
        self._write_network()
        self._write_containerd()
        self._write_kubelet()
        apiserver = {
            "etcd-servers": "http://127.0.0.1:2379",
            "advertise-address": self.address,
            "bind-address": "0.0.0.0",
            "secure-port": "6443",
            "service-cluster-ip-range": self.services,
            "tls-cert-file": server[0],
            "tls-private-key-file": server[1],
            "client-ca-file": pki.certificate,
            "kubelet-certificate-authority": pki.certificate,
            "kubelet-client-certificate": admin[0],
            "kubelet-client-key": admin[1],
            "kubelet-preferred-address-types": "InternalIP",
            "service-account-issuer": "https://kubernetes.default.svc",
            "service-account-key-file": accounts[1],
            "service-account-signing-key-file": accounts[0],
            "authorization-mode": "Node,RBAC",
            "max-requests-inflight": "800",
            "max-mutating-requests-inflight": "400",
        }
        controllers = {
            "kubeconfig": self.kubeconfig,
            "service-account-private-key-file": accounts[0],
            "root-ca-file": pki.certificate,
            "use-service-account-credentials": "true",
            "leader-elect": "false",
            "kube-api-qps": "500",
            "kube-api-burst": "1000",
        }
        if not self._has_node:
            # Nodes that exist only in the API send no sign of life.
            controllers["node-monitor-grace-period"] = "24h"
        scheduler = {
            "kubeconfig": self.kubeconfig,
            "leader-elect": "false",
            "kube-api-qps": "500",
            "kube-api-burst": "1000",
        }
        etcd = {
            "data-dir": "/run/etcd",
            "listen-client-urls": "http://127.0.0.1:2379",
            "advertise-client-urls": "http://127.0.0.1:2379",
            "listen-peer-urls": "http://127.0.0.1:2380",
            "quota-backend-bytes": str(4 * 1024**3),
        }
        return {
            "etcd": ["etcd", *_flags(etcd)],
            "kube-apiserver": [bin / "kube-apiserver", *_flags(apiserver)],
            "kube-controller-manager": [bin / "kube-controller-manager", *_flags(controllers)],
            "kube-scheduler": [bin / "kube-scheduler", *_flags(scheduler)],
            "containerd": ["containerd", "--config", self._containerd / "config.toml"],
            "kubelet": [
                bin / "kubelet",
                *_flags(
                    {
                        "config": home / "kubelet.yaml",
                        "kubeconfig": home / "kubelet.conf",
                        "root-dir": home / "kubelet",
                        "hostname-override": NODE,
                        "node-ip": self.address,
                    }
                ),
            ],
        }

    def _write_network(self) -> None:
        bin = self.directory / "cni-bin"
        for program in Path("/usr/lib/cni").iterdir():
            (bin / program.name).symlink_to(program)
        (bin / "policy").symlink_to(Path(__file__).with_name("policy-plugin.sh"))
        kubectl = f'"{self.programs}/kubectl" --kubeconfig "{self.kubeconfig}"'
        (bin / "kubectl.sh").write_text(f'kubectl() {{ {kubectl} "$@"; }}\n')
        bridge = {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            "ipam": {
                "type": "host-local",
                "ranges": [[{"subnet": self.pods}]],
                "routes": [{"dst": "0.0.0.0/0"}],
                "dataDir": "/run/cni",
            },
        }
        conf = {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge, {"type": "policy"}]}
        (self.directory / "cni/10-pods.conflist").write_text(json.dumps(conf))

    def _write_containerd(self) -> None:
        home = self._containerd
        (home / "config.toml").write_text(
            f'version = 2\nroot = "{home}/root"\nstate = "/run/containerd"\n[grpc]\naddress = "{home}/sock"\n'
            '[plugins."io.containerd.grpc.v1.cri"]\n'
            f'sandbox_image = "{images.PAUSE}"\nrestrict_oom_score_adj = true\n'
            '[plugins."io.containerd.grpc.v1.cri".cni]\n'
            f'bin_dir = "{self.directory}/cni-bin"\nconf_dir = "{self.directory}/cni"\n'
        )

    def _write_kubelet(self) -> None:
        none_left = {
            "memory.available": "1Mi",
            "nodefs.available": "1Mi",
            "nodefs.inodesFree": "1",
            "imagefs.available": "1Mi",
        }
        (self.directory / "kubelet.yaml").write_text(
            yaml.safe_dump(
                {
                    "kind": "KubeletConfiguration",
                    "apiVersion": "kubelet.config.k8s.io/v1beta1",
                    "failCgroupV1": False,
                    "cgroupDriver": "cgroupfs",
                    "cgroupRoot": self._cgroup,
                    "failSwapOn": False,
                    "containerRuntimeEndpoint": f"unix://{self._containerd}/sock",
                    "authentication": {
                        "anonymous": {"enabled": False},
                        "webhook": {"enabled": False},
                        "x509": {"clientCAFile": str(self.authority.certificate)},
                    },
                    "authorization": {"mode": "AlwaysAllow"},
                    "tlsCertFile": str(self.authority.directory / "kubelet.crt"),
                    "tlsPrivateKeyFile": str(self.authority.directory / "kubelet.key"),
                    "evictionHard": none_left,
                    "imageMinimumGCAge": "24h",
                    "resolvConf": "",
                    "maxPods": 200,
                    "enforceNodeAllocatable": ["pods"],
                    "syncFrequency": "10s",
                    "kubeAPIQPS": 200,
                    "kubeAPIBurst": 400,
                    "registryPullQPS": 0,
                }
            )
        )


@contextlib.contextmanager
def cluster(directory: Path, *, node: bool = True) -> Iterator[Cluster]:
    """A cluster with the images of `images.py`; without a `node` only its API and controllers."""
    if not build.is_built():
        raise Missing("Kubernetes is not built: `make kubernetes` builds it")
    engines.need("etcd", "containerd", "ctr", "runc", "iptables", "ip", "nsenter", "openssl", "setpriv", "unshare")
    if not Path("/usr/lib/cni/bridge").exists():
        raise Missing("no CNI plugins: `make parts` installs containernetworking-plugins on Debian")
    with contextlib.ExitStack() as stack:
        cgroup = stack.enter_context(engines.cgroup_parent())
        first = stack.enter_context(_namespaces(directory))
        subnet = stack.enter_context(_cable(first))
        if node:
            _make_cgroups(cgroup)
        made = Cluster(directory, subnet, first, cgroup, node)
        _prepare_namespaces(made)
        programs = ["etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"]
        if node:
            programs += ["containerd", "kubelet"]
        stack.callback(_end, made)
        for program in programs:
            if program == "kubelet":
                made.await_containerd()
            made.start(program)
        if node:
            images.load_all(made)
            made.await_ready()
        yield made


def _end(made: Cluster) -> None:
    """Remove pods and their cgroups while the kubelet and containerd can; the rest ends with the namespaces."""
    if made.is_running("kubelet") and made.is_running("kube-apiserver"):
        with contextlib.suppress(Missing, subprocess.TimeoutExpired):
            made.kubectl(
                "delete", "pods", "--all", "--all-namespaces", "--grace-period=0", "--force", "--wait=false"
            )
    if made.is_running("kubelet"):
        made.kill("kubelet")
    if made.is_running("containerd"):
        sock = str(made.directory / "containerd/sock")
        with contextlib.suppress(Missing, subprocess.TimeoutExpired):
            tasks = made.inside("ctr", "--address", sock, "--namespace", "k8s.io", "tasks", "ls", "--quiet").split()
            for task in tasks:
                with contextlib.suppress(Missing):
                    made.inside("ctr", "--address", sock, "--namespace", "k8s.io", "tasks", "rm", "--force", task)
    for name in list(made._running):
        made.kill(name)


@contextlib.contextmanager
def _namespaces(directory: Path) -> Iterator[int]:
    """The pid of the first process of new namespaces."""
    command = [
        *("setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--propagation", "private", "--net", "--pid"),
        *("--fork", "--kill-child", "--mount-proc", sys.executable, "-ISc", _FIRST),
    ]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise Missing("namespaces cannot be made here: run as root")
        yield _children(process.pid)[0]
    finally:
        process.kill()
        process.wait(60)
        if process.stdout is not None:
            process.stdout.close()
        for line in Path("/proc/mounts").read_text().splitlines():
            if line.split()[1].startswith(f"{directory}/"):
                subprocess.run(["umount", "--lazy", line.split()[1]], check=False)


@contextlib.contextmanager
def _cable(first: int) -> Iterator[int]:
    """A pair of network devices, one end here and one in the namespace; gives the number of its subnet."""
    for subnet in range(1, 250):
        name = f"hfk{subnet}"
        if (
            subprocess.run(
                ["ip", "link", "add", name, "type", "veth", "peer", "name", f"{name}n"], capture_output=True
            ).returncode
            == 0
        ):
            break
    else:
        raise Missing("no network devices can be made here")
    try:
        engines.run(["ip", "link", "set", f"{name}n", "netns", str(first)])
        engines.run(["ip", "addr", "add", f"10.211.{subnet}.1/30", "dev", name])
        engines.run(["ip", "link", "set", name, "up"])
        yield subnet
    finally:
        subprocess.run(["ip", "link", "del", name], capture_output=True)


def _prepare_namespaces(made: Cluster) -> None:
    device = f"hfk{made.address.split('.')[2]}n"
    made.inside(
        "sh",
        "-ec",
        # Programs of the node keep their state below /run and /var/log: none of this machine's is seen or changed.
        "mount -t tmpfs tmpfs /run; mount -t tmpfs tmpfs /var/log; mkdir /run/lock; "
        f"ip link set lo up; ip addr add {made.address}/30 dev {device}; ip link set {device} up; "
        # Pods reach the API by the address of its service, which kube-proxy would serve.
        f"ip addr add {made.service_address}/32 dev lo; "
        f"iptables -t nat -A PREROUTING -d {made.service_address} -p tcp --dport 443 -j REDIRECT --to-ports 6443; "
        f"iptables -t nat -A OUTPUT -d {made.service_address} -p tcp --dport 443 -j REDIRECT --to-ports 6443; "
        "echo 1 > /proc/sys/net/ipv4/ip_forward; "
        f"for s in {' '.join(_SYSCTLS)}; do [ -e /proc/sys/$s ] || continue; "
        "f=/run/sysctl-$(basename $s); cat /proc/sys/$s > $f; mount --bind $f /proc/sys/$s; done",
    )


def _make_cgroups(name: str) -> None:
    """The kubelet expects its parent cgroup in every hierarchy."""
    for base in Path("/sys/fs/cgroup").iterdir():
        if base.is_dir() and not base.is_symlink():
            path = base / name.lstrip("/")
            path.mkdir(exist_ok=True)
            if base.name == "cpuset":
                for file in ("cpuset.cpus", "cpuset.mems"):
                    (path / file).write_text((base / file).read_text())


def _flags(options: Mapping[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in options.items()]


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def _children(pid: int) -> Sequence[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
