"""What follows an encoder in Sentence Transformers: the exported graph answers as its own `encode` does."""

from __future__ import annotations

import importlib.util
import inspect
import json
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
import sentence_transformers
import torch
from sentence_transformers.sentence_transformer import modules
from torch import nn

from bertserve.export.checkpoint import modules as read_modules
from bertserve.export.checkpoint import pooling
from bertserve.export.engines import tensorrt
from bertserve.export.graph import optimize, task_model
from bertserve.export.precision import emulation, half, int8, openvino, quantize
from bertserve.serving.engine.base import Batch
from bertserve.serving.engine.batches import Padder
from bertserve.serving.records import ModelIndex
from bertserve.serving.tasks import embed
from bertserve.serving.tasks.embed import EmbedOptions
from tests.support.checkpoints import edit_json, use_fast_tokenizer, write_checkpoint, write_json, write_modules
from tests.support.expected import cosines
from tests.support.exports import answers_together, fused, ignore, opened
from tests.support.graphs import check_ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from sentence_transformers.base.modules import Module

    from bertserve.export.checkpoint.reader import Checkpoint
    from bertserve.serving.models.manifest import Target

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sentence_transformers") is None,
    reason="the module sentence-transformers is not installed",
)

TEXTS = ["the server", "a text that is not in it, and to a text with more of it", "it", "of the server for the text"]
WIDTH = 32
ROBERTA, BERT, ALBERT = (f"sentence_{kind}_config.json" for kind in ("roberta", "bert", "albert"))
AS_IT_IS = EmbedOptions()
EVERY_MODE = ["lasttoken", "cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean"]


def norm(width: int) -> Module:
    """A layer normalisation whose scale and bias are not those that it starts with."""
    made = modules.LayerNorm(width)
    nn.init.normal_(made.norm.weight, 1, 0.2)
    nn.init.normal_(made.norm.bias, 0, 0.2)
    return made


PIPELINES: dict[str, Callable[[], list[Module]]] = {
    **{mode: (lambda mode=mode: [modules.Pooling(WIDTH, mode)]) for mode in EVERY_MODE},
    "all-together": lambda: [modules.Pooling(WIDTH, EVERY_MODE), modules.Normalize()],
    # As distiluse and LaBSE have it.
    "dense": lambda: [modules.Pooling(WIDTH), modules.Dense(WIDTH, 24)],
    "dense-normalize": lambda: [modules.Pooling(WIDTH, "cls"), modules.Dense(WIDTH, WIDTH), modules.Normalize()],
    # As EmbeddingGemma.
    "two-denses": lambda: [
        modules.Pooling(WIDTH),
        modules.Dense(WIDTH, 96, bias=False, activation_function=nn.Identity()),
        modules.Dense(96, WIDTH, bias=False, activation_function=nn.Identity()),
        modules.Normalize(),
    ],
    "normalize-dense": lambda: [
        modules.Pooling(WIDTH, ["max", "mean"]),
        modules.Normalize(),
        modules.Dropout(0.1),
        modules.Dense(2 * WIDTH, 16, activation_function=nn.GELU()),
    ],
    "layer-norm": lambda: [modules.Pooling(WIDTH, "mean_sqrt_len_tokens"), norm(WIDTH), modules.Normalize()],
    "dense-layer-norm-dense": lambda: [
        modules.Pooling(WIDTH, "weightedmean"),
        modules.Dense(WIDTH, WIDTH, use_residual=True, activation_function=nn.SiLU()),
        norm(WIDTH),
        modules.Dense(WIDTH, 20, use_residual=True, activation_function=nn.ReLU()),
        modules.Dropout(),
    ],
}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BERT that Sentence Transformers opens too."""
    folder = write_checkpoint(tmp_path_factory.mktemp("modules") / "encoder", pooling=None)
    use_fast_tokenizer(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    write_json(folder / "tokenizer.json", {**tokenizer, "truncation": None, "padding": None})
    return folder


def saved(
    encoder: Path, folder: Path, following: Sequence[Module], **settings: object
) -> sentence_transformers.SentenceTransformer:
    """A model of these modules, written as Sentence Transformers writes it."""
    torch.manual_seed(0)
    model = sentence_transformers.SentenceTransformer(
        modules=[modules.Transformer(str(encoder)), *following], device="cpu"
    )
    model.save(str(folder), create_model_card=False)
    if settings:
        edit_json(folder / "config_sentence_transformers.json", **settings)
    return model


def vectors(checkpoint: Checkpoint, path: Path, options: EmbedOptions = AS_IT_IS, target: Target = "cpu") -> np.ndarray:
    """What the server makes of one padded batch."""
    rows = answers_together(checkpoint, path, checkpoint.vocabulary.encode(TEXTS, 64), target)
    assert all(row[0].shape == (checkpoint.dimensions,) for row in rows)
    return embed.finish(rows, options, normalize=checkpoint.sentence.normalize)


SHORT = {"all-together", "dense-layer-norm-dense", "normalize-dense"}
"""Between them they have every module and way to pool."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.slow) for name in PIPELINES]
)
def test_every_module_answers_as_encode_does(encoder: Path, tmp_path: Path, name: str) -> None:
    """Whatever the order: fp32 to the last digits, and of length 1 only where the folder says so; fp16 and INT8 too."""
    pytest.importorskip("openvino", reason="the extra `openvino` is not installed")
    torch.manual_seed(3)
    wanted = saved(encoder, tmp_path / "model", PIPELINES[name]()).encode(TEXTS)
    checkpoint = opened(tmp_path / "model")
    path = fused(checkpoint, tmp_path)
    raw = path.with_name("raw.onnx")
    np.testing.assert_allclose(vectors(checkpoint, path), wanted, atol=2e-5)
    half.convert(path, tmp_path / "fp16.onnx")
    emulation.emulate(tmp_path / "fp16.onnx", tmp_path / "twin.onnx")
    assert cosines(vectors(checkpoint, tmp_path / "twin.onnx"), wanted).min() > 0.9999
    texts, shape = checkpoint.vocabulary.encode(TEXTS, 64), optimize.shape_of(checkpoint)
    check_ranges(
        raw, tmp_path / "watched.onnx", Padder(task_model.spec_of(checkpoint, raw)).tensors(Batch(ModelIndex(0), texts))
    )
    for graph, target in ((path, "cpu"), (raw, "openvino")):
        cuts = int8.cuts_of(graph, task_model.spec_of(checkpoint, graph), texts, ignore)
        small = tmp_path / f"{target}.onnx"
        if target == "cpu":
            quantize.quantize(graph, small, shape, cuts, static=True)
        else:
            openvino.quantize(graph, small, shape, cuts)
        # Weights that were never trained mind 8 bits more than those that were.
        assert cosines(vectors(checkpoint, small, target=target), wanted).min() > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all-together", "dense-layer-norm-dense"])
