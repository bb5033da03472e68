"""`harbor run` on Docker and Podman: an image that the task names, and one that its Dockerfile makes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from suite_oracle import harbor, results, write_task

from tests.support.engines import ContainerEngine, Missing, debian_root, docker_engine, podman_engine

ENGINES = {"docker": docker_engine, "podman": podman_engine}


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ContainerEngine]:
    try:
        with ENGINES[request.param]() as engine:
            engine.image(debian_root(tmp_path_factory.mktemp("root")), "holdfast-test-harbor")
            yield engine
    except Missing as missing:
        pytest.skip(str(missing))


def test_images_of_tasks(engine: ContainerEngine, tmp_path: Path) -> None:
    test = 'test "$(cat /workspace/out)" = solved && test "$(cat /etc/made-by 2>/dev/null)" = "$FROM"'
    named = '[environment]\ndocker_image = "holdfast-test-harbor"\nnetwork_mode = "no-network"\n'
    built = '[environment]\nnetwork_mode = "no-network"\n[environment.env]\nFROM = "a Dockerfile"\n'
    write_task(tmp_path / "dataset" / "named", "echo solved > out", test, named)
    write_task(tmp_path / "dataset" / "built", "echo solved > out", test, built)
    dockerfile = "FROM holdfast-test-harbor\nCOPY made-by /etc/made-by\nWORKDIR /workspace\n"
    (tmp_path / "dataset/built/environment/Dockerfile").write_text(dockerfile)
    (tmp_path / "dataset/built/environment/made-by").write_text("a Dockerfile")
    options = ("--ek", f"engine={engine.program}")
    done = harbor(
        *("run", "-p", "dataset", "-a", "oracle", "-e", "holdfast.integrations.harbor:Environment", *options),
        *("-o", "jobs", "--yes"),
        cwd=tmp_path,
        alone=False,
    )

    rewards = {name: result["verifier_result"] for name, result in results(tmp_path / "jobs").items()}
    assert rewards == {name: {"rewards": {"reward": 1.0}} for name in ("named", "built")}, done.stdout + done.stderr
