"""Writes the checkpoint folder of a draw: a tiny random model and all files around it, as authors publish them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors import torch as safetensors_torch
from tokenizers import pre_tokenizers

from bertserve.export.progress import quiet
from tests.support.checkpoints import BYTE_ROLES, ROLES, added_token, edit_json, write_json, write_modules
from tests.support.folders import grammar
from tests.support.folders.grammar import ABSENT, BYTE_LEVEL, OFFSET, PIECES, POSITIONS, WORDPIECE, value

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.support.folders.grammar import Draw

WIDTH = 16
_CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEHILMNST0123éÉèüÜöñçß中国東京がかアあمح🙂,.!?'-:«»[]<>/"
LETTERS = "bcdfghijklmnopqrstuvwxyz"
"""Words of one token in every vocabulary."""
_WORDS = ("the", "The", "server", "cafe", "café", "élan", "text", "and", "in", "don", "er", "an", "re", "on", "th")
_SPARE = 8
"""Rows of the embedding behind the vocabulary, for tokens that other files add."""


def _roles(tokens: Mapping[str, str]) -> dict[str, str]:
    return {name.removesuffix("_token"): token for name, token in tokens.items()}


_BERT, _ROBERTA = _roles(ROLES), {**_roles(BYTE_ROLES), "bos": "<s>", "eos": "</s>"}
_DEBERTA = {role: _BERT[role] for role in ("pad", "cls", "sep", "unk", "mask")}
_SPECIAL = {
    **dict.fromkeys(("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer"), _BERT),
    **dict.fromkeys(("RobertaTokenizer", "XLMRobertaTokenizer", "CamembertTokenizer"), _ROBERTA),
    **dict.fromkeys(("DebertaTokenizer", "DebertaV2Tokenizer"), _DEBERTA),
    "MPNetTokenizer": {**_ROBERTA, "unk": "[UNK]"},
    "AlbertTokenizer": {**_BERT, "pad": "<pad>", "unk": "<unk>"},
}


def special_tokens(draw: Draw) -> dict[str, str]:
    return _SPECIAL[grammar.tokenizer_class(draw)]


def write(folder: Path, draw: Draw, seed: int) -> Path:
    """Writes a folder; its weights are of the seed."""
    encoder = folder / "0_Transformer" if draw.get("layout") == "0_Transformer" else folder
    encoder.mkdir(parents=True)
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        size, pad = _write_tokenizer(encoder, draw)
        _write_model(encoder, draw, size, pad)
        if draw["task"] == "embed":
            _write_sentences(folder, encoder, draw)
        if draw["task"] == "rerank":
            _write_reranker(folder, draw)
    return folder


# The tokenizer.


@cache
def _vocabulary(kind: str) -> tuple[str, ...]:
    special = tuple(dict.fromkeys(_SPECIAL[kind].values()))
    if kind in WORDPIECE:
        return tuple(dict.fromkeys([*special, *_CHARACTERS, *(f"##{c}" for c in _CHARACTERS), *_WORDS, "##er", "##an"]))
    return (*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in _MERGES))


_MERGES = (
    ("t", "h"),
    ("th", "e"),
    ("Ġ", "the"),
    ("e", "r"),
    ("a", "n"),
    ("Ġ", "an"),
    ("Ġan", "d"),
    ("s", "e"),
    ("s", "er"),
    ("Ã", "©"),
    *(("Ġ", letter) for letter in LETTERS),
)


def _write_old_files(folder: Path, kind: str) -> None:
    if kind in WORDPIECE:
        (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in _vocabulary(kind)), encoding="utf-8")
    elif kind in BYTE_LEVEL:
        write_json(folder / "vocab.json", {token: at for at, token in enumerate(_vocabulary(kind))})
        lines = ["#version: 0.2", *(" ".join(pair) for pair in _MERGES)]
        (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    else:
        (folder / PIECES[kind]).write_bytes(_pieces(kind))


@cache
def _pieces(kind: str) -> bytes:
    """A SentencePiece model, written and not trained: what a tokenizer is made of is its list of pieces."""
    # Transformers does not load this module with itself.
    from transformers.convert_slow_tokenizer import import_protobuf  # noqa: PLC0415

    model: Any = import_protobuf().ModelProto()
    control = {
        "AlbertTokenizer": ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"],
        "DebertaV2Tokenizer": ["[PAD]", "[CLS]", "[SEP]", "[UNK]"],
    }.get(kind, ["<unk>", "<s>", "</s>"])
    unknown = _SPECIAL[kind]["unk"]
    words = ["▁", *(f"▁{word}" for word in (*_WORDS, *LETTERS)), *_WORDS, *_CHARACTERS]
    listed = [(token, 0.0) for token in control]
    listed += [(piece, -3.0 - 0.03 * at) for at, piece in enumerate(dict.fromkeys(words))]
    for piece, score in listed:
        kinds = model.SentencePiece
        shape = kinds.UNKNOWN if piece == unknown else kinds.CONTROL if piece in control else kinds.NORMAL
        model.pieces.add(piece=piece, score=score, type=shape)
    model.trainer_spec.model_type = 1
    model.trainer_spec.unk_id = control.index(unknown)
    content: bytes = model.SerializeToString()
    return content


@cache
def _authors(kind: str, settings: tuple[tuple[str, Any], ...]) -> str:
    made = getattr(transformers, kind)
    with TemporaryDirectory() as folder:
        _write_old_files(Path(folder), kind)
        document: str = made.from_pretrained(folder, **dict(settings)).backend_tokenizer.to_str()
    return document


def _document(draw: Draw) -> dict[str, Any]:
    kind = grammar.tokenizer_class(draw)
    settings: dict[str, Any] = {}
    if kind in WORDPIECE:
        names = ("do_lower_case", "strip_accents", "tokenize_chinese_chars")
        settings = {name: value(draw, f"tokenizer.json {name}") for name in names}
    elif kind in BYTE_LEVEL:
        settings = {name: value(draw, f"tokenizer.json {name}") for name in ("add_prefix_space", "trim_offsets")}
    else:
        settings = {"add_prefix_space": value(draw, "tokenizer.json spaces before pieces")}
    document: dict[str, Any] = json.loads(_authors(kind, tuple(settings.items())))
    if (cut := value(draw, "tokenizer.json truncation")) is not None:
        direction, strategy = cut
        document["truncation"] = {"direction": direction, "max_length": 8, "strategy": strategy, "stride": 0}
    if (padding := value(draw, "tokenizer.json padding")) is not None:
        document["padding"] = {
            "strategy": {"Fixed": 16} if padding == "Fixed" else "BatchLongest",
            "direction": "Left" if padding == "left" else "Right",
            "pad_to_multiple_of": 8 if padding == "multiple" else None,
            "pad_id": _ids(document)[special_tokens(draw)["pad"]],
            "pad_type_id": 0,
            "pad_token": special_tokens(draw)["pad"],
        }
    if draw.get("tokenizer.json types") == "all 0" and document["post_processor"]["type"] == "TemplateProcessing":
        for step in document["post_processor"]["pair"]:
            next(iter(step.values()))["type_id"] = 0
    if (special := value(draw, "tokenizer.json added token")) is not None:
        document["added_tokens"].append(added_token(len(_ids(document)), "<j>", special=special))
    return document


def _ids(document: Mapping[str, Any]) -> dict[str, int]:
    vocabulary = document["model"]["vocab"]
    listed = vocabulary if isinstance(vocabulary, dict) else {token: at for at, (token, _) in enumerate(vocabulary)}
    return {**listed, **{token["content"]: token["id"] for token in document["added_tokens"]}}


def _write_tokenizer(folder: Path, draw: Draw) -> tuple[int, int]:
    """Writes the tokenizer's files; the rows that an embedding needs, and the id of padding."""
    kind, files = grammar.tokenizer_class(draw), draw.get("tokenizer files")
    document = _document(draw)
    ids = _ids(document)
    if files != "old":
        (folder / "tokenizer.json").write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
    if files is not None:
        _write_old_files(folder, kind)
    _write_settings(folder, draw, ids)
    if value(draw, "added_tokens.json") is None and "added_tokens.json" in draw:
        write_json(folder / "added_tokens.json", {"<a>": len(ids)})
    return len(ids) + _SPARE, ids[special_tokens(draw)["pad"]]