def test_every_module_builds_for_a_t4(encoder: Path, tmp_path: Path, name: str) -> None:
    """TensorRT takes the operators of each."""
    saved(encoder, tmp_path / "model", PIPELINES[name]())
    fused(opened(tmp_path / "model"), tmp_path)
    half.convert(tmp_path / "raw.onnx", tmp_path / "fp16.onnx")
    tensorrt.build(tmp_path / "fp16.onnx", tmp_path / "engine", "t4", max_length=16, count=ignore)
    assert (tmp_path / "engine").stat().st_size > 0


@pytest.mark.usefixtures("reader")
def test_old_files_are_read_as_sentence_transformers_reads_them(encoder: Path, tmp_path: Path) -> None:
    """Flags of pooling, the old names of classes, and weights in a pickle, which the first versions wrote."""
    folder = tmp_path / "model"
    saved(encoder, folder, [modules.Pooling(WIDTH), modules.Dense(2 * WIDTH, 8)])
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense"}
    write_modules(folder, *((f"sentence_transformers.models.{kind}", path) for path, kind in kinds.items()))
    flags = {"word_embedding_dimension": WIDTH, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}
    write_json(folder / "1_Pooling" / "config.json", {**flags, "pooling_mode_max_tokens": False})
    dense = modules.Dense(2 * WIDTH, 8)
    torch.save(dense.state_dict(), folder / "2_Dense" / "pytorch_model.bin")
    (folder / "2_Dense" / "model.safetensors").unlink()
    wanted = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    checkpoint = opened(folder)
    assert checkpoint.sentence.pooling == ("cls", "mean")
    np.testing.assert_allclose(vectors(checkpoint, fused(checkpoint, tmp_path)), wanted, atol=2e-5)


