"""The lifecycle's table, the error tree, and the task `embed`."""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace

import grpc
import numpy as np
import pytest

from bertserve.serving import errors
from bertserve.serving.engine.kinds import ENGINES
from bertserve.serving.errors import BertserveError, InvalidRequest
from bertserve.serving.http.exchange import outcome_head
from bertserve.serving.inference.requests import Outcome, Timings
from bertserve.serving.lifecycle import Lifecycle, State
from bertserve.serving.records import TensorSpec
from bertserve.serving.tasks import embed, rerank
from bertserve.serving.tasks.embed import EmbedOptions
from bertserve.serving.tasks.parts import Embedding
from bertserve.serving.tasks.rerank import RerankOptions

S = State
ALLOWED = {
    S.STARTING: {S.WARMING, S.DRAINING, S.FAILED},
    S.WARMING: {S.READY, S.DEGRADED, S.DRAINING, S.FAILED},
    S.READY: {S.DEGRADED, S.WARMING, S.DRAINING, S.FAILED},
    S.DEGRADED: {S.READY, S.WARMING, S.DRAINING, S.FAILED},
    S.DRAINING: {S.STOPPED, S.FAILED},
    S.STOPPED: set(),
    S.FAILED: set(),
}
PATHS = {
    S.STARTING: [],
    S.WARMING: [S.WARMING],
    S.READY: [S.WARMING, S.READY],
    S.DEGRADED: [S.WARMING, S.DEGRADED],
    S.DRAINING: [S.WARMING, S.READY, S.DRAINING],
    S.STOPPED: [S.DRAINING, S.STOPPED],
    S.FAILED: [S.FAILED],
}


def lifecycle_in(state: State) -> Lifecycle:
    """A lifecycle that has come to a state."""
    made = Lifecycle()
    for step in PATHS[state]:
        assert made.to(step)
    return made


@pytest.mark.parametrize(("before", "after"), list(itertools.product(State, State)))
def test_transitions(before: State, after: State) -> None:
    """Exactly the transitions of the table happen; the others change nothing and say so."""
    lifecycle = lifecycle_in(before)
    allowed = after in ALLOWED[before]
    assert lifecycle.to(after) is allowed
    assert lifecycle.state is (after if allowed else before)


@pytest.mark.parametrize("state", State)
def test_what_probes_and_requests_see(state: State) -> None:
    """Ready where new traffic should come; live until nothing will ever work again; requests also while it drains."""
    lifecycle = lifecycle_in(state)
    assert lifecycle.ready is (state in {S.READY, S.DEGRADED})
    assert lifecycle.live is (state not in {S.FAILED, S.STOPPED})
    assert lifecycle.accepting is (state in {S.READY, S.DEGRADED, S.DRAINING})


@pytest.mark.parametrize(
    ("states", "accepting"),
    [
        ([S.WARMING], False),
        ([S.WARMING, S.READY, S.WARMING], True),  # they wait while an engine is started again
        ([S.WARMING, S.READY, S.WARMING, S.DRAINING], True),
        ([S.WARMING, S.DRAINING], False),  # no lame duck for what was never ready
        ([S.WARMING, S.READY, S.WARMING, S.DRAINING, S.FAILED], False),
    ],
)
def test_requests_are_taken_where_an_engine_has_been_ready(states: list[State], accepting: bool) -> None:  # noqa: FBT001
    """Before the first engine there is nothing to wait for."""
    lifecycle = Lifecycle()
    for state in states:
        lifecycle.to(state)
    assert lifecycle.accepting is accepting


def test_refusals_say_when_to_come_again() -> None:
    """Whoever is refused for the server's state is told to try again soon; past the drain's limit nothing is taken."""
    refusal = Lifecycle().refusal()
    assert (refusal.message, refusal.retry_after_s) == ("the server is starting; try again", 1)
    lifecycle = lifecycle_in(S.DRAINING)
    lifecycle.accept_no_more()
    assert not lifecycle.accepting