def _write_settings(folder: Path, draw: Draw, ids: Mapping[str, int]) -> None:
    kind, named = grammar.tokenizer_class(draw), draw.get("tokenizer_class", "own")
    settings = grammar.fields(draw, grammar.TOKENIZER)
    if "tokenizer" in draw and named == "absent":
        named = "own"  # the family's class would make another tokenizer of this vocabulary
    if named in {"own", "own with Fast"}:
        generic = draw["family"] == "modernbert" and not {"tokenizer", "tokenizer files"} & draw.keys()
        fast = named == "own with Fast"
        settings["tokenizer_class"] = "PreTrainedTokenizerFast" if generic else f"{kind}Fast" if fast else kind
    elif named != "absent":
        settings["tokenizer_class"] = named
    tokens: dict[str, Any] = {f"{role}_token": token for role, token in special_tokens(draw).items()}
    where = draw.get("special tokens", "by name")
    if "objects" in where:
        tokens = {role: {**_object(token), "__type": "AddedToken"} for role, token in tokens.items()}
    if flags := value(draw, "mask token"):
        tokens["mask_token"] = {**_object(special_tokens(draw)["mask"]), **flags, "__type": "AddedToken"}
    if where in {"by name", "as objects"}:
        settings |= tokens
    elif where != "absent":
        write_json(folder / "special_tokens_map.json", tokens)
    if (flags := value(draw, "added_tokens_decoder")) is not None or draw.get("added_tokens_decoder") == "as it is":
        listed = {token: ids[token] for token in dict.fromkeys(special_tokens(draw).values())}
        entries = {str(at): _object(token, special=True) for token, at in listed.items()}
        if flags is not None:
            entries[str(len(ids))] = _object("<d>", **flags)
        settings["added_tokens_decoder"] = entries
    write_json(folder / "tokenizer_config.json", settings)


