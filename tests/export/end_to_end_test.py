"""The end-to-end check: an export is held against the checkpoint's reference library."""

from __future__ import annotations

import io
import json
import logging
import re
import shutil
import subprocess
import sys
from dataclasses import is_dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from bertserve.export import build
from bertserve.export.cli.export import main
from bertserve.export.errors import ExportError
from bertserve.export.progress import Progress
from bertserve.export.recipe import Recipe
from bertserve.serving.models.bundle import BundleWriter
from tests.support.checkpoints import (
    HEADS,
    edit_json,
    edit_weights,
    vocabulary,
    write_checkpoint,
    write_json,
    write_task_checkpoint,
)
from tests.support.exports import opened
from tests.support.skips import SHARED, needs_shared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from bertserve.export.checkpoint.reader import Checkpoint
    from bertserve.serving.models.manifest import Manifest

    Fault = Callable[[Checkpoint], Checkpoint]

pytestmark = pytest.mark.usefixtures("few_texts_of_pytorch")

WITHIN = 1e-5
NAMES = dict.fromkeys(("embed", "embed_tokens", "embed_sparse", "rerank"), "Sentence Transformers")
"""The library of each task; of others it is Transformers."""
NEARLY_TIED = ("classify", "tag", "fill_mask", "answer")
"""Tasks that decide: their answers are proven with every change where two decisions are nearly tied."""


def written(folder: Path, task: str, family: str = "bert") -> Path:
    """A small checkpoint of a task; those for vectors have the files of Sentence Transformers, with prompts."""
    if task != "embed":
        return write_task_checkpoint(folder, family, task)
    write_checkpoint(folder)
    prompts = {"query": "search for: ", "passage": ""}
    edit_json(folder / "config_sentence_transformers.json", prompts=prompts, default_prompt_name="query")
    return folder


def made(folder: Path, task: str, fault: Fault = lambda checkpoint: checkpoint) -> tuple[Manifest, str]:
    """What an export makes of a folder, and says, with something changed between reading it and the proof."""
    recipe = Recipe(str(folder), folder.with_name("models"), artifacts=("fp32",))
    said = io.StringIO()
    checkpoint = fault(opened(folder, task))  # type: ignore[arg-type]  a key of HEADS
    built = build.build(recipe, checkpoint, BundleWriter(recipe.out, "small"), Progress(said, lambda: None))
    return built.bundle.manifest, said.getvalue()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("task", HEADS)
@pytest.mark.parametrize("family", ["bert", pytest.param("roberta", marks=pytest.mark.slow)])
def test_a_bundle_answers_as_the_library_of_its_users(tmp_path: Path, task: str, family: str, probes: str) -> None:
    """Every number that a client gets is theirs, and the report and the manifest say who answered."""
    manifest, _ = made(written(tmp_path / "small", task, family), task)
    reference, found = manifest.reference_library, manifest.artifacts[0].end_to_end
    assert reference.library.startswith(NAMES.get(task, "Transformers"))
    assert not reference.unproven
    assert found.texts > 10
    assert probes == "few" or reference.texts > found.texts
    assert found.max_difference <= WITHIN
    assert found.agreement in (1, None)
    report = (tmp_path / "models" / "small" / "1" / "report.html").read_text()
    assert "End-to-end check" in report
    assert reference.library in report


def within(part: str, **changes: Callable[[Any], Any]) -> Fault:
    """Something else in a part of the checkpoint."""

    def fault(checkpoint: Checkpoint) -> Checkpoint:
        old = getattr(checkpoint, part)
        replaced = replace if is_dataclass(old) else msgspec.structs.replace
        new = replaced(old, **{name: change(getattr(old, name)) for name, change in changes.items()})
        return replace(checkpoint, **{part: new})

    return fault