def test_listeners_hear_real_changes_only() -> None:
    """Listeners hear each new state once, and nothing of what the table forbids."""
    lifecycle, heard = Lifecycle(), []
    lifecycle.subscribe(heard.append)
    lifecycle.to(S.WARMING)
    lifecycle.to(S.STOPPED)
    lifecycle.to(S.READY)
    assert heard == [S.WARMING, S.READY]


def test_the_first_failure_is_kept() -> None:
    """What went wrong first is what the operator reads."""
    lifecycle = Lifecycle()
    lifecycle.fail("the cause")
    lifecycle.fail("a consequence")
    assert lifecycle.failure == "the cause"
    assert lifecycle.state is S.FAILED


def tree(kind: type[BertserveError] = BertserveError) -> list[type[BertserveError]]:
    """Every class of the error tree."""
    return [kind, *[below for child in kind.__subclasses__() for below in tree(child)]]


@pytest.mark.parametrize("kind", tree(), ids=lambda kind: kind.__name__)
def test_error_table(kind: type[BertserveError]) -> None:
    """Each error has a reason, an HTTP status and a real gRPC code; blame fits: 4xx, 501 and 505 are the client's."""
    assert kind.reason.replace("_", "").islower()
    assert grpc.StatusCode[kind.grpc_code] not in {grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN}
    clients_fault = issubclass(kind, (errors.InvalidRequest, errors.Overloaded))
    assert (400 <= kind.http_status < 500 or kind.http_status in {501, 505}) is clients_fault


def test_reasons_are_unique() -> None:
    """A reason names one class, the roots of the tree apart."""
    reasons = [kind.reason for kind in tree() if kind not in {BertserveError, errors.Unavailable}]
    assert len(set(reasons)) == len(reasons)


@pytest.mark.parametrize(
    ("engine", "compute_type"),
    [
        ("ort-cpu", "cpu"),
        ("fake", "cpu"),
        ("openvino", "cpu+openvino"),
        ("ort-cuda", "gpu+onnxruntime"),
        ("tensorrt", "gpu+tensorrt"),
    ],
)
def test_replies_say_what_computed(engine: str, compute_type: str) -> None:
    """In TEI's words, as the header of a reply has it."""
    timings = Timings(1, 2, 3, 4)
    outcome = Outcome([1.0], "m", "1", timings, 5, 0, ENGINES[engine].compute_type)
    assert b"\r\nx-compute-type: %b\r\n" % compute_type.encode() in outcome_head(outcome)


@pytest.mark.parametrize(
    ("raw", "activation", "score"), [(None, "identity", 3.0), (None, "sigmoid", 0.953), (False, "identity", 0.953)]
)
def test_what_a_request_leaves_open_the_model_decides(raw: bool | None, activation: str, score: float) -> None:  # noqa: FBT001
    """A score is what the model makes of a logit."""
    found = rerank.finish([(np.array([3.0], np.float32),)], RerankOptions(raw), activation)
    assert found == [pytest.approx(score, abs=1e-3)]


@pytest.mark.parametrize(
    ("sizes", "dimensions", "refused"),
    [
        *[((), dimensions, None) for dimensions in (1, 384)],
        *[((), dimensions, "1 to 384") for dimensions in (0, -1, 385, 10**30)],
        *[((64, 256), dimensions, None) for dimensions in (64, 384)],
        *[((64, 256), number, f"`dimensions` is {number}; .* one of 64, 256, 384") for number in (128, 385)],
    ],
)
def test_dimensions(sizes: tuple[int, ...], dimensions: int, refused: str | None) -> None:
    """From 1 to the model's size, or a size that a Matryoshka model was trained for; else the client is told."""
    outputs = (TensorSpec("pooled", "float32", (-1, 384)),)
    model = SimpleNamespace(outputs=outputs, embedding=Embedding(("mean",), matryoshka=sizes))
    with pytest.raises(InvalidRequest, match=refused) if refused else contextlib.nullcontext():
        embed.check(EmbedOptions(dimensions=dimensions), model)