def _object(token: str, **flags: bool) -> dict[str, Any]:
    entry = added_token(0, token, **flags)
    del entry["id"]
    return entry


# The model.


def _write_model(folder: Path, draw: Draw, size: int, pad: int) -> None:
    name, task = draw["family"], draw["task"]
    family = grammar.FAMILIES[name]
    layers = 2 if name in {"albert", "modernbert"} else 1
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": layers, "num_attention_heads": 2, "intermediate_size": 24}
    if name == "distilbert":
        sizes = {"dim": WIDTH, "n_layers": layers, "n_heads": 2, "hidden_dim": 24}
    positions = POSITIONS + pad + 1 if name in OFFSET else POSITIONS
    settings: dict[str, Any] = {**sizes, "vocab_size": size, "max_position_embeddings": positions, **family.settings}
    if name in OFFSET or pad:
        settings["pad_token_id"] = pad
    own = grammar.fields(draw, grammar.CONFIG)
    settings |= {**value(draw, "settings"), **own, **_labels(draw), **value(draw, "activation_fn")}
    if (epsilon := value(draw, "epsilon")) is not ABSENT and family.epsilon:
        settings[family.epsilon] = epsilon
    if (activation := value(draw, "activation")) != "absent":
        settings[family.activation] = activation
    config = _config(family.stem, settings)
    _save(folder, draw, _model(family.stem + grammar.HEADS[task], config))
    written = config.to_dict() | settings if draw.get("settings written") == "all" else settings
    written = {"model_type": name, **written}
    written["architectures"] = _architectures(draw)
    if written["architectures"] is ABSENT:
        del written["architectures"]
    write_json(folder / "config.json", written)


def _config(stem: str, settings: Mapping[str, Any]) -> Any:
    kind = getattr(transformers, f"{stem}Config")
    # Weights are made by what the settings mean to Transformers, in fp32 and on a head that is no decoder's.
    left_out = {
        "problem_type",
        "torch_dtype",
        "is_decoder",
        "sentence_transformers",
        "tokenizer_class",
        "max_length",
        "_name_or_path",
    }
    named = {key: content for key, content in settings.items() if key not in left_out}
    if (labels := named.get("id2label")) is not None:
        named["id2label"] = {int(at): str(label) for at, label in labels.items()}
    return kind(**named)


