"""Small random checkpoints: BERT in the layout of Sentence Transformers, and every architecture with every head."""

from __future__ import annotations

import json
import string
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors import torch as safetensors_torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from bertserve.export.checkpoint.families import FAMILIES
from bertserve.export.texts import corpus
from tests.support import own_forms

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = ("the", "a", "of", "and", "to", "in", "is", "it", "that", "for", "with", "on", "not", "as", "server", "text")


def vocabulary() -> dict[str, int]:
    """The tokens: special ones, printable characters alone and as continuations, a few words."""
    characters = string.ascii_lowercase + string.digits + string.punctuation
    tokens = [*SPECIAL, *characters, *(f"##{c}" for c in characters), *WORDS]
    return {token: identity for identity, token in enumerate(dict.fromkeys(tokens))}


def write_checkpoint(
    folder: Path,
    *,
    layers: int = 2,
    heads: int = 4,
    hidden_size: int = 32,
    positions: int = 64,
    seed: int = 0,
    pooling: str | None = "mean",
) -> Path:
    """Writes a BERT with random weights; without `pooling` (`mean` or `cls`) it lacks the files of sentence models."""
    folder.mkdir(parents=True, exist_ok=True)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary()),
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden_size,
        max_position_embeddings=positions,
        # Wide enough for attention to look at something, narrow enough to stay smooth.
        initializer_range=0.1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        bert = transformers.BertModel(config)
        for name, tensor in bert.named_parameters():
            # Biases start as 0 and scales as 1, where a graph that mixes them up would not be noticed.
            if tensor.ndim == 1:
                tensor.data.normal_(mean=float(name.endswith("LayerNorm.weight")), std=0.1)
    safetensors_torch.save_file(
        {f"bert.{name}": tensor for name, tensor in bert.state_dict().items()}, folder / "model.safetensors"
    )
    write_json(folder / "config.json", {**config.to_dict(), "architectures": ["BertModel"], "model_type": "bert"})
    (folder / "tokenizer.json").write_text(_tokenizer().to_str())
    token = {"__type": "AddedToken", "content": "[CLS]"}
    write_json(folder / "tokenizer_config.json", {"model_max_length": positions, "cls_token": token})
    if pooling is not None:
        _write_sentence_files(folder, hidden_size, pooling)
    return folder


