from __future__ import annotations

import pytest

from tests.support.exports import Export, export_small


@pytest.fixture(scope="session")
def small_export(tmp_path_factory: pytest.TempPathFactory) -> Export:
    """An export of a small checkpoint, for tests that change nothing of it."""
    return export_small(tmp_path_factory.mktemp("export"))
