"""Bundles that commit 54307b58 wrote, of schema 3 and 2, are read as those of today and answer what they did then.

`54307b58/tasks.tar.xz` has small models of schema 3, each with the first twelve texts of its reference file, and in
`answers.json` what the server of that commit answered.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from bertserve.export.proof import parity, reference
from bertserve.export.proof.engine import open_engine
from bertserve.export.tasks import comparator_of
from bertserve.serving.models.artifact_selection import select_artifact
from bertserve.serving.models.bundle import open_bundle
from bertserve.serving.tasks.parts import Embedding, Expansion, Labels, MultiVector, Sparse
from tests.support.clients import get, post_json
from tests.support.exports import ignore
from tests.support.server import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

OLD = Path(__file__).with_name("54307b58")
NAMES = ("bad", "fair", "good")
PUNCTUATION = (*range(41, 73), 141)
PARTS: dict[str, dict[str, object]] = {
    "schema-2": {"embedding": Embedding(("mean",))},
    "schema-3": {"embedding": Embedding(("mean",))},
    "vectors": {"embedding": Embedding(("max", "mean"), matryoshka=(4, 8), similarity="dot")},
    "sentiment": {"labels": Labels(NAMES)},
    "topics": {"labels": Labels(NAMES, "multi_label")},
    "stars": {"labels": Labels(NAMES, "regression")},
    "rank": {"activation": "identity"},
    "masks": {},
    "sparse": {"sparse": Sparse(query_weights=True, similarity="dot")},
    "colbert": {"multi_vector": MultiVector(12, 40, Expansion(4, 12, attended=False), PUNCTUATION)},
    "m3": {
        "embedding": Embedding(("cls",)),
        "sparse": Sparse(),
        "multi_vector": MultiVector(48, 48, mean=True, skips_first=True),
    },
}
ALSO = {"m3": ("embed_sparse", "embed_tokens")}


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old")
    for archive in ("data", "tasks"):
        with tarfile.open(OLD / f"{archive}.tar.xz") as packed:
            packed.extractall(folder / archive, filter="data")
    return folder


def place(disk: Path, name: str) -> Path:
    return disk / ("data" if name.startswith("schema") else "tasks") / "models" / name / "1"


@pytest.mark.parametrize("name", PARTS)
def test_flat_fields_are_read_as_parts(disk: Path, name: str) -> None:
    """A bundle has the parts of its task and no others."""
    manifest = open_bundle(place(disk, name)).manifest
    assert {part: getattr(manifest, part) for part in manifest.parts} == PARTS[name]
    assert manifest.also == ALSO.get(name, ())


@pytest.mark.parametrize("name", PARTS)
def test_a_graph_answers_what_its_export_recorded(disk: Path, name: str) -> None:
    """The numbers of PyTorch in the reference file, for token IDs that are there too."""
    bundle = open_bundle(place(disk, name))
    manifest = bundle.manifest
    problem = (manifest.labels or Labels(())).problem
    comparator = comparator_of(manifest.task, manifest.also, manifest.outputs, manifest.special_ids, problem)
    recorded = reference.read(bundle.path / reference.REFERENCE, comparator)
    spec = select_artifact(bundle, "fp32", "ort-cpu", unproven=False).spec()
    rows = parity.answers(open_engine(spec, "cpu", 1), comparator, recorded.encoded, ignore)
    for row, expected in zip(rows, recorded.rows, strict=True):
        np.testing.assert_allclose(*comparator.pair(row, expected), rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def server(disk: Path) -> Iterator[Server]:
    with Server(disk / "tasks" / "models", "--engine", "ort-cpu", "--precision", "fp32") as running:
        yield running


@pytest.mark.slow
def test_a_server_answers_as_the_old_one_did(disk: Path, server: Server) -> None:
    """Vectors, labels, scores, words, and the properties that clients of the Open Inference Protocol see."""
    for path, body, expected in json.loads((disk / "tasks" / "answers.json").read_text()):
        reply = get(server.http, path) if body is None else post_json(server.http, path, json.dumps(body).encode())
        found = {name: reply.json()[name] for name in expected} if body is None else reply.json()
        assert (path, found) == (path, close_to(expected))


def close_to(value: Any) -> Any:
    """JSON whose numbers may differ by rounding."""
    if isinstance(value, dict):
        return {key: close_to(each) for key, each in value.items()}
    if isinstance(value, list):
        return [close_to(each) for each in value]
    return pytest.approx(value, rel=1e-4, abs=1e-5) if isinstance(value, float) else value
