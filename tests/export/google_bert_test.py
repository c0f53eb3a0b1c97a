"""BERT as TensorFlow's checkpoints hold it: the same weights as Transformers', and a sentence for all that is not."""

from __future__ import annotations

import random
import shutil
import struct
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from bertserve.export.checkpoint.layouts import tensor_bundle
from bertserve.export.checkpoint.source import find
from bertserve.export.errors import ExportError
from bertserve.export.graph import task_model
from tests.support import tensor_bundles
from tests.support.checkpoints import edit_json, write_json, write_task_checkpoint
from tests.support.exports import opened
from tests.support.fuzzing import sizes
from tests.support.tensor_bundles import entry, header, masked, table, varint, write_bundle, write_google_bert

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bertserve.export.checkpoint.layouts.case import Case

INDEX, DATA = "model.ckpt-7038.index", "model.ckpt-7038.data-00000-of-00001"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT as Transformers saves it, which nobody changes."""
    return write_task_checkpoint(tmp_path_factory.mktemp("saved") / "bert", "bert", "fill_mask")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """The same in Google's layout."""
    return write_google_bert(tmp_path / "google", saved)


@pytest.mark.parametrize("task", ["fill_mask", "classify", "answer"])
def test_weights_and_answers_are_those_of_transformers(tmp_path: Path, task: str) -> None:
    """By name, shape and value, with a head found by its variables; slots of LAMB and counters are left aside."""
    saved = write_task_checkpoint(tmp_path / "saved", "bert", task)
    folder = write_google_bert(tmp_path / "google", saved, shards=3)
    theirs, ours = opened(saved), opened(folder)
    assert (ours.task, len(ours.labels.names), ours.max_length) == (task, len(theirs.labels.names), theirs.max_length)
    expected, found = task_model.load(theirs), task_model.load(ours)
    state = found.model.state_dict()
    assert state.keys() == expected.model.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.model.state_dict().items())
    text = theirs.encode(["the server is [MASK]"])[0]
    for one, other in zip(found.answer(text), expected.answer(text), strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("dtype", [attrgetter("float16"), attrgetter("bfloat16"), attrgetter("float64")])
def test_other_precisions_are_read(tmp_path: Path, saved: Path, dtype: attrgetter[torch.dtype]) -> None:
    """An encoder of a pre-trained checkpoint, whose heads are left out."""
    folder = write_google_bert(tmp_path / "google", saved, dtype=dtype(torch))
    expected = task_model.load(opened(saved, "embed")).model.state_dict()
    found = task_model.load(opened(folder, "embed")).model.state_dict()
    assert all(torch.equal(found[name], tensor.to(dtype(torch)).float()) for name, tensor in expected.items())


def test_texts_are_read_as_transformers_reads_them(folder: Path, saved: Path) -> None:
    """Lower-cased, since a vocabulary with every small letter and no capital is of no other use."""
    texts = ["The Server IS a text", "pair of é", "x" * 200]
    assert opened(folder, "embed_tokens").encode(texts) == opened(saved, "embed_tokens").encode(texts)


def test_the_newest_checkpoint_is_taken(folder: Path) -> None:
    """As TensorFlow's own file names it; without one, somebody has to choose."""
    for file in (INDEX, DATA):
        shutil.copy(folder / file, folder / file.replace("7038", "12"))
    with pytest.raises(ExportError, match=r"has 2 checkpoints, .* model\.ckpt-12\.index and model\.ckpt-7038\.index"):
        opened(folder)
    (folder / "checkpoint").write_text('model_checkpoint_path: "gs://bucket/run/model.ckpt-7038"\n')
    assert [file.name for file in opened(folder).encoder.weights.files] == [INDEX, DATA]


def test_files_of_transformers_are_taken_first(folder: Path, saved: Path) -> None:
    """Many a folder of the hub holds both."""
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        shutil.copy(saved / file, folder)
    assert [file.name for file in opened(folder).encoder.weights.files] == ["model.safetensors"]


def test_another_state_of_the_files_is_another_revision(folder: Path) -> None:
    """So that an export that is made where something changed sees it."""
    before = find(str(folder)).revision()
    with (folder / DATA).open("r+b") as stream:
        stream.write(b"\1")
    assert find(str(folder)).revision() != before


SMALL, CAPITAL = "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@pytest.mark.parametrize(
    ("words", "settings", "asked", "outcome"),
    [
        ([*SMALL, "[unused1]"], None, None, "lowers"),
        ([*SMALL], None, "uncased", "lowers"),
        ([*SMALL, *CAPITAL, "The"], None, None, "keeps"),
        ([*SMALL, "The"], None, "cased", "keeps"),
        ([*SMALL, "The"], None, "uncased", "lowers"),
        ([*SMALL, *CAPITAL], {"do_lower_case": True}, None, "lowers"),
        ([*SMALL, "The"], None, None, "does not show whether the model is cased; set --case cased"),
        ([*SMALL[1:]], None, None, "does not show whether the model is cased"),
        ([*SMALL], None, "cased", "its files say uncased, not cased; remove --case"),
        ([*SMALL], {"do_lower_case": True}, "cased", "the tokenizer files define the case; remove --case"),
        (None, None, "cased", "vocab.txt is missing; add the vocabulary"),
    ],
)
def test_case_is_told_or_asked_for(
    folder: Path, words: list[str] | None, settings: dict[str, object] | None, asked: Case | None, outcome: str
) -> None:
    """By the vocabulary where one reading alone makes sense, by the tokenizer's settings, or by the command line."""
    (folder / "vocab.txt").unlink()
    if words is not None:
        (folder / "vocab.txt").write_text("\n".join([*("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), *words]))
    if settings is not None:
        write_json(folder / "tokenizer_config.json", settings)
    if outcome not in {"lowers", "keeps"}:
        with pytest.raises(ExportError, match=outcome):
            opened(folder, case=asked)
        return
    small, large = opened(folder, "embed_tokens", case=asked).encode(["b", "B"])
    assert (small == large) == (outcome == "lowers")


def one_variable(**changes: int | bytes | tuple[int, ...]) -> Callable[[Path], None]:
    """An index with one variable instead, of which something is changed."""
    fields = {"kind": 1, "shape": (2,), "offset": 0, "shard": 0, "slices": b""} | changes
    kind, shape, offset = fields.pop("kind"), fields.pop("shape"), fields.pop("offset")
    made = entry(kind, shape, offset, b"\0" * 8, **fields)  # type: ignore[arg-type]
    return index(table({b"": header(), b"bert/pooler/dense/bias": made}))


def index(content: bytes) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / INDEX).write_bytes(content)

    return spoil


def with_variable(name: str) -> Callable[[Path], None]:
    return lambda folder: write_bundle(folder, "model.ckpt-7038", {name: torch.ones(1)})


def longer_names(block: bytes) -> bytes:
    """A table of one block of a tensor bundle, as it stands."""
    content = block + b"\0" + struct.pack("<I", masked(block + b"\0"))
    handle = varint(0) + varint(len(block))
    last = tensor_bundles.block([(b"z", handle)])
    footer = varint(0) + varint(len(block)) + varint(len(content)) + varint(len(last) - 5)
    return content + last + footer.ljust(40, b"\0") + struct.pack("<Q", tensor_bundles.MAGIC)


ENTRY = entry(1, (2,), 0, b"\0" * 8)
SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no settings": (lambda folder: (folder / "bert_config.json").unlink(), r"bert_config\.json is missing"),
    "no data": (lambda folder: (folder / DATA).unlink(), rf"{INDEX} names {DATA}, which is missing"),
    "cut data": (lambda folder: (folder / DATA).write_bytes((folder / DATA).read_bytes()[:9000]), "ends before"),
    "no index": (index(b"\0" * 100), "is truncated, or not the index of a TensorFlow checkpoint"),
    "large index": (index(bytes(1 << 25)), "has more than 16777216 bytes"),
    "compressed": (index(table({b"": header()}, compression=1)), "has compressed blocks"),
    "no header": (index(table({b"a": ENTRY})), "it has no header"),
    "big-endian": (index(table({b"": header(endianness=1)})), "big-endian"),
    "newer form": (index(table({b"": header(least_reader=2)})), "format version 2; supported"),
    "many files": (index(table({b"": header(shards=10**6)})), "it names 1000000 data files"),
    "no message": (index(table({b"": header(), b"a": b"\xff"})), "is damaged"),
    "shares nothing": (index(longer_names(varint(9) + varint(1) + varint(0) + b"a" + bytes(4))), "longer than"),
    "long name": (index(table({b"": header(), b"a" * 2000: ENTRY})), "a name or a value is longer than"),
    "no end": (index(longer_names(b"\xff" * 20)), "more restart points than bytes"),
    "partitioned": (one_variable(slices=b"\x0a\x00"), "has bert/pooler/dense/bias as a partitioned variable"),
    "strings": (one_variable(kind=7), "has bert/pooler/dense/bias as strings"),
    "integers": (one_variable(kind=3), "has bert/pooler/dense/bias as int32"),
    "unknown type": (one_variable(kind=23), "as TensorFlow type 23"),
    "wrong size": (one_variable(shape=(3,)), r"has 8 bytes and the shape \[3\]"),
    "no shape": (one_variable(shape=((1 << 64) - 2,)), r"the shape \[-2\]"),
    "no such file": (one_variable(shard=5), "is in none of its 1 files"),
    "beyond the end": (one_variable(offset=1 << 40), f"{DATA} ends before bert/pooler/dense/bias"),
    "objects": (with_variable("_CHECKPOINTABLE_OBJECT_GRAPH"), "object-based TensorFlow 2"),
    "another model": (with_variable("electra/a"), "has electra/a, which is not a variable of"),
    "one value many times": (
        index(table({b"": header(), **{b"bert/%06d" % n: entry(1, (30000,), 0, bytes(120000)) for n in range(99)}})),
        "its variables are larger than its data files",
    ),
    "no bert": (lambda folder: edit_json(folder / "bert_config.json", hidden_size="x"), "hidden_size in config.json"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_what_cannot_be_read_is_named(folder: Path, name: str) -> None:
    """One sentence, before a model is made."""
    spoil, sentence = SPOILED[name]
    spoil(folder)
    with pytest.raises(ExportError, match=sentence):
        opened(folder)


def test_a_variable_that_changed_on_disk_is_refused(folder: Path) -> None:
    """By its checksum, when it is read."""
    content = bytearray((folder / DATA).read_bytes())
    content[:] = [byte ^ 1 for byte in content]
    (folder / DATA).write_bytes(content)
    with pytest.raises(ExportError, match=r"the checksum of .* differs from"):
        task_model.load(opened(folder))


def test_unknown_variables_are_refused(folder: Path) -> None:
    """Below BERT's own names, too."""
    write_bundle(folder, "model.ckpt-7038", {"bert/encoder/layer_0/adapter/kernel": torch.ones(2, 2)})
    with pytest.raises(ExportError, match="tensors that BertModel needs"):
        task_model.load(opened(folder))


@sizes(4000)
def test_damaged_files_give_the_same_numbers_or_one_sentence(tmp_path: Path, examples: int) -> None:
    """Bits that flip, ends that are missing, pieces that come twice: nothing else is ever raised or read."""
    rng, prefix = random.Random(11), "model.ckpt"
    variables = {f"bert/encoder/layer_{n}/output/dense/kernel": torch.rand(2, 3) for n in range(60)}
    write_bundle(tmp_path, prefix, variables, shards=2)
    files = [tmp_path / f"{prefix}.index", *sorted(tmp_path.glob("*.data-*"))]
    contents = {file: file.read_bytes() for file in files}
    refused = read_whole = 0
    for _ in range(examples):
        file = rng.choice([files[0], files[0], *files])
        content = bytearray(contents[file])
        at = rng.randrange(len(content))
        match rng.randrange(3):
            case 0:
                content[at] ^= 1 << rng.randrange(8)
            case 1:
                del content[at : rng.choice([at + 1, at + rng.randrange(1, 60), len(content)])]
            case 2:
                content[at:at] = content[at : at + rng.randrange(1, 60)]
        file.write_bytes(content)
        try:
            bundle = tensor_bundle.read(files[0])
            found = {name: bundle.tensor(name).bits().view(np.float32) for name in bundle.entries}
        except ExportError as error:
            refused += str(error).startswith(f"checkpoint {tmp_path}: {prefix}.")
        else:
            read_whole += 1
            assert found.keys() == variables.keys()
            assert all(np.array_equal(found[name], tensor.numpy()) for name, tensor in variables.items())
        file.write_bytes(contents[file])
    assert refused + read_whole == examples
    assert refused > read_whole