def _model(name: str, config: Any) -> torch.nn.Module:
    made: torch.nn.Module = getattr(transformers, name)(config)
    for path, tensor in made.named_parameters():
        # Loud enough that another token, another scale or another bias means another answer.
        if tensor.ndim == 1:
            tensor.data.normal_(mean=float("norm" in path.lower() and path.endswith("weight")), std=0.1)
        else:
            tensor.data.normal_(std=0.3)
    return made.eval()


def _labels(draw: Draw) -> dict[str, Any]:
    if draw["task"] == "rerank":
        count = value(draw, "num_labels")
        return {"id2label": {str(at): f"LABEL_{at}" for at in range(count)}}
    if draw["task"] not in {"classify", "tag"}:
        return {}
    labels = value(draw, "labels")
    if isinstance(labels, int):
        return {} if labels == 2 else {"num_labels": labels}
    if labels == "other order":
        return {"id2label": {"2": "I-x", "0": "O", "1": "B-x"}}
    return {"id2label": {str(at): label for at, label in enumerate(labels)}}


def _architectures(draw: Draw) -> Any:
    stem, named = grammar.FAMILIES[draw["family"]].stem, value(draw, "architectures")
    if named is None:
        return [stem + grammar.HEADS[draw["task"]]]
    return [stem + named] if isinstance(named, str) else named


