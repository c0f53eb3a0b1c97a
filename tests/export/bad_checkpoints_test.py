"""Checkpoints that cannot be exported: one sentence each, exit code 1, and nothing is written."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import torch as safetensors_torch

from bertserve.export.cli.export import main
from tests.support.checkpoints import (
    edit_json,
    use_fast_tokenizer,
    vocabulary,
    write_checkpoint,
    write_json,
    write_modules,
    write_task_checkpoint,
)
from tests.support.own_forms import to_first_nomic_bert

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Spoil = Callable[[Path], object]

CONFIG, SETTINGS, POOLING = "config.json", "config_sentence_transformers.json", "1_Pooling/config.json"
WEIGHTS, BIN, INDEX = "model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"
ADAPTER, POINTER = "adapter_config.json", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WIDTH = 32
TOKENIZER, BELOW, LORA = "tokenizer_config.json", "0_Transformer", {"peft_type": "LORA"}
SMALL, FIRST = "small", "first nomic_bert"
"""The good checkpoint, and NomicBERT in its first form."""
SNAPSHOT, OFFLINE = f"snapshots/{COMMIT}", "org/name with HF_HUB_OFFLINE=1"
PIECES, NO_TOKENIZER = "sentencepiece.bpe.model", "cannot build a tokenizer from"
DAMAGED, MISH = r"model\.safetensors is damaged", "torch.nn.modules.activation.Mish"
LINEAR, YARN = ({"rope_type": kind, "factor": 2} for kind in ("linear", "yarn"))
NTK = {"type": "ntk", "factor": 2}
QUERY_PROMPT: dict[str, object] = {"prompts": {"query": "q: "}}
ROWS = len(vocabulary())
MULTIPLE = r"hidden_size in config\.json must be a multiple of num_attention_heads"
UNKNOWN_HEAD = r"in config\.json; set --task embed"
UNTAKEN = r"of sentence_bert_config\.json cannot be exported"
BESIDE = r"must map tensors to \.safetensors files"
TOO_MANY_IDS = r"tokenizer\.json has token IDs up to \d+ .*, but the model's vocab_size is"
TASK_EMBEDDINGS = "embeddings.task_type_embeddings.weight"


def put(file: str, **changes: object) -> Spoil:
    return lambda folder: edit_json(folder / file, **changes)


def write(file: str, content: object) -> Spoil:
    """Writes a file: bytes, a text, or else JSON."""

    def spoil(folder: Path) -> None:
        if isinstance(content, bytes):
            (folder / file).write_bytes(content)
        elif isinstance(content, str):
            (folder / file).write_text(content)
        else:
            write_json(folder / file, content)

    return spoil


def drop(file: str) -> Spoil:
    return lambda folder: (folder / file).unlink()


def renamed(name: str) -> Spoil:
    """Another name for the weights."""
    return lambda folder: (folder / WEIGHTS).rename(folder / name)


def cut(file: str) -> Spoil:
    """Takes the end off a file, as a download that broke off."""
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:-100])


def all_of(*spoils: Spoil) -> Spoil:
    def spoil(folder: Path) -> None:
        for each in spoils:
            each(folder)

    return spoil


def family(kind: str, **changes: object) -> Spoil:
    """Another architecture, with a head where its name is followed by a task, and changes of its config.json."""

    def spoil(folder: Path) -> None:
        model_type, _, task = kind.removeprefix("first ").partition(" ")
        shutil.rmtree(folder)
        write_task_checkpoint(folder, model_type, task or "embed")
        if kind == FIRST:
            to_first_nomic_bert(folder)
        edit_json(folder / CONFIG, **changes)

    return spoil


def limited(kind: str, supported: str, said: str = "", **changes: object) -> tuple[Spoil, str]:
    """Settings of which the first, or what is said instead, is none of those supported."""
    name, value = next(iter(changes.items()))
    said = said or f"{name} {re.escape(repr(value))}"
    sentence = rf"{said} in config\.json cannot be exported.*; supported: {supported}"
    return (put(CONFIG, **changes) if kind == SMALL else family(kind, **changes)), sentence


def wrong(kind: str, right: str, **change: object) -> tuple[Spoil, str]:
    """A setting of another kind or size than there can be."""
    ((name, value),) = change.items()
    spoil = put(CONFIG, **change) if kind == SMALL else family(kind, **change)
    return spoil, rf"{name} in config\.json must be {right}(, .*)?, not {re.escape(repr(value))}"


def angles(kind: str, words: str, **change: object) -> tuple[Spoil, str]:
    """Rotations of positions that are not known."""
    supported = "" if "with" in words else "; supported: default, linear, dynamic"
    name = next(iter(change))
    return family(kind, **change), rf"{name} (of type '\w+' )?{words} in config\.json cannot be exported{supported}"


def pointer(file: str, *before: Spoil) -> tuple[Spoil, str]:
    """What git-lfs puts in the place of a file that it has not loaded."""
    return all_of(*before, write(file, POINTER)), rf"{re.escape(file)} is a Git LFS pointer.* `git lfs pull`"


def kinds(*names: str, path: str = "", prefix: str = "sentence_transformers.x.") -> Spoil:
    """A modules.json of these classes, all of them in one folder."""
    return lambda folder: write_modules(folder, *((f"{prefix}{name}", path) for name in names))


def splade(kind: str = "MLMTransformer", **pooling: object) -> Spoil:
    """The modules of a sparse encoder, with settings of its pooling."""

    def spoil(folder: Path) -> None:
        own = (kind, ""), ("SpladePooling", "1_SpladePooling")
        write_modules(folder, *((f"sentence_transformers.x.{name}", path) for name, path in own))
        write_json(folder / "1_SpladePooling" / CONFIG, pooling)

    return spoil


def follow(kind: str, config: dict[str, object], **shapes: list[int]) -> Spoil:
    """Puts a module behind the pooling, with weights of these shapes."""

    def spoil(folder: Path) -> None:
        listed = json.loads((folder / "modules.json").read_text())
        added = {"idx": 2, "name": "2", "path": "2_Added", "type": f"sentence_transformers.models.{kind}"}
        write_json(folder / "modules.json", [*listed[:2], added])
        write_json(folder / "2_Added" / CONFIG, config)
        if shapes:
            tensors = {name.replace("_", ".", 1): torch.zeros(shape) for name, shape in shapes.items()}
            safetensors_torch.save_file(tensors, folder / "2_Added" / WEIGHTS)

    return spoil


def dense(*, weight: list[int] | None = None, **config: object) -> Spoil:
    """A Dense to 8 components; its matrix and bias are left out where no shape is named."""
    usual = {"in_features": WIDTH, "out_features": 8, "activation_function": "torch.nn.modules.activation.Tanh"}
    shapes = {} if weight is None else {"linear_weight": weight, "linear_bias": [8]}
    return follow("Dense", {key: value for key, value in {**usual, **config}.items() if value is not None}, **shapes)


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Spoil:
    def spoil(folder: Path) -> None:
        held = safetensors_torch.load_file(folder / WEIGHTS)
        change(held)
        safetensors_torch.save_file(held, folder / WEIGHTS)

    return spoil


def without(name: str) -> Spoil:
    return tensors(lambda held: held.pop(name))


def replaced(name: str, *shape: int, dtype: str = "float32") -> Spoil:
    return tensors(lambda held: held.update({name: torch.zeros(shape, dtype=getattr(torch, dtype))}))


def sentence(**settings: object) -> Spoil:
    return write("sentence_bert_config.json", settings)


def normalize_at(path: str) -> Spoil:
    def spoil(folder: Path) -> None:
        listed = json.loads((folder / "modules.json").read_text())
        write_json(folder / "modules.json", [*listed[:2], {**listed[2], "path": path}])

    return spoil


def plain(folder: Path) -> None:
    """Takes the files of Sentence Transformers away."""
    (folder / "modules.json").unlink()
    shutil.rmtree(folder / "1_Pooling")


def moved_to(path: str) -> Spoil:
    """Puts the encoder into a folder of its own, which modules.json names where there is one."""

    def spoil(folder: Path) -> None:
        (folder / path).mkdir()
        for file in (CONFIG, WEIGHTS, "tokenizer.json", "tokenizer_config.json"):
            (folder / file).rename(folder / path / file)
        if (folder / "modules.json").exists():
            listed = json.loads((folder / "modules.json").read_text())
            listed[0]["path"] = path
            write_json(folder / "modules.json", listed)

    return spoil


def cached(name: str = ".") -> Spoil:
    """Puts the checkpoint where the hub's client keeps it, below the folder that is given."""

    def spoil(folder: Path) -> None:
        held = folder.rename(folder.with_name("held"))
        (folder / name / "snapshots").mkdir(parents=True)
        held.rename(folder / name / "snapshots" / COMMIT)
        (folder / name / "refs").mkdir()
        (folder / name / "refs" / "main").write_text(COMMIT)

    return spoil


