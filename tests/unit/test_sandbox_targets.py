"""The command line of each kind of sandbox, and addresses that name none. Starts nothing."""

from __future__ import annotations

import json
import re
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ConnectionLost, InvalidParams, SandboxGone
from holdfast.sandboxes import place
from holdfast.sandboxes.bubblewrap import BwrapJail
from holdfast.sandboxes.containers import Container
from holdfast.sandboxes.kubernetes import Pod, PodStatus, read_status
from holdfast.sandboxes.registry import KINDS, AddressKind, target_at
from holdfast.sandboxes.ssh import SshHost
from holdfast.sandboxes.target import CommandSandbox, CommandTarget, SandboxTarget

DOCUMENT = Path(__file__).parents[2] / "docs" / "sandboxes.md"
HELLO = ["sh", "-c", "echo 'a  b'"]


@pytest.mark.parametrize(
    ("address", "options", "argv"),
    [
        ("docker:web", {}, ["docker", "exec", "--interactive", "web", *HELLO]),
        ("docker:web", {"user": "app"}, ["docker", "exec", "--interactive", "--user", "app", "web", *HELLO]),
        ("docker:web?user=app", {}, ["docker", "exec", "--interactive", "--user", "app", "web", *HELLO]),
        ("docker:web?user=app", {"user": "me"}, ["docker", "exec", "--interactive", "--user", "me", "web", *HELLO]),
        ("podman:web", {}, ["podman", "exec", "--interactive", "web", *HELLO]),
    ],
)
def test_containers(address: str, options: dict[str, Any], argv: list[str]) -> None:
    target = target_at(address, **options)
    assert isinstance(target, Container)
    assert (target.address, target.command(HELLO)) == (address.partition("?")[0], argv)


def test_options_in_an_address(tmp_path: Path) -> None:
    jail = target_at(f"bwrap:{tmp_path}/a%3Fb?network=no&read_only=/opt&read_only=/srv")
    assert isinstance(jail, BwrapJail)
    assert (jail.directory, jail.network, jail.read_only) == (f"{tmp_path}/a?b", False, ("/opt", "/srv"))
    host = target_at("ssh:build@host?port=2222")
    assert isinstance(host, SshHost)
    assert host.command(HELLO)[host.command(HELLO).index("-p") + 1] == "2222"


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("colour=red", "'colour' is none of bundle, directory, user"),
        ("arguments=--bind", "'arguments' is none of"),
        ("user=a&user=b", "user is given twice"),
        ("user", "NAME=VALUE"),
        ("network=yes", "network"),  # no option of containers
    ],
)
def test_options_that_an_address_cannot_have(query: str, named: str) -> None:
    with pytest.raises(InvalidParams, match=re.escape(named)):
        target_at(f"docker:web?{query}")


@pytest.mark.parametrize(
    ("address", "named"),
    [
        ("ssh:host?port=ssh", "port=ssh: invalid literal"),
        ("bwrap:/tmp?network=perhaps", "network=perhaps: yes or no"),
    ],
)
def test_values_that_an_option_cannot_have(address: str, named: str) -> None:
    with pytest.raises(InvalidParams, match=re.escape(named)):
        target_at(address)


@pytest.mark.parametrize(
    ("address", "end"),
    [
        ("ssh:build@host", ["-T", "--", "build@host"]),
        ("ssh:alias", ["-T", "--", "alias"]),
        ("ssh://build@host:2222", ["-T", "--", "build@host"]),
    ],
)
def test_ssh_quotes_each_word_for_the_shell_there(address: str, end: list[str]) -> None:
    target = target_at(address, options=["LogLevel=ERROR"])
    assert isinstance(target, SshHost)
    argv = target.command(HELLO)
    assert argv[-4:] == [*end, """sh -c 'echo '"'"'a  b'"'"''"""]
    assert ("-p" in argv) == ("2222" in address)
    assert argv[argv.index("LogLevel=ERROR") - 1] == "-o"
    assert "BatchMode=yes" in argv


def test_a_prefix() -> None:
    target = CommandSandbox(["nerdctl", "exec", "-i", "web"])
    assert target.address == "nerdctl exec -i web"
    assert target.command(HELLO) == ["nerdctl", "exec", "-i", "web", *HELLO]


@pytest.mark.parametrize("prefix", [[], "nerdctl exec -i web"])
def test_what_is_no_prefix(prefix: Any) -> None:
    with pytest.raises(InvalidParams, match="prefix"):
        CommandSandbox(prefix)


@pytest.mark.parametrize(
    "address", ["docker:", "docker:-it", "ssh:", "ssh:-oProxyCommand=touch", "ssh:a b", "bwrap:"]
)
def test_addresses_that_name_nothing(address: str) -> None:
    with pytest.raises(InvalidParams, match=address.partition(" ")[0].rstrip(":")):
        target_at(address)


@pytest.mark.parametrize(
    ("address", "option"), [("docker:web", "port"), ("ssh:host", "user"), ("bwrap:/tmp", "image")]
)
def test_an_option_of_another_kind(address: str, option: str) -> None:
    with pytest.raises(InvalidParams, match=f"{address}: .*{option}"):
        target_at(address, **{option: "x"})


