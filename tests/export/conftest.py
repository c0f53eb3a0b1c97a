from __future__ import annotations

import pytest
import torch

from export.texts import corpus
from tests.support.exports import Export, export_small
from tests.support.lean_exports import few_probes, keep_optimized

WHOLE_PROBES = (
    "folder_settings_test",
    "folders_test",
    "test_a_bundle_answers_as_the_library_of_its_users",
    "test_a_fault_in_the_bundle_is_refused_by_the_text_that_shows_it",
    "test_a_near_tie_is_decided_by_rounding_and_no_fault",
)
"""Where it is tested what each text of `export/texts/probes.jsonl` tells; other tests export with some short ones."""


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Several threads wait for each other awake: with them, products of tiny matrices take ten times as long."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _graphs_optimized_once() -> None:
    keep_optimized()


@pytest.fixture(scope="session")
def small_export(tmp_path_factory: pytest.TempPathFactory) -> Export:
    """An export of a small checkpoint, for tests that change nothing of it."""
    return export_small(tmp_path_factory.mktemp("export"))


@pytest.fixture(autouse=True)
def short_proof(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has exports of this process compare few texts with the libraries."""
    if not {request.path.stem, request.node.originalname} & {*WHOLE_PROBES}:
        monkeypatch.setattr(corpus, "probes", few_probes)
