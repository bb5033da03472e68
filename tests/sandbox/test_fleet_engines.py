"""The engine suite over every engine, each a real one; and what is particular to one of them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import InvalidParams, SandboxError
from holdfast.fleet.engine import FLEET_FIELDS, make_engine
from holdfast.fleet.fleet import Fleet, create
from holdfast.fleet.template import Mount, Template
from holdfast.runtime.confine.resource_groups import hierarchies
from holdfast.testing import engine_suite
from holdfast.testing.engine_suite import Check
from tests.support.parts import require

#: Prints the share of one processor that a busy loop gets.
_SPIN = """
import time
began = time.monotonic()
while time.monotonic() - began < 1.5:
    pass
print(time.process_time() / (time.monotonic() - began))
"""
KINDS = ("local", "bwrap", "bwrap-root", "docker", "podman")
#: Podman takes the commands of Docker, and a second for each: `make test` runs the checks in which the two engines
#: differ, `make engines` all of them.
PODMAN_CHECKS = (
    engine_suite.a_sandbox_lives_from_create_to_remove,
    engine_suite.an_extension_moves_the_expiry,
    engine_suite.a_fork_has_the_files_and_not_the_processes,
    engine_suite.a_fork_has_the_files_of_one_moment,
    engine_suite.a_paused_sandbox_does_nothing,
)
CASES = [
    pytest.param(kind, check, id=f"{check.__name__}-{kind}")
    for kind in KINDS
    for check in engine_suite.CHECKS
    if kind != "podman" or check in PODMAN_CHECKS or "HOLDFAST_ALL_ENGINE_CHECKS" in os.environ
]


@pytest.fixture(autouse=True)
def fleet_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Directories of the jails of one test, apart from those of the machine; empty at the end."""
    directory = Path(tmp_path_factory.mktemp("f"))
    directory.chmod(0o711)
    monkeypatch.setenv("HOLDFAST_FLEET_DIRECTORY", str(directory))
    yield directory
    left = [path for kind in ("bwrap", "local") for path in directory.glob(f"{kind}/*")]
    assert left == []


def subject(kind: str, request: pytest.FixtureRequest) -> tuple[str, Template]:
    """The name of an engine, and a template that it honours."""
    if kind == "local":
        return "local", Template()
    if kind.startswith("bwrap"):
        require("bwrap")
        return "bwrap", Template(root=request.getfixturevalue("busybox_root") if kind == "bwrap-root" else None)
    request.getfixturevalue(kind)
    return kind, Template(image="hf-busybox")


@pytest.mark.parametrize(("kind", "check"), CASES)
async def test_suite(kind: str, check: Check, request: pytest.FixtureRequest) -> None:
    engine, template = subject(kind, request)
    async with Fleet(engine) as fleet:
        await engine_suite.run_check(check, fleet, template)


