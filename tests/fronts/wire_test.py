"""The frames between fronts and the core."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertserve.serving import errors
from bertserve.serving.engine.process.wire import FrameReader
from bertserve.serving.errors import BertserveError, MethodNotAllowed, NotReady, Overloaded
from bertserve.serving.fronts.wire import (
    KINDS,
    Kind,
    pack_error,
    pack_rows,
    pack_run,
    unpack_error,
    unpack_rows,
    unpack_running,
)
from bertserve.serving.records import EncodedText, ModelIndex

if TYPE_CHECKING:
    from bertserve.serving.records import Row

IDS = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=5).map(lambda ids: array("i", ids))


@st.composite
def encoded(draw: st.DrawFn) -> EncodedText:
    ids = draw(IDS)
    typed = draw(st.booleans())
    return EncodedText(ids, array("i", [number % 2 for number in range(len(ids))]) if typed else None)


def only(frame: bytes) -> tuple[Kind, int, int, bytes]:
    (found,) = FrameReader(KINDS).feed(frame)
    return found


@given(st.lists(encoded(), min_size=1, max_size=4), st.none() | st.floats(0, 1e9), st.integers(1, 4))
def test_a_request_arrives_as_it_was_sent(texts: list[EncodedText], timeout_ms: float | None, priority: int) -> None:
    frame = pack_run(7, ModelIndex(3), texts, 12.5, timeout_ms, priority)
    kind, model, number, payload = only(frame)
    assert (kind, model, number) == (Kind.RUN, 3, 7)
    found = unpack_running(payload)
    assert (found.arrival, found.timeout_ms, found.priority) == (12.5, timeout_ms, priority)
    assert [text.ids for text in found.texts] == [text.ids for text in texts]
    typed = any(text.type_ids is not None for text in texts)
    zeros = [array("i", bytes(4 * len(text.ids))) for text in texts]
    expected = [text.type_ids or zero if typed else None for text, zero in zip(texts, zeros, strict=True)]
    assert [text.type_ids for text in found.texts] == expected


def rows(*shapes: tuple[tuple[int, ...], ...]) -> list[Row]:
    """Rows of float32, and of int32 in the second output."""
    rng = np.random.default_rng(0)
    return [
        tuple(rng.integers(-9, 9, shape).astype((np.float32, np.int32)[place % 2]) for place, shape in enumerate(each))
        for each in shapes
    ]


@pytest.mark.parametrize(
    "sent",
    [
        rows(((4,),)),
        rows(((4,),), ((4,),), ((4,),)),
        rows(((3, 2),), ((1, 2),), ((0, 2),)),
        rows(((2,), (5,)), ((2,), (1,))),
        [(np.arange(12, dtype=np.float32).reshape(3, 4)[:, 1:3],)],
    ],
    ids=["one", "several", "by-token", "two-outputs", "strided"],
)
@pytest.mark.parametrize("cached", [False, True])
def test_rows_arrive_as_they_were_sent(sent: list[Row], *, cached: bool) -> None:
    kind, _, number, payload = only(pack_rows(9, sent, 1.5, 2.5, 3.5, cached=cached))
    assert (kind, number) == (Kind.ROWS, 9)
    found = unpack_rows(payload)
    assert (found.queue_us, found.compute_us, found.submitted) == (1.5, 2.5, 3.5)
    assert found.cached is cached
    for row, expected in zip(found.rows, sent, strict=True):
        for part, other in zip(row, expected, strict=True):
            assert part.dtype == other.dtype
            np.testing.assert_array_equal(part, other)


def every_error() -> list[type[BertserveError]]:
    kinds: list[type[BertserveError]] = [BertserveError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return [kind for kind in kinds if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", every_error())
def test_an_error_of_any_kind_arrives(kind: type[BertserveError]) -> None:
    _, _, _, payload = only(pack_error(1, kind("what is wrong")))
    found = unpack_error(payload)
    assert type(found) is kind
    assert (str(found), found.message) == ("what is wrong", "what is wrong")


@pytest.mark.parametrize(
    "sent",
    [
        Overloaded("full", retry_after_s=0.25, jitter=0.5),
        NotReady("ending", begun=True),
        MethodNotAllowed("no", allowed="GET, HEAD"),
        errors.InvalidRequest("bad", param="inputs"),
    ],
)
def test_an_error_keeps_what_its_reply_tells(sent: BertserveError) -> None:
    found = unpack_error(only(pack_error(1, sent))[3])
    assert vars(found) == vars(sent)
    assert found.retry_after_ms == sent.retry_after_ms
