"""The task `embed_sparse`: from the graph's heaviest tokens, or from the weights of a query's tokens, to a vector."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertserve.serving.bulk.answers import AnswerColumn
from bertserve.serving.errors import InvalidRequest
from bertserve.serving.http.apis.vectors import sparse_json
from bertserve.serving.records import EncodedText, TensorSpec
from bertserve.serving.tasks import embed_sparse
from bertserve.serving.tasks.base import Work
from bertserve.serving.tasks.embed_sparse import TASK, EmbedSparseOptions, NamedSparseVector, SparseVector
from bertserve.serving.tasks.parts import Sparse

WORDS = 40
FACTS: Any = SimpleNamespace(
    default_prompt=None,
    outputs=(TensorSpec("indices", "int32", (-1, 8)), TensorSpec("weights", "float32", (-1, 8))),
    sparse=Sparse(query_weights=True),
)
TABLE = np.linspace(-1, 3, WORDS, dtype=np.float32) * (np.arange(WORDS) % 4 != 0)


def work(options: EmbedSparseOptions, *, ids: list[int] | None = None, row: Any = None) -> Work[EmbedSparseOptions]:
    """A text with these token ids, or with this row of the engine's."""
    tokenizer: Any = SimpleNamespace(query_weights=TABLE, name=lambda token: f"w{token}" if token < WORDS - 1 else "")
    texts = [EncodedText(array("i", ids or [1]))]
    return Work(["a"], options, texts, [] if row is None else [row], FACTS, tokenizer)


@given(
    st.lists(st.integers(0, 3), min_size=8, max_size=8),
    st.none() | st.integers(1, 9),
    st.none() | st.sampled_from([0.0, 1.0, 2.5]),
    st.integers(0, 99),
)
@settings(derandomize=True, max_examples=200, deadline=None)
def test_the_answer_is_what_plain_numpy_says(
    halves: list[int], top_k: int | None, threshold: float | None, seed: int
) -> None:
    """The heaviest weights that reach the threshold and are not 0, in the order of their tokens."""
    weights = np.sort(np.array(halves, np.float32) / 2)[::-1]
    indices = np.random.default_rng(seed).permutation(WORDS)[:8].astype(np.int32)
    (vector,) = embed_sparse.finish(work(EmbedSparseOptions(top_k, threshold), row=(indices, weights)))
    pairs = list(zip(indices.tolist(), weights.tolist(), strict=True))
    wanted = [pair for pair in pairs if pair[1] != 0 and pair[1] >= (threshold or 0)][:top_k]
    assert list(zip(vector.indices.tolist(), vector.values.tolist(), strict=True)) == sorted(wanted)
    assert vector.indices.dtype == np.int32
    assert vector.values.dtype == np.float32
    assert type(vector) is SparseVector


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({}, [1, 7, 30]),
        ({"top_k": 1}, [30]),
        ({"threshold": 0.0}, [30]),
        ({"top_k": 2, "threshold": -0.5}, [7, 30]),
    ],
    ids=str,
)
def test_a_query_has_the_weight_of_each_of_its_tokens(options: dict[str, Any], tokens: list[int]) -> None:
    """Once, however often it occurs; weights may be negative, and tokens of weight 0 are left out."""
    query = work(EmbedSparseOptions(query=True, **options), ids=[30, 7, 4, 30, 1, 7])
    (vector,) = embed_sparse.finish(query)
    assert vector.indices.tolist() == tokens
    np.testing.assert_array_equal(vector.values, TABLE[tokens])


def test_the_limit_of_an_encoder_holds_for_its_queries() -> None:
    """Their signs do not count, as in Sentence Transformers."""
    import torch  # noqa: PLC0415  slow to import
    from sentence_transformers.util import select_max_active_dims  # noqa: PLC0415  likewise

    ids = [*range(24)]
    (vector,) = embed_sparse.finish(work(EmbedSparseOptions(query=True), ids=ids))
    wanted = select_max_active_dims(torch.from_numpy(TABLE[ids]), 8).numpy()
    assert np.count_nonzero(wanted > 0) < 8 < np.count_nonzero(TABLE[ids])
    assert vector.indices.tolist() == np.flatnonzero(wanted).tolist()
    np.testing.assert_array_equal(vector.values, wanted[wanted != 0])


def test_who_needs_no_engine() -> None:
    """Queries of models whose queries have weights; documents and other models do."""
    options = EmbedSparseOptions(query=True)
    other: Any = SimpleNamespace(sparse=Sparse(), default_prompt=None)
    assert embed_sparse.prepare([], options, FACTS, None, None).engineless
    assert not embed_sparse.prepare([], EmbedSparseOptions(), FACTS, None, None).engineless
    assert not embed_sparse.prepare([], options, other, None, None).engineless
    with pytest.raises(InvalidRequest, match="at least 1"):
        embed_sparse.check(EmbedSparseOptions(top_k=0), FACTS)


def test_formats() -> None:
    """Each as JSON, with as few digits as float32 needs; an id without a name is a name."""
    row = (np.array([39, 3, 5], np.int32), np.array([1.5, 0.3, 0.0], np.float32))
    (bare,) = embed_sparse.finish(work(EmbedSparseOptions(), row=row))
    (named,) = embed_sparse.finish(work(EmbedSparseOptions(tokens=True), row=row))
    assert sparse_json(bare, "list") == b'[{"index":3,"value":0.3},{"index":39,"value":1.5}]'
    assert sparse_json(named, "list") == (
        b'[{"index":3,"value":0.3,"token":"w3"},{"index":39,"value":1.5,"token":"#39"}]'
    )
    assert sparse_json(bare, "arrays") == b'{"indices":[3,39],"values":[0.3,1.5]}'
    assert sparse_json(named, "arrays") == b'{"indices":[3,39],"values":[0.3,1.5],"tokens":["w3","#39"]}'
    assert sparse_json(named, "tokens") == b'{"w3":0.3,"#39":1.5}'
    none = NamedSparseVector(row[0][:0], row[1][:0], [])
    assert [sparse_json(none, form) for form in ("list", "tokens")] == [b"[]", b"{}"]
    odd = NamedSparseVector(bare.indices, bare.values, ['"', "\\é"])
    assert orjson.loads(sparse_json(odd, "tokens")) == {'"': 0.3, "\\é": 1.5}


@pytest.mark.parametrize("tokens", [False, True])
def test_columns_of_bulk_work(*, tokens: bool) -> None:
    """Arrow holds a record of lists."""
    options = EmbedSparseOptions(tokens=tokens)
    row = (np.array([7, 3], np.int32), np.array([1.5, 0.5], np.float32))
    (answer,) = embed_sparse.finish(work(options, row=row))
    wanted = {"indices": [3, 7], "values": [0.5, 1.5], **({"tokens": ["w3", "w7"]} if tokens else {})}
    column = AnswerColumn(TASK, options, FACTS)
    assert (column.name, column.nested, column.width) == ("sparse", False, None)
    assert column.array([answer, None]).to_pylist() == [wanted, None]
