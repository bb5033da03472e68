"""The model bridge into a jail without network, where holdfast runs from the bundle."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast.bridge import ModelRequest, sandbox_agent_bridge
from holdfast.sandboxes.bundle import Bundle

pytest.importorskip("h11", reason="the bundle has no h11 for the model proxy: install holdfast[bridge]")

#: Not that of a virtual environment, which is not in the jail.
PYTHON = os.path.realpath(sys.executable)
AGENT = """
import json, os, urllib.request
with open("/proc/net/dev") as file:
    print([line.split(":")[0].strip() for line in file if ":" in line])
body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]}
request = urllib.request.Request(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", json.dumps(body).encode())
print(urllib.request.urlopen(request, timeout=60).read().decode())
"""


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed")
async def test_an_agent_without_network_has_a_model(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(bundle.path.parents[2]))

    async def model(request: ModelRequest) -> str:
        return f"you said {request.messages[-1].text}"

    async with (
        holdfast.connect(f"bwrap:{tmp_path}", read_only=[sys.base_prefix]) as box,
        sandbox_agent_bridge(box, model) as bridge,
    ):
        assert bridge.url == "http://127.0.0.1:13131"
        result = await box.exec([PYTHON, "-c", AGENT], env=bridge.env, timeout=60)
        assert result.stderr == ""
        interfaces, answer = result.stdout.splitlines()
        assert interfaces == "['lo']"
        assert json.loads(answer)["content"] == [{"type": "text", "text": "you said hello"}]
