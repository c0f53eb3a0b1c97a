"""The Open Inference Protocol v2 by the four flavours of its own client, for every task."""

from __future__ import annotations

import json
import shutil
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tritonclient.utils import InferenceServerException

from tests.support.clients import ask, get, http_call, metric, post_json
from tests.support.server import FAKE, Server, measured
from tests.support.tasks import LABELS, MAX_LENGTH
from tests.support.triton_clients import FLAVOURS, TritonClient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.tasks import TinyModel

TEXTS = ["the server", "It is a text, and not on the server.", "a"]
CONTEXT = "It is a text. The server is in the text, and that is not on it for a server with text."
QUESTION = "what is in the text"
LONG = "a " * 400
CLOSE = 1e-4


@pytest.fixture(params=FLAVOURS)
def client(request: pytest.FixtureRequest, tasks_server: Server) -> TritonClient:
    return TritonClient(request.param, tasks_server)


def texts_of(values: Any) -> list[str]:
    return [value.decode() for value in values.ravel()]


MASKED = ["the [MASK] is on", "[MASK]"]
ASKED = {"question": QUESTION, "context": CONTEXT}


def classes(ask: Callable[..., Any]) -> dict[str, Any]:
    """`scores` stand in the order of the labels, and `label` is the best one."""
    found = ask("/predict", inputs=[[text] for text in TEXTS])
    named = [{entry["label"]: entry["score"] for entry in entries} for entries in found]
    scores = [[scores[label] for label in LABELS["classify"]] for scores in named]
    return {"label": [entries[0]["label"] for entries in found], "scores": scores}


def ranks(ask: Callable[..., Any]) -> dict[str, Any]:
    """The scores stand in the order of the pairs."""
    found = sorted(ask("/rerank", query=QUESTION, texts=TEXTS), key=lambda entry: entry["index"])
    return {"score": [entry["score"] for entry in found]}


def masks(ask: Callable[..., Any]) -> dict[str, Any]:
    """The best five tokens for the one mask of each text."""
    rows = ask("/fill-mask", inputs=MASKED)
    return {
        "token": [[e["token_str"] for e in row] for row in rows],
        "score": [[e["score"] for e in row] for row in rows],
    }


BY_HTTP: dict[str, tuple[dict[str, list[str]], Callable[[Callable[..., Any]], dict[str, Any]]]] = {
    "embed": ({"text": TEXTS}, lambda ask: {"embedding": ask("/embed", inputs=TEXTS)}),
    "classify": ({"text": TEXTS}, classes),
    "rerank": ({"text": [QUESTION] * 3, "text_pair": TEXTS}, ranks),
    "answer": (
        {"text": [QUESTION], "text_pair": [CONTEXT]},
        lambda ask: {name: [value] for name, value in ask("/answer", inputs=ASKED).items()},
    ),
    "fill_mask": ({"text": MASKED}, masks),
}
"""Inputs of a task, and its outputs as the task's own route has them."""


@pytest.mark.parametrize("task", BY_HTTP)
def test_a_task(client: TritonClient, tasks_server: Server, task: str) -> None:
    """Each output holds what the task's route answers, also of a version that is named."""
    tensors, of_route = BY_HTTP[task]
    result = client.infer(task, tensors, model_version="1")
    for name, expected in of_route(partial(ask, tasks_server)).items():
        found = result.as_numpy(name)
        if found.dtype == np.object_:
            assert texts_of(found) == np.ravel(expected).tolist()
        else:
            np.testing.assert_allclose(found, expected, rtol=CLOSE, atol=1e-6)


def test_several_masks_are_refused(client: TritonClient) -> None:
    with pytest.raises(InferenceServerException, match="2 masks"):
        client.infer("fill_mask", {"text": ["[MASK] [MASK]"]})


def test_tag(client: TritonClient, tasks_server: Server) -> None:
    """For each text a JSON list of what `/tag` finds."""
    found = [json.loads(text) for text in texts_of(client.infer("tag", {"text": TEXTS}).as_numpy("entities"))]
    expected = ask(tasks_server, "/tag", inputs=TEXTS)
    keys = ("entity_group", "word", "start", "end")
    pick = [[[entity[key] for key in keys] for entity in entities] for entities in found]
    assert pick == [[[entity[key] for key in keys] for entity in entities] for entities in expected]


