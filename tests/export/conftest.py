from __future__ import annotations

import pytest
import torch

from tests.support.exports import Export, export_small


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Several threads wait for each other awake: with them, products of tiny matrices take ten times as long."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def small_export(tmp_path_factory: pytest.TempPathFactory) -> Export:
    """An export of a small checkpoint, for tests that change nothing of it."""
    return export_small(tmp_path_factory.mktemp("export"))