def with_tokenizer(change: Callable[[dict[str, Any]], object]) -> Fault:
    def changed(content: bytes) -> bytes:
        document = json.loads(content)
        change(document)
        return json.dumps(document).encode()

    return within("vocabulary", content=changed)


def two_segments(document: dict[str, Any]) -> None:
    """The second text of a pair is of a segment of its own, which this folder's tokenizer does not say."""
    for part in document["post_processor"]["pair"][-2:]:
        next(iter(part.values()))["type_id"] = 1


not_scaled = within("sentence", normalize=lambda _: False)
turned = within("labels", names=lambda names: names[::-1])

FAULTS: dict[str, tuple[str, Fault, str]] = {
    "case": (
        "embed",
        with_tokenizer(lambda made: made["normalizer"].update(lowercase=False)),
        r"the text '.*' has different tokens .* differ in normalizer",
    ),
    "prompt": (
        "embed",
        within("sentence", prompts=lambda prompts: {**prompts, "query": "find: "}),
        r"the text '.*' has different tokens .* here \d+ tokens, .*; there \d+ tokens",
    ),
    "length 1": ("embed", not_scaled, r"largest difference from Sentence .* at the text '.*: \(.*\) here"),
    "case of tokens": (
        "embed_tokens",
        with_tokenizer(lambda made: made["normalizer"].update(lowercase=False)),
        r"the text '.*' has different tokens",
    ),
    "activation": (
        "rerank",
        lambda checkpoint: replace(checkpoint, score_activation="identity"),
        r"largest difference .* at the text ['\"].*/ .*: .* tokens: \[CLS\] ",
    ),
    "segments": (
        "rerank",
        with_tokenizer(two_segments),
        r"segments .* here, .* there, of .* differ in model_input_names",
    ),
    "label's place": ("classify", turned, r"decisions differ from Transformers .* the text '.*' returns"),
    "label's name": (
        "classify",
        within("labels", names=lambda names: (*names[:-1], "other")),
        r"the text '.*' returns \(.*'other'.*\), but Transformers .*tokens: ",
    ),
    "tag's place": ("tag", turned, r"decisions differ from Transformers .* the text '.*' returns"),
    "words": (
        "fill_mask",
        with_tokenizer(lambda made: made["decoder"].update(prefix="@@")),
        r"decisions differ .* the text '.*' returns",
    ),
    "length": (
        "answer",
        lambda checkpoint: replace(checkpoint, max_length=32),
        r"different tokens .* differ in the maximum length \(32 tokens here, 64 there\)",
    ),
}


@pytest.mark.usefixtures("probes")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_bundle_is_refused_by_the_text_that_shows_it(tmp_path: Path, fault: str) -> None:
    """Token ids as the beginning would hide it: both sides of that comparison read the bundle."""
    task, change, words = FAULTS[fault]
    with pytest.raises(ExportError, match=f"(?s){words}"):
        made(written(tmp_path / "small", task), task, change)
    assert not (tmp_path / "models" / "small" / "1").exists()


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("jina_bert", "position_embedding_type 'alibi'"),
        pytest.param("bert with distances", "position_embedding_type 'relative_key_query'", marks=pytest.mark.slow),
        ("new", "Sentence Transformers cannot load the folder: "),
    ],
)
def test_what_no_library_loads_is_proven_from_token_ids_on(tmp_path: Path, family: str, reason: str) -> None:
    """The export goes on and says, once, what was not proven and why; the manifest keeps it."""
    manifest, said = made(written(tmp_path / "small", "embed_tokens", family), "embed_tokens")
    assert reason in manifest.reference_library.unproven
    assert said.count("note: end-to-end check skipped") == said.count(reason) == 1
    assert manifest.artifacts[0].end_to_end is None


def test_a_folder_that_its_library_rejects_is_rejected(tmp_path: Path) -> None:
    """The library has this model: a folder that it cannot load is at fault, and no user of it gets an answer."""
    folder = written(tmp_path / "small", "embed")
    edit_json(folder / "config_sentence_transformers.json", __version__={"sentence_transformers": "six"})
    with pytest.raises(ExportError, match=r"Sentence Transformers cannot load the folder: Invalid version: 'six'"):
        made(folder, "embed")


