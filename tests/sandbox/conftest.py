"""What the tests of sandboxes share: the bundle, which takes seconds to make."""

from __future__ import annotations

import pytest

from holdfast.sandboxes.bundle import Bundle, make_bundle


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The bundle of this Python, in a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return make_bundle()
