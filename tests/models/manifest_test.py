"""What a manifest must say, and that its bundle is exactly what it says; without a server."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from bertserve.serving.errors import BundleError, InvalidRequest
from bertserve.serving.inference.tokenizer import TextTokenizer
from bertserve.serving.models.bundle import BundleWriter, open_bundle
from bertserve.serving.models.manifest import SCHEMA_VERSION, Manifest, problem
from bertserve.serving.models.verified_dir import digest
from bertserve.serving.tasks import TASKS
from tests.support.models import NAME
from tests.support.poison import FP32, TINY_SIZE, edit_manifest, tiny_bundle
from tests.support.specs import parts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MODEL, TOKENIZER = FP32, "tokenizer.json"
WORDS = 30_522
"""Of the demo model's vocabulary."""


def small_tokenizer() -> Tokenizer:
    words = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "c")
    made = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))  # noqa: S106  no secret
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return made


@pytest.fixture
def bundle(models: Path, tmp_path: Path) -> Path:
    return tiny_bundle(models, tmp_path / "models")


def refusal(bundle: Path) -> str:
    with pytest.raises(BundleError) as refused:
        open_bundle(bundle)
    assert str(bundle) in str(refused.value)
    return str(refused.value)


def test_an_honest_bundle_opens(bundle: Path) -> None:
    """The refusals below are of what is wrong with theirs."""
    assert open_bundle(bundle).manifest == opened(bundle)