def test_weights_that_a_library_does_not_find_prove_nothing(tmp_path: Path) -> None:
    """It fills them with random numbers, which are no reference."""
    folder = written(tmp_path / "small", "embed")
    lacking = shutil.copytree(folder, tmp_path / "lacking")
    edit_weights(lacking, lambda tensors: tensors.pop("bert.encoder.layer.1.attention.self.query.weight"))
    manifest, said = made(folder, "embed", within("source", path=lambda _: lacking))
    assert manifest.reference_library.unproven.endswith("has no weights for a part of the model")
    assert manifest.reference_library.unproven in said
    assert manifest.artifacts[0].end_to_end is None


def test_a_pooler_that_is_not_stored_hides_no_fault(tmp_path: Path) -> None:
    """Many folders for vectors are saved without one: the library fills it with random numbers that nobody reads."""
    folder = written(tmp_path / "small", "embed")
    edit_weights(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "pooler." in name])
    with pytest.raises(ExportError, match="largest difference from Sentence Transformers"):
        made(folder, "embed", not_scaled)


def nearly_tied(folder: Path, task: str, step: float) -> None:
    """Makes the two best decisions so near to one another that `step` says which of them is the best."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(0)
        name = {"answer": "qa_outputs", "fill_mask": "cls.predictions"}.get(task, "classifier")
        if task == "answer":
            weight = tensors["qa_outputs.weight"]
            tensors["qa_outputs.weight"] = step * torch.rand(weight.shape, generator=generator)
            return
        if task == "fill_mask":
            words = tensors["bert.embeddings.word_embeddings.weight"]
            words[11] = words[10]
        else:
            tensors[f"{name}.weight"][1] = tensors[f"{name}.weight"][0]
        first = 10 if task == "fill_mask" else 0
        tensors[f"{name}.bias"][first : first + 2] = torch.tensor([8 + step, 8 - step])

    edit_weights(folder, change)


@pytest.mark.usefixtures("probes")
@pytest.mark.parametrize(
    ("task", "probes"),
    [
        *((task, "few") for task in NEARLY_TIED[:-1]),
        # Of few texts, one whose answer stands elsewhere would be too many.
        (NEARLY_TIED[-1], "all"),
        *(pytest.param(task, "all", marks=pytest.mark.slow) for task in NEARLY_TIED[:-1]),
    ],
    indirect=["probes"],
)
def test_a_near_tie_is_decided_by_rounding_and_no_fault(tmp_path: Path, task: str) -> None:
    """Two labels, words or places whose numbers are equal but for the last bits may stand either way round."""
    folder, other = written(tmp_path / "small", task), written(tmp_path / "other", task)
    nearly_tied(folder, task, 1e-6)
    nearly_tied(other, task, -1e-6)
    manifest, _ = made(folder, task, within("source", path=lambda _: other))
    found = manifest.artifacts[0].end_to_end
    assert found.agreement in (1, None)


def test_a_library_that_fails_on_a_text_ends_the_export(tmp_path: Path) -> None:
    """Here for want of a word embedding's rows: users of the library get no answer of such a folder either."""
    folder, other = written(tmp_path / "small", "rerank"), tmp_path / "other"
    shutil.copytree(folder, other)
    name = "bert.embeddings.word_embeddings.weight"
    edit_weights(other, lambda tensors: tensors.update({name: tensors[name][:8].clone()}))
    edit_json(other / "config.json", vocab_size=8)
    with pytest.raises(ExportError, match="fails on a text: "):
        made(folder, "rerank", within("source", path=lambda _: other))