class Runs:
    """What runs a command when it is unpickled by whoever allows it."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch ran",)


def pickled(folder: Path) -> None:
    """Weights in a pickle that runs a command."""
    torch.save({**safetensors_torch.load_file(folder / WEIGHTS), "more": Runs()}, folder / BIN)
    (folder / WEIGHTS).unlink()


def shards(change: Callable[[dict[str, str]], object] = dict) -> Spoil:
    """Splits the weights into two files, and changes what the index says of them."""

    def spoil(folder: Path) -> None:
        held = safetensors_torch.load_file(folder / WEIGHTS)
        (folder / WEIGHTS).unlink()
        where = {name: f"{'ab'[at % 2]}.safetensors" for at, name in enumerate(sorted(held))}
        for file in ("a.safetensors", "b.safetensors"):
            safetensors_torch.save_file({name: held[name] for name in held if where[name] == file}, folder / file)
        write_json(folder / INDEX, {"weight_map": change(where)})

    return spoil


def swapped(index: dict[str, str]) -> dict[str, str]:
    """Says of every tensor that it lies in the other file."""
    return {name: "b.safetensors" if file == "a.safetensors" else "a.safetensors" for name, file in index.items()}


def twice(folder: Path) -> None:
    held = safetensors_torch.load_file(folder / "b.safetensors")
    held.update(list(safetensors_torch.load_file(folder / "a.safetensors").items())[:1])
    safetensors_torch.save_file(held, folder / "b.safetensors")


def tokenizer(change: Callable[[dict[str, Any]], object]) -> Spoil:
    def spoil(folder: Path) -> None:
        document = json.loads((folder / "tokenizer.json").read_text())
        change(document)
        write_json(folder / "tokenizer.json", document)

    return spoil


def instead(*spoils: Spoil, **settings: object) -> Spoil:
    """Older files in the place of tokenizer.json."""
    return all_of(drop("tokenizer.json"), write("tokenizer_config.json", settings), *spoils)


def lines(count: int) -> str:
    return "\n".join([*SPECIAL, *map(str, range(count))])


MORE = r"is more than \d+, which weights of so many bytes can have"
SURROGATE = "has half of a surrogate pair"
DOUBLES = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
LENGTHENS = {"type": "Replace", "pattern": {"String": "q"}, "content": "z" * 10_000}
BOMB = json.dumps({"linear.weight": {"dtype": "F32", "shape": [10**9, 32], "data_offsets": [0, 128 * 10**9]}}).encode()
BOMB = struct.pack("<Q", len(BOMB)) + BOMB
MERGES = {token: at for at, token in enumerate(("<s>", "<pad>", "</s>", "<unk>", "a"))}
QUERY = "bert.encoder.layer.1.attention.self.query.weight"
BIAS = "bert.encoder.layer.0.output.dense.bias"

CASES: dict[str, tuple[Spoil, str]] = {
    # config.json
    "no-config": (drop(CONFIG), r"config\.json is missing"),
    "a-config-cut": (write(CONFIG, "{"), r"config\.json is not JSON"),
    "a-config-that-is-a-list": (write(CONFIG, []), r"config\.json must be a JSON object"),
    "an-unknown-family": (put(CONFIG, model_type="funnel"), "'funnel' cannot be exported; supported: bert, distilbert"),
    "a-family-that-is-an-object": (put(CONFIG, model_type={}), r"model_type \{\} cannot be exported; supported: bert"),
    "an-unknown-head": (all_of(put(CONFIG, architectures=["BertForCL"]), plain), f"class BertForCL {UNKNOWN_HEAD}"),
    "a-language-model-without-a-task": (
        family("bert", architectures=["BertLMHeadModel"]),
        f"BertLMHeadModel {UNKNOWN_HEAD}",
    ),
    "an-unknown-activation": limited(SMALL, "gelu, ", hidden_act="mish"),
    "relative-positions": limited("electra", "'absolute'", position_embedding_type="relative_key"),
    "a-size-that-is-a-text": wrong(SMALL, "a positive integer", hidden_size="32"),
    "a-width-of-gigabytes": (put(CONFIG, hidden_size=10**9), rf"hidden_size 1000000000 in config\.json {MORE}"),
    "layers-without-end": (put(CONFIG, num_hidden_layers=10**9), "num_hidden_layers 1000000000 .* more than 1024, the"),
    "labels-of-gigabytes": (family("bert classify", id2label=None, num_labels=10**9), f"num_labels 10+ .* {MORE}"),
    "half-of-a-letter": (put(CONFIG, _name_or_path="a\ud800"), rf"_name_or_path in config\.json {SURROGATE}"),
    "half-of-a-letter-in-a-list": (
        put(SETTINGS, prompts={"query": "\ud800"}),
        rf"prompts\.query in {SETTINGS} {SURROGATE}",
    ),
    "half-of-a-letter-for-a-library": (
        put(TOKENIZER, model_input_names=["input_ids", "\udfff"]),
        rf"model_input_names\.1 in {TOKENIZER} {SURROGATE}",
    ),
    "heads-that-do-not-divide": (put(CONFIG, num_attention_heads=5), MULTIPLE),
    "labels-not-numbered": (family("bert classify", id2label={"0": "a", "2": "b"}), "number its labels 0, 1, 2"),
    "labels-in-a-list": (family("bert classify", id2label=["a"]), "id2label .* number its labels 0, 1, 2"),
    "a-label-without-a-name": (family("bert tag", id2label={"0": "a", "1": None}), "; label 1 has None"),
    "an-unknown-problem": (family("bert classify", problem_type="ranking"), "problem_type 'ranking' with 3 outputs"),
    "one-number-without-words": (family("bert rerank", sentence_transformers=None), "set --task rerank"),
    "another-familys-activation": limited("distilbert", "", activation="mish"),
    "another-padding": (family("roberta", pad_token_id=0), "pads with ID 1, .* from pad_token_id 0 in config.json"),
    "another-familys-head": (family("electra", architectures=["ElectraForCausalLM"]), "class ElectraForCausalLM"),
    "another-gelu": limited("megatron-bert", "", hidden_act="quick_gelu"),
    "task-embeddings-of-another-width": (
        all_of(family("ernie"), replaced(TASK_EMBEDDINGS, 3, 8)),
        r"embeddings\.task_type_embeddings\.weight has rows of shape \[8\], but embeddings\.token_type.* has \[32\]",
    ),
    "no-task-embeddings": (all_of(family("ernie"), without(TASK_EMBEDDINGS)), f"the weights lack {TASK_EMBEDDINGS}"),
    "angles-of-an-unknown-kind-in-some-layers": angles(
        "modernbert", "of type 'yarn'", rope_parameters={"full_attention": YARN}
    ),
    "alibi-without-gates": limited("jina_bert", "geglu", feed_forward_type="original"),
    "alibi-in-berts-name": limited(SMALL, "geglu", "feed_forward_type 'original'", position_embedding_type="alibi"),
    "another-jina-bert": (
        family("jina_bert", auto_map={"AutoModel": "jinaai/jina-bert-v2-qk-post-norm--modeling_bert.X"}),
        r"the weights lack .* tensors that BertModel needs, first encoder\.layer\.0\.attention\.norm\.bias",
    ),
    "alibi-with-heads-that-do-not-divide": (family("jina_bert", num_attention_heads=5), MULTIPLE),
    "angles-of-an-unknown-kind": angles("new", "of type 'yarn'", rope_scaling=YARN),
    "angles-of-a-mixed-kind": angles("new", "of type 'ntk' with mixed_b", rope_scaling={**NTK, "mixed_b": 0.6}),
    "angles-of-no-factor": (
        family("new", rope_scaling={**NTK, "factor": "2"}),
        "rope_scaling .* a positive number, not '2'",
    ),
    "angles-in-a-text": (family("new", rope_scaling="ntk"), "rope_scaling in config.json must be an object"),
    "angles-of-a-kind-since-then": angles("gte", "of type 'longrope'", rope_parameters={"rope_type": "longrope"}),
    "scores-by-the-texts-length": limited("new", "False", logn_attention_scale=True),
    "a-first-form-without-gates": limited(FIRST, "swiglu, geglu", activation_function="gelu"),
    "a-first-form-with-heads-that-do-not-divide": (family(FIRST, n_head=5), "n_embd .* must be a multiple of n_head"),
    "a-first-form-of-experts": limited(FIRST, "0", moe_every_n_layers=2),
    "a-first-form-half-rotated": limited(FIRST, "1", rotary_emb_fraction=0.5),
    "a-first-form-scaled-by-nothing": wrong(FIRST, "a positive number", rotary_scaling_factor=0),
    "more-groups-than-layers": wrong("albert", "an integer from 1 to 2", num_hidden_groups=3),
    "no-embedding-size": wrong("albert", "a positive integer", embedding_size=None),
    "other-distances": limited("mpnet", "32", relative_attention_num_buckets=16),
    "a-convolution-that-shortens-a-text": limited("deberta-v2", "0 and odd sizes", conv_kernel_size=4),
    "a-convolution-with-another-activation": limited("deberta-v2", "'gelu'", conv_act="mish", conv_kernel_size=3),
    "heads-of-another-width": limited("deberta-v2", "8", attention_head_size=16),
    "narrower-words": limited("deberta", "32", embedding_size=16),
    "heads-that-talk": limited("deberta", "False", talking_head=True),
    "no-segments": wrong(SMALL, "a positive integer", type_vocab_size=0),
    "settings-of-a-layer": limited(SMALL, "None", per_layer_config={"0": {}}),
    "heads-that-were-taken-out": limited(SMALL, "{}", pruned_heads={"0": [1]}),
    "a-setting-of-another-type": (
        put(CONFIG, layer_norm_eps="small"),
        "Transformers cannot read .*: .*layer_norm_eps",
    ),
    "a-normalization-that-is-not-fused": limited("deberta", r"up to 0\.0001", layer_norm_eps=0.01),
    "angles-in-a-part": limited("nomic_bert", "1", partial_rotary_factor=0.5),
    "angles-by-an-unknown-setting": angles("gte", "with beta_fast", rope_parameters={**LINEAR, "beta_fast": 3}),
    "angles-scaled-in-all-layers": angles("modernbert", "of type 'yarn'", rope_scaling=YARN),
    "another-pooling-in-a-head": limited("modernbert classify", "'cls', 'mean'", classifier_pooling="max"),
    # Folders that are no whole encoder
    "an-adapter": (
        all_of(drop(CONFIG), drop(WEIGHTS), write(ADAPTER, {"peft_type": "LORA", "base_model_name_or_path": "org/b"})),
        r"an adapter \(LORA in .*\) of org/b, not .*; merge .*ModelForFeatureExtraction .*merge_and_unload",
    ),
    "an-adapter-beside-a-model": (
        write(ADAPTER, {"peft_type": "LORA", "task_type": "SEQ_CLS"}),
        "of another model, not a full model; merge .* AutoPeftModelForSequenceClassification",
    ),
    "an-adapter-below": (
        all_of(moved_to(BELOW), write(f"{BELOW}/{ADAPTER}", LORA)),
        rf"{BELOW}: this is an adapter",
    ),
    "weights-that-are-pointers": pointer(WEIGHTS),
    "pickled-weights-that-are-pointers": pointer(BIN, drop(WEIGHTS)),
    "a-shard-that-is-a-pointer": pointer("b.safetensors", shards()),
    "a-tokenizer-that-is-a-pointer": pointer("tokenizer.json"),
    "pieces-that-are-a-pointer": pointer("spiece.model", instead()),
    "a-config-that-is-a-pointer": pointer(CONFIG),
    "the-cache-of-the-hub": (cached(), rf"the Hugging Face cache, not .*; use \S+small/{SNAPSHOT}"),
    "a-cache-above-models": (cached("models--org--name"), rf"; use \S+models--org--name/{SNAPSHOT}, or {OFFLINE}"),
    "a-home-of-the-hub": (
        cached("hub/models--org--name"),
        rf"; use \S+hub/models--org--name/{SNAPSHOT}, or {OFFLINE}",
    ),
    "onnx-alone": (
        all_of(drop(WEIGHTS), lambda folder: (folder / "onnx").mkdir(), write("onnx/model.onnx", b"")),
        r"pytorch_model\.bin are missing, and onnx/model\.onnx is not supported \(an ONNX graph\)",
    ),
    "gguf": (
        all_of(drop(CONFIG), renamed("q4.gguf")),
        r"config\.json is missing, and q4\.gguf is not supported \(.* llama\.cpp file\)",
    ),
    "flax": (renamed("flax_model.msgpack"), r"flax_model\.msgpack is not supported \(a Flax file\)"),
    "weights-under-another-name": (renamed("model.fp16.safetensors"), r"model\.fp16\.safetensors is .* \(rename it"),
    "a-folder-of-folders": (all_of(plain, moved_to("run-5")), "config.json is missing; use its subfolder run-5"),
    **{
        f"quantized-by-{method}": (
            put(CONFIG, quantization_config={"quant_method": method}),
            rf"its weights are quantized \('{method}' in quantization_config of config\.json\); use the original",
        )
        for method in ("gptq", "awq", "bitsandbytes")
    },
    "a-bert-that-writes": (put(CONFIG, is_decoder=True), "is_decoder in config.json says that this is a decoder"),
    "a-decoder": (put(CONFIG, model_type="gpt2"), "'gpt2' cannot be exported: it is a decoder, which generates text"),
    "a-larger-decoder": (put(CONFIG, model_type="llama"), "'llama' cannot be exported: it is a decoder"),
    "an-encoder-with-a-decoder": (
        put(CONFIG, model_type="t5"),
        "'t5' cannot be exported: it has an encoder and a decoder",
    ),
    "another-encoder-with-a-decoder": (
        put(CONFIG, model_type="bart", is_encoder_decoder=True),
        "is an encoder-decoder",
    ),
    "images": (put(CONFIG, model_type="vit"), "'vit' cannot be exported: it reads images"),
    "images-and-texts": (put(CONFIG, model_type="clip"), "'clip' cannot be exported: it reads images"),
    "sound": (put(CONFIG, model_type="wav2vec2"), "'wav2vec2' cannot be exported: it reads audio"),
    **{
        f"weights-from-{name}": (
            tensors(lambda held, before=before: [held.update({before + key: held.pop(key)}) for key in [*held]]),
            rf"the weight names begin with '{re.escape(before)}bert\.' \({name}\)",
        )
        for before, name in {
            "module.": "DataParallel or DeepSpeed",
            "_orig_mod.": "torch.compile",
            "model.": "a training framework such as Lightning",
            "0.auto_model.": "a Sentence Transformers module list",
            "encoder.": "a wrapper model",
        }.items()
    },
    # Models of other kinds
    "csr": (kinds("Transformer", "Pooling", "SparseAutoEncoder"), r"this is CSR \(.* cannot be served yet"),
    "a-table-alone": (kinds("SparseStaticEmbedding"), "this is a table of weights of words without an encoder, which"),
    "splade-without-a-head": (splade(), "the weights lack .* that BertForMaskedLM needs"),
    "splade-of-means": (
        splade(pooling_strategy="mean"),
        "pooling_strategy 'mean' .* cannot be .*; supported: max, sum",
    ),
    "splade-of-another-function": (
        splade(activation_function="gelu"),
        "activation_function 'gelu' in .*; supported: relu, log1p_relu",
    ),
    "splade-with-an-unknown-setting": (splade(pooling_mode="max"), "unknown SpladePooling setting pooling_mode in"),
    "splade-of-vectors": (
        splade("Transformer"),
        "a Transformer before SpladePooling must have the transformer_task 'fill-mask', not None",
    ),
    "splade-with-a-dense": (
        kinds("MLMTransformer", "Dense", "SpladePooling"),
        "the modules MLMTransformer, Dense, SpladePooling cannot be exported as a sparse encoder; supported: Transf",
    ),
    "masked-words-without-pooling": (kinds("MLMTransformer"), "has a MLMTransformer module, which cannot be exported"),
    "colbert-by-modules": (
        kinds("Transformer", "Dense", "MultiVectorMask"),
        "has a MultiVectorMask, but model_type in .* is None; supported: 'MultiVectorEncoder'",
    ),
    "colbert-by-prefixes": (
        put(SETTINGS, query_prefix="[Q]", document_prefix="[D]"),
        "says that this is ColBERT, but modules.json has no Dense, which Sentence Transformers would replace by random",
    ),
    "colbert-by-its-trainer": (
        all_of(plain, write("artifact.metadata", {"dim": 128})),
        r"artifact.metadata says that this is ColBERT, but .* names HF_ColBERT in architectures",
    ),
    "colbert-by-class": (
        put(CONFIG, architectures=["HF_ColBERT"]),
        "has a Pooling module, which .* a multi-vector model; supported: Transformer and then any of Dense, Normalize",
    ),
    "colbert-by-another-class": (
        all_of(plain, put(CONFIG, architectures=["ColBERTModel"])),
        "ColBERTModel says that this is ColBERT, but a folder of its trainer names HF_ColBERT",
    ),
    # modules.json and what it leads to
    "modules-in-an-object": (write("modules.json", {"0": "Transformer"}), r"modules\.json must list modules"),
    "modules-without-paths": (write("modules.json", [{"type": "a"}]), "each with a type and a path"),
    "no-modules": (kinds(), r"modules\.json lists nothing; supported: Transformer, Pooling and then any of Dense"),
    "pooling-first": (kinds("Pooling", "Transformer"), r"modules\.json lists Pooling, Transformer; supported"),
    "pooling-twice": (kinds("Transformer", "Pooling", "Pooling"), "lists Transformer, Pooling, Pooling; supported"),
    "dense-before-pooling": (kinds("Transformer", "Dense", "Pooling"), "lists Transformer, Dense, Pooling; supported"),
    "no-pooling": (kinds("Transformer"), r"modules\.json lists Transformer; supported"),
    "an-unknown-module": (
        kinds("Transformer", "WordWeights", "Pooling"),
        "has a WordWeights module, which cannot be exported; supported: Transformer, Pooling, Dense, LayerNorm",
    ),
    "a-module-of-its-own-code": (kinds("Transformer", "Pooling", prefix="own."), r"a own\.Transformer .* is never run"),
    "a-module-outside": (kinds("Transformer", "Pooling", path="../other"), r"module path '\.\./other' leads outside"),
    "a-normalize-outside": (normalize_at("../../etc"), r"the module path '\.\./\.\./etc' leads outside"),
    "a-module-missing": (lambda folder: shutil.rmtree(folder / "1_Pooling"), "the folder '1_Pooling' is missing"),
    "an-unknown-pooling": (put(POOLING, pooling_mode="largest"), r"pooling_mode 'largest' .*supported: cls, max, mean"),
    "pooling-by-a-number": (put(POOLING, pooling_mode=[3]), r"pooling_mode 3 in config\.json cannot be exported"),
    "a-pooling-of-null": (write(POOLING, {"pooling_mode": None}), r"pooling_mode None in config\.json cannot be exp"),
    "a-pooling-with-an-unknown-setting": (
        put(POOLING, pooling_mode_median_tokens=True),
        "unknown Pooling setting .*; supp",
    ),
    "another-pooling-without-modules": (
        all_of(drop("modules.json"), write(POOLING, {"pooling_mode": "cls"})),
        r"1_Pooling/config\.json says cls, but modules\.json is missing, so .* would use mean pooling",
    ),
    **{
        f"{key}-of-a-transformer": (
            write("sentence_roberta_config.json", {key: value}),
            rf"{key} .* in sentence_roberta_config\.json cannot be exported; supported: ",
        )
        for key, value in {
            "transformer_task": "fill-mask",
            "modality_config": {"text": {"method": "forward", "method_output_name": "pooler_output"}},
            "module_output_name": "sentence_embedding",
            "processing_kwargs": {"text": {"max_length": 8}},
            "query_length": 8,
            "document_length": 8,
            "query_expansion": {"length": 32},
            "tokenizer_name_or_path": "org/other",
        }.items()
    },
    "an-unknown-setting-of-a-transformer": (
        sentence(max_length=8),
        "unknown Transformer setting max_length .*; supported: max_seq_",
    ),
    "another-config": (sentence(config_args={"num_hidden_layers": 1}), f"num_hidden_layers in config_kwargs {UNTAKEN}"),
    "another-model": (sentence(model_kwargs={"variant": "fp16"}), f"variant in model_kwargs {UNTAKEN}"),
    "arguments-in-a-list": (
        sentence(tokenizer_args=["x"]),
        r"tokenizer_args .* must be an object, not \['x'\]",
    ),
    "another-tokenizer": (sentence(tokenizer_args={"vocab_file": "x"}), "vocab_file refers to another tokenizer"),
    "no-pooling-named": (write(POOLING, {"pooling_mode": []}), r"config\.json names no pooling_mode"),
    "pooling-of-another-width": (
        put(POOLING, word_embedding_dimension=64),
        "expects vectors of size 64, but the model returns size 32",
    ),
    "a-prompt-left-out-of-pooling": (
        all_of(put(POOLING, include_prompt=False), put(SETTINGS, prompts={"query": "q: "})),
        r"pooling that excludes the prompt \(include_prompt\) cannot be exported",
    ),
    "a-dense-of-another-width": (dense(in_features=64, weight=[8, 64]), "expects vectors of size 64, but gets size 32"),
    "a-dense-without-sizes": (dense(out_features=None), r"config\.json must set out_features"),
    "a-dense-of-a-text": (dense(in_features="32"), "in_features in config.json must be a positive integer, not '32'"),
    "a-dense-without-weights": (dense(), "2_Added: model.safetensors and pytorch_model.bin are missing"),
    "a-dense-of-other-weights": (
        dense(weight=[8, 16]),
        r"2_Added: linear\.weight has shape \[8, 16\], .* \[8, 32\]",
    ),
    "a-dense-with-a-bias-too-many": (
        dense(weight=[8, WIDTH], bias=False),
        r"2_Added: .* does not, first linear\.bias",
    ),
    "a-dense-without-its-residual": (
        dense(weight=[8, WIDTH], use_residual=True),
        r"2_Added: .*, first residual\.weight",
    ),
    "a-dense-with-weights-cut": (all_of(dense(weight=[8, WIDTH]), cut(f"2_Added/{WEIGHTS}")), f"2_Added: {DAMAGED}"),
    "a-dense-in-a-pickle-that-runs": (
        all_of(dense(), lambda folder: torch.save({"linear.weight": Runs()}, folder / "2_Added" / BIN)),
        r"2_Added: pytorch_model\.bin calls posix\.system when it is loaded",
    ),
    "a-dense-of-another-activation": (
        dense(activation_function=MISH),
        f"{re.escape(MISH)}' .* supported: Identity, Tanh",
    ),
    "a-dense-of-its-own-code": (dense(activation_function="custom.Tanh"), r"activation_function 'custom\.Tanh'"),
    "a-dense-with-a-bias-of-words": (dense(bias="yes"), "bias in config.json must be true or false, not 'yes'"),
    "a-dense-of-128-GB": (
        all_of(dense(out_features=10**9), write(f"2_Added/{WEIGHTS}", BOMB)),
        r"2_Added: model\.safetensors is damaged",
    ),
    "a-dense-beyond-its-weights": (
        dense(weight=[8, WIDTH], out_features=10**9),
        r"2_Added: linear\.(weight|bias) has shape \[8(, 32)?\], but config\.json requires \[1000000000(, 32)?\]",
    ),
    "a-path-of-a-byte-0": (normalize_at("a\0b"), r"the module path 'a\\x00b' is no path"),
    "a-path-in-a-circle": (
        all_of(lambda folder: (folder / "loop").symlink_to("loop"), normalize_at("loop")),
        "the module path 'loop' is no path",
    ),
    "a-dense-on-tokens": (
        dense(module_input_name="token_embeddings"),
        "module_input_name 'token_embeddings' cannot be exp",
    ),
    "a-dense-of-no-input": (
        follow("Dense", {"in_features": WIDTH, "out_features": 8, "module_input_name": None}),
        "a Dense with the module_input_name None cannot be exported",
    ),
    "a-layer-norm-of-another-width": (
        follow("LayerNorm", {"dimension": 16}, norm_weight=[16], norm_bias=[16]),
        "this LayerNorm expects vectors of size 16, but gets size 32",
    ),
    "a-length-that-is-a-text": (sentence(max_seq_length="long"), "max_seq_length .* a positive integer, not 'long'"),
    # config_sentence_transformers.json, and what config.json says of vectors and scores
    "a-prompt-that-is-a-number": (put(SETTINGS, prompts={"query": 1}), f"prompts in {SETTINGS} must map names"),
    "prompts-of-null": (write(SETTINGS, {"prompts": None}), f"prompts in {SETTINGS} must map names .* not None"),
    "prompts-in-a-list": (put(SETTINGS, prompts=["query: "]), f"prompts in {SETTINGS} must map names"),
    "an-unknown-default-prompt": (
        put(SETTINGS, **QUERY_PROMPT, default_prompt_name="x"),
        r"'x' .*; prompts: query",
    ),
    "a-default-prompt-of-none": (put(SETTINGS, default_prompt_name=7), r"default_prompt_name 7 .*; prompts: none"),
    "cut-to-nothing": (put(SETTINGS, truncate_dim=0), f"truncate_dim in {SETTINGS} must be a positive integer, not 0"),
    "cut-beyond-the-vector": (put(SETTINGS, truncate_dim=64), f"truncate_dim 64 in {SETTINGS} is more than .* 32"),
    "an-unknown-similarity": (
        put(SETTINGS, similarity_fn_name="hamming"),
        "'hamming' .*: cosine, dot, euclidean, manhattan",
    ),
    "matryoshka-beyond-the-vector": (
        put(CONFIG, matryoshka_dimensions=[16, 64]),
        r"sizes from 1 to 32, .* not \[16, 64\]",
    ),
    "matryoshka-that-is-a-text": (put(CONFIG, matryoshka_dimensions="16"), "must be a list of sizes from 1 to 32"),
    "a-score-of-another-activation": (
        family("bert rerank", sentence_transformers={"activation_fn": "torch.nn.modules.activation.Tanh"}),
        r"Tanh' \(sentence_transformers\.activation_fn in config\.json\) cannot be exported",
    ),
    # Weights
    "no-weights": (drop(WEIGHTS), r"model\.safetensors and pytorch_model\.bin are missing; save the model"),
    "weights-of-another-framework": (renamed("tf_model.h5"), r"model\.bin are missing, and tf_model\.h5 is not"),
    "weights-cut": (
        cut(WEIGHTS),
        rf"{DAMAGED} \(its header does not match its \d+ bytes, .* download it again\)",
    ),
    "weights-that-are-a-page": (
        write(WEIGHTS, "<!doctype>"),
        rf"{DAMAGED} \(its 10 bytes are not safetensors; download it again\)",
    ),
    "weights-of-nothing": (write(WEIGHTS, b""), r"model\.safetensors is damaged \(its 0 bytes are not safetensors"),
    "a-pickle-that-runs": (pickled, r"pytorch_model\.bin calls posix\.system when it is loaded, .* nothing was run"),
    "a-tensor-missing": (without(QUERY), "lack 1 of .*layer.1.attention.self.query.weight"),
    "a-tensor-too-many": (replaced("bert.adapter.weight", 2), "1 tensors that BertModel .*, first adapter"),
    "a-tensor-misshapen": (replaced(BIAS, 7), r"output\.dense\.bias has shape \[7\], .* requires \[32\]"),
    "a-tensor-of-integers": (replaced(BIAS, WIDTH, dtype="int8"), "only floating-point weights"),
    "more-words-than-rows": (put(CONFIG, vocab_size=4000), r"word_embeddings\.weight has shape \[\d+, 32\]"),
    "shards-swapped": (shards(swapped), r"the weights index says that [ab]\.safetensors has"),
    "a-shard-cut": (all_of(shards(), cut("b.safetensors")), r"b\.safetensors is damaged"),
    "a-tensor-in-two-shards": (all_of(shards(), twice), "two weight files have"),
    "a-shard-missing": (
        all_of(shards(), drop("b.safetensors")),
        r"model\.safetensors\.index\.json names b\.safetensors, which is missing",
    ),
    "an-index-of-nothing": (shards(lambda _: {}), BESIDE),
    "an-index-that-leads-outside": (shards(lambda index: dict.fromkeys(index, "../a.safetensors")), BESIDE),
    "an-index-of-other-files": (shards(lambda index: dict.fromkeys(index, "a.bin")), BESIDE),
    "an-index-that-is-a-list": (shards(list), BESIDE),
    "an-index-cut": (all_of(shards(), cut(INDEX)), r"model\.safetensors\.index\.json is not JSON"),
    # Text
    "no-tokenizer": (instead(), r"no tokenizer found; add tokenizer\.json, vocab\.txt, vocab\.json with merges\.txt"),
    "a-tokenizer-that-is-none": (write("tokenizer.json", {"model": 1}), r"tokenizer\.json is not a tokenizer"),
    "a-rule-that-lengthens": (
        all_of(tokenizer(lambda made: made.update(normalizer=LENGTHENS)), use_fast_tokenizer),
        r"tokenizer\.json: normalizer makes a text more than 16 times as long",
    ),
    "rules-that-multiply": (
        tokenizer(lambda made: made.update(normalizer={"type": "Sequence", "normalizers": [DOUBLES] * 30})),
        r"tokenizer\.json: normalizer\.normalizers.* takes more than 2 s or 512 MiB on a text",
    ),
    "a-word-of-gigabytes": (
        tokenizer(lambda made: made["model"]["vocab"].update({"[PAD]": 10**9})),
        r"tokenizer\.json: has the token ID 1000000000; the maximum is",
    ),
    "a-special-token-without-a-row": (
        put(TOKENIZER, cls_token="[OTHER]"),  # noqa: S106  a token of words
        rf"the tokenizer adds the token {ROWS} .*, but the model's vocab_size is {ROWS}",
    ),
    "a-word-without-a-row": (tokenizer(lambda made: made["model"]["vocab"].update(extra=ROWS)), TOO_MANY_IDS),
    "no-frame": (
        all_of(tokenizer(lambda made: made.update(post_processor=None)), use_fast_tokenizer),
        "does not add its cls",
    ),
    "no-merges": (instead(write("vocab.json", {"a": 0})), r"merges\.txt is missing; a BPE tokenizer needs it"),
    "no-vocabulary": (instead(write("merges.txt", "a b")), r"vocab\.json is missing; a BPE tokenizer"),
    "broken-merges": (
        instead(
            write("vocab.json", MERGES),
            write("merges.txt", "#version: 0.2\na b c d\n"),
            tokenizer_class="RobertaTokenizer",
        ),
        r"cannot build a tokenizer from vocab\.json",
    ),
    "a-vocabulary-of-bytes": (instead(write("vocab.txt", b"[PAD]\n\xff\xfe")), r"vocab\.txt is not UTF-8, at byte 6"),
    "a-vocabulary-of-another-class": (
        instead(write("vocab.txt", lines(99)), tokenizer_class="XLMRobertaTokenizer"),
        r"cannot build a tokenizer from vocab\.txt: it has 104 entries, but XLMRobertaTokenizer loaded",
    ),
    "a-tokenizer-of-another-class": (
        put(TOKENIZER, tokenizer_class="XLMRobertaTokenizer"),
        rf"{NO_TOKENIZER} tokenizer\.json",
    ),
    "a-tokenizer-in-python": (put(TOKENIZER, tokenizer_class="CanineTokenizer"), "CanineTokenizer"),
    "words-in-japanese": (
        instead(write("vocab.txt", lines(9)), tokenizer_class="BertJapaneseTokenizer", word_tokenizer_type="mecab"),
        r"cannot build a tokenizer from vocab\.txt",
    ),
    "special-tokens-that-are-split": (put(TOKENIZER, split_special_tokens=True), "split_special_tokens in tokenizer"),
    "a-truncation-side-that-is-none": (put(TOKENIZER, truncation_side="middle"), "middle"),
    "a-vocabulary-too-long": (instead(write("vocab.txt", lines(5000)), tokenizer_class="BertTokenizer"), TOO_MANY_IDS),
    "a-sentencepiece-file-that-is-none": (
        instead(write("spiece.model", b"x")),
        r"spiece\.model is not a SentencePiece",
    ),
    "a-sentencepiece-file-of-nothing": (
        instead(write(PIECES, b"")),
        r"sentencepiece\.bpe\.model is not a SentencePiece",
    ),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("bad") / "small")


@pytest.mark.parametrize(
    "name",
    # Whoever refuses it is the same as of the other pickle, in a process that takes seconds to start.
    [pytest.param(case, marks=pytest.mark.slow) if case == "a-dense-in-a-pickle-that-runs" else case for case in CASES],
)
def test_what_cannot_be_exported_is_refused(
    good: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would be served wrongly or unsafely is named in one line, and neither a bundle nor a part of one is left."""
    if "sentencepiece" in name:
        pytest.importorskip("sentencepiece", reason="the module sentencepiece is not installed")
    spoil, sentence = CASES[name]
    folder = tmp_path / "small"
    shutil.copytree(good, folder)
    spoil(folder)
    capsys.readouterr()
    monkeypatch.chdir(folder)
    assert main([str(folder), "--out", str(tmp_path / "models")]) == 1
    error = capsys.readouterr().err
    assert re.fullmatch(rf"bertserve export: checkpoint {re.escape(str(folder))}.*{sentence}.*\n", error), error
    assert list(tmp_path.iterdir()) == [folder]
    assert not (folder / "ran").exists()
