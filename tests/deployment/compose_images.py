"""Images for deploy/compose.yaml from this machine's packages, under the names that the file uses: no registry.

They have the entry points, variables and directories of the published images as far as the file uses them. Grafana
has no package in Debian.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from tests.support.engines import ContainerEngine, debian_root

POSTGRES: Final = "postgres:16-alpine"
PROMETHEUS: Final = "prom/prometheus:v3.1.0"
#: The start of the published image: a database of this name and user in an empty directory, then the server.
_START_POSTGRES: Final = """#!/bin/sh
set -e
cd /var/lib/postgresql/data
if [ ! -e PG_VERSION ]; then
    initdb --username "$POSTGRES_USER" --auth trust >/dev/null
    echo "host all all all scram-sha-256" >> pg_hba.conf
    pg_ctl --wait --options "-c listen_addresses='' -k /tmp" --log /tmp/log start >/dev/null
    psql --host /tmp --username "$POSTGRES_USER" --dbname postgres --quiet \\
        --command "ALTER USER \\"$POSTGRES_USER\\" PASSWORD '$POSTGRES_PASSWORD'" \\
        --command "CREATE DATABASE \\"$POSTGRES_DB\\""
    pg_ctl --wait stop >/dev/null
fi
exec postgres -c listen_addresses='*' -k /tmp -D .
"""


def make_images(docker: ContainerEngine, directory: Path) -> None:
    """Import both images."""
    _postgres(docker, directory / "postgres")
    _prometheus(docker, directory / "prometheus")


def _postgres(docker: ContainerEngine, root: Path) -> None:
    programs = sorted(Path("/usr/lib/postgresql").iterdir())[-1]
    debian_root(root, f"postgresql-{programs.name}", f"postgresql-client-{programs.name}")
    for directory in (f"/usr/share/postgresql/{programs.name}", "/usr/share/zoneinfo"):
        shutil.copytree(directory, f"{root}{directory}", symlinks=True, dirs_exist_ok=True)
    (root / "start").write_text(_START_POSTGRES)
    (root / "start").chmod(0o755)
    with (root / "etc/passwd").open("a") as users:
        users.write("postgres:x:70:70::/var/lib/postgresql:/bin/sh\n")
    data = root / "var/lib/postgresql/data"
    data.mkdir(parents=True, mode=0o700)
    data.chmod(0o700)
    shutil.chown(data, 70, 70)
    variables = f"ENV PATH={programs}/bin:/usr/bin:/bin PGDATA=/var/lib/postgresql/data PGHOST=/tmp"
    changes = ("USER 70:70", 'ENTRYPOINT ["/start"]', variables)
    _import(docker, root, POSTGRES, *changes)


def _prometheus(docker: ContainerEngine, root: Path) -> None:
    debian_root(root, "prometheus")
    for name in ("prometheus", "etc/prometheus"):
        (root / name).mkdir(parents=True, exist_ok=True)
    shutil.chown(root / "prometheus", 65534, 65534)
    command = '["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]'
    _import(docker, root, PROMETHEUS, "USER 65534", 'ENTRYPOINT ["/usr/bin/prometheus"]', f"CMD {command}")


def _import(docker: ContainerEngine, root: Path, name: str, *changes: str) -> None:
    archive = root.with_suffix(".tar")
    shutil.make_archive(str(root), "tar", root)
    options = [word for change in changes for word in ("--change", change)]
    docker("import", *options, archive, name)
    archive.unlink()