STEMS = {
    "bert": "Bert",
    "distilbert": "DistilBert",
    "roberta": "Roberta",
    "electra": "Electra",
    "megatron-bert": "MegatronBert",
    "xlm-roberta": "XLMRoberta",
    "camembert": "Camembert",
    "data2vec-text": "Data2VecText",
    "mpnet": "MPNet",
    "albert": "Albert",
    "ernie": "Ernie",
    "deberta": "Deberta",
    "deberta-v2": "DebertaV2",
    "modernbert": "ModernBert",
    "nomic_bert": "NomicBert",
    "gte": "Gte",
    "new": "Gte",
    "jina_bert": "Bert",
    "jina_bert for code": "Bert",
    "bert with distances": "Bert",
}
OWN_FORMS = {
    "new": own_forms.to_new,
    "jina_bert": own_forms.to_jina_bert,
    "jina_bert for code": partial(own_forms.to_jina_bert, normalised=True),
    "bert with distances": partial(own_forms.to_relative_bert, kind="relative_key_query"),
    "bert with distances of queries": partial(own_forms.to_relative_bert, kind="relative_key"),
}
_TWELVE = {"num_attention_heads": 12, "hidden_size": 48}
OWN_SIZES = {"distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 128}}
OWN_SETTINGS: dict[str, dict[str, Any]] = {
    # As ERNIE 3 has them.
    "ernie": {"use_task_id": True, "task_type_vocab_size": 3, "type_vocab_size": 4},
    # As deberta-base has them.
    "deberta": {
        "relative_attention": True,
        "max_relative_positions": -1,
        "pos_att_type": "c2p|p2c",
        "position_biased_input": False,
        "type_vocab_size": 0,
    },
    # As deberta-v3-base has them, smaller.
    "deberta-v2": {
        "relative_attention": True,
        "max_relative_positions": -1,
        "position_buckets": 8,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": "p2c|c2p",
        "position_biased_input": False,
        "type_vocab_size": 0,
    },
    # A window that is shorter than the texts, in the second layer.
    "modernbert": {"local_attention": 8, "pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3},
    "gte": {"pad_token_id": 0, "type_vocab_size": 2},
    "new": {"pad_token_id": 0, "type_vocab_size": 1},
}
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "bert-base-uncased": ("bert", {**_TWELVE, "max_position_embeddings": 512}),
    "distilbert-base-uncased": ("distilbert", {"max_position_embeddings": 512}),
    "bge-m3": ("xlm-roberta", {**_TWELVE, "max_position_embeddings": 8194, "layer_norm_eps": 1e-5}),
    "roberta-base": ("roberta", {**_TWELVE, "max_position_embeddings": 514, "layer_norm_eps": 1e-5}),
    "camembert-base": ("camembert", {**_TWELVE, "max_position_embeddings": 514, "layer_norm_eps": 1e-5}),
    "data2vec-text-base": ("data2vec-text", {**_TWELVE, "max_position_embeddings": 514, "layer_norm_eps": 1e-5}),
    "electra-small-discriminator": ("electra", {"max_position_embeddings": 512}),
    "albert-base-v2": ("albert", {**_TWELVE, "max_position_embeddings": 512, "hidden_act": "gelu_new"}),
    "all-mpnet-base-v2": (
        "mpnet",
        {**_TWELVE, "max_position_embeddings": 514, "layer_norm_eps": 1e-5, "relative_attention_num_buckets": 32},
    ),
    "deberta-base": ("deberta", {**_TWELVE, "max_position_embeddings": 512, "layer_norm_eps": 1e-7}),
    "deberta-v3-base": (
        "deberta-v2",
        {**_TWELVE, "max_position_embeddings": 512, "position_buckets": 256, "layer_norm_eps": 1e-7},
    ),
    "ModernBERT-base": (
        "modernbert",
        {
            **_TWELVE,
            "num_hidden_layers": 5,
            "max_position_embeddings": 8192,
            "local_attention": 128,
            "global_attn_every_n_layers": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 160000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "nomic-embed-text-v1": ("nomic_bert", {**_TWELVE, "max_position_embeddings": 8192}),
    "gte-multilingual-base": ("new", {**_TWELVE, "max_position_embeddings": 8192, "type_vocab_size": 1}),
    "jina-embeddings-v2-base-en": ("jina_bert", {**_TWELVE, "max_position_embeddings": 8192}),
    "ernie-3.0-base-zh": ("ernie", {**_TWELVE, "max_position_embeddings": 2048}),
    "megatron-bert-uncased-345m": ("megatron-bert", {"max_position_embeddings": 512}),
}
"""What is published of each family's best-known checkpoint, but for its width and its layers."""
HEADS = {
    "embed": "Model",
    "embed_tokens": "Model",
    "classify": "ForSequenceClassification",
    "rerank": "ForSequenceClassification",
    "answer": "ForQuestionAnswering",
    "tag": "ForTokenClassification",
    "fill_mask": "ForMaskedLM",
    "embed_sparse": "ForMaskedLM",
}
LABELS = {"classify": ("bad", "fair", "good"), "rerank": ("relevance",), "tag": ("O", "B-x", "I-x", "B-y", "I-y")}
BYTE_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
ROLES = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
BYTE_ROLES = dict(zip(("cls_token", "pad_token", "sep_token", "unk_token", "mask_token"), BYTE_SPECIAL, strict=True))


def write_task_checkpoint(
    folder: Path, model_type: str, task: str, *, projected: bool = False, **settings: object
) -> Path:
    """Writes a checkpoint of any architecture and task, saved by Transformers itself, with random weights.

    Those that Transformers does not read are made of what it saved. With `projected`, for ELECTRA and ALBERT,
    embeddings are narrower than the layers; `settings` have Transformers' names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    offset = model_type in FAMILIES and FAMILIES[model_type].offset_positions
    tokenizer = byte_tokenizer() if offset else _tokenizer()
    named = dict(enumerate(LABELS.get(task, ("a", "b"))))
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 66 if offset else 64}
    usual = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    sizes |= OWN_SIZES.get(model_type, usual) | OWN_SETTINGS.get(model_type, {})
    if offset:
        sizes |= {"pad_token_id": 1} | ({} if model_type == "mpnet" else {"type_vocab_size": 1})
    if model_type in {"electra", "albert"}:
        sizes |= {**usual, "embedding_size": 16 if projected else 32}
    sizes |= settings
    kind = getattr(transformers, STEMS.get(model_type, "Bert") + HEADS[task])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(kind.config_class(**sizes, id2label=named, initializer_range=0.1))
        for name, tensor in model.named_parameters():
            if tensor.ndim == 1:
                tensor.data.normal_(mean=float("orm.weight" in name or "ln.weight" in name), std=0.1)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    # A family's own class makes a tokenizer of its own kind, which this one is not for most of them.
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **(BYTE_ROLES if offset else ROLES)}
    write_json(folder / "tokenizer_config.json", settings)
    if model_type in OWN_FORMS:
        OWN_FORMS[model_type](folder)
    if task == "rerank":
        # As cross-encoders of Sentence Transformers say what their one number is.
        activation = "torch.nn.modules.activation.Sigmoid"
        edit_json(folder / "config.json", sentence_transformers={"activation_fn": activation, "version": "5.0.0"})
    return folder


def write_large_checkpoint(folder: Path) -> Path:
    """Writes an XLM-RoBERTa with random weights, of the size of XLM-R large, and words of the corpus."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer()
    texts = [text if isinstance(text, str) else " ".join(text) for text in corpus.read()]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=8000, special_tokens=list(BYTE_SPECIAL)))
    config = transformers.XLMRobertaConfig(
        vocab_size=250_002,
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        max_position_embeddings=514,
        type_vocab_size=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.XLMRobertaModel(config, add_pooling_layer=False).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **BYTE_ROLES})
    return folder


