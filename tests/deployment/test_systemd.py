"""deploy/holdfast.service under a real systemd, which is the first process of a container. `make deployment`.

The container is a private layer over this machine's root, without a network. The package is installed as the
comment at the top of the unit describes.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.parts import require

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.skipif(not os.environ.get("HOLDFAST_DEPLOYMENT"), reason="runs in `make deployment`: minutes"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: boots systemd in namespaces"),
]

#: Sessions run in a unit beside that of the service. Dynamic users of one name have one uid.
SANDBOX = """
[Service]
Type=exec
ExecStart=/opt/holdfast/bin/holdfast serve --listen unix:/run/sandbox/server.sock
Environment=HOME=/run/sandbox HOLDFAST_DIRECTORY=/run/sandbox
DynamicUser=yes
User=holdfast
RuntimeDirectory=sandbox
RuntimeDirectoryMode=0700
"""
CHECK = """
[Unit]
After=holdfast.service sandbox.service
Wants=holdfast.service sandbox.service
SuccessAction=exit-force
FailureAction=exit-force
[Service]
Type=oneshot
ExecStart=/bin/sh /checks/check.sh
StandardOutput=file:/checks/printed
StandardError=file:/checks/messages
TimeoutStartSec=300
"""
TARGET = """
[Unit]
Requires=basic.target check.service
After=basic.target
"""
SCRIPT = """
export PATH=/opt/holdfast/bin:$PATH
again() { until "$@"; do sleep 0.2; done; }
again sh -c 'journalctl --unit holdfast --output cat | grep -m 1 -o "hf_[A-Za-z0-9_-]*" > /tmp/token'
export HOLDFAST_SERVICE_TOKEN=$(cat /tmp/token)
ready() { again python3 -c 'import urllib.request as u; u.urlopen("http://127.0.0.1:7401/readyz")'; }
first() { systemctl show --property MainPID --value holdfast; }
ready
pid=$(first)
echo user $(ps -o user= -p $pid)
echo limits $(grep -E '^(CapEff|CapBnd|NoNewPrivs|Seccomp):' /proc/$pid/status | cut -f 2)
echo session $(holdfast session run 'test $(id -u) != 0 && echo ran')
systemctl reload holdfast && echo reloaded $(holdfast session run 'echo ran')
kill -KILL $pid
until [ "$(first)" != 0 ] && [ "$(first)" != $pid ]; do sleep 0.2; done
ready
echo restarted $(holdfast session run 'echo ran')
systemctl stop holdfast && echo stopped $(systemctl show --property Result --value holdfast)
echo state $(stat -c %a /var/lib/private/holdfast-service) $(stat -c '%U %a' /var/lib/holdfast)
journalctl --unit holdfast --no-pager >&2
"""
BOOT = """
set -e
mkdir -p /opt/holdfast && mount --bind {venv} /opt/holdfast
/usr/bin/python3 -m venv /opt/holdfast
set -- '{project}[service]'
[ ! -d {project}/wheels ] || set -- --no-index --find-links {project}/wheels 'holdfast[service]'
/opt/holdfast/bin/python -m pip install --quiet --disable-pip-version-check "$@"
mount -t tmpfs tmpfs {layer}
mkdir {layer}/upper {layer}/work {layer}/root
mount -t overlay -o lowerdir=/,upperdir={layer}/upper,workdir={layer}/work overlay {layer}/root
mkdir -p {layer}/root/etc/holdfast {layer}/root/checks
# As on a machine where root has made sandboxes.
mkdir -p -m 0711 {layer}/root/var/lib/holdfast/bwrap
rm -rf {layer}/root/var/log/journal {layer}/root/etc/machine-id
cp {units}/* {layer}/root/etc/systemd/system/
cat > {layer}/root/etc/holdfast/service.env <<end
HOLDFAST_SERVICE_SANDBOX=unix:/run/sandbox/server.sock
HOLDFAST_SERVICE_RULES=/etc/holdfast/rules.toml
end
echo 'workspaces = "/run/sandbox/workspaces"' > {layer}/root/etc/holdfast/rules.toml
exec systemd-nspawn --quiet --register=no --keep-unit --private-network --console=pipe --directory={layer}/root \\
    --bind-ro={venv}:/opt/holdfast --bind={checks}:/checks /lib/systemd/systemd --unit=check.target
"""


def test_the_unit_runs_sessions_and_survives_a_kill(tmp_path: Path) -> None:
    require("systemd-nspawn", "unshare")
    if not Path("/usr/bin/python3").exists():
        pytest.skip("no /usr/bin/python3: the environment of the unit is made with it")
    units, checks, venv, layer = (tmp_path / name for name in ("units", "checks", "venv", "layer"))
    for directory in (units, checks, venv, layer):
        directory.mkdir()
    for name, text in (("sandbox.service", SANDBOX), ("check.service", CHECK), ("check.target", TARGET)):
        (units / name).write_text(text)
    (units / "holdfast.service").write_text((ROOT / "deploy/holdfast.service").read_text())
    (checks / "check.sh").write_text(SCRIPT)
    boot = BOOT.format(venv=venv, project=ROOT, layer=layer, units=units, checks=checks)
    made = not os.path.exists("/opt/holdfast")
    try:
        done = subprocess.run(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", boot],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=900,
        )
    finally:
        if made:
            os.rmdir("/opt/holdfast")
    assert (checks / "printed").exists(), done.stderr
    printed = dict(line.split(" ", 1) for line in (checks / "printed").read_text().splitlines())
    assert printed == {
        "user": "holdfast",
        # No capability, none to be had, `no_new_privs`, a filter of system calls.
        "limits": "0000000000000000 0000000000000000 1 2",
        "session": "ran",
        "reloaded": "ran",
        "restarted": "ran",
        "stopped": "success",
        "state": "700 root 711",
    }, (checks / "messages").read_text()