LENGTHS: dict[str, tuple[dict[str, object], int]] = {
    # By every name of its file, whoever wrote it.
    **{
        name: ({name: {"max_seq_length": 8, "do_lower_case": False, "tokenizer_args": {"use_fast": True}}}, 8)
        for name in pooling.TRANSFORMER_FILES
    },
    # A file that says nothing is none.
    "the-first": ({ROBERTA: {"max_seq_length": 9}, BERT: {}, ALBERT: {"max_seq_length": 7}}, 9),
    "of-the-tokenizer": ({BERT: {"max_seq_length": 9, "processor_kwargs": {"model_max_length": 7}}}, 7),
    "by-its-old-name": (
        {BERT: {"processor_kwargs": {"model_max_length": 9}, "tokenizer_args": {"model_max_length": 7}}},
        7,
    ),
    "beside-what-changes-nothing": (
        {
            BERT: {
                "max_seq_length": 7,
                "unpad_inputs": False,
                "transformer_task": "feature-extraction",
                "model_args": {"attn_implementation": "eager"},
                "config_args": {"trust_remote_code": True},
            }
        },
        7,
    ),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_the_length_is_that_of_sentence_transformers(encoder: Path, tmp_path: Path, name: str) -> None:
    """Of several files, of arguments and settings, and of names old and new."""
    folder, (files, length) = tmp_path / "model", LENGTHS[name]
    saved(encoder, folder, [modules.Pooling(WIDTH)])
    (folder / BERT).unlink()
    for file, content in files.items():
        write_json(folder / file, content)
    assert opened(folder).max_length == sentence_transformers.SentenceTransformer(str(folder)).max_seq_length == length


@pytest.mark.parametrize(
    "flags",
    [{}, dict.fromkeys(("pooling_mode_cls_token", "pooling_mode_mean_tokens", "pooling_mode_lasttoken"), False)],
)
def test_a_pooling_without_a_mode_is_the_mean(encoder: Path, tmp_path: Path, flags: dict[str, bool]) -> None:
    """As in Sentence Transformers, whose own answer is compared with."""
    folder = tmp_path / "model"
    saved(encoder, folder, [modules.Pooling(WIDTH)])
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": WIDTH, **flags})
    wanted = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    checkpoint = opened(folder)
    assert checkpoint.sentence.pooling == ("mean",)
    np.testing.assert_allclose(vectors(checkpoint, fused(checkpoint, tmp_path)), wanted, atol=1e-5)


def test_every_setting_of_sentence_transformers_is_sorted(encoder: Path, tmp_path: Path) -> None:
    """What its modules take and what it writes is read, exported with one value or without effect."""
    arguments = {name for names in pooling.ARGUMENTS_UNUSED for name in names}
    transformer = {*pooling.TRANSFORMER_READ, *pooling.TRANSFORMER_FIXED, *pooling.TRANSFORMER_UNUSED, *arguments}
    of_modules = {kind: {*read, *read_modules.FIXED} for kind, read in read_modules.READ.items()}
    sorted_ones = {"Transformer": transformer, "Pooling": {*pooling.POOLING_READ, *pooling.OLD_FLAGS}, **of_modules}
    sorted_ones["Dropout"].add("dropout")
    # Weights that the constructor may be given, which files never say.
    sorted_ones["Dense"] |= {"init_weight", "init_bias"}
    for kind, known in sorted_ones.items():
        made = getattr(modules, kind)
        taken = {*inspect.signature(made.__init__).parameters, *made.config_keys, *made.config_key_renames}
        assert taken - known == {"self"} | taken & {"model_name_or_path"}, kind
    saved(encoder, tmp_path / "model", [modules.Pooling(WIDTH)])
    written = json.loads((tmp_path / "model" / "config_sentence_transformers.json").read_text())
    assert written.keys() - {*pooling.SETTINGS_READ} == {"__version__"}


def test_truncate_dim_cuts_as_encode_does(encoder: Path, tmp_path: Path) -> None:
    """After a Normalize, without scaling again; a request for fewer components or length 1 gets them."""
    folder = tmp_path / "model"
    saved(encoder, folder, [modules.Pooling(WIDTH), modules.Normalize()], truncate_dim=20, similarity_fn_name="dot")
    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    checkpoint = opened(folder)
    assert (checkpoint.dimensions, checkpoint.sentence.similarity) == (20, "dot")
    path = fused(checkpoint, tmp_path)
    found = vectors(checkpoint, path)
    np.testing.assert_allclose(found, model.encode(TEXTS), atol=2e-5)
    assert np.linalg.norm(found, axis=1).max() < 0.99
    # A bundle is opened only where the graph itself says its outputs' sizes.
    (output,) = onnx.load(path, load_external_data=False).graph.output
    assert output.type.tensor_type.shape.dim[1].dim_value == 20
    asked = vectors(checkpoint, path, EmbedOptions(normalize=True, dimensions=8))
    np.testing.assert_allclose(asked, model.encode(TEXTS, truncate_dim=8, normalize_embeddings=True), atol=2e-5)
