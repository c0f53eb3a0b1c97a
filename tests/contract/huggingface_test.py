"""`/` and `/models/NAME`, which answer as the model's task does, and zero-shot classification."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from huggingface_hub.errors import HfHubHTTPError

from tests.support.clients import get, metric, post_json
from tests.support.server import Server, measured
from tests.support.tasks import TinyModel, tiny_model, write_bundle

if TYPE_CHECKING:
    from collections.abc import Iterator

TEXT = "the server is not on it"
LABELS = ["text", "server", "it is"]
LONG_LABEL = "it is not on the server and " * 6


@pytest.fixture(scope="module")
def inference() -> TinyModel:
    return tiny_model("classify", labels=("contradiction", "neutral", "entailment"))


@pytest.fixture(scope="module")
def server(inference: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("inference")
    write_bundle(repository, inference, "nli")
    with Server(repository, *measured(repository)) as running:
        yield running


def ask(server: Server, path: str, message: Any, status: int = 200) -> Any:
    reply = post_json(server.http, path, message)
    assert reply.status == status, reply.body
    return reply.json()


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"multi_label": True},
        {"hypothesis_template": "it is {} or not"},
        {"candidate_labels": ["server"]},
        {"candidate_labels": "text, server , it is"},
        {"candidate_labels": [LONG_LABEL, f"the {LONG_LABEL}"]},
        {"candidate_labels": [LONG_LABEL], "hypothesis_template": "{}", "multi_label": True},
        {"candidate_labels": ["{x}", "{}", "a{b"]},
        {"hypothesis_template": "it is {0} or {0}"},
        {"hypothesis_template": "it is {{on}} a {}"},
    ],
    ids=json.dumps,
)
def test_zero_shot_is_what_transformers_says(server: Server, inference: TinyModel, parameters: dict[str, Any]) -> None:
    """Labels in the order of the pipeline, with its scores; a list of texts is answered by a list."""
    parameters = {"candidate_labels": LABELS, **parameters}
    pipeline = transformers.ZeroShotClassificationPipeline(model=inference.model, tokenizer=inference.tokenizer)
    texts = [TEXT, "a text of it", "and " * 100]
    found = ask(server, "/", {"inputs": texts, "parameters": parameters})
    for text, labels in zip(texts, found, strict=True):
        expected = pipeline(text, **parameters)
        assert [one["label"] for one in labels] == expected["labels"]
        np.testing.assert_allclose([one["score"] for one in labels], expected["scores"], rtol=1e-4)
    assert ask(server, "/classify", {"inputs": texts[0], "parameters": parameters}) == found[0]


def test_zero_shot_where_entailment_is_the_first_label(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The last label stands for contradiction then, as in the pipeline."""
    tiny = tiny_model("classify", labels=("ENTAILMENT", "not_entailment"))
    repository = tmp_path_factory.mktemp("two")
    write_bundle(repository, tiny, "nli")
    pipeline = transformers.ZeroShotClassificationPipeline(model=tiny.model, tokenizer=tiny.tokenizer)
    with Server(repository, *measured(repository)) as running:
        found = ask(running, "/", {"inputs": TEXT, "parameters": {"candidate_labels": LABELS, "multi_label": True}})
    expected = pipeline(TEXT, LABELS, multi_label=True)
    assert [one["label"] for one in found] == expected["labels"]
    np.testing.assert_allclose([one["score"] for one in found], expected["scores"], rtol=1e-4)


@pytest.mark.parametrize(
    ("parameters", "status", "message"),
    [
        ({"candidate_labels": []}, 400, "`candidate_labels` is empty"),
        ({"candidate_labels": " , "}, 400, "`candidate_labels` is empty"),
        *(
            ({"candidate_labels": ["a"], "hypothesis_template": template}, 422, "must contain {} once")
            for template in ("it is", "{} {}", "{} {0}", "{0.__class__}", "{0[0]}", "{!r}", "{:>999999999}", "{", "{a}")
        ),
        ({"candidate_labels": ["a ", "a " * 90]}, 422, "has 103 tokens; at most 60 fit beside a text"),
        ({"candidate_labels": ["a", "a" * 2048]}, 422, "has 2067 characters; at most 2048 are read"),
        ({"candidate_labels": ["a" * 99], "hypothesis_template": "{0}" * 99}, 422, "at most 2048 are read"),
        ({"candidate_labels": ["a"], "hypothesis_template": "{}" + " " * 2048}, 422, "at most 2048 are read"),
        ({"candidate_labels": ["a"] * 2049}, 422, "2049 `candidate_labels` each are 2049 inputs; the maximum is 2048"),
        ({"candidate_labels": [1]}, 422, "expected `str`"),
    ],
)
def test_what_labels_may_not_be(server: Server, parameters: dict[str, Any], status: int, message: str) -> None:
    """Each is refused by a sentence that says why."""
    refused = ask(server, "/", {"inputs": "a", "parameters": parameters}, status)
    assert message in refused["error"]