def byte_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer in the form of RoBERTa's, without merges."""
    tokens = [*BYTE_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    ids = {token: identity for identity, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.add_special_tokens(list(BYTE_SPECIAL))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", ids["</s>"]), ("<s>", ids["<s>"]))
    return tokenizer


def edit_json(path: Path, **changes: object) -> None:
    """Changes keys of a JSON file; None removes a key."""
    content = json.loads(path.read_text()) if path.exists() else {}
    write_json(path, {key: value for key, value in {**content, **changes}.items() if value is not None})


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = safetensors_torch.load_file(folder / "model.safetensors")
    change(tensors)
    safetensors_torch.save_file(tensors, folder / "model.safetensors")


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def write_modules(folder: Path, *modules: tuple[str, str]) -> None:
    """Writes the modules.json of Sentence Transformers: the class and the folder of each module."""
    listed = [{"idx": at, "name": str(at), "path": path, "type": kind} for at, (kind, path) in enumerate(modules)]
    write_json(folder / "modules.json", listed)


def use_fast_tokenizer(folder: Path, **settings: object) -> None:
    """Has every library load tokenizer.json as it stands: a family's own class makes a tokenizer of its own kind."""
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **ROLES, **settings})


def added_token(identity: int, content: str, **flags: bool) -> dict[str, Any]:
    usual = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": identity, "content": content, **usual, **flags}


def _write_sentence_files(folder: Path, hidden_size: int, pooling: str) -> None:
    places = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    write_modules(folder, *((f"sentence_transformers.models.{kind}", path) for kind, path in places.items()))
    flags = {
        "pooling_mode_mean_tokens": pooling == "mean",
        "pooling_mode_cls_token": pooling == "cls",
        "pooling_mode_max_tokens": pooling == "max",
    }
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": hidden_size, **flags})


def stripped_tokenizer() -> str:
    """The tokenizer as bundles hold it: lengths belong to the manifest."""
    tokenizer = _tokenizer()
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer.to_str()


def _tokenizer() -> Tokenizer:
    ids = vocabulary()
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=100))  # noqa: S106
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, ids[token]) for token in ("[CLS]", "[SEP]")],
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    # As real checkpoints do, this one carries the lengths that it was trained with.
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    return tokenizer
