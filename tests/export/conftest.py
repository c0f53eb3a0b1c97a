from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from bertserve.export.checkpoint import unpickle, weights
from bertserve.export.checkpoint.layouts import megatron
from bertserve.export.errors import ExportError
from bertserve.export.texts import corpus
from tests.support.exports import Export, all_probes, all_texts, export_small, few_probes, few_texts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Several threads wait for each other awake: with them, products of tiny matrices take ten times as long."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def small_export(tmp_path_factory: pytest.TempPathFactory) -> Export:
    """An export of a small checkpoint, for tests that change nothing of it; proven with all texts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "probes", all_probes)
        return export_small(tmp_path_factory.mktemp("export"))


@pytest.fixture(scope="module", autouse=True)
def _short_proofs() -> Iterator[None]:
    """Has exports of this process compare few texts with the libraries, those of a file's fixtures too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "probes", few_probes)
        yield


@pytest.fixture
def few_texts_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has exports of a test compare few texts with PyTorch as well; such a bundle passes no `bertserve verify`."""
    monkeypatch.setattr(corpus, "read", few_texts)


@pytest.fixture
def whole_proof(few_texts_of_pytorch: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001  undone here
    """Has exports of a test compare all texts."""
    monkeypatch.setattr(corpus, "read", all_texts)
    monkeypatch.setattr(corpus, "probes", all_probes)


@pytest.fixture(params=["few", pytest.param("all", marks=pytest.mark.slow)])
def probes(request: pytest.FixtureRequest) -> str:
    """Where it is tested what texts of `export/texts/probes.jsonl` tell: the slow tests compare all."""
    if request.param == "all":
        request.getfixturevalue("whole_proof")
    return str(request.param)


@pytest.fixture
def unpickled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader of pickles without a confined process of its own, whose start takes seconds."""
    from bertserve.export.proof import reference_library as load  # noqa: PLC0415  needs the libraries to be imported

    def read(file: Path, target: Path, *, training: bool = False) -> dict[str, Any]:
        with file.open("rb") as stream, target.open("wb") as out:
            answer = unpickle.convert(stream, out, training=training)
        if answer.keys() & {"wanted", "refused"}:
            raise ExportError(f"{file.name}: {answer}")
        return answer

    for module in (weights, megatron, load):
        monkeypatch.setattr(module, "unpickle", read)


@pytest.fixture(params=["here", pytest.param("confined", marks=pytest.mark.slow)])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader of pickles; in the slow tests in its confined process as well, where this one cannot read."""
    if request.param == "here":
        request.getfixturevalue("unpickled_here")
    else:
        monkeypatch.delattr("bertserve.export.checkpoint.unpickle.convert")
