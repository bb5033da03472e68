"""How bundles are made and kept: the same bytes each time, from the cache the second time, and what is in them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import marshal
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import VERBS
from holdfast.errors import InvalidParams, PermissionRefused, SandboxError
from holdfast.launch import self_exec
from holdfast.sandboxes.install import bundle as bundle_module, bundle_tree, elf
from holdfast.sandboxes.install.bundle import Bundle, make_package, pack, package, read_bundle
from holdfast.sandboxes.install.bundle_tree import TreeFile, loaded_modules, our_modules, package_files
from holdfast.sandboxes.install.unpacking import unpacked
from tests.support.parts import require

SOURCE = Path(bundle_module.__file__).parents[3]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "holdfast" / "bundles"


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of one file, where only the keeping is tested."""
    monkeypatch.setattr(bundle_module, "package_files", lambda **_: {"a/file": TreeFile(b"content")})


def test_another_process_makes_the_same_bytes(bundle: Bundle, tmp_path: Path) -> None:
    code = "from holdfast.sandboxes.install.bundle import make_bundle; print(make_bundle().sha256)"
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "7",
        "PYTHONPATH": str(SOURCE),
        "XDG_CACHE_HOME": str(tmp_path / "other"),
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == bundle.sha256


def test_a_compiled_module_has_a_name_once_and_refers_to_it(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text("def first():\n    return some_name\n\n\ndef second():\n    return some_name + 1\n")
    compiled = bundle_tree._compiled("module", str(source))
    assert compiled.count(b"some_name") == 1
    found: dict[str, Any] = {"some_name": 1}
    exec(marshal.loads(compiled[16:]), found)
    assert (found["first"](), found["second"]()) == (1, 2)


def test_a_bundle_is_what_it_says(bundle: Bundle) -> None:
    assert hashlib.sha256(bundle.path.read_bytes()).hexdigest() == bundle.sha256
    assert (bundle.path.name, bundle.path.stat().st_size) == (f"{bundle.sha256}.tar.gz", bundle.size)
    assert bundle.size < 15_000_000
    assert read_bundle(bundle.path) == bundle
    # Nothing of it is for people, for hosts or for tests; nothing of it is a source.
    with tarfile.open(bundle.path) as tar:
        found = tar.getnames()
    others = (
        "client/sandbox",
        "client/process",
        "client/dial",
        "holdfast/sandboxes",
        "holdfast/testing",
        "typer",
        "rich",
        "libssl",
        "libcrypto",
    )
    assert [name for name in found if name.endswith(".py") or any(other in name for other in others)] == []


async def test_it_is_unpacked_by_a_python_whose_tar_has_no_filters(
    little: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    extract = tarfile.TarFile.extractall
    filtered: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    monkeypatch.setattr(tarfile.TarFile, "extractall", lambda tar, path: extract(tar, path, **filtered))
    async with unpacked(make_package(msgspec=False)) as tree:
        assert (tree / "a/file").read_bytes() == b"content"


async def test_a_tree_that_is_used_outlives_another_bundle(little: None) -> None:
    async with unpacked(make_package(msgspec=False)) as used:
        async with unpacked(make_package(msgspec=True)) as other:
            assert used != other
        assert (used / "a/file").read_bytes() == b"content"
    async with unpacked(make_package(msgspec=True)) as other:
        assert [entry.name for entry in used.parent.iterdir()] == [other.name]


async def test_a_tree_that_another_process_removed_before_its_lock_is_unpacked_again(
    little: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    make = tempfile.mkdtemp

    def mkdtemp(**options: Any) -> str:
        made.append(make(**options))
        if len(made) == 1:
            os.rmdir(made[0])
        return made[-1]

    package = make_package(msgspec=False)
    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    async with unpacked(package) as tree:
        assert (tree / "a/file").read_bytes() == b"content"
    assert len(made) == 2


def test_h11_is_in_it_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("h11", reason="h11 is not installed (extra `bridge`)")
    assert {"h11", "h11._connection"} <= set(loaded_modules())
    assert "h11/_connection.py" in package_files(msgspec=False)
    monkeypatch.setattr(bundle_tree, "inputs_of_h11", list)
    assert [name for name in loaded_modules() if name.partition(".")[0] == "h11"] == []
    assert [name for name in package_files(msgspec=False) if name.startswith("h11")] == []


def test_the_tar_is_root_s_and_without_times() -> None:
    with tarfile.open(make_package(msgspec=False).path) as tar:
        members = tar.getmembers()
    assert members[0].name == "MANIFEST.json"
    assert {(each.uid, each.gid, each.mtime) for each in members} == {(0, 0, 0)}
    assert {each.mode for each in members} <= {0o644, 0o755}
    names = [each.name for each in members[1:]]
    assert names == sorted(names)


def test_what_is_packed_is_the_in_sandbox_part() -> None:
    ours = set(our_modules())
    assert {f"holdfast.cli.verbs.{verb.module}" for verb in VERBS.values() if verb.plain} <= ours
    assert {
        "holdfast.runtime.durability.keeper",
        "holdfast.runtime.process.launcher",
        "holdfast.transport.websocket",
    } <= ours
    assert [name for name in ours if name.startswith(("holdfast.sandboxes", "holdfast.testing"))] == []
    # The modules that a program inside needs in order to call the host.
    assert {name.removeprefix("holdfast.client.") for name in ours if name.startswith("holdfast.client.")} == {
        "connection",
        "connection.channel_connection",
        "connection.clean_up",
        "connection.connection",
        "connection.subscription",
        "host_call",
    }
    assert "holdfast.cli.support.typed_verb" not in ours


@pytest.mark.usefixtures("little")
def test_the_second_use_makes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first = make_package(msgspec=False)
    monkeypatch.setattr(bundle_module, "package_files", lambda **_: pytest.fail("made again"))
    assert make_package(msgspec=False) == first


@pytest.mark.usefixtures("little")
@pytest.mark.parametrize("damage", ["torn", "changed", "gone", "index"])
def test_a_damaged_cache_is_made_again(damage: str, cache: Path) -> None:
    first = make_package(msgspec=False)
    content = first.path.read_bytes()
    match damage:
        case "torn":
            first.path.write_bytes(content[: len(content) // 2])
        case "changed":
            first.path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        case "gone":
            first.path.unlink()
        case "index":
            for index in cache.glob("*.json"):
                index.write_text('{"sha256": ')
    assert make_package(msgspec=False) == first
    assert first.path.read_bytes() == content


@pytest.mark.usefixtures("little")
def test_old_ones_are_removed_and_those_used_last_stay(cache: Path) -> None:
    cache.mkdir(parents=True, mode=0o700)
    for age in range(10):
        old = cache / f"{age:064}.tar.gz"
        old.write_bytes(b"old")
        os.utime(old, ns=(10**18 - age, 10**18 - age))
        (cache / f"{age}.json").write_text(json.dumps({"sha256": f"{age:064}"}))
    (cache / ".unfinished").write_bytes(b"")
    made = make_package(msgspec=False)
    tars = {path.name for path in cache.glob("*.tar.gz")}
    assert tars == {made.path.name, *(f"{age:064}.tar.gz" for age in range(3))}
    assert len(list(cache.glob("*.json"))) == 4
    assert not (cache / ".unfinished").exists()


@pytest.mark.usefixtures("little")
def test_a_cache_that_others_may_write_is_refused(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.raises(PermissionRefused, match="other users may write to this cache"):
        make_package(msgspec=False)


@pytest.mark.usefixtures("little")
def test_a_cache_that_cannot_be_made_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(SandboxError, match="set XDG_CACHE_HOME"):
        make_package(msgspec=False)


async def test_another_machine_needs_a_bundle_from_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidParams, match=f"this machine is {os.uname().machine} and the sandbox is riscv64"):
        await bundle_module.bundle("riscv64")
    manifest = {"kind": "bundle", "holdfast": "0.1.0", "machine": "riscv64", "python": "3.11.2"}
    given = tmp_path / "given.tar.gz"
    given.write_bytes(pack({"MANIFEST.json": TreeFile(json.dumps(manifest).encode())}))
    found = await bundle_module.bundle("riscv64", path=given)
    assert (found.machine, found.path, found.kind) == ("riscv64", given, "bundle")
    with pytest.raises(InvalidParams, match="is for riscv64, and the sandbox is aarch64"):
        await bundle_module.bundle("arm64", path=given)


@pytest.mark.parametrize(
    "content", [b"", b"text", pack({"other": TreeFile(b"")}), pack({"MANIFEST.json": TreeFile(b"{}")})]
)
def test_a_file_that_is_no_bundle_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "given"
    path.write_bytes(content)
    with pytest.raises(InvalidParams, match="is not a bundle"):
        read_bundle(path)
    with pytest.raises(InvalidParams, match="cannot be read: No such file"):
        read_bundle(tmp_path / "missing")


def test_a_package_runs_on_a_python_that_has_nothing(tmp_path: Path) -> None:
    made = asyncio.run(package(msgspec=True))
    tree = tmp_path / "tree"
    tree.mkdir()
    subprocess.run(["tar", "-xzf", str(made.path), "-C", str(tree)], check=True)
    # `-S`: without the packages of this Python, as a fresh one.
    python, *rest = made.command(str(tree), sys.executable)
    request = b'{"id":1,"method":"initialize","params":{"clientName":"test"}}\n'
    done = subprocess.run(
        [python, "-S", *rest, "serve", "--listen", "stdio"],
        input=request,
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout)["id"] == 1


def test_the_verb_tells_what_it_made(tmp_path: Path) -> None:
    output = tmp_path / "out.tar.gz"
    argv = [sys.executable, "-m", "holdfast", "bundle", "--no-interpreter", "--json", "-o", str(output)]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
    reported = json.loads(done.stdout)
    assert reported["path"] == str(output)
    assert reported["sha256"] == hashlib.sha256(output.read_bytes()).hexdigest()


def test_the_parts_of_a_pod_bring_the_bundle_to_where_a_connection_searches_it(bundle: Bundle) -> None:
    argv = [sys.executable, "-m", "holdfast", "bundle", "--init-container", "registry.example/server:1"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "XDG_CACHE_HOME": str(bundle.path.parents[2])}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
    parts = json.loads(done.stdout)
    (copying,), (mount,) = parts["initContainers"], parts["volumeMounts"]
    assert copying["image"] == "registry.example/server:1"
    assert copying["command"][-1] == mount["mountPath"] == f"/{bundle.name}"
    refused = subprocess.run([*argv, "--no-interpreter"], env=environment, capture_output=True, text=True)
    assert refused.returncode == 1
    assert "not with --no-interpreter" in refused.stderr


def test_outside_a_bundle_we_start_ourselves_as_ever() -> None:
    assert self_exec.command() == [sys.executable]
    assert self_exec.holdfast() == [sys.executable, "-m", "holdfast"]
    assert not self_exec.is_injected()


def test_a_program_forgets_where_this_machine_has_its_libraries(tmp_path: Path) -> None:
    require("cc")
    for name, source in (
        ("part.c", "int part(void) { return 7; }"),
        ("main.c", "int part(void); int main(void) { return part(); }"),
    ):
        (tmp_path / name).write_text(source)
    here, there = tmp_path / "here", tmp_path / "there"
    for location in (here, there):
        location.mkdir()
    subprocess.run(["cc", "-shared", "-o", here / "libpart.so", tmp_path / "part.c"], check=True)
    (tmp_path / "part.c").write_text("int part(void) { return 8; }")
    subprocess.run(["cc", "-shared", "-o", there / "libpart.so", tmp_path / "part.c"], check=True)
    main = tmp_path / "main"
    paths = f"-Wl,--disable-new-dtags,-rpath,{here}"
    subprocess.run(["cc", "-o", main, tmp_path / "main.c", "-L", here, "-lpart", paths], check=True)
    loader = elf.loader_of(main.read_bytes(), "main")
    argv = [loader, "--library-path", str(there), str(main)]
    assert subprocess.run(argv, check=False).returncode == 7
    main.write_bytes(elf.relocatable(main.read_bytes(), "main"))
    assert subprocess.run(argv, check=False).returncode == 8


def test_elf_files_are_told_from_others() -> None:
    program = os.path.realpath(sys.executable)
    content = Path(program).read_bytes()
    loader = elf.loader_of(content, program)
    assert os.path.basename(loader).startswith("ld-")
    assert any(name.startswith("libc.") for name in elf.libraries(loader, program))
    assert elf.loader_of(elf.relocatable(content, program), program) == loader
    with pytest.raises(SandboxError, match="text is not a 64-bit"):
        elf.relocatable(b"#!/bin/sh\n", "text")
    with pytest.raises(SandboxError, match="--list /nowhere"):
        elf.libraries(loader, "/nowhere")
