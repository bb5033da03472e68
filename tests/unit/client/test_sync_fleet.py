"""The blocking facade of the fleet, over real servers of this machine."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import holdfast.sync
from holdfast.errors import InvalidRequest, SandboxGone


@pytest.fixture(autouse=True)
def fleet_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path_factory.mktemp("f")
    directory.chmod(0o711)
    monkeypatch.setenv("HOLDFAST_FLEET_DIRECTORY", str(directory))
    return directory


def test_a_sandbox_for_a_block(fleet_directory: Path) -> None:
    with holdfast.sync.create("local", setup=["exit 0"], labels={"task": "17"}) as box:
        assert box.exec(["echo", "hello"]).stdout == "hello\n"
        assert box.ref.labels == {"task": "17"}
        assert len(list(fleet_directory.glob("local/*"))) == 1
    assert list(fleet_directory.glob("local/*")) == []
    assert not [thread for thread in threading.enumerate() if thread.name == "holdfast-sync"]


def test_a_fleet_from_create_to_remove() -> None:
    with holdfast.sync.Fleet("local") as fleet:
        ref = fleet.create(holdfast.Template(lifetime=600), labels={"task": "17"})
        try:
            assert [each.id for each in fleet.list(labels={"task": "17"})] == [ref.id]
            assert ref.expires_at is not None
            assert fleet.extend(ref.id, 600).expires_at == ref.expires_at + 600
            box = fleet.connect(ref.id)
            assert box.ref.id == ref.id
            assert box.exec(["echo", "hello"]).stdout == "hello\n"
            activity = fleet.activity(ref)
            assert activity is not None
            assert activity.running == 0
            with fleet.connect(ref.id) as second:
                assert second.exec(["true"]).success
            with fleet.block() as other:
                assert {each.id for each in fleet.list()} == {ref.id, other.ref.id}
            with pytest.raises(holdfast.CallerError, match="engine local: fork"):
                fleet.fork(ref.id)
            assert fleet.prune() == []
        finally:
            fleet.remove(ref.id)
        with pytest.raises(SandboxGone):
            fleet.get(ref.id)
    fleet.close()
    with pytest.raises(InvalidRequest, match="closed"):
        box.exec(["true"])


def test_a_pool_serves_threads(fleet_directory: Path) -> None:
    with holdfast.sync.Pool("local", warm=1, max=2) as pool:
        pool.ready()
        assert pool.status.warm == 1
        seen: list[str] = []

        def work() -> None:
            with pool.take() as box:
                seen.append(box.exec(["echo", box.ref.id]).stdout.strip())

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(seen)) == 3
    pool.close()
    assert list(fleet_directory.glob("local/*")) == []
