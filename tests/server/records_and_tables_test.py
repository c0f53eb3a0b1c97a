"""The lifecycle's table, the error tree, and the task `embed`."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import grpc
import numpy as np
import pytest

from serving import errors
from serving.engine.kinds import ENGINES
from serving.errors import BertserveError, InvalidRequest
from serving.http.exchange import outcome_head
from serving.inference.requests import Outcome, Timings
from serving.lifecycle import Lifecycle, State
from serving.tasks import embed, rerank
from serving.tasks.embed import EmbedOptions
from serving.tasks.rerank import RerankOptions

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


def test_requests_are_taken_while_an_engine_is_started_again() -> None:
    """They wait for it, and through the drain too; before the first engine there is nothing to wait for."""
    lifecycle = Lifecycle()
    taken = []
    for state in (S.WARMING, S.READY, S.WARMING, S.DRAINING, S.FAILED):
        lifecycle.to(state)
        taken.append((lifecycle.accepting, lifecycle.ready))
    assert taken == [(False, False), (True, True), (True, False), (True, False), (False, False)]


@pytest.mark.parametrize("state", State)
def test_what_probes_see(state: State) -> None:
    """Ready where new traffic should come; live until nothing will ever work again."""
    lifecycle = lifecycle_in(state)
    assert lifecycle.ready is (state in {S.READY, S.DEGRADED})
    assert lifecycle.live is (state not in {S.FAILED, S.STOPPED})


@pytest.mark.parametrize("state", State)
def test_what_requests_see(state: State) -> None:
    """Requests are taken while ready, and on through the lame duck and the drain."""
    assert lifecycle_in(state).accepting is (state in {S.READY, S.DEGRADED, S.DRAINING})


def test_refusals_say_when_to_come_again() -> None:
    """Whoever is refused for the server's state is told to try again soon."""
    refusal = Lifecycle().refusal()
    assert (refusal.message, refusal.retry_after_s) == ("the server is starting; try again", 1)


def test_the_drain_ends() -> None:
    """Past the drain's limit nothing is taken."""
    lifecycle = lifecycle_in(S.DRAINING)
    lifecycle.accept_no_more()
    assert not lifecycle.accepting


def test_no_lame_duck_for_what_was_never_ready() -> None:
    """A server that is told to end while it warms up takes nothing."""
    lifecycle = lifecycle_in(S.WARMING)
    lifecycle.to(S.DRAINING)
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


def test_no_dimensions_keeps_all() -> None:
    """Without options the vectors are scaled and nothing else."""
    found = embed.finish([(np.array([3.0, 4.0], np.float32),)], EmbedOptions(), normalize=True)
    np.testing.assert_allclose(found, [[0.6, 0.8]])


def test_dimensions_are_cut_before_scaling() -> None:
    """What is cut off does not count for the length."""
    pooled = np.array([[3.0, 4.0, 12.0], [1.0, 0.0, 5.0]], np.float32)
    found = embed.finish([(row,) for row in pooled], EmbedOptions(dimensions=2), normalize=True)
    np.testing.assert_allclose(found, [[0.6, 0.8], [1.0, 0.0]])


def test_unscaled_vectors_are_the_models_own() -> None:
    """`normalize` off leaves the numbers as they are, cut or whole, in rows that encoders can write."""
    pooled = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(
        embed.finish([(row,) for row in pooled], EmbedOptions(normalize=False), normalize=True), pooled
    )
    cut = embed.finish([(row,) for row in pooled], EmbedOptions(normalize=False, dimensions=2), normalize=True)
    np.testing.assert_array_equal(cut, pooled[:, :2])
    assert cut.flags.c_contiguous


def test_what_a_request_leaves_open_the_model_decides() -> None:
    """Vectors are scaled where the model's folder says so, or a request; a score is what the model makes of a logit."""
    rows = [(np.array([3.0, 4.0], np.float32),)]
    for asked, own, expected in [(None, False, 3.0), (None, True, 0.6), (True, False, 0.6), (False, True, 3.0)]:
        assert embed.finish(rows, EmbedOptions(asked), normalize=own)[0, 0] == pytest.approx(expected)
    for raw, activation, score in [(None, "identity", 3.0), (None, "sigmoid", 0.953), (False, "identity", 0.953)]:
        assert rerank.finish(rows, RerankOptions(raw), activation) == [pytest.approx(score, abs=1e-3)]


def test_a_zero_vector_stays_zero() -> None:
    """A vector without a direction is not divided by zero."""
    np.testing.assert_array_equal(
        embed.finish([(np.zeros(3, np.float32),)], EmbedOptions(), normalize=True), np.zeros((1, 3))
    )


def test_read_only_vectors_are_taken() -> None:
    """Rows that come straight off the wire are read-only; they are not written to."""
    pooled = np.frombuffer(np.ones((1, 4), np.float32).tobytes(), np.float32).reshape(1, 4)
    np.testing.assert_allclose(
        embed.finish([(row,) for row in pooled], EmbedOptions(), normalize=True), np.full((1, 4), 0.5)
    )


@pytest.mark.parametrize("dimensions", [1, 384])
def test_dimensions_in_range(dimensions: int) -> None:
    """From 1 to the model's size is allowed."""
    embed.check(EmbedOptions(dimensions=dimensions), SimpleNamespace(vector_size=384, matryoshka=()))


@pytest.mark.parametrize(("dimensions", "taken"), [(64, True), (384, True), (128, False), (385, False)])
def test_dimensions_of_a_matryoshka_model(dimensions: int, taken: bool) -> None:  # noqa: FBT001  drawn
    """Only sizes that the model was trained for, and all of a vector."""
    model = SimpleNamespace(vector_size=384, matryoshka=(64, 256))
    if taken:
        embed.check(EmbedOptions(dimensions=dimensions), model)
    else:
        with pytest.raises(
            InvalidRequest, match=f"{dimensions} dimensions are asked for; this model has one of 64, 256, 384"
        ):
            embed.check(EmbedOptions(dimensions=dimensions), model)


@pytest.mark.parametrize("dimensions", [0, -1, 385, 10**30])
def test_dimensions_out_of_range(dimensions: int) -> None:
    """Anything else is the client's error."""
    with pytest.raises(InvalidRequest, match="between 1 and 384"):
        embed.check(EmbedOptions(dimensions=dimensions), SimpleNamespace(vector_size=384, matryoshka=()))
