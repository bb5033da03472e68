"""LangChain's tests of sandbox backends, unmodified, over a jail.

langchain-tests 1.1.9 tests the interface of deepagents 0.6: `write` refuses an existing file, and `glob` returns
relative paths (langchain-ai/langchain#40283). `suite_agent.py` tests these two by the contract of 0.7.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from langchain_tests.integration_tests import SandboxIntegrationTests

import holdfast.sync
from holdfast.integrations.deepagents import Backend


class TestStandard(SandboxIntegrationTests):
    @pytest.fixture(scope="class")
    def sandbox(self) -> Iterator[Backend]:
        # The suite runs `python`; Debian's package has only `python3`.
        links = "mkdir -p /root/bin && ln -s /usr/bin/python3 /root/bin/python"
        with holdfast.sync.create("bwrap", setup=[links], env={"PATH": "/root/bin:/usr/bin:/bin"}) as box:
            yield Backend(box)
