"""Every route of text-embeddings-inference as its API describes it, and `tei.v1`, its services over gRPC."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.clients import TIMEOUT_S, ask, get, metric, post_json
from tests.support.expected import cosines
from tests.support.server import FAKE, SLOW_ENGINES
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.support.server import Server
    from tests.support.tasks import TinyModel


TEXTS = ["the server", "It is a text, and not on the server.", "a"]
LONG = "the server is " * 40 + "a text"
HEADERS = (
    *("x-compute-time", "x-compute-characters", "x-compute-tokens"),
    *("x-total-time", "x-tokenization-time", "x-queue-time", "x-inference-time"),
)


def http_refusal(server: Server, path: str, **message: Any) -> tuple[int, str, str]:
    """Status, type and sentence of a refusal in TEI's shape."""
    reply = post_json(server.http, path, message)
    assert reply.json().keys() == {"error", "error_type"}
    return reply.status, reply.json()["error_type"], reply.json()["error"]


@pytest.mark.parametrize(
    ("path", "message", "counted"),
    [
        ("/embed", {"inputs": "the server"}, ["the server"]),
        ("/embed", {"inputs": TEXTS}, TEXTS),
        ("/rerank", {"query": "the server", "texts": TEXTS}, ["the server", *TEXTS]),
    ],
    ids=["text", "texts", "query and texts"],
)
def test_headers(tasks_server: Server, path: str, message: dict[str, Any], counted: list[str]) -> None:
    """Whole numbers tell what was computed and how long it took."""
    headers = post_json(tasks_server.http, path, message).headers
    assert all(headers[name].isdigit() for name in HEADERS)
    assert (headers["x-compute-type"], headers["x-compute-characters"]) == ("cpu", str(sum(map(len, counted))))


@pytest.mark.parametrize("direction", ["Right", "Left"])
def test_truncation_cuts_the_end_or_the_beginning(
    tei: Callable[..., Any], tasks_server: Server, direction: str
) -> None:
    """`Right` keeps the beginning of a text, `Left` its end; neither is done where `truncate` is false."""
    (tokens,) = tei("/tokenize", inputs=LONG)
    ids = [token["id"] for token in tokens]
    expected = tei("/embed", inputs=[[*ids[:63], ids[-1]] if direction == "Right" else [ids[0], *ids[-63:]]])
    for written in ({"truncation_direction": direction}, {"truncation_direction": direction.lower(), "truncate": True}):
        np.testing.assert_allclose(tei("/embed", inputs=LONG, **written), expected, atol=CLOSE)
    whole = {"inputs": LONG, "truncation_direction": direction, "truncate": False}
    assert http_refusal(tasks_server, "/embed", **whole)[:2] == (422, "Validation")
    scores = [
        tei("/predict", inputs=LONG, raw_scores=True, **more) for more in ({}, {"truncation_direction": direction})
    ]
    assert (scores[0] == scores[1]) is (direction == "Right")


def test_truncate_left_follows_the_servers_default(serve: Callable[..., Server]) -> None:
    """Where a request does not say whether to cut, `auto_truncate` does."""
    server = serve(*FAKE, "--auto-truncate", "false")
    message = {"inputs": "server " * 300, "truncation_direction": "Left"}
    assert "tokens" in http_refusal(server, "/embed", **message)[2]
    assert len(ask(server, "/embed", **message, truncate=True)) == 1