def test_a_special_token_that_the_model_has_no_row_of_is_asked_of_nobody(tmp_path: Path) -> None:
    """BERT's class adds a mask to a vocabulary without one, and the model fails on it."""
    folder = written(tmp_path / "small", "classify")
    words = [name for name in vocabulary() if name != "[MASK]"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer", "model_max_length": 64})
    config = json.loads((folder / "config.json").read_text())
    name = "bert.embeddings.word_embeddings.weight"
    edit_weights(folder, lambda tensors: tensors.update({name: tensors[name][: len(words)].clone()}))
    edit_json(folder / "config.json", vocab_size=len(words))
    assert config["vocab_size"] > len(words)
    manifest, _ = made(folder, "classify")
    assert not manifest.reference_library.unproven


@pytest.mark.parametrize(
    ("task", "longest"), [("embed_tokens", 64), pytest.param("rerank", 64, marks=pytest.mark.slow), ("classify", 100)]
)
@pytest.mark.parametrize("family", ["modernbert", pytest.param("deberta-v2", marks=pytest.mark.slow)])
def test_a_limit_beyond_the_positions_counts_where_the_library_takes_it(
    tmp_path: Path, family: str, task: str, longest: int
) -> None:
    """Without a table of positions: Sentence Transformers caps the tokenizer's limit at them, Transformers does not."""
    folder = written(tmp_path / "small", task, family)
    edit_json(folder / "tokenizer_config.json", model_max_length=100)
    manifest, _ = made(folder, task)
    assert manifest.max_length == longest
    assert not manifest.reference_library.unproven


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[list[logging.LogRecord]]:
    """What the libraries log; Transformers keeps its lines from other handlers."""
    transformers = logging.getLogger("transformers")
    transformers.addHandler(caplog.handler)
    yield caplog.records
    transformers.removeHandler(caplog.handler)


def test_loading_a_folder_for_its_proof_logs_nothing(
    tmp_path: Path, logged: list[logging.LogRecord], capfd: pytest.CaptureFixture[str]
) -> None:
    """Sentence Transformers warns where it makes modules of its own, and Python writes what no handler takes."""
    folder = written(tmp_path / "small", "embed_tokens")
    words = [str(folder), "--task", "embed", "--out", str(tmp_path / "models"), "--precision", "fp32"]
    capfd.readouterr()
    assert main(words) == 0
    assert capfd.readouterr().err == ""
    assert [record.getMessage() for record in logged if record.levelno >= logging.WARNING] == []


@pytest.mark.slow
def test_an_export_in_a_process_of_its_own_logs_nothing(tmp_path: Path) -> None:
    """Nor does what it imports."""
    folder = written(tmp_path / "small", "embed_tokens")
    code = "import sys; from bertserve.export.cli.export import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, str(folder), "--task", "embed", "--out", str(tmp_path / "models")]
    done = subprocess.run([*command, "--precision", "fp32"], check=True, capture_output=True, text=True)
    lines = [line for line in done.stderr.splitlines() if not re.search(r" {2}.* \d+\.\d s$|^  note: ", line)]
    assert lines == []


@pytest.mark.slow
@pytest.mark.usefixtures("whole_proof")
@needs_shared(SHARED / "models")
@pytest.mark.parametrize("name", ["minilm-sst2", "minilm-squad", "minilm-wnut17"])
def test_trained_checkpoints_answer_as_their_library(tmp_path: Path, name: str) -> None:
    """Where scores are far apart and tags have a meaning."""
    recipe = Recipe(str(SHARED / "models" / name), tmp_path / "models", artifacts=("fp32",))
    checkpoint = opened(SHARED / "models" / name)
    writer = BundleWriter(recipe.out, "real")
    manifest = build.build(recipe, checkpoint, writer, Progress(io.StringIO(), lambda: None)).bundle.manifest
    assert manifest.artifacts[0].end_to_end is not None
    assert manifest.artifacts[0].end_to_end.max_difference <= WITHIN