def test_embed_tokens(client: TritonClient, tiny_models: dict[str, TinyModel]) -> None:
    """A vector for each token, filled up with zeros to the longest text, and how many tokens each text has."""
    tiny = tiny_models["embed_tokens"]
    encoded = tiny.tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.inference_mode():
        expected = tiny.model(**encoded).last_hidden_state.numpy() * encoded["attention_mask"].numpy()[..., None]
    result = client.infer("embed_tokens", {"text": TEXTS})
    np.testing.assert_allclose(result.as_numpy("embeddings"), expected, atol=1e-4)
    assert result.as_numpy("tokens").tolist() == encoded["attention_mask"].sum(1).tolist()


OUTPUTS: dict[str, Callable[[Any], Any]] = {
    "embed": lambda answer: {"pooled": answer.last_hidden_state[:, 0]},
    "embed_tokens": lambda answer: {"token_embeddings": answer.last_hidden_state},
    "classify": lambda answer: {"logits": answer.logits},
    "rerank": lambda answer: {"logits": answer.logits},
    "answer": lambda answer: {"start_logits": answer.start_logits, "end_logits": answer.end_logits},
    "tag": lambda answer: {"logits": answer.logits},
}


@pytest.mark.parametrize("task", OUTPUTS)
@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_tokens(client: TritonClient, tiny_models: dict[str, TinyModel], task: str, kind: type) -> None:
    """`{model}.tokens` takes token ids, mask and segments, and answers what PyTorch answers to them."""
    tiny = tiny_models[task]
    encoded = tiny.tokenizer(TEXTS, ["a text"] * 3, padding="max_length", max_length=40, return_tensors="pt")
    result = client.infer(f"{task}.tokens", {name: values.numpy().astype(kind) for name, values in encoded.items()})
    with torch.inference_mode():
        expected = OUTPUTS[task](tiny.model(**encoded))
    mask = encoded["attention_mask"].numpy().astype(bool)
    for name, values in expected.items():
        found, exact = result.as_numpy(name), values.numpy()
        assert found.shape == exact.shape
        if exact.shape[:2] == mask.shape:
            assert not found[~mask].any()
            found, exact = found[mask], exact[mask]
        np.testing.assert_allclose(found, exact, atol=1e-4)


def test_tokens_of_masks(client: TritonClient, tiny_models: dict[str, TinyModel]) -> None:
    """Of `fill_mask` the graph's outputs have a row for each mask of the text with the most."""
    tiny = tiny_models["fill_mask"]
    ids = [tiny.tokenizer.encode(text) for text in ("[MASK] is [MASK]", "the a [MASK]")]
    result = client.infer("fill_mask.tokens", {"input_ids": np.array(ids)})
    assert [result.as_numpy(name).shape for name in ("top_ids", "top_logits", "logsumexp")] == [
        (2, 2, 8),
        (2, 2, 8),
        (2, 2),
    ]
    assert not result.as_numpy("top_logits")[1, 1].any()


def test_texts_and_tokens_mean_the_same(client: TritonClient, tiny_models: dict[str, TinyModel]) -> None:
    """Under its plain name a model takes tokens too, and answers as to the text that they come from."""
    for task, output in (("embed", "embedding"), ("classify", "scores"), ("fill_mask", "score")):
        text = "the [MASK] is on"
        ids = np.array([tiny_models[task].tokenizer.encode(text)])
        found = client.infer(task, {"input_ids": ids}).as_numpy(output)
        np.testing.assert_allclose(found, client.infer(task, {"text": [text]}).as_numpy(output), rtol=CLOSE)
    pair = tiny_models["rerank"].tokenizer(QUESTION, "a text", return_tensors="np")
    found = client.infer("rerank", {name: pair[name] for name in ("input_ids", "token_type_ids")}).as_numpy("score")
    expected = client.infer("rerank", {"text": [QUESTION], "text_pair": ["a text"]}).as_numpy("score")
    np.testing.assert_allclose(found, expected, rtol=CLOSE)


IDS = np.array([[7, 8, 9, 9]])