# --- what an engine cannot honour ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "fields", "words"),
    [
        ("local", {"image": "debian:12"}, "engine local: image"),
        ("local", {"memory": "1GiB"}, "engine local: memory"),
        ("local", {"network": "none"}, "engine local: network"),
        ("local", {"mounts": ["/etc:/e"]}, "engine local: mounts"),
        ("bwrap", {"root": "/no/such/root"}, "engine bwrap: root"),
        ("bwrap", {"image": "/no/such/image.tar"}, "engine bwrap: image"),
        ("bwrap", {"mounts": ["/no/such/path:/x"]}, "engine bwrap: mounts"),
        ("bwrap", {"mounts": ["/etc:/usr/no/such"]}, "engine bwrap: mounts: /usr/no/such"),
        ("bwrap", {"workdir": "/usr/no/such"}, "engine bwrap: workdir: /usr/no/such"),
        ("bwrap", {"mounts": ["/etc:/e"], "workdir": "/e/no/such"}, "engine bwrap: workdir: /e/no/such"),
        ("docker", {"root": "/"}, "engine docker: root"),
        ("docker", {}, "engine docker: image"),
        ("podman", {"image": "x", "options": {"pull": "perhaps"}}, "engine podman: options: pull"),
    ],
)
async def test_a_field_that_cannot_be_honoured_is_refused_by_its_name(
    engine: str, fields: dict[str, object], words: str
) -> None:
    if engine == "bwrap":
        require("bwrap")
    with pytest.raises(InvalidParams, match=words):
        await Fleet(engine).create(Template(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("user", ["hf-nobody", "root:hf-nobody"])
@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes jails with several users")
async def test_a_user_that_the_root_directory_does_not_have_is_refused(user: str, busybox_root: Path) -> None:
    require("bwrap")
    for root in (None, busybox_root):
        with pytest.raises(InvalidParams, match="engine bwrap: user: hf-nobody"):
            await Fleet("bwrap").create(user=user, root=root)


#: A value for every field that an engine may lack.
LACKED: dict[str, object] = {
    "image": "x",
    "root": "/",
    "cpus": 1,
    "memory": "1GiB",
    "disk": "1GiB",
    "processes": 9,
    "network": "none",
    "user": "nobody",
    "mounts": ["/etc:/e"],
    "options": {"hf-no-such-option": True},
}


@pytest.mark.parametrize("name", ["bwrap", "docker", "podman", "local"])
async def test_every_field_that_an_engine_lacks_is_refused_by_its_name(name: str) -> None:
    engine = make_engine(name)
    usual = {"image": "x"} if "image" in engine.fields and name != "bwrap" else {}
    lacked = LACKED.keys() - engine.fields
    if name == "local":
        lacked.add("network")  # it has "host" alone
    assert set(Template.__struct_fields__) - FLEET_FIELDS <= LACKED.keys()
    for field in lacked:
        given = {**usual, field: LACKED[field]}
        if field == "root":
            given.pop("image", None)
        with pytest.raises(InvalidParams, match=f"engine {name}: {field}: "):
            await engine.check(Template(**given))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
async def test_every_other_field_is_visible_inside(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Limits and the network have tests of their own, which run into them."""
    engine, template = subject(kind, request)
    shared = tmp_path / "with, comma"
    shared.mkdir(mode=0o755)
    (shared / "data").write_text("from the host")
    os.chmod(tmp_path, 0o755)
    # Neither exists: the first is made by the engine for root, the second with the file for the user.
    workdir, files = (f"{tmp_path if engine == 'local' else '/tmp'}/{name}" for name in ("work/deep", "files"))
    fields: dict[str, Any] = {
        "env": {"VALUE": "two\nlines, a = b"},
        "workdir": workdir,
        "files": {f"{files}/file": "text"},
        "setup": [f"cat {files}/file > {files}/copy", ["sh", "-c", f'printf %s "$0" >> {files}/copy', "; more"]],
        "labels": {"task": "17, a = b"},
        "lifetime": 600,
        "idle": 500,
        "idle_while_running": True,
    }
    if engine != "local":
        fields |= {"mounts": [Mount(str(shared), "/srv/with, comma")]}
    if engine != "local" and os.geteuid() == 0:
        fields |= {"user": "nobody:nogroup"}
    async with Fleet(engine) as fleet, fleet.block(template, **fields) as box:
        shown = await box.exec(["sh", "-c", f'pwd; cat {files}/copy; echo; echo "$VALUE"; id -un; id -gn'])
        user = ["nobody", "nogroup"] if "user" in fields else shown.stdout.splitlines()[-2:]
        assert shown.stdout.splitlines() == [workdir, "text; more", "two", "lines, a = b", *user], shown
        if "mounts" in fields:
            assert await box.read_text("/srv/with, comma/data") == "from the host"
            assert not (await box.exec(["touch", "/srv/with, comma/more"])).success
        (ref,) = await fleet.list(labels={"task": "17, a = b"})
        assert ref.expires_at is not None
        assert abs(ref.expires_at - ref.created_at - 600) < 1
        assert (ref.record.template.idle, ref.record.template.idle_while_running) == (500.0, True)


# --- jails --------------------------------------------------------------------------------------------------------


async def test_a_jail_shows_the_system_and_hides_what_others_may_not_read() -> None:
    require("bwrap")
    async with create("bwrap") as box:
        shown = await box.exec(["sh", "-c", "id -u; pwd; ls -A ~; touch ~/f /tmp/f && echo written; touch /usr/f"])
        assert shown.stdout == "0\n/root\nwritten\n"
        assert "Read-only" in shown.stderr
        # A layer of its own over /etc, in which no account has a password; the host's files stay as they are.
        hashes = await box.exec(["sh", "-c", "cut -d: -f2 /etc/shadow | sort -u"])
        assert hashes.stdout in ("*\n", "")
        await box.exec(["sh", "-c", "echo planted > /etc/planted-by-a-jail"])
        assert "planted-by-a-jail" not in os.listdir("/etc")
        assert not (await box.exec(["unshare", "--user", "true"])).success
        # Neither the host's files nor the socket that the server listens on outside.
        assert (await box.exec(["sh", "-c", "ls /work /var/lib /proc/1/root/work 2>/dev/null"])).stdout == ""
        assert (await box.exec(["env"])).stdout.count("HOLDFAST") == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="limits of jails need a cgroup that can be written: run as root")
async def test_the_limits_of_a_jail_hold() -> None:
    require("bwrap")
    if not {"memory", "pids", "cpu"} <= hierarchies().keys():
        pytest.skip("no cgroup controllers memory, pids and cpu here")
    async with create("bwrap", memory="128MiB", processes=40, cpus=0.5, disk="16MiB") as box:
        big = await box.exec(["python3", "-c", "bytearray(256 * 2**20)"])
        assert (big.exit_code, big.oom) == (137, True), big
        full = await box.exec(
            ["sh", "-c", "head -c 32000000 /dev/zero > /root/big; wc -c < /root/big; rm /root/big"]
        )
        assert "No space left" in full.stderr
        assert int(full.stdout) <= 16 * 2**20
        # A share of the time that has passed: a loaded machine makes it smaller, never larger.
        used = await box.exec(["python3", "-c", _SPIN])
        assert float(used.stdout) < 0.75, used
        # Last: the shell ends when it cannot fork, and its children hold their places for a while.
        forks = await box.exec(["sh", "-c", "for i in $(seq 60); do sleep 5 & done; wait"], timeout=30)
        assert "fork" in forks.stderr.lower()


async def test_a_mount_is_read_only_unless_it_is_writable(tmp_path: Path) -> None:
    require("bwrap")
    for name in ("in", "out"):
        (tmp_path / name).mkdir()
    (tmp_path / "in" / "data").write_text("from the host")
    mounts = [f"{tmp_path}/in:/data", f"{tmp_path}/out:/results:rw"]
    async with create("bwrap", mounts=mounts) as box:
        assert await box.read_text("/data/data") == "from the host"
        assert not (await box.exec(["touch", "/data/more"])).success
        await box.write_file("/results/made", "inside")
    assert (tmp_path / "out" / "made").read_text() == "inside"
    assert (tmp_path / "out" / "made").stat().st_uid == os.geteuid()


async def test_a_jail_of_an_image_has_its_files_environment_and_user(
    tmp_path: Path, busybox_root: Path, request: pytest.FixtureRequest
) -> None:
    require("bwrap")
    docker = request.getfixturevalue("docker")
    (tmp_path / "Dockerfile").write_text("")
    name = docker("create", "hf-busybox", "true")
    docker("commit", "--change", "ENV COLOUR=blue", "--change", "WORKDIR /srv/app", name, "hf-configured")
    image = tmp_path / "image.tar"
    docker("save", "--output", image, "hf-configured")
    seen: list[float] = []

    def progress(text: str, share: float | None) -> None:
        if share is not None:
            seen.append(share)

    async with create("bwrap", image=image, progress=progress) as box:
        assert (
            await box.exec(["sh", "-c", "echo $COLOUR; pwd; echo x > /etc/changed"])
        ).stdout == "blue\n/srv/app\n"
    assert seen[-1] == 1.0
    async with create("bwrap", image=image) as box:
        assert not (await box.exec(["test", "-e", "/etc/changed"])).success


async def test_a_layer_does_not_lead_out_of_its_root(tmp_path: Path) -> None:
    require("bwrap")
    outside = tmp_path / "outside"
    outside.mkdir()
    image = _hostile_image(tmp_path, outside)
    async with create("bwrap", image=image) as box:
        shown = await box.exec(["/bin/busybox", "cat", "/etc/planted"])
        assert shown.stdout == "planted"
    assert list(outside.iterdir()) == []


def _hostile_image(directory: Path, outside: Path) -> Path:
    """An image whose second layer writes through a link to an absolute path, with `..`, and with a whiteout."""
    import io
    import json

    busybox = Path(require_busybox())

    def layer(*members: tuple[str, bytes | str, int]) -> bytes:
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as tar:
            for name, content, mode in members:
                info = tarfile.TarInfo(name)
                info.mode = mode
                if isinstance(content, str):
                    info.type, info.linkname = tarfile.SYMTYPE, content
                    tar.addfile(info)
                else:
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
        return stream.getvalue()

    first = layer(
        ("bin/busybox", busybox.read_bytes(), 0o755),
        ("etc/removed", b"old", 0o644),
        ("escape", str(outside), 0o777),
        ("root/.keep", b"", 0o600),
        ("tmp/.keep", b"", 0o600),
    )
    second = layer(
        ("escape/file", b"out", 0o644),
        ("../../../etc/planted", b"planted", 0o644),
        ("etc/.wh.removed", b"", 0o644),
    )
    path = directory / "hostile.tar"
    with tarfile.open(path, "w") as tar:
        manifest = json.dumps([{"Config": "config.json", "Layers": ["1/layer.tar", "2/layer.tar"]}]).encode()
        for name, content in (
            ("manifest.json", manifest),
            ("config.json", b"{}"),
            ("1/layer.tar", first),
            ("2/layer.tar", second),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def require_busybox() -> str:
    require("busybox")
    return subprocess.run(["sh", "-c", "command -v busybox"], capture_output=True, text=True).stdout.strip()


# --- containers ---------------------------------------------------------------------------------------------------


async def test_a_missing_image_is_named(docker: object) -> None:
    with pytest.raises(SandboxError, match="hf-no-such-image"):
        await Fleet("docker").create(image="hf-no-such-image", options={"pull": "never"})


@pytest.mark.parametrize("kind", ["docker", "podman"])
async def test_a_disk_limit_that_the_storage_driver_lacks_is_refused(
    kind: str, request: pytest.FixtureRequest
) -> None:
    engine, template = subject(kind, request)
    async with Fleet(engine) as fleet:
        with pytest.raises(InvalidParams, match=f"engine {kind}: disk: "):
            await fleet.create(template, disk="8MiB")
        assert await fleet.list() == []


async def test_the_limits_of_a_container_hold(docker: object) -> None:
    async with create("docker", image="hf-busybox", memory="128MiB", processes=40, cpus=0.5) as box:
        forks = await box.exec(["sh", "-c", "for i in $(seq 60); do sleep 5 & done; wait"], timeout=60)
        assert "fork" in forks.stderr.lower(), forks
        big = await box.exec(["sh", "-c", "head -c 300m /dev/zero | tail -c 290m | wc -c"])
        assert "290" not in big.stdout or big.returncode != 0, big
        killed = await box.exec(["awk", 'BEGIN { x = "0123456789"; for (i = 0; i < 26; i++) x = x x }'])
        assert (killed.exit_code, killed.oom) == (137, True), killed


async def test_a_container_out_of_memory_leaves_no_file_here(
    podman: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with create("podman", image="hf-busybox", memory="128MiB") as box:
        killed = await box.exec(["awk", 'BEGIN { x = "0123456789"; for (i = 0; i < 26; i++) x = x x }'])
        assert killed.oom, killed
    assert os.listdir(tmp_path) == []


async def test_labels_of_a_committed_container_do_not_make_a_sandbox(docker: object) -> None:
    fleet = Fleet("docker")
    ref = await fleet.create(image="hf-busybox")
    try:
        docker("commit", ref.id, "hf-committed")  # type: ignore[operator]
        stranger = docker("create", "hf-committed", "true")  # type: ignore[operator]
        assert {each.id for each in await fleet.list()} == {ref.id}
        await asyncio.gather(fleet.remove(ref.id), fleet.prune())
        assert docker("inspect", "-f", "{{.Id}}", stranger) == stranger  # type: ignore[operator]
        docker("rm", stranger)  # type: ignore[operator]
    finally:
        await fleet.remove(ref.id)


# --- the network --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bwrap-root", "docker"])
async def test_an_allow_list_admits_its_hosts_and_no_others(kind: str, request: pytest.FixtureRequest) -> None:
    """The proxy is on this machine, and the sandbox has no network: two servers of this test, one on the list."""
    engine, template = subject(kind, request)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello")
        writer.close()

    servers = [await asyncio.start_server(serve, "127.0.0.1", 0) for _ in range(2)]
    allowed, other = (f"127.0.0.1:{each.sockets[0].getsockname()[1]}" for each in servers)
    try:
        async with create(engine, template, network=[allowed]) as box:
            found = await box.exec(["wget", "-q", "-O-", f"http://{allowed}/"])
            assert found.stdout == "hello", found
            refused = await box.exec(["wget", "-O-", f"http://{other}/"])
            assert "403" in refused.stderr, refused
            without = await box.exec(["env", "-u", "http_proxy", "wget", "-q", "-O-", f"http://{allowed}/"])
            assert without.exit_code != 0
            async with await Fleet(engine).connect(box.ref.id) as second:  # a proxy of its own, on another port
                found = await second.exec(["wget", "-q", "-O-", f"http://{allowed}/"])
                assert found.stdout == "hello", found
    finally:
        for each in servers:
            each.close()