def _save(folder: Path, draw: Draw, model: Any) -> None:
    with TemporaryDirectory() as place:
        model.save_pretrained(place)
        tensors = safetensors_torch.load_file(f"{place}/model.safetensors")
    prefix = f"{model.base_model_prefix}."
    if draw.get("pooler") == "absent":
        tensors = {name: tensor for name, tensor in tensors.items() if "pooler." not in name}
    match draw.get("prefix", "as saved"):
        case "the family's" if draw["task"] == "embed":
            tensors = {prefix + name: tensor for name, tensor in tensors.items()}
        case "none":
            tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        case "module." | "model." | "encoder." as foreign:
            tensors = {foreign + name: tensor for name, tensor in tensors.items()}
    if draw.get("names of normalizations") == "gamma and beta":
        old = {"weight": "gamma", "bias": "beta"}
        tensors = {
            f"{stem}.{old[last]}" if stem.endswith("LayerNorm") else name: tensor
            for name, tensor in tensors.items()
            for stem, _, last in [name.rpartition(".")]
        }
    match draw.get("tensors beside"):
        case "position_ids":
            own = prefix if any(name.startswith(prefix) for name in tensors) else ""
            tensors[f"{own}embeddings.position_ids"] = torch.arange(POSITIONS)[None]
        case "another head":
            tensors["cls.seq_relationship.weight"] = torch.randn(2, WIDTH)
            tensors["cls.seq_relationship.bias"] = torch.randn(2)
    kind = getattr(torch, draw.get("dtype", "float32"))
    tensors = {
        name: (tensor.to(kind) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in tensors.items()
    }
    _write_weights(folder, tensors, draw.get("weights", "safetensors"))


def _write_weights(folder: Path, tensors: dict[str, torch.Tensor], form: str) -> None:
    safe = "safetensors" in form
    stem, ending = ("model", "safetensors") if safe else ("pytorch_model", "bin")

    def save(file: str, part: dict[str, torch.Tensor]) -> None:
        if safe:
            safetensors_torch.save_file(part, folder / file, {"format": "pt"})
        else:
            torch.save(part, folder / file)

    if not form.startswith("two"):
        save(f"{stem}.{ending}", tensors)
        return
    names = list(tensors)
    places = {name: f"{stem}-0000{1 + (at * 2 >= len(names))}-of-00002.{ending}" for at, name in enumerate(names)}
    for file in sorted(set(places.values())):
        save(file, {name: tensor for name, tensor in tensors.items() if places[name] == file})
    write_json(folder / f"{stem}.{ending}.index.json", {"metadata": {"total_size": 1}, "weight_map": places})


# What Sentence Transformers reads.

_NEW_TYPES = {
    "Transformer": "base.modules.transformer",
    "Pooling": "sentence_transformer.modules.pooling",
    "Dense": "base.modules.dense",
    "Normalize": "base.modules.normalize",
    "LayerNorm": "sentence_transformer.modules.layer_norm",
    "Dropout": "sentence_transformer.modules.dropout",
}
_TORCH = "torch.nn.modules"


def _type(draw: Draw, kind: str) -> str:
    if draw.get("module types") == "new":
        return f"sentence_transformers.{_NEW_TYPES[kind]}.{kind}"
    return f"sentence_transformers.models.{kind}"


def _write_sentences(folder: Path, encoder: Path, draw: Draw) -> None:
    layout = draw.get("layout", "modules.json")
    if layout == "no file":
        return
    pooling = {draw.get("width of pooling", "word_embedding_dimension"): WIDTH, **value(draw, "pooling")}
    write_json(folder / "1_Pooling" / "config.json", pooling)
    settings = {**value(draw, "prompts"), **grammar.fields(draw, grammar.SENTENCE)}
    if settings:
        write_json(folder / grammar.SENTENCE, {"__version__": {"sentence_transformers": "3.0.0"}, **settings})
    if layout == "1_Pooling alone":
        return
    path = "0_Transformer" if layout == "0_Transformer" else ""
    listed = [(_type(draw, "Transformer"), path), (_type(draw, "Pooling"), "1_Pooling")]
    modes = pooling.get("pooling_mode") or [key for key, flag in pooling.items() if key.startswith("pooling_") and flag]
    width = WIDTH * (1 if isinstance(modes, str) else max(len(modes), 1))
    for at, words in enumerate(value(draw, "modules after"), start=2):
        kind, _, further = words.partition(" ")
        listed.append((_type(draw, kind), f"{at}_{kind}"))
        width = _write_module(folder / f"{at}_{kind}", kind, further, width, draw)
    write_modules(folder, *listed)
    _write_sentence_config(encoder, draw)


def _write_sentence_config(encoder: Path, draw: Draw, **further: Any) -> None:
    file = draw.get("sentence config", "sentence_bert_config.json")
    if file == "absent":
        return
    own = {
        "max_seq_length": value(draw, "max_seq_length"),
        "do_lower_case": value(draw, "do_lower_case of sentences"),
        **value(draw, "further settings of sentences"),
        **further,
    }
    write_json(encoder / file, {name: content for name, content in own.items() if content is not ABSENT})


def _write_module(folder: Path, kind: str, further: str, width: int, draw: Draw) -> int:
    """Writes a module; returns the width of what it makes."""
    folder.mkdir()
    if kind == "Normalize":
        return width
    if kind == "Dropout":
        write_json(folder / "config.json", {"dropout": 0.2})
        return width
    if kind == "LayerNorm":
        write_json(folder / "config.json", {"dimension": width})
        _write_weights(folder, {"norm.weight": torch.randn(width), "norm.bias": torch.randn(width)}, _form(draw))
        return width
    outputs = 12
    activation = {"Identity": "linear.Identity", "GELU": "activation.GELU", "ReLU": "activation.ReLU"}.get(further)
    config: dict[str, Any] = {"in_features": width, "out_features": outputs, "bias": further != "without bias"}
    config["activation_function"] = f"{_TORCH}.{activation or 'activation.Tanh'}"
    tensors = {"linear.weight": torch.randn(outputs, width)}
    if config["bias"]:
        tensors["linear.bias"] = torch.randn(outputs)
    if further == "residual":
        config["use_residual"] = True
        if width != outputs:
            tensors["residual.weight"] = torch.randn(outputs, width)
    write_json(folder / "config.json", config)
    _write_weights(folder, tensors, _form(draw))
    return outputs


def _form(draw: Draw) -> str:
    return draw.get("weights of modules", "safetensors")


def _write_reranker(folder: Path, draw: Draw) -> None:
    settings = value(draw, "prompts")
    if draw.get("layout of a reranker") == "modules.json":
        write_modules(folder, (_type({"module types": "new"}, "Transformer"), ""))
        _write_sentence_config(folder, draw, transformer_task="sequence-classification")
        hint = value(draw, "activation_fn").get("sentence_transformers", {})
        settings = {**settings, "model_type": "CrossEncoder", **hint}
        edit_json(folder / "config.json", sentence_transformers=None)
    if settings:
        write_json(folder / grammar.SENTENCE, {"__version__": {"sentence_transformers": "6.2.0"}, **settings})