def test_the_only_model_needs_no_name(server: Server, inference: TinyModel) -> None:
    """Hugging Face's client with an address alone: classes, pairs, empty parameters."""
    client = huggingface_hub.InferenceClient(base_url=f"http://{server.http}")
    classes = ask(server, "/classify", {"inputs": TEXT})[0]
    assert [(one.label, one.score) for one in client.text_classification(TEXT)] == [
        (one["label"], pytest.approx(one["score"])) for one in classes
    ]
    best, *_ = client.zero_shot_classification(TEXT, LABELS)
    assert (
        best.label
        == transformers.ZeroShotClassificationPipeline(model=inference.model, tokenizer=inference.tokenizer)(
            TEXT, LABELS
        )["labels"][0]
    )
    assert ask(server, "/", {"inputs": TEXT, "parameters": {}}) == [classes]
    assert ask(server, "/", {"inputs": TEXT, "options": {"wait_for_model": True}}) == [classes]
    pair = {"text": "the server", "text_pair": "is on"}
    with torch.inference_mode():
        logits = inference.model(**inference.tokenizer("the server", "is on", return_tensors="pt")).logits[0]
    expected = dict(zip(inference.labels, torch.softmax(logits, -1).tolist(), strict=True))
    for inputs in (pair, [pair]):
        (found,) = ask(server, "/models/nli", {"inputs": inputs})
        assert {one["label"]: one["score"] for one in found} == pytest.approx(expected, rel=1e-4)
    assert get(server.http, "/").status == 200  # the console


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_model_named_answers_as_its_task_does(tasks_server: Server, tiny_models: dict[str, TinyModel]) -> None:
    """The same client, asking one model of several."""

    def client(name: str) -> huggingface_hub.InferenceClient:
        return huggingface_hub.InferenceClient(base_url=f"http://{tasks_server.http}/models/{name}")

    texts = ["the server", "it is a text"]
    vectors = np.array(ask(tasks_server, "/embed", {"inputs": texts}))
    np.testing.assert_allclose(client("embed").feature_extraction(texts), vectors, atol=1e-6)
    np.testing.assert_allclose(client("embed").feature_extraction(texts[0]), vectors[:1], atol=1e-6)
    raw = client("embed").feature_extraction(texts[0], normalize=False, truncate=True, truncation_direction="left")
    assert np.linalg.norm(raw) != pytest.approx(1, abs=1e-2)
    similar = client("embed").sentence_similarity(texts[0], texts)
    np.testing.assert_allclose(similar, vectors @ vectors[0], atol=1e-6)
    states = client("embed_tokens").feature_extraction(texts[0])
    assert states.shape == (1, 4, 32)
    pipeline = transformers.TokenClassificationPipeline(
        model=tiny_models["tag"].model, tokenizer=tiny_models["tag"].tokenizer
    )
    for given, strategy in ((None, "simple"), ("average", "average"), ("none", "none")):
        found = client("tag").token_classification(TEXT, aggregation_strategy=given)
        assert [(one.entity, one.entity_group, one.start, one.end) for one in found] == [
            (one.get("entity"), one.get("entity_group"), one["start"], one["end"])
            for one in pipeline(TEXT, aggregation_strategy=strategy)
        ]
    answer = client("answer").question_answering(question="what is on", context=TEXT)
    assert answer.answer == TEXT[answer.start : answer.end]
    assert client("answer").question_answering(question="a", context=TEXT, align_to_words=False, max_seq_len=64)
    filled = client("fill_mask").fill_mask("the [MASK] is on", top_k=8)
    targets = [one.token_str for one in filled[3:5]]
    assert client("fill_mask").fill_mask("the [MASK] is on", targets=targets) == filled[3:5]
    ranks = ask(tasks_server, "/models/rerank", {"query": "it", "texts": texts})
    assert ranks == ask(tasks_server, "/rerank", {"query": "it", "texts": texts})