BAD = "400 StatusCode.INVALID_ARGUMENT"
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "texts and tokens": ("embed", {"text": ["a"], "input_ids": IDS}, "unexpected inputs"),
    "no ids": ("embed", {"attention_mask": IDS}, "unexpected inputs"),
    "an empty mask": ("embed", {"input_ids": IDS, "attention_mask": IDS * 0}, "must contain a 1"),
    "a mask with holes": ("embed", {"input_ids": IDS, "attention_mask": np.array([[1, 0, 1, 0]])}, "ones, then zeros"),
    "a mask of twos": ("embed", {"input_ids": IDS, "attention_mask": np.array([[2, 0, 0, 0]])}, "0 and 1"),
    "a third segment": ("embed", {"input_ids": IDS, "token_type_ids": IDS}, "0 and 1"),
    "another shape": ("embed", {"input_ids": IDS, "attention_mask": np.array([[1]])}, "differ"),
    "a negative id": ("embed.tokens", {"input_ids": -IDS}, "outside"),
    "an id beyond the vocabulary": ("embed.tokens", {"input_ids": IDS * 1000}, "outside"),
    "an id beyond 32 bits": ("embed.tokens", {"input_ids": IDS * 2**40}, "INT32"),
    "too many tokens": ("embed.tokens", {"input_ids": np.ones((1, MAX_LENGTH + 1), int)}, "token IDs"),
    "one dimension": ("embed.tokens", {"input_ids": IDS[0]}, "shape"),
    "text under the name for tokens": ("embed.tokens", {"text": ["a"]}, "takes 'input_ids'"),
    "tokens where text is pointed into": ("tag", {"input_ids": IDS}, "must be one text"),
    "one of two texts": ("rerank", {"text": ["a"]}, "pair of texts"),
    "a pair for a task of one text": ("embed", {"text": ["a"], "text_pair": ["b"]}, "without 'text_pair'"),
    "texts without partners": ("rerank", {"text": ["a", "b"], "text_pair": ["a"]}, "2 elements"),
    "too many texts": ("embed", {"text": ["a"] * 2049}, "the maximum is 2048"),
    "not to be cut": ("embed", {"text": [LONG]}, "402 tokens"),
    "an unknown model": ("nobody", {"text": ["a"]}, "unknown model"),
    "a timeout in microseconds": ("embed", {"text": ["a"]}, "deadline"),
}
MORE: dict[str, tuple[dict[str, Any], str]] = {
    # What is asked for beside the tensors, and the statuses, where a row has more than they.
    "not to be cut": ({"parameters": {"truncate": False}}, BAD),
    "an unknown model": ({}, "404 StatusCode.NOT_FOUND"),
    "a timeout in microseconds": ({"timeout": 1}, "504 StatusCode.DEADLINE_EXCEEDED"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_inputs(client: TritonClient, case: str) -> None:
    """A refusal is the client's own exception, with our sentence and status; the next request is answered."""
    model, tensors, words = WRONG[case]
    more, statuses = MORE.get(case, ({}, BAD))
    with pytest.raises(InferenceServerException, match=words) as refused:
        client.infer(model, tensors, **more)
    assert refused.value.status() in statuses.split()
    assert client.infer("embed", {"text": ["a"]}).as_numpy("embedding").shape == (1, 32)


def test_health(client: TritonClient) -> None:
    """Its probes are true for what is served and false, not an error, for what is not."""
    for method, *names in (("is_server_live",), ("is_server_ready",), ("is_model_ready", "embed", "1")):
        assert client.call(method, *names)
    for names in (("embed", "2"), ("nobody",)):
        assert not client.call("is_model_ready", *names)


@pytest.mark.parametrize(("binary_in", "binary_out"), [(True, False), (False, True)], ids=["in", "out"])
def test_binary_data_one_way(tasks_server: Server, binary_in: bool, binary_out: bool) -> None:  # noqa: FBT001
    """JSON and binary mix as the client likes."""
    module = FLAVOURS["http"]
    tensor = module.InferInput("text", [len(TEXTS), 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[text.encode()] for text in TEXTS], np.object_), binary_data=binary_in)
    wanted = module.InferRequestedOutput("embedding", binary_data=binary_out)
    with module.InferenceServerClient(tasks_server.http) as client:
        found = client.infer("embed", [tensor], outputs=[wanted]).as_numpy("embedding")
    np.testing.assert_allclose(found, ask(tasks_server, "/embed", inputs=TEXTS), atol=1e-6)


def test_outputs_are_chosen_by_name(client: TritonClient) -> None:
    """Only what is asked for comes back, in the order asked; unknown or doubled names are refused."""
    result = client.infer("answer", {"text": [QUESTION], "text_pair": [CONTEXT]}, outputs=["end", "answer"])
    reply = result.get_response()
    names = (
        [output["name"] if isinstance(output, dict) else output.name for output in reply["outputs"]]
        if isinstance(reply, dict)
        else [output.name for output in reply.outputs]
    )
    assert names == ["end", "answer"]
    assert result.as_numpy("answer").shape == (1,)
    for outputs in (["pooled"], ["end", "end"]):
        with pytest.raises(InferenceServerException, match="unexpected output"):
            client.infer("answer", {"text": [QUESTION], "text_pair": [CONTEXT]}, outputs=outputs)


@pytest.mark.parametrize("everywhere", [None, False, True])
@pytest.mark.parametrize("answer", [None, False, True])
def test_each_output_is_binary_or_not(tasks_server: Server, everywhere: bool | None, answer: bool | None) -> None:  # noqa: FBT001
    """An output's own flag wins over the request's; without either, outputs are JSON."""
    tensors = {"text": QUESTION, "text_pair": CONTEXT}
    message = {
        "inputs": [{"name": name, "datatype": "BYTES", "shape": [1], "data": [text]} for name, text in tensors.items()],
        "outputs": [
            {"name": "answer", "parameters": {} if answer is None else {"binary_data": answer}},
            {"name": "start"},
        ],
        "parameters": {} if everywhere is None else {"binary_data_output": everywhere},
    }
    reply = post_json(tasks_server.http, "/v2/models/answer/infer", message)
    assert reply.status == 200, reply.body
    length = int(reply.headers.get("inference-header-content-length", len(reply.body)))
    first, second = json.loads(reply.body[:length])["outputs"]
    expected = [bool(everywhere if answer is None else answer), bool(everywhere)]
    assert ["parameters" in output for output in (first, second)] == expected
    assert ["data" not in output for output in (first, second)] == expected
    tail = reply.body[length:]
    assert len(tail) == sum(
        output["parameters"]["binary_data_size"] for output in (first, second) if "data" not in output
    )
    assert (reply.headers["content-type"] == "application/octet-stream") == any(expected)


RAW: dict[str, tuple[str, bytes, dict[str, Any]]] = {
    "a text": ("embed", b"the server", {"text": ["the server"]}),
    "text and numbers": ("classify", "a ½ text".encode(), {"text": ["a ½ text"]}),
    "nothing": ("embed", b"", {"text": [""]}),
    "ids": ("embed.tokens", np.array([[7, 8, 9, 9]], "<i8").tobytes(), {"input_ids": np.array([[7, 8, 9, 9]])}),
}


@pytest.mark.parametrize("case", RAW)
def test_raw_binary_requests(tasks_server: Server, case: str) -> None:
    """The body alone is the model's input, and all outputs are binary: Triton's client reads what it would ask for."""
    model, body, tensors = RAW[case]
    reply = http_call(
        tasks_server.http, "POST", f"/v2/models/{model}/infer", body, {"Inference-Header-Content-Length": "0"}
    )
    assert reply.status == 200, reply.body
    length = int(reply.headers["inference-header-content-length"])
    found = FLAVOURS["http"].InferenceServerClient.parse_response_body(reply.body, header_length=length)
    expected = TritonClient("http", tasks_server).infer(model, tensors)
    outputs = found.get_response()["outputs"]
    assert [output["name"] for output in outputs] == [output["name"] for output in expected.get_response()["outputs"]]
    for output in outputs:
        assert "data" not in output
        np.testing.assert_array_equal(found.as_numpy(output["name"]), expected.as_numpy(output["name"]))


@pytest.mark.parametrize(
    ("model", "length", "body", "status", "words"),
    [
        ("rerank", "0", b"a text", 400, b"'text' and 'text_pair'"),
        ("embed.tokens", "0", bytes(15), 400, b"15 bytes are not a row of INT64"),
        ("embed.tokens", "0", b"", 400, b"0 bytes are not a row of INT64"),
        ("embed", "0", b"\xff", 400, b"not UTF-8"),
        ("nobody", "0", b"a text", 404, b"unknown model"),
        ("embed/versions/9", "0", b"a text", 404, b"available: 1"),
        ("embed", "7", b"a text", 400, b"from 0 to 6"),
        ("embed", "-1", b"a text", 400, b"from 0 to 6"),
        ("embed", "9" * 5000, b"a text", 400, b"from 0 to 6"),
    ],
)
def test_raw_binary_requests_that_are_refused(
    tasks_server: Server, model: str, length: str, body: bytes, status: int, words: bytes
) -> None:
    """With a sentence that says what the model takes."""
    headers = {"Inference-Header-Content-Length": length}
    reply = http_call(tasks_server.http, "POST", f"/v2/models/{model}/infer", body, headers)
    assert (reply.status, words in reply.body) == (status, True), reply.body


def test_metadata_and_configuration_agree(client: TritonClient, tasks_server: Server) -> None:
    """Both describe the same tensors under both names: with the batch's dimension, and without it."""
    for model in ("embed", "embed.tokens", "answer", "fill_mask.tokens", "tag"):
        metadata = client.told("get_model_metadata", model)
        config = client.told("get_model_config", model)
        config = config.get("config", config)
        assert metadata["name"] == config["name"] == model
        assert metadata["versions"] == ["1"]
        assert config["max_batch_size"] == 2048
        assert not config["model_transaction_policy"].get("decoupled", False)
        assert "dynamic_batching" in config
        for side in ("input", "output"):
            tensors, described = metadata[f"{side}s"], config[side]
            assert [tensor["name"] for tensor in tensors] == [tensor["name"] for tensor in described]
            for tensor, other in zip(tensors, described, strict=True):
                kind = tensor["datatype"].replace("BYTES", "STRING")
                assert other["data_type"] == f"TYPE_{kind}"
                assert [int(size) for size in tensor["shape"][1:]] == (
                    [] if "reshape" in other else [int(size) for size in other["dims"]]
                )
    assert get(tasks_server.http, "/v2/models/answer").json()["inputs"][1]["name"] == "text_pair"


def test_extensions(client: TritonClient) -> None:
    """What is implemented is listed, what is not is not."""
    server = client.told("get_server_metadata")
    assert server["name"] == "bertserve"
    extensions = set(server["extensions"])
    assert {"statistics", "model_configuration", "binary_tensor_data", "model_repository"} <= extensions
    assert {"parameters", "schedule_policy"} <= extensions
    assert not {"system_shared_memory", "cuda_shared_memory", "trace", "classification"} & extensions


@pytest.fixture(scope="module")
def counted(models: Path) -> Iterator[Server]:
    """A server that only the test of statistics asks."""
    with Server(models, *FAKE) as server:
        yield server


STAGES = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")


def counts(stats: dict[str, Any]) -> list[int]:
    return [int(stats["inference_count"]), *[int(stats["inference_stats"][stage]["count"]) for stage in STAGES]]


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_statistics_agree_with_the_metrics(flavour: str, counted: Server) -> None:
    """What the client shows is what Prometheus sees, text by text and microsecond by microsecond."""
    client = TritonClient(flavour, counted)
    (before,) = client.told("get_inference_statistics", "minilm", "1")["model_stats"]
    for texts in (["a"], ["b", "c"], ["d"] * 5):
        client.infer("minilm", {"text": texts})
    with pytest.raises(InferenceServerException):
        client.infer("minilm", {"text": ["x " * 100_000]}, parameters={"truncate": False})
    (stats,) = client.told("get_inference_statistics", "minilm", "1")["model_stats"]
    whole = client.told("get_inference_statistics")["model_stats"]
    assert [(model["name"], model["version"]) for model in whole] == [("minilm", "1")]
    assert [after - earlier for earlier, after in zip(counts(before), counts(stats), strict=True)] == [
        8,
        3,
        1,
        3,
        3,
        3,
        3,
    ]
    assert int(stats["inference_count"]) == metric(counted, "bertserve_batch_size_sum")
    assert int(stats["execution_count"]) == metric(counted, "bertserve_batch_size_count")
    sizes = {int(entry["batch_size"]): entry for entry in stats["batch_stats"]}
    assert sum(int(entry["compute_infer"]["count"]) for entry in sizes.values()) == int(stats["execution_count"])
    assert sum(size * int(entry["compute_infer"]["count"]) for size, entry in sizes.items()) == int(
        stats["inference_count"]
    )
    assert all(int(entry["compute_infer"]["ns"]) > 0 for entry in sizes.values())
    assert int(stats["last_inference"]) > 1_600_000_000_000
    for stage, name in (
        ("success", "request"),
        ("queue", "queue"),
        ("compute_input", "tokenize"),
        ("compute_infer", "compute"),
    ):
        told = int(stats["inference_stats"][stage]["ns"])
        assert told == pytest.approx(metric(counted, f"bertserve_{name}_seconds_sum") * 1e9, rel=1e-6)


def test_repository_index(client: TritonClient) -> None:
    """Every name of every model is listed as ready."""
    index = client.told("get_model_repository_index")
    models = index if isinstance(index, list) else index["models"]
    assert {"embed", "embed.tokens", "tag", "tag.tokens"} <= {model["name"] for model in models}
    assert {model["state"] for model in models} == {"READY"}


def test_models_are_not_unloaded_by_default(client: TritonClient) -> None:
    """Loading and unloading is forbidden unless it is switched on."""
    for method in ("load_model", "unload_model"):
        with pytest.raises(InferenceServerException, match="--model-control") as refused:
            client.call(method, "embed")
        assert refused.value.status() in {"403", "StatusCode.PERMISSION_DENIED"}
    assert client.call("is_model_ready", "embed")


@pytest.fixture(scope="module")
def controlled(tasks_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose only model may be taken out of service."""
    repository = tmp_path_factory.mktemp("controlled")
    shutil.copytree(tasks_repository / "tag", repository / "tag")
    with Server(repository, *measured(repository), "--model-control", "true") as server:
        yield server


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_models_out_of_service_and_back(controlled: Server, flavour: str) -> None:
    """Switched on, a model can be taken out of service and back; names that the repository lacks are not found."""
    client = TritonClient(flavour, controlled)
    client.call("unload_model", "tag")
    assert not client.call("is_model_ready", "tag")
    assert not client.call("is_model_ready", "tag.tokens")
    with pytest.raises(InferenceServerException, match="unknown model"):
        client.infer("tag", {"text": ["a"]})
    assert post_json(controlled.http, "/tag", b'{"inputs": "a"}').status == 400
    index = client.told("get_model_repository_index")
    models = index if isinstance(index, list) else index["models"]
    assert {"UNAVAILABLE"} == {model["state"] for model in models if model["name"].startswith("tag")}
    client.call("load_model", "tag")
    client.call("load_model", "tag")
    assert client.infer("tag", {"text": ["a"]}).as_numpy("entities").shape == (1,)
    with pytest.raises(InferenceServerException, match="unknown model"):
        client.call("load_model", "nobody")
    with pytest.raises(InferenceServerException, match="parameters"):
        client.call("load_model", "tag", config="{}")


def test_shared_memory_is_refused_as_such(client: TritonClient) -> None:
    """Its calls, and requests that refer to it, say that it is not supported."""
    for method, *arguments in (
        ("get_system_shared_memory_status",),
        ("unregister_system_shared_memory",),
        ("register_system_shared_memory", "region", "/key", 64),
        ("get_cuda_shared_memory_status",),
        ("unregister_cuda_shared_memory",),
    ):
        with pytest.raises(InferenceServerException, match="shared memory is not supported") as refused:
            client.call(method, *arguments)
        assert refused.value.status() in {"501", "StatusCode.UNIMPLEMENTED"}
    tensor = client._tensors.InferInput("text", [1, 1], "BYTES")
    tensor.set_shared_memory("region", 64)
    with pytest.raises(InferenceServerException, match="shared memory is not supported"):
        client.call("infer", "embed", [tensor])


def test_settings_of_traces_and_logs(client: TritonClient) -> None:
    """They are not part of this server, and it says so."""
    for method in ("get_trace_settings", "get_log_settings"):
        with pytest.raises(InferenceServerException, match="trace and log settings"):
            client.call(method)


def test_the_models_name_comes_back_as_it_was_asked_for(client: TritonClient) -> None:
    """Replies name the model as the request did, and the version that answered."""
    reply = client.infer("embed.tokens", {"input_ids": IDS}, request_id="7").get_response()
    fields = reply if isinstance(reply, dict) else {name: getattr(reply, name) for name in ("model_name", "id")}
    assert (fields["model_name"], fields["id"]) == ("embed.tokens", "7")