def put(name: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: manifest.update({name: value})


def put_file(name: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: manifest["files"][0].update({name: value})


ENGINE = {"flavour": "rtx", "version": "1.7", "compute_capability": "7.5", "profiles": []}

SIDES = {"query_length": 8, "document_length": 16}


def of_sides(**changes: object) -> Callable[[dict[str, Any]], object]:
    """A model of token vectors with something else in how it reads queries and documents."""
    outputs = msgspec.to_builtins(TASKS["embed_tokens"].graph_outputs(hidden_size=TINY_SIZE))
    return lambda m: m.update(task="embed_tokens", embedding=None, multi_vector=SIDES | changes, outputs=outputs)


def of_embedding(**changes: object) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: manifest["embedding"].update(changes)


def of_task(task: str, **values: object) -> Callable[[dict[str, Any]], object]:
    """A model of another task, with its outputs."""
    outputs = msgspec.to_builtins(TASKS[task].graph_outputs(hidden_size=4, labels=2, candidates=3, active=3))
    return lambda m: m.update(task=task, embedding=None, outputs=outputs, **values)


CONTRADICTIONS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a-later-schema": (put("schema_version", SCHEMA_VERSION + 1), "export again"),
    "an-earlier-schema": (put("schema_version", 1), "schema version must be 2, 3 or 4: export again"),
    "another-name": (put("model", "other"), "name differs"),
    "another-version": (put("version", 2), "version differs"),
    "no-artifact": (put("artifacts", []), "no artifact"),
    "no-size": (put("hidden_size", 0), "hidden_size"),
    "too-wide": (put("hidden_size", 2**20 + 1), "hidden_size"),
    "no-words": (put("vocab_size", 0), "vocab_size"),
    "too-many-words": (put("vocab_size", 2**23 + 1), "vocab_size"),
    "too-short": (put("max_length", 2), "max_length"),
    "too-long": (put("max_length", 2**20 + 1), "max_length"),
    "special-token-outside": (put("special_ids", {"cls": WORDS}), "special token"),
    "negative-special-token": (put("special_ids", {"cls": -1}), "special token"),
    "other-outputs": (lambda m: m["outputs"][0].update(name="logits"), "outputs"),
    "no-output-size": (lambda m: m["outputs"][0].update(shape=[-1, -1]), "outputs"),
    "outputs-too-wide": (lambda m: m["outputs"][0].update(shape=[-1, 2**20 + 1]), "outputs"),
    "outputs-of-another-rank": (lambda m: m["outputs"][0].update(shape=[-1]), "outputs"),
    "another-batch-size": (lambda m: m["outputs"][0].update(shape=[1, TINY_SIZE]), "outputs"),
    "no-outputs": (put("outputs", []), "outputs"),
    "more-outputs": (lambda m: m["outputs"].append(m["outputs"][0]), "outputs"),
    "other-inputs": (lambda m: m["inputs"].reverse(), "inputs"),
    "fewer-inputs": (lambda m: m["inputs"].pop(0), "inputs"),
    "no-embedding": (put("embedding", None), "embedding is missing, which the task embed needs"),
    "embedding-elsewhere": (put("task", "rerank"), "embedding does not belong to the task rerank"),
    "no-pooling": (of_embedding(pooling=[]), "pooling must be one of cls, max, mean"),
    "pooling-unknown": (of_embedding(pooling=["mean", "least"]), "pooling must be one of cls, max, mean"),
    "similarity-unknown": (of_embedding(similarity="likeness"), "similarity"),
    "cut-beyond-the-vector": (of_embedding(matryoshka=[2, TINY_SIZE + 1]), "matryoshka"),
    "cut-to-nothing": (of_embedding(matryoshka=[0]), "matryoshka"),
    "activation-elsewhere": (put("activation", "identity"), "activation does not belong"),
    "no-activation": (of_task("rerank"), "activation is missing"),
    "labels-elsewhere": (put("labels", {"names": ["a"]}), "labels does not belong"),
    "classes-without-names": (of_task("classify"), "labels is missing"),
    "fewer-names-than-classes": (of_task("classify", labels={"names": ["a"]}), "outputs"),
    "problem-unknown": (of_task("classify", labels={"names": ["a", "b"], "problem": "hard"}), "problem"),
    "no-such-prompt": (put("default_prompt", "query"), "not one of the prompts"),
    "default-prompt-elsewhere": (
        of_task("rerank", activation="sigmoid", prompts={"query": "q"}, default_prompt="query"),
        "default_prompt",
    ),
    "sides-elsewhere": (of_task("classify", labels={"names": ["a", "b"]}, multi_vector=SIDES), "multi_vector does not"),
    "sides-without-their-output": (put("multi_vector", SIDES), "outputs"),
    "sides-longer-than-the-model": (of_sides(document_length=1 << 19), "a length of multi_vector is out of range"),
    "sides-shorter-than-a-text": (of_sides(query_length=2), "multi_vector.query_length"),
    "filled-beyond-a-query": (
        of_sides(expansion={"token": 103, "length": 9, "attended": False}),
        "a length of multi_vector is out of range",
    ),
    "filled-with-no-word": (
        of_sides(expansion={"token": WORDS, "length": 8, "attended": True}),
        "a token of multi_vector is outside the vocabulary",
    ),
    "skips-no-word": (of_sides(skipped=[-1]), "a token of multi_vector is outside the vocabulary"),
    "weights-without-their-output": (put("sparse", {}), "outputs"),
    "no-sparse": (of_task("embed_sparse"), "sparse is missing"),
    "weights-of-queries-elsewhere": (
        lambda m: m["files"].append({**m["files"][0], "file": "query_weights.npy"}),
        "query_weights.npy must be listed for query_weights, and only then",
    ),
    "no-weights-of-queries": (
        of_task("embed_sparse", sparse={"query_weights": True}),
        "query_weights.npy must be listed for query_weights, and only then",
    ),
    "no-mask-token": (of_task("fill_mask", special_ids={}), "mask token"),
    "other-task's-outputs": (lambda m: m.update(task="answer", embedding=None), "outputs"),
    "invariant-without-proof": (lambda m: m["artifacts"][0].update(batch_invariant=True, invariance=None), "proof"),
    "engine-of-an-onnx-file": (lambda m: m["artifacts"][0].update(engine=ENGINE), "TensorRT"),
    "same-role-twice": (
        lambda m: m["artifacts"].append({**m["artifacts"][0], "file": "b.onnx"}),
        "same precision and target",
    ),
    "batched-and-unproven": (lambda m: m["artifacts"][0].update(parity=None), "invariance but no parity"),
    "no-tokenizer": (put("files", []), "tokenizer.json is not listed"),
    "listed-twice": (lambda m: m["files"].append(m["files"][0]), "twice"),
    "upper-case-digest": (put_file("sha256", "A" * 64), "64 hexadecimal"),
    "short-digest": (put_file("sha256", "a" * 63), "64 hexadecimal"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_manifest_that_contradicts_itself_is_refused(bundle: Path, case: str) -> None:
    """Each check by itself, with a sentence of its own."""
    change, sentence = CONTRADICTIONS[case]
    edit_manifest(bundle, change)
    assert sentence in refusal(bundle)


@pytest.mark.parametrize(
    "name",
    [
        *("../x", "/etc/passwd", "a/b", "a/../b", ".hidden", "..", ".", "", "~/a"),
        *("a\\b", "a\n", "a\x00b", "manifest.json", "x" * 129),
    ],
)
def test_a_file_name_that_leads_elsewhere_is_refused(bundle: Path, name: str) -> None:
    """Only plain names, none of them the manifest's own."""
    edit_manifest(bundle, lambda manifest: manifest["files"].append({**manifest["files"][0], "file": name}))
    assert "plain name" in refusal(bundle)


@pytest.mark.parametrize("segments", [True, False])
@pytest.mark.parametrize("task", TASKS)
def test_every_task_has_its_tensors(bundle: Path, task: str, *, segments: bool) -> None:
    """A manifest of any task passes with that task's inputs and outputs, and with no other task's."""
    sizes = {"hidden_size": TINY_SIZE, "labels": 2, "candidates": 3, "active": 3}
    manifest = msgspec.structs.replace(
        opened(bundle),
        task=task,
        **parts(task),
        special_ids={"mask": 4},
        inputs=TASKS[task].graph_inputs(segments=segments),
        outputs=TASKS[task].graph_outputs(**sizes),
    )
    assert problem(manifest, NAME, "1") is None
    for other in set(TASKS) - {task}:
        outputs = TASKS[other].graph_outputs(**sizes)
        assert problem(msgspec.structs.replace(manifest, outputs=outputs), NAME, "1") == (
            "the outputs do not match the task"
        )


UNREADABLE: dict[str, bytes] = {
    "empty": b"",
    "no-json": b"schema_version: 1",
    "no-utf8": b'{"model": "\xff"}',
    "a-list": b"[]",
    "no-fields": b"{}",
    "too-deep": b'{"source": ' + b"[" * 50_000,
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_manifest_that_is_none_is_refused(bundle: Path, case: str) -> None:
    (bundle / "manifest.json").write_bytes(UNREADABLE[case])
    assert "is not a valid manifest" in refusal(bundle)


@pytest.mark.parametrize("change", [put("more", 1), put("hidden_size", "4"), put("prompts", {"a": 1})])
def test_a_manifest_of_another_shape_is_refused(bundle: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Unknown fields, other types."""
    edit_manifest(bundle, change)
    assert "is not a valid manifest" in refusal(bundle)


def test_a_manifest_of_an_unknown_task_is_refused(bundle: Path) -> None:
    """With the names of those there are."""
    edit_manifest(bundle, put("task", "dance"))
    assert "unknown task 'dance'; available: embed, " in refusal(bundle)


def test_a_manifest_that_is_too_large_is_not_read(bundle: Path) -> None:
    """A megabyte is more than any has."""
    with (bundle / "manifest.json").open("ab") as file:
        file.write(b" " * (1 << 20))
    assert "the maximum is 1048576" in refusal(bundle)


def test_a_place_without_a_bundle_is_refused(bundle: Path, tmp_path: Path) -> None:
    """No directory, a file, a link to a directory, a directory without a manifest."""
    assert "no such directory" in refusal(tmp_path / "nowhere")
    assert "must be a directory" in refusal(bundle / MODEL)
    (tmp_path / "1").symlink_to(bundle)
    assert "must be a directory" in refusal(tmp_path / "1")
    (bundle / "manifest.json").unlink()
    assert "manifest.json is missing" in refusal(bundle)


def opened(bundle: Path) -> Manifest:
    return msgspec.json.decode((bundle / "manifest.json").read_bytes(), type=Manifest)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(bundle: Path) -> None:
    """Added tokens count: the model has no row for their ids."""
    changed = Tokenizer.from_file(str(bundle / TOKENIZER))
    changed.add_tokens(["[MORE]"])
    changed.save(str(bundle / TOKENIZER))
    with pytest.raises(BundleError, match=f"has {WORDS + 1} tokens, but the model's vocab_size is {WORDS}; export"):
        TextTokenizer.open(bundle, opened(bundle))


@pytest.mark.parametrize("longest", [3, 4, 5])
def test_very_short_models_cut_texts_and_pairs(longest: int) -> None:
    """What is left is special tokens and, if there is room, the first words; the count of what was cut is exact."""
    small = TextTokenizer(small_tokenizer(), longest, 7)
    text, pair = small.encode(["a b c a b c", ("a b c", "b c")], truncate=True)
    assert list(text.ids) == [2, *[4, 5, 6][: longest - 2], 3]
    assert text.truncated == 8 - longest
    assert (len(pair.ids), pair.truncated) == (longest, 8 - longest)
    assert [list(pair.ids).count(special) for special in (2, 3)] == [1, 2]


def test_a_pair_that_is_too_long_is_refused_where_nothing_is_cut() -> None:
    """With its own count, all three special tokens included."""
    with pytest.raises(InvalidRequest, match="input 0 has 9 tokens; the model takes 8"):
        TextTokenizer(small_tokenizer(), 8, 7).encode([("a b c", "a b c")], truncate=False)


def test_what_is_being_written_is_not_seen(bundle: Path, tmp_path: Path) -> None:
    """Until it is published a version has no name that anybody looks for; then it is there whole."""
    out = tmp_path / "out"
    with BundleWriter(out, NAME) as writer:
        for entry in opened(bundle).entries():
            shutil.copy(bundle / entry.file, writer.path)
        assert [path.name[0] for path in (out / NAME).iterdir()] == ["."]
        published = writer.publish(opened(bundle))
    assert [path.name for path in (out / NAME).iterdir()] == ["1"]
    assert open_bundle(published.path).manifest == opened(bundle)
    assert digest(published.path / MODEL) == digest(bundle / MODEL)


def test_a_failed_export_leaves_earlier_versions_alone(bundle: Path) -> None:
    with BundleWriter(bundle.parents[1], NAME) as writer:
        (writer.path / MODEL).write_bytes(b"half")
        assert writer.version == 2
    assert [path.name for path in bundle.parent.iterdir()] == ["1"]
    assert open_bundle(bundle).manifest.version == 1


def test_leftovers_with_a_name_of_another_form_are_swept_too(bundle: Path) -> None:
    (bundle.parent / ".staging-old").mkdir()
    with BundleWriter(bundle.parents[1], NAME):
        assert not (bundle.parent / ".staging-old").exists()