def test_similarity(tei: Callable[..., Any]) -> None:
    """The cosines of the vectors of `/embed`."""
    vectors = np.array(tei("/embed", inputs=TEXTS))
    expected = cosines(np.repeat(vectors[:1], 2, axis=0), vectors[1:])
    np.testing.assert_allclose(
        tei("/similarity", inputs={"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}), expected, atol=1e-5
    )
    same = {"source_sentence": "a", "sentences": ["a"]}
    assert tei("/similarity", inputs=same, parameters={"truncate": True})[0] == pytest.approx(1, abs=1e-6)
    assert tei("/similarity", inputs=same)[0] <= 1


def test_tokenize_and_decode(tei: Callable[..., Any], tiny_models: dict[str, TinyModel]) -> None:
    """Tokens point into the text, and their ids lead back to it."""
    text = "The server, a text é!"
    (tokens,) = tei("/tokenize", inputs=text)
    assert [token["id"] for token in tokens] == tiny_models["embed"].tokenizer.encode(text)
    assert [token["text"] for token in tokens if token["special"]] == ["[CLS]", "[SEP]"]
    assert all((token["start"] is None) == (token["stop"] is None) == token["special"] for token in tokens)
    inside = [token for token in tokens if not token["special"]]
    assert all(text[token["start"] : token["stop"]] == token["text"] for token in inside)
    bare = tei("/tokenize", inputs=[text, "a"], add_special_tokens=False)
    assert bare[0] == inside
    ids = [token["id"] for token in tei("/tokenize", inputs="the server is on")[0]]
    assert tei("/decode", ids=ids) == ["the server is on"]
    assert tei("/decode", ids=[ids, ids[1:2]], skip_special_tokens=False)[1] == "the"
    assert tei("/decode", ids=[ids], skip_special_tokens=False)[0].startswith("[CLS]")


def test_long_texts_are_tokenised_too(tei: Callable[..., Any]) -> None:
    """Beyond what a model reads, and beyond what is done at once on the event loop."""
    assert len(tei("/tokenize", inputs=["a " * 1000] * 4)[3]) == 1002


def test_info_and_health(fake_server: Server, tasks_server: Server) -> None:
    """The model's kind and the limits; with several models, of the one that `/embed` asks, or of the one named."""
    info = get(fake_server.http, "/info").json()
    assert info["served_model_name"] == "minilm"
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert info["max_input_length"] == 256
    assert {"max_concurrent_requests", "max_batch_tokens", "max_batch_requests", "tokenization_workers"} <= info.keys()
    assert get(tasks_server.http, "/info").json()["served_model_name"] == "embed"
    labels = get(tasks_server.http, "/models/classify/info").json()["model_type"]["classifier"]
    assert labels["id2label"] == {"0": "calm", "1": "glad", "2": "sad"}
    assert "reranker" in get(tasks_server.http, "/models/rerank/info").json()["model_type"]
    sparse = get(tasks_server.http, "/models/embed_sparse/info").json()["model_type"]
    assert sparse == {"embedding": {"pooling": "splade"}}
    health = get(tasks_server.http, "/health")
    assert (health.status, health.body) == (200, b"")


@pytest.mark.parametrize(
    ("path", "message", "status", "kind"),
    [
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, 400, "Empty"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["a"] * 32}}, 422, "Validation"),
        ("/tokenize", {"inputs": []}, 400, "Empty"),
        ("/tokenize", {"inputs": ["a"] * 33}, 422, "Validation"),
        # What `is_empty` of TEI's core/src/tokenization.rs says is empty, and `decode` beside it.
        ("/embed", {"inputs": ["a", ""]}, 400, "Empty"),
        ("/embed", {"inputs": [[]]}, 400, "Empty"),
        ("/predict", {"inputs": ["", ""]}, 400, "Empty"),
        ("/rerank", {"query": "", "texts": ["a", ""]}, 400, "Empty"),
        ("/similarity", {"inputs": {"source_sentence": "", "sentences": ["a"]}}, 400, "Empty"),
        ("/tokenize", {"inputs": ""}, 400, "Empty"),
        ("/decode", {"ids": [[], [1]]}, 400, "Empty"),
        ("/models/embed", {"inputs": ""}, 400, "Empty"),
        ("/models/classify", {"inputs": ""}, 400, "Empty"),
        ("/tokenize", {"inputs": "a " * 2000}, 422, "Validation"),
        ("/tokenize", {"inputs": "a", "prompt_name": "none"}, 422, "Validation"),
        ("/decode", {"ids": []}, 400, "Empty"),
        ("/decode", {"ids": [1, [2]]}, 422, "Validation"),
        ("/decode", {"ids": [-1]}, 422, "Validation"),
        ("/decode", {"ids": [[10**6]]}, 422, "Validation"),
        ("/decode", {"ids": [2**70]}, 422, "Validation"),
        ("/decode", {"ids": [1] * 3000}, 422, "Validation"),
        ("/embed", {"inputs": "a", "truncation_direction": "Up"}, 422, "Validation"),
        ("/embed", {"inputs": "a", "prompt_name": "none"}, 422, "Validation"),
        ("/models/embed/embed_all", {"inputs": "a"}, 424, "Backend"),
        ("/models/embed/embed_sparse", {"inputs": "a"}, 424, "Backend"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_errors(tasks_server: Server, path: str, message: dict[str, object], status: int, kind: str) -> None:
    """Each has TEI's body and status."""
    assert http_refusal(tasks_server, path, **message)[:2] == (status, kind)


def test_empty_texts(tei: Callable[..., Any], tasks_server: Server) -> None:
    """An empty text is refused in TEI's words, with a prompt too; blanks and pairs with one empty side are answered."""
    for message in ({}, {"prompt_name": "query"}):
        assert http_refusal(tasks_server, "/embed", inputs="", **message) == (400, "Empty", "`inputs` cannot be empty")
    assert len(tei("/embed", inputs=[" "])) == 1
    assert len(tei("/rerank", query="", texts=["a"])) == 1
    assert len(tei("/predict", inputs=["a", ""])) == 3


def test_health_while_the_server_starts(serve: Callable[..., Server]) -> None:
    """It is 503 with TEI's body until the server is ready."""
    fails = ("--engine", "fake", "--fake-faults", "101:exit", "--engine-crash-limit", "1")
    server = serve(*fails, env=SLOW_ENGINES, cold=True, wait_ready=False)
    statuses = set()
    while server.process.poll() is None:
        try:
            reply = get(server.http, "/health")
        except OSError:
            continue
        statuses.add(reply.status)
        if reply.status == 503:
            assert reply.json() == {"error": "unhealthy", "error_type": "Unhealthy"}
    assert statuses <= {200, 503}
    assert 503 in statuses


pb, stubs = grpc.protos_and_services("serving/grpc/services/tei.proto")

LEFT = "TRUNCATION_DIRECTION_LEFT"
CLOSE = 1e-6

WIRE = {
    "InfoResponse": "version sha docker_label model_id model_sha model_dtype model_type max_concurrent_requests"
    " max_input_length max_batch_tokens max_batch_requests max_client_batch_size tokenization_workers",
    "Metadata": "compute_chars compute_tokens total_time_ns tokenization_time_ns queue_time_ns inference_time_ns",
    "EmbedRequest": "inputs truncate normalize truncation_direction prompt_name dimensions",
    "EmbedResponse": "embeddings metadata",
    "EmbedSparseRequest": "inputs truncate truncation_direction prompt_name",
    "SparseValue": "index value",
    "EmbedSparseResponse": "sparse_embeddings metadata",
    "EmbedAllRequest": "inputs truncate truncation_direction prompt_name",
    "TokenEmbedding": "embeddings",
    "EmbedAllResponse": "token_embeddings metadata",
    "PredictRequest": "inputs truncate raw_scores truncation_direction",
    "PredictPairRequest": "inputs truncate raw_scores truncation_direction",
    "Prediction": "score label",
    "PredictResponse": "predictions metadata",
    "RerankRequest": "query texts truncate raw_scores return_text truncation_direction",
    "RerankStreamRequest": "query text truncate raw_scores return_text truncation_direction",
    "Rank": "index text score",
    "RerankResponse": "ranks metadata",
    "EncodeRequest": "inputs add_special_tokens prompt_name",
    "SimpleToken": "id text special start stop",
    "EncodeResponse": "tokens",
    "DecodeRequest": "ids skip_special_tokens",
    "DecodeResponse": "text",
}
"""The fields of TEI's messages, in the order of their numbers, which begin with 1."""


@pytest.fixture(scope="module")
def channel(tasks_server: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(tasks_server.grpc) as opened:
        yield opened


@pytest.fixture(scope="module")
def tei(tasks_server: Server) -> Callable[..., Any]:
    """Asks the same server over HTTP."""
    return partial(ask, tasks_server)


@pytest.fixture(scope="module")
def embed(channel: grpc.Channel) -> Any:
    return stubs.EmbedStub(channel)


@pytest.fixture(scope="module")
def predict(channel: grpc.Channel) -> Any:
    return stubs.PredictStub(channel)


@pytest.fixture(scope="module")
def rerank(channel: grpc.Channel) -> Any:
    return stubs.RerankStub(channel)


@pytest.fixture(scope="module")
def tokenize(channel: grpc.Channel) -> Any:
    return stubs.TokenizeStub(channel)


def test_fields_have_teis_numbers() -> None:
    """A client's stubs were made from another file than ours: only names, numbers and kinds of fields are shared."""
    for name, fields in WIRE.items():
        found = pb.DESCRIPTOR.message_types_by_name[name].fields
        assert {field.name: field.number for field in found} == {
            field: number for number, field in enumerate(fields.split(), 1)
        }


@pytest.mark.parametrize(
    "options",
    [{}, {"normalize": False}, {"normalize": True, "dimensions": 8}, {"truncate": True, "inputs": LONG}],
    ids=str,
)
def test_grpc_embed(embed: Any, tei: Callable[..., Any], options: dict[str, Any]) -> None:
    """The vector of `/embed`, and what it took."""
    options = {"inputs": TEXTS[1], **options}
    reply = embed.Embed(pb.EmbedRequest(**options))
    np.testing.assert_allclose(reply.embeddings, tei("/embed", **options)[0], atol=CLOSE)
    assert reply.metadata.compute_chars == len(options["inputs"])
    assert reply.metadata.compute_tokens > 2
    parts = ("tokenization_time_ns", "queue_time_ns", "inference_time_ns")
    assert 0 < sum(getattr(reply.metadata, part) for part in parts) <= reply.metadata.total_time_ns


def test_truncation_is_asked_for(embed: Any, tei: Callable[..., Any]) -> None:
    """A message that does not ask for it is refused where its text is too long; either end is cut."""
    with pytest.raises(grpc.RpcError) as refused:
        embed.Embed(pb.EmbedRequest(inputs=LONG))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    left = embed.Embed(pb.EmbedRequest(inputs=LONG, truncate=True, truncation_direction=LEFT))
    np.testing.assert_allclose(left.embeddings, tei("/embed", inputs=LONG, truncation_direction="Left")[0], atol=CLOSE)


def test_embed_all(embed: Any, tei: Callable[..., Any]) -> None:
    """The vectors of `/embed_all`."""
    reply = embed.EmbedAll(pb.EmbedAllRequest(inputs=TEXTS[1]))
    found = [token.embeddings for token in reply.token_embeddings]
    np.testing.assert_allclose(found, tei("/embed_all", inputs=TEXTS[1])[0], atol=CLOSE)


@pytest.mark.parametrize(
    ("kind", "inputs", "by_http"),
    [("", TEXTS[1], TEXTS[1]), ("Pair", TEXTS[:2], TEXTS[:2]), ("Pair", TEXTS[:1], TEXTS[0])],
    ids=["text", "pair", "half a pair"],
)
@pytest.mark.parametrize("raw", [False, True])
def test_grpc_predict(
    predict: Any, tei: Callable[..., Any], kind: str, inputs: Any, by_http: Any, *, raw: bool
) -> None:
    """The classes of `/predict`, of texts and of pairs, as probabilities or raw."""
    request = getattr(pb, f"Predict{kind}Request")(inputs=inputs, raw_scores=raw)
    assert scores(getattr(predict, f"Predict{kind}")(request)) == told(tei("/predict", inputs=by_http, raw_scores=raw))


def scores(reply: Any) -> list[tuple[str, Any]]:
    return [(one.label, pytest.approx(one.score, abs=CLOSE)) for one in reply.predictions]


def told(reply: Sequence[dict[str, Any]]) -> list[tuple[str, float]]:
    return [(one["label"], one["score"]) for one in reply]


@pytest.mark.parametrize("raw", [False, True])
def test_grpc_rerank(rerank: Any, tei: Callable[..., Any], *, raw: bool) -> None:
    """The order of `/rerank`, of one message and of one for each text."""
    expected = tei("/rerank", query="the server", texts=TEXTS, return_text=True, raw_scores=raw)
    together = pb.RerankRequest(query="the server", texts=TEXTS, return_text=True, raw_scores=raw)
    # Of a stream the first message decides what is answered.
    first = {"return_text": True, "raw_scores": raw}
    stream = [
        pb.RerankStreamRequest(query="the server", text=text, **({} if index else first))
        for index, text in enumerate(TEXTS)
    ]
    for reply in (rerank.Rerank(together), rerank.RerankStream(iter(stream))):
        found = [(rank.index, rank.text, pytest.approx(rank.score, abs=CLOSE)) for rank in reply.ranks]
        assert found == [(one["index"], one["text"], one["score"]) for one in expected]
    plain = rerank.Rerank(pb.RerankRequest(query="a", texts=TEXTS))
    assert not any(rank.HasField("text") for rank in plain.ranks)


def test_a_stream_of_more_texts_than_one_message_takes(rerank: Any, tasks_server: Server) -> None:
    """Of hundreds of messages, some of them compressed, all are ranked together, and nothing stays held."""
    texts = ["a " * (index % 50) + "server" for index in range(300)]
    stream = (pb.RerankStreamRequest(query="the server", text=text, truncate=True) for text in texts)
    reply = rerank.RerankStream(stream, compression=grpc.Compression.Gzip)
    assert sorted(rank.index for rank in reply.ranks) == list(range(len(texts)))
    assert [rank.score for rank in reply.ranks] == sorted((rank.score for rank in reply.ranks), reverse=True)
    wait_for(lambda: metric(tasks_server, "bertserve_buffer_bytes") == 0, "no bytes held")


def test_grpc_tokenize_and_decode(tokenize: Any, tei: Callable[..., Any]) -> None:
    """The tokens of `/tokenize`, without characters where they are special, and the way back."""
    text = "The server, a text é!"
    reply = tokenize.Tokenize(pb.EncodeRequest(inputs=text, add_special_tokens=True))
    (expected,) = tei("/tokenize", inputs=text)
    optional = ("start", "stop")
    assert [
        {"id": token.id, "text": token.text, "special": token.special}
        | {name: getattr(token, name) if token.HasField(name) else None for name in optional}
        for token in reply.tokens
    ] == expected
    ids = [token["id"] for token in tei("/tokenize", inputs="the server is on")[0]]
    assert tokenize.Decode(pb.DecodeRequest(ids=ids, skip_special_tokens=True)).text == "the server is on"
    assert tokenize.Decode(pb.DecodeRequest(ids=ids)).text.startswith("[CLS]")


def test_streams_keep_their_order(embed: Any, predict: Any, tokenize: Any) -> None:
    """Each message gets what it gets alone, short and long ones in turn."""
    texts = [("the " * (index * 7 % 40) + "server")[: 1 + index * 13 % 120] for index in range(100)]
    vectors = [list(embed.Embed(pb.EmbedRequest(inputs=text)).embeddings) for text in texts[:8]]
    found = [list(reply.embeddings) for reply in embed.EmbedStream(pb.EmbedRequest(inputs=text) for text in texts)]
    assert len(found) == len(texts)
    np.testing.assert_allclose(found[:8], vectors, atol=CLOSE)
    counts = [len(tokenize.Tokenize(pb.EncodeRequest(inputs=text)).tokens) for text in texts]
    encoded = list(tokenize.TokenizeStream(pb.EncodeRequest(inputs=text) for text in texts))
    assert [len(reply.tokens) for reply in encoded] == counts
    rows = [[token.id for token in reply.tokens] for reply in encoded]
    decoded = [tokenize.Decode(pb.DecodeRequest(ids=row)).text for row in rows if row]
    assert [reply.text for reply in tokenize.DecodeStream(pb.DecodeRequest(ids=row) for row in rows if row)] == decoded
    alls = embed.EmbedAllStream(pb.EmbedAllRequest(inputs=text) for text in texts)
    assert [len(reply.token_embeddings) for reply in alls] == [count + 2 for count in counts]
    pairs = [pb.PredictPairRequest(inputs=[text, "a text"]) for text in texts[:20]]
    assert [scores(reply) for reply in predict.PredictPairStream(iter(pairs))] == [
        [(one.label, one.score) for one in predict.PredictPair(pair).predictions] for pair in pairs
    ]
    singles = [pb.PredictRequest(inputs=text) for text in texts[:20]]
    assert [scores(reply) for reply in predict.PredictStream(iter(singles))] == [
        [(one.label, one.score) for one in predict.Predict(single).predictions] for single in singles
    ]


def test_info(channel: grpc.Channel, tasks_server: Server) -> None:
    """What `/info` says, of the model of `/embed` or of the one that the metadata names."""
    info = stubs.InfoStub(channel)
    expected, reply = get(tasks_server.http, "/info").json(), info.Info(pb.InfoRequest())
    unset = {"sha", "docker_label", "max_batch_requests"}
    assert [name for name in unset if reply.HasField(name) or expected[name] is not None] == []
    fields = {field.name for field in pb.InfoResponse.DESCRIPTOR.fields} - unset - {"model_type"}
    assert {name: getattr(reply, name) for name in fields} == {name: expected[name] for name in fields}
    kinds = {"embed": "EMBEDDING", "embed_sparse": "EMBEDDING", "classify": "CLASSIFIER", "rerank": "RERANKER"}
    for model, kind in kinds.items():
        named = info.Info(pb.InfoRequest(), metadata=[("model", model)])
        assert pb.ModelType.Name(named.model_type) == f"MODEL_TYPE_{kind}"


@pytest.mark.parametrize(
    ("method", "message", "code", "words"),
    [
        ("Embed.EmbedSparse", {"inputs": ""}, "INVALID_ARGUMENT", "`inputs` cannot be empty"),
        ("Embed.Embed", {"inputs": "a", "dimensions": 0}, "INVALID_ARGUMENT", "dimensions"),
        ("Embed.Embed", {"inputs": "a", "prompt_name": "none"}, "INVALID_ARGUMENT", "unknown `prompt_name`"),
        ("Embed.Embed", {"inputs": "a", "truncation_direction": 7}, "INVALID_ARGUMENT", "send 0 to cut the right end"),
        ("Embed.Embed", {"inputs": ""}, "INVALID_ARGUMENT", "`inputs` cannot be empty"),
        ("Tokenize.Tokenize", {}, "INVALID_ARGUMENT", "`inputs` cannot be empty"),
        ("Rerank.Rerank", {"texts": ["a", ""]}, "INVALID_ARGUMENT", "`inputs` cannot be empty (input 1)"),
        ("Predict.PredictPair", {"inputs": ["a", "a", "a"]}, "INVALID_ARGUMENT", "an input has 3 texts"),
        ("Predict.PredictPair", {}, "INVALID_ARGUMENT", "an input has 0 texts"),
        ("Rerank.Rerank", {"query": "a"}, "INVALID_ARGUMENT", "send at least one"),
        ("Rerank.Rerank", {"query": "a", "texts": ["a"] * 33}, "INVALID_ARGUMENT", "the request has 33 inputs"),
        ("Tokenize.Tokenize", {"inputs": "a", "prompt_name": "none"}, "INVALID_ARGUMENT", "unknown `prompt_name`"),
        ("Tokenize.Decode", {}, "INVALID_ARGUMENT", "`ids` is empty"),
        ("Tokenize.Decode", {"ids": [2**31]}, "INVALID_ARGUMENT", "a token ID is outside"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refusals(channel: grpc.Channel, method: str, message: dict[str, Any], code: str, words: str) -> None:
    """Each has TEI's status and a sentence, also as a message of a stream, which it ends."""
    service, _, name = method.partition(".")
    stub = getattr(stubs, f"{service}Stub")(channel)
    kind = pb.DESCRIPTOR.services_by_name[service].methods_by_name[name].input_type.name
    request = getattr(pb, kind)(**message)
    calls = [lambda: getattr(stub, name)(request, timeout=TIMEOUT_S)]
    if service != "Rerank":
        calls.append(lambda: list(getattr(stub, f"{name}Stream")(iter([request]), timeout=TIMEOUT_S)))
    for call in calls:
        with pytest.raises(grpc.RpcError) as refused:
            call()
        assert (refused.value.code().name, words in refused.value.details()) == (code, True)


@pytest.mark.parametrize(
    ("model", "code", "words"),
    [
        ("classify", "FAILED_PRECONDITION", "model 'classify' has the task classify, not embed; "),
        ("nobody", "NOT_FOUND", "unknown model; "),
    ],
)
def test_the_metadata_name_a_model(embed: Any, model: str, code: str, words: str) -> None:
    """One of another task, or that is not there."""
    with pytest.raises(grpc.RpcError) as refused:
        embed.Embed(pb.EmbedRequest(inputs="a"), metadata=[("model", model)])
    assert (refused.value.code().name, refused.value.details().startswith(words)) == (code, True)


@pytest.mark.parametrize(
    ("messages", "code", "words"),
    [
        ([], "INVALID_ARGUMENT", "the stream has no message"),
        ([{"text": "a", "truncate": True}, {"text": "a"}], "INVALID_ARGUMENT", "must be the same in all messages"),
        ([{"text": "a"}] * 2049, "INVALID_ARGUMENT", "more than 2048 messages in one call"),
        ([{"text": "a" * 2_000_000}] * 3, "RESOURCE_EXHAUSTED", "exceed 4194304 bytes in total"),
    ],
    ids=["none", "mixed", "many", "large"],
)
def test_what_a_stream_to_be_ranked_may_not_be(
    rerank: Any, tasks_server: Server, messages: list[dict[str, Any]], code: str, words: str
) -> None:
    """It is refused as soon as that is known, and nothing of it stays held."""
    with pytest.raises(grpc.RpcError) as refused:
        rerank.RerankStream((pb.RerankStreamRequest(query="a", **one) for one in messages), timeout=TIMEOUT_S)
    assert (refused.value.code().name, words in refused.value.details()) == (code, True)
    wait_for(lambda: metric(tasks_server, "bertserve_buffer_bytes") == 0, "no bytes held")


def test_health_knows_the_services(channel: grpc.Channel) -> None:
    """Each by its name, as TEI's probes ask, Triton's too, and the whole without one; no other."""
    health = health_pb2_grpc.HealthStub(channel)
    own = [f"tei.v1.{name}" for name in pb.DESCRIPTOR.services_by_name]
    for name in (*own, "inference.GRPCInferenceService", ""):
        reply = health.Check(health_pb2.HealthCheckRequest(service=name))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as refused:
        health.Check(health_pb2.HealthCheckRequest(service="nobody"))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