@pytest.fixture(scope="module")
def reranker(tiny_models: dict[str, TinyModel], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("reranker")
    write_bundle(repository, tiny_models["rerank"])
    with Server(repository, *measured(repository)) as running:
        yield running


def test_sagemaker(server: Server, tasks_server: Server) -> None:
    """`/ping` is 200 without a body where the server is ready, `/invocations` answers as `/` does."""
    assert (get(server.http, "/ping").status, get(server.http, "/ping").body) == (200, b"")
    for message in ({"inputs": TEXT}, {"inputs": [TEXT], "parameters": {"candidate_labels": LABELS}}):
        assert ask(server, "/invocations", message) == ask(server, "/", message)
    for empty in ([], "", [TEXT, ""]):
        refused = ask(server, "/invocations", {"inputs": empty}, 400)
        assert (refused["error_type"], "empty" in refused["error"]) == ("Empty", True)
    assert len(ask(server, "/classify", {"inputs": ""})[0]) == 3
    for path in ("/invocations", "/vertex"):
        message = {"inputs": TEXT} if path == "/invocations" else {"instances": [{"inputs": TEXT}]}
        assert "8 models are available" in ask(tasks_server, path, message, 400)["error"]


def test_vertex(server: Server, fake_server: Server, reranker: Server) -> None:
    """For each instance what `/` answers it; the parameters are those of instances without."""
    instances = [{"inputs": TEXT}, {"inputs": ["it", TEXT]}, {"inputs": "it", "parameters": {"top_k": 2}}]
    shared = {"top_k": 1}
    before = get(server.http, "/status").json()["totals"]["texts"]
    found = ask(server, "/vertex", {"instances": instances, "parameters": shared})
    assert get(server.http, "/status").json()["totals"]["texts"] == before + 4
    assert found == {"predictions": [ask(server, "/", {"parameters": shared, **instance}) for instance in instances]}
    assert [len(prediction[0]) for prediction in found["predictions"]] == [1, 1, 2]
    text = {"inputs": "What is a T4?"}
    reply = ask(fake_server, "/vertex", {"instances": [text] * 3, "parameters": {"dimensions": 8}})
    assert reply == {"predictions": [ask(fake_server, "/embed", {**text, "dimensions": 8})] * 3}
    query = {"query": "it", "texts": ["the server", "it is"]}
    reply = ask(reranker, "/vertex", {"instances": [query], "parameters": {"raw_scores": True}})
    assert reply == {"predictions": [ask(reranker, "/rerank", {**query, "raw_scores": True})]}


@pytest.mark.parametrize(
    ("message", "status", "kind", "said"),
    [
        ({"instances": []}, 400, "Empty", "`instances` is empty"),
        (
            {"instances": [{"inputs": TEXT}] * 2049},
            422,
            "Validation",
            "the request has 2049 inputs; the maximum is 2048",
        ),
        ({"instances": ["a"]}, 422, "Validation", "expected `object`, got `str`"),
        ({"instances": [{"inputs": TEXT}, {"text": TEXT}]}, 422, "Validation", "instance 1: "),
        ({"instances": [{"inputs": TEXT}, {"inputs": []}]}, 400, "Empty", "instance 1: the list of inputs is empty"),
        ({"instances": [{"inputs": TEXT}], "parameters": {"topk": 1}}, 422, "Validation", "instance 0: unknown field"),
        ({"inputs": TEXT}, 422, "Validation", "missing required field `instances`"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_instances_that_are_refused(server: Server, message: dict[str, Any], status: int, kind: str, said: str) -> None:
    """All are answered or none, and the one that is wrong is named; nothing of the others stays under way."""
    refused = ask(server, "/vertex", message, status)
    assert refused["error_type"] == kind
    assert said in refused["error"]
    assert metric(server, "bertserve_admitted_tokens") == 0


def test_several_models_and_no_name(tasks_server: Server) -> None:
    """The client shows which there are and how one is asked."""
    client = huggingface_hub.InferenceClient(base_url=f"http://{tasks_server.http}")
    said = r"8 models are available \(.*fill_mask.*\); name one in the path: POST /models/NAME$"
    with pytest.raises(HfHubHTTPError, match=said):
        client.feature_extraction("a")
    with pytest.raises(HfHubHTTPError, match="unknown model"):
        huggingface_hub.InferenceClient(base_url=f"http://{tasks_server.http}/models/nobody").feature_extraction("a")
    refused = ask(tasks_server, "/models/embed", {"inputs": "a", "encoding_format": "base64"}, 422)
    assert refused["error_type"] == "Validation"