def test_a_jail_has_one_path_on_both_sides() -> None:
    target = target_at("bwrap:/tmp", network=True, writable=["/srv"], env={"A": "b"})
    assert isinstance(target, BwrapJail)
    assert (target.directory, target.network, target.writable) == ("/tmp", True, ("/srv",))


@pytest.mark.parametrize("kind", [kind for kind in KINDS.values() if kind.target], ids=lambda kind: kind.scheme)
def test_the_row_of_a_kind_names_what_its_target_takes(kind: AddressKind) -> None:
    module, _, name = kind.target.partition(":")
    target = getattr(import_module(f"holdfast.sandboxes.{module}"), name)
    assert {*kind.options, *kind.own_defaults} <= {*signature(target).parameters}
    assert f"`{kind.form}`" in DOCUMENT.read_text()


def test_the_former_names_of_targets() -> None:
    assert (place.Place, place.CommandPlace) == (SandboxTarget, CommandTarget)


class Foreign(CommandTarget):
    """A kind from another package."""

    def command(self, argv: Any) -> list[str]:
        return ["enter", *argv]


def lost(code: int, words: str) -> ConnectionLost:
    return ConnectionLost(f"the command ended with exit code {code}: {words}", exit_code=code, words=words)


def test_a_channel_that_ends_otherwise_is_lost() -> None:
    error = Foreign("foreign:one").channel_ended(lost(1, "broken pipe"))
    assert isinstance(error, ConnectionLost)


def test_an_engine_that_says_gone_is_believed_at_once() -> None:
    target = Container("docker", "web")
    error = target.channel_ended(lost(1, "Error response from daemon: No such container: web"))
    assert isinstance(error, SandboxGone)
    assert error.details["final"] is True
    assert (
        str(error) == "docker:web: there is no such container: Error response from daemon: No such container: web"
    )


def pod_status(container: str | None, state: dict[str, Any], *, phase: str = "Running", **more: Any) -> PodStatus:
    """Of a pod with the containers `app` and `side` and the native sidecar `log`; the state is that of all."""
    names = ("app", "side")
    pod = {
        "metadata": {"uid": "u1", "annotations": more.pop("annotations", {})} | more.pop("metadata", {}),
        "spec": {
            "restartPolicy": more.pop("policy", "Never"),
            "containers": [{"name": name} for name in names],
            "initContainers": [{"name": "log", "restartPolicy": "Always"}],
        },
        "status": {
            "phase": phase,
            "containerStatuses": [{"name": name, "ready": name == "side", "state": state} for name in names],
            "initContainerStatuses": [{"name": "log", "ready": True, "state": state}],
        },
    }
    found = read_status(json.dumps(pod), container)
    assert found is not None
    return found


ENDED = {"terminated": {"exitCode": 3, "reason": "Error"}}


@pytest.mark.parametrize(
    ("container", "state", "more", "gone"),
    [
        ("app", {"running": {}}, {}, None),
        ("app", {"waiting": {"reason": "ContainerCreating"}}, {"phase": "Pending"}, None),
        ("app", {}, {"phase": "Pending"}, None),
        ("app", ENDED, {}, "the container has ended (Error, exit code 3) and is not restarted"),
        ("app", ENDED, {"policy": "Always"}, None),
        ("app", ENDED, {"policy": "OnFailure"}, None),
        ("app", {"terminated": {"exitCode": 0}}, {"policy": "OnFailure"}, "the container has ended (exit code 0)"),
        ("log", ENDED, {}, None),
        ("app", ENDED, {"phase": "Failed"}, "the pod has ended (Error, exit code 3)"),
        ("app", {"running": {}}, {"metadata": {"deletionTimestamp": "now"}}, None),
        ("app", ENDED, {"metadata": {"deletionTimestamp": "now"}, "policy": "Always"}, "the pod is being deleted"),
    ],
)
def test_what_a_pods_object_says_about_a_container(
    container: str, state: dict[str, Any], more: dict[str, Any], gone: str | None
) -> None:
    found = pod_status(container, state, **more).gone
    assert found is None if gone is None else found is not None and found.startswith(gone)


def test_which_container_of_a_pod_is_meant_if_none_is_named() -> None:
    assert not pod_status(None, {"running": {}}).ready
    annotations = {"kubectl.kubernetes.io/default-container": "side"}
    assert pod_status(None, {"running": {}}, annotations=annotations).ready


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"kind": "List"}', "Error from server"])
def test_what_is_no_pod(text: str) -> None:
    assert read_status(text, None) is None


@pytest.mark.parametrize("seconds", ["soon", "-1", "nan", "inf"])
def test_how_long_a_pod_is_waited_for(seconds: str) -> None:
    with pytest.raises(InvalidParams, match="wait_ready"):
        target_at(f"kubernetes:team/web?wait_ready={seconds}")


@pytest.mark.parametrize(
    ("words", "lacks"),
    [
        ('exec failed: unable to start container process: exec: "sh": executable file not found in $PATH', True),
        (
            'exec failed: unable to start container process: exec: "/x/y": stat /x/y: no such file or directory',
            True,
        ),
        ("command terminated with exit code 1", False),
        ("cat: /etc/x: No such file or directory", False),
    ],
)
def test_which_words_of_kubectl_mean_that_a_program_is_not_in_the_image(words: str, lacks: bool) -> None:
    assert Pod("team", "web").lacks_program(1, words) == lacks
