"""The grammar of generated checkpoint folders: every file and field that the two libraries read, with values of each.

A folder is one choice for each axis. The first choice of an axis is the usual one, so a folder is told by its unusual
choices, and a failing one is reduced by putting them back, one after another.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Draw = dict[str, str]
"""For each axis the name of a choice; an axis that is left out has its usual one."""

ABSENT = object()
"""The value of a field that a file does not have."""

POSITIONS = 48
"""Tokens of the longest input."""

SAVED, TOKENIZER = "tokenizer.json", "tokenizer_config.json"
CONFIG, SENTENCE = "config.json", "config_sentence_transformers.json"


@dataclass(frozen=True)
class Family:
    """What a folder of a family holds.

    Attributes:
        stem: What its classes in Transformers begin with.
        tokenizer: Its usual tokenizer class.
        settings: Those of its usual config.json beside the sizes.
        variants: Further settings, by a name for each set of them.
        epsilon: What it calls the epsilon of its normalizations; empty where nothing sets it.
        activation: What it calls its activation.
    """

    stem: str
    tokenizer: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    epsilon: str = "layer_norm_eps"
    activation: str = "hidden_act"


_DISTANCES = {"relative_attention": True, "max_relative_positions": -1, "pos_att_type": "p2c|c2p"}
_DEBERTA: dict[str, Mapping[str, Any]] = {
    "no relative attention": {"relative_attention": False},
    "c2p alone": {"pos_att_type": "c2p"},
    "pos_att_type listed": {"pos_att_type": ["p2c"]},
    "max_relative_positions 16": {"max_relative_positions": 16},
    "position_biased_input": {"position_biased_input": True},
    "not legacy": {"legacy": False},
}
_ROTATED: dict[str, Mapping[str, Any]] = {
    "as published": {"rope_theta": 160000.0, "rope_scaling": None},
    "rope_theta 500": {"rope_theta": 500.0},
    "rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 2000.0}},
    "linear rope_scaling": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "dynamic rope_scaling": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
}
FAMILIES: dict[str, Family] = {
    "bert": Family("Bert", "BertTokenizer"),
    "roberta": Family("Roberta", "RobertaTokenizer", {"type_vocab_size": 1}),
    "xlm-roberta": Family("XLMRoberta", "XLMRobertaTokenizer", {"type_vocab_size": 1}),
    "distilbert": Family(
        "DistilBert",
        "DistilBertTokenizer",
        variants={"sinusoidal_pos_embds": {"sinusoidal_pos_embds": True}},
        epsilon="",
        activation="activation",
    ),
    "mpnet": Family("MPNet", "MPNetTokenizer", variants={"as published": {"relative_attention_num_buckets": 32}}),
    "electra": Family(
        "Electra", "ElectraTokenizer", {"embedding_size": 16}, {"narrow embeddings": {"embedding_size": 8}}
    ),
    "camembert": Family("Camembert", "CamembertTokenizer", {"type_vocab_size": 1}),
    "albert": Family(
        "Albert",
        "AlbertTokenizer",
        {"embedding_size": 16},
        {
            "narrow embeddings": {"embedding_size": 8},
            "two groups": {"num_hidden_groups": 2},
            "two inner layers": {"inner_group_num": 2},
        },
    ),
    "deberta": Family(
        "Deberta",
        "DebertaTokenizer",
        {**_DISTANCES, "position_biased_input": False, "type_vocab_size": 0},
        {**_DEBERTA, "talking_head": {"talking_head": True}},
    ),
    "deberta-v2": Family(
        "DebertaV2",
        "DebertaV2Tokenizer",
        {
            **_DISTANCES,
            "position_buckets": 8,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "position_biased_input": False,
            "type_vocab_size": 0,
        },
        {
            **_DEBERTA,
            "as published": {"position_buckets": 256},
            "no position_buckets": {"position_buckets": -1},
            "norm_rel_ebd none": {"norm_rel_ebd": "none"},
            "share_att_key false": {"share_att_key": False},
            "conv_kernel_size 3": {"conv_kernel_size": 3, "conv_act": "gelu"},
            "conv_kernel_size 3, tanh": {"conv_kernel_size": 3},
            "conv_groups 2": {"conv_kernel_size": 3, "conv_groups": 2, "conv_act": "gelu"},
        },
    ),
    "modernbert": Family(
        "ModernBert",
        "DebertaTokenizer",
        {"local_attention": 8, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2},
        {
            "classifier_pooling mean": {"classifier_pooling": "mean"},
            "attention_bias": {"attention_bias": True, "mlp_bias": True},
            "norm_bias": {"norm_bias": True},
            "decoder_bias false": {"decoder_bias": False},
            "as published": {
                "local_attention": 128,
                "global_attn_every_n_layers": 3,
                "global_rope_theta": 160000.0,
                "local_rope_theta": 10000.0,
            },
            "every layer global": {"global_attn_every_n_layers": 1},
            "global_rope_theta": {"global_rope_theta": 1000.0, "local_rope_theta": 300.0},
            "classifier_activation": {"classifier_activation": "relu", "classifier_bias": True},
            "sparse_prediction": {"sparse_prediction": True},
        },
        epsilon="norm_eps",
        activation="hidden_activation",
    ),
    "nomic_bert": Family("NomicBert", "BertTokenizer", variants={**_ROTATED, "head_dim 4": {"head_dim": 4}}),
    "gte": Family("Gte", "XLMRobertaTokenizer", {"pad_token_id": 1}, _ROTATED),
    "megatron-bert": Family("MegatronBert", "BertTokenizer"),
    "data2vec-text": Family("Data2VecText", "RobertaTokenizer", {"type_vocab_size": 1}),
    "ernie": Family(
        "Ernie",
        "BertTokenizer",
        {"type_vocab_size": 4},
        {"use_task_id": {"use_task_id": True, "task_type_vocab_size": 3}},
    ),
}
OFFSET = frozenset({"roberta", "xlm-roberta", "camembert", "data2vec-text", "mpnet"})
"""Families whose positions begin behind the padding id."""

HEADS = {
    "embed": "Model",
    "rerank": "ForSequenceClassification",
    "classify": "ForSequenceClassification",
    "tag": "ForTokenClassification",
    "fill_mask": "ForMaskedLM",
    "answer": "ForQuestionAnswering",
}
WORDPIECE = frozenset({"BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MPNetTokenizer"})
BYTE_LEVEL = frozenset({"RobertaTokenizer", "DebertaTokenizer"})
PIECES = {
    "XLMRobertaTokenizer": "sentencepiece.bpe.model",
    "CamembertTokenizer": "sentencepiece.bpe.model",
    "AlbertTokenizer": "spiece.model",
    "DebertaV2Tokenizer": "spm.model",
}


def tokenizer_class(draw: Draw) -> str:
    other = draw.get("tokenizer", "of the family")
    return FAMILIES[draw["family"]].tokenizer if other == "of the family" else other


@dataclass(frozen=True)
class Axis:
    """Something that folders may differ in.

    Attributes:
        name: A file and a field of it, or a few words.
        choices: Values by their names, the usual one first.
        when: Which folders have it.
        refused: Choices that an export may refuse, with the reason; another refusal is a fault.
    """

    name: str
    choices: Mapping[str, Any]
    when: Callable[[Draw], bool] = lambda _draw: True
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def usual(self) -> str:
        return next(iter(self.choices))


def _of(*tasks: str) -> Callable[[Draw], bool]:
    return lambda draw: draw["task"] in tasks


def _in(*families: str) -> Callable[[Draw], bool]:
    return lambda draw: draw["family"] in families


def _wordpiece(draw: Draw) -> bool:
    return tokenizer_class(draw) in WORDPIECE


def _pieces(draw: Draw) -> bool:
    return tokenizer_class(draw) in PIECES


def _byte_level(draw: Draw) -> bool:
    return tokenizer_class(draw) in BYTE_LEVEL


def _names(*choices: str) -> dict[str, None]:
    return dict.fromkeys(choices)


def _field(
    file: str,
    name: str,
    *values: Any,
    usual: Any = ABSENT,
    when: Callable[[Draw], bool] = lambda _draw: True,
    refused: Mapping[str, str] | None = None,
) -> Axis:
    named = {_shown(value): value for value in (usual, *values)}
    return Axis(f"{file} {name}", named, when, refused or {})


def _shown(value: object) -> str:
    return "absent" if value is ABSENT else str(value)


_TYPED = ["input_ids", "token_type_ids", "attention_mask"]
_UNTYPED = ["input_ids", "attention_mask"]
_CODE = "no such operator is fused"
_ANOTHER_MODEL = "it is another model"
_NO_CODE = "the server computes no such function"

_TOKENIZERS = [
    Axis(
        "tokenizer",
        _names("of the family", "BertTokenizer", "RobertaTokenizer", "XLMRobertaTokenizer"),
        lambda draw: draw["family"] in {"bert", "distilbert", "nomic_bert", "gte", "modernbert", "electra"},
    ),
    # For ModernBERT no library reads older files.
    Axis(
        "tokenizer files",
        _names("tokenizer.json", "old", "both"),
        lambda draw: draw["family"] != "modernbert" or draw.get("tokenizer", "of the family") != "of the family",
    ),
    Axis(
        "tokenizer_class",
        _names("own", "own with Fast", "PreTrainedTokenizerFast", "TokenizersBackend", "absent"),
        # Of older files no library makes a tokenizer without a class.
        lambda draw: draw.get("tokenizer files") != "old",
    ),
    # How the author's tokenizer.json was saved, whatever tokenizer_config.json says.
    _field(SAVED, "do_lower_case", False, usual=True, when=_wordpiece),
    _field(SAVED, "strip_accents", True, False, usual=None, when=_wordpiece),
    _field(SAVED, "tokenize_chinese_chars", False, usual=True, when=_wordpiece),
    _field(SAVED, "add_prefix_space", True, usual=False, when=_byte_level),
    _field(SAVED, "trim_offsets", False, usual=True, when=_byte_level),
    _field(SAVED, "spaces before pieces", False, usual=True, when=_pieces),
    Axis(
        "tokenizer.json truncation", {"None": None, "8": ("Right", "LongestFirst"), "8 left": ("Left", "LongestFirst")}
    ),
    Axis(
        "tokenizer.json padding",
        {
            "None": None,
            "Fixed 16": "Fixed",
            "BatchLongest": "BatchLongest",
            "left": "left",
            "multiple of 8": "multiple",
        },
    ),
    Axis("tokenizer.json types", _names("as usual", "all 0"), _wordpiece),
    Axis("tokenizer.json added token", {"none": None, "plain": False, "special": True}),
    _field(TOKENIZER, "do_lower_case", True, False),
    _field(TOKENIZER, "strip_accents", None, True, False, when=_wordpiece),
    _field(TOKENIZER, "tokenize_chinese_chars", True, False, when=_wordpiece),
    _field(TOKENIZER, "keep_accents", True, False, when=_in("albert")),
    _field(TOKENIZER, "split_by_punct", True, False, when=_in("deberta-v2")),
    _field(TOKENIZER, "add_prefix_space", True, False),
    _field(TOKENIZER, "trim_offsets", True, False),
    _field(TOKENIZER, "truncation_side", "left", "right"),
    _field(TOKENIZER, "padding_side", "left", "right"),
    _field(TOKENIZER, "model_max_length", 12, 17, 512, 10**30, ABSENT, usual=POSITIONS),
    _field(TOKENIZER, "model_input_names", _TYPED, _UNTYPED),
    _field(TOKENIZER, "clean_up_tokenization_spaces", True, False),
    _field(TOKENIZER, "split_special_tokens", True, False, refused={"True": "tokenizer.json has no place for it"}),
    _field(TOKENIZER, "extra_special_tokens", {"x_token": "<x>"}, ["<x>"]),
    _field(TOKENIZER, "additional_special_tokens", ["<x>"]),
    _field(TOKENIZER, "max_length", 8),
    _field(TOKENIZER, "truncation_strategy", "longest_first", "only_first", "only_second"),
    _field(TOKENIZER, "pad_to_multiple_of", 8),
    _field(TOKENIZER, "pad_token_type_id", 0, 1),
    _field(TOKENIZER, "stride", 0, 4),
    _field(TOKENIZER, "never_split", ["café"], when=_wordpiece),
    _field(TOKENIZER, "do_basic_tokenize", True, False, when=_wordpiece),
    _field(TOKENIZER, "add_bos_token", False, when=lambda draw: not _wordpiece(draw)),
    _field(TOKENIZER, "use_fast", False),
    _field(TOKENIZER, "sp_model_kwargs", {}, when=_pieces),
    Axis("special tokens", _names("by name", "as objects", "in special_tokens_map.json", "as objects there", "absent")),
    Axis("mask token", {"as usual": None, "lstrip": {"lstrip": True}, "normalized": {"normalized": True}}),
    Axis(
        "added_tokens_decoder",
        {
            "absent": None,
            "as it is": None,
            "one more": {},
            "one more, single_word": {"single_word": True},
            "one more, lstrip and rstrip": {"lstrip": True, "rstrip": True},
            "one more, normalized": {"normalized": True},
            "one more, special": {"special": True},
        },
    ),
    Axis("added_tokens.json", _names("absent", "one more")),
]

_LINEAR = "torch.nn.modules.linear.Identity"
_SIGMOID = "torch.nn.modules.activation.Sigmoid"
_CONFIGS = [
    Axis(
        "architectures",
        {
            "own": None,
            "absent": ABSENT,
            "BertForCL": ["BertForCL"],
            "Contriever": ["Contriever"],
            "ForPreTraining": "ForPreTraining",
            "Model": "Model",
            "ForMaskedLM": "ForMaskedLM",
        },
    ),
    # Each family has its own.
    Axis("settings", {"as usual": {}}, refused=dict.fromkeys(("talking_head", "sparse_prediction"), _ANOTHER_MODEL)),
    Axis("settings written", _names("what differs", "all")),
    Axis(
        "epsilon",
        {"absent": ABSENT, "1e-5": 1e-5, "1e-2": 1e-2},
        lambda draw: bool(FAMILIES[draw["family"]].epsilon),
        refused={"1e-2": "ONNX Runtime does not fuse DeBERTa's normalization with it"},
    ),
    Axis(
        "activation",
        {
            name: name
            for name in (
                *("absent", "gelu", "relu", "gelu_new", "silu", "gelu_pytorch_tanh", "gelu_fast", "tanh"),
                *("quick_gelu", "swish", "gelu_python"),
            )
        },
        refused=dict.fromkeys(("tanh", "quick_gelu"), _CODE),
    ),
    _field(
        CONFIG,
        "type_vocab_size",
        1,
        2,
        3,
        when=lambda draw: draw["family"] not in {"distilbert", "mpnet", "modernbert"},
    ),
    _field(CONFIG, "tie_word_embeddings", True, False, when=_of("fill_mask")),
    _field(CONFIG, "output_hidden_states", True),
    _field(CONFIG, "chunk_size_feed_forward", 0),
    _field(CONFIG, "classifier_dropout", 0.3),
    _field(CONFIG, "use_cache", False),
    _field(CONFIG, "torch_dtype", "float16", "bfloat16", "float32"),
    _field(
        CONFIG,
        "tokenizer_class",
        "BertTokenizer",
        "XLMRobertaTokenizer",
        refused=dict.fromkeys(("BertTokenizer", "XLMRobertaTokenizer"), "it is for another kind of vocabulary"),
    ),
    _field(CONFIG, "_name_or_path", "someone/else"),
    _field(CONFIG, "max_length", 20),
    _field(
        CONFIG,
        "is_decoder",
        False,
        True,
        when=_in("bert", "roberta", "xlm-roberta", "electra", "camembert"),
        refused={"True": _ANOTHER_MODEL},
    ),
    Axis(
        "labels",
        {
            "named": ("O", "B-x", "I-x"),
            "two": ("no", "yes"),
            "absent": 2,
            "num_labels 4": 4,
            "numbers": (0, 1, 2),
            "twice": ("a", "b", "a"),
            "one": ("one",),
            "without prefixes": ("O", "x", "y"),
            "other order": "other order",
            "spaces": ("B-a b", "I-a b", "-"),
        },
        _of("classify", "tag"),
    ),
    _field(
        CONFIG,
        "problem_type",
        "single_label_classification",
        "multi_label_classification",
        "regression",
        None,
        when=_of("classify", "rerank"),
    ),
    Axis(
        "activation_fn",
        {
            "absent": {},
            "Sigmoid": {"sentence_transformers": {"activation_fn": _SIGMOID, "version": "5.0.0"}},
            "Identity": {"sentence_transformers": {"activation_fn": _LINEAR, "version": "5.0.0"}},
            "old Identity": {"sbert_ce_default_activation_function": _LINEAR},
            "Tanh": {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}},
            "without one": {"sentence_transformers": {"version": "5.0.0"}},
        },
        _of("rerank"),
        refused={"Tanh": _NO_CODE},
    ),
    Axis("num_labels", {"1": 1, "2": 2}, _of("rerank"), refused={"2": "a relevance is one number"}),
]
_WEIGHTS = [
    Axis("weights", _names("safetensors", "bin", "two safetensors", "two bin")),
    Axis(
        "prefix",
        _names("as saved", "the family's", "none", "module.", "model.", "encoder."),
        refused=dict.fromkeys(("module.", "model.", "encoder."), "its own library finds none of the weights either"),
    ),
    Axis("names of normalizations", _names("weight and bias", "gamma and beta")),
    Axis("dtype", _names("float32", "float16", "bfloat16")),
    Axis("tensors beside", _names("none", "position_ids", "another head")),
    Axis("pooler", _names("stored", "absent"), _of("embed")),
]

_FOLLOWING = {
    "none": (),
    "Normalize": ("Normalize",),
    "Dense": ("Dense",),
    "Dense, Normalize": ("Dense", "Normalize"),
    "Dense Identity": ("Dense Identity",),
    "Dense without bias": ("Dense without bias",),
    "Dense residual": ("Dense residual",),
    "Dense GELU, LayerNorm": ("Dense GELU", "LayerNorm"),
    "LayerNorm": ("LayerNorm",),
    "Dropout, Dense ReLU": ("Dropout", "Dense ReLU"),
    "Normalize, Dense": ("Normalize", "Dense"),
    "Normalize, Normalize": ("Normalize", "Normalize"),
}


def _has_modules(draw: Draw) -> bool:
    return draw["task"] == "embed" and draw.get("layout", "modules.json") in {"modules.json", "0_Transformer"}


def _mode(**flags: bool) -> dict[str, Any]:
    return {f"pooling_mode_{name}": flag for name, flag in flags.items()}


_SENTENCES = [
    Axis(
        "layout",
        _names("modules.json", "0_Transformer", "1_Pooling alone", "no file"),
        _of("embed"),
        refused={"1_Pooling alone": "Sentence Transformers does not read it, and its author meant it"},
    ),
    Axis("module types", _names("old", "new"), _has_modules),
    Axis(
        "pooling",
        {
            "mean": _mode(mean_tokens=True, cls_token=False, max_tokens=False),
            "cls": _mode(cls_token=True, mean_tokens=False),
            "max": _mode(max_tokens=True, mean_tokens=False),
            "mean_sqrt_len": _mode(mean_sqrt_len_tokens=True),
            "weightedmean": _mode(weightedmean_tokens=True),
            "lasttoken": _mode(lasttoken=True),
            "no mode": {},
            "all false": _mode(cls_token=False, mean_tokens=False, max_tokens=False),
            "mean and max": _mode(max_tokens=True, mean_tokens=True),
            "cls, max, mean": _mode(mean_tokens=True, cls_token=True, max_tokens=True),
            "named": {"pooling_mode": "cls"},
            "listed": {"pooling_mode": ["mean", "cls"]},
            "named beside a flag": {"pooling_mode": "max", "pooling_mode_mean_tokens": True},
            "include_prompt": {**_mode(cls_token=True), "include_prompt": False},
        },
        lambda draw: draw["task"] == "embed" and draw.get("layout") != "no file",
        refused={"include_prompt": "it depends on the length of a prompt"},
    ),
    Axis("width of pooling", _names("word_embedding_dimension", "embedding_dimension"), _has_modules),
    Axis("modules after", _FOLLOWING, _has_modules),
    Axis("weights of modules", _names("safetensors", "bin"), _has_modules),
    Axis(
        "sentence config",
        {
            f"sentence_{name}_config.json": None
            for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
        }
        | _names("absent"),
        lambda draw: _has_modules(draw) or draw.get("layout of a reranker") == "modules.json",
    ),
    Axis(
        "max_seq_length", {str(value): value for value in (POSITIONS, 12, 200, None)} | {"absent": ABSENT}, _has_modules
    ),
    Axis("do_lower_case of sentences", {"False": False, "True": True, "absent": ABSENT}, _has_modules),
    Axis(
        "further settings of sentences",
        {
            "none": {},
            "tokenizer_args": {"tokenizer_args": {"model_max_length": 10}},
            "model_args": {"model_args": {}},
            "processing_kwargs": {"processing_kwargs": {"text": {"truncation_side": "left"}}},
        },
        _has_modules,
        refused={"processing_kwargs": "any argument of a tokenizer may stand there"},
    ),
    Axis(
        "prompts",
        {
            "none": {},
            "not the default": {"prompts": {"query": "the query: "}, "default_prompt_name": None},
            "the default": {"prompts": {"query": "the query: ", "document": ""}, "default_prompt_name": "query"},
            "empty": {"prompts": {"query": "", "document": ""}},
            "null default": {"prompts": {}, "default_prompt_name": None},
        },
        _of("embed", "rerank"),
    ),
    _field(SENTENCE, "similarity_fn_name", "cosine", "dot", None, when=_of("embed")),
    _field(SENTENCE, "truncate_dim", 5, None, when=_of("embed")),
    _field(SENTENCE, "model_type", "SentenceTransformer", when=_of("embed")),
    Axis("layout of a reranker", _names("no file", "modules.json"), _of("rerank")),
]

AXES = {
    axis.name: axis
    for axis in (
        Axis("family", dict.fromkeys(FAMILIES)),
        Axis("task", dict.fromkeys(HEADS)),
        *_TOKENIZERS,
        *_CONFIGS,
        *_WEIGHTS,
        *_SENTENCES,
    )
}
_TASKS = ("embed", "embed", "embed", "rerank", "rerank", "classify", "classify", "tag", "fill_mask", "answer")
_DENSITIES = (0.03, 0.06, 0.12, 0.25)
"""How often an axis is unusual: folders with few such choices tell most, those with many find what few would not."""
_LEAST = {"settings": 0.4, "labels": 0.4, "pooling": 0.4, "modules after": 0.3}
"""Axes of many choices are unusual more often."""
_REFUSED_SHARE = 0.1
"""Of the draws of a choice that may be refused, those that are kept: a refusal hides all other choices."""


def settings_of(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    """The choices of the axis `settings`, which every family has of its own."""
    return {"as usual": {}, **FAMILIES[draw["family"]].variants}


def drawn(seed: int) -> Draw:
    """The folder of a seed."""
    rng = random.Random(seed)
    draw: Draw = {"family": rng.choice(list(FAMILIES)), "task": rng.choice(_TASKS)}
    if draw["family"] in {"nomic_bert", "gte"} and draw["task"] == "answer":
        draw["task"] = "embed"  # Transformers has no such class
    density = rng.choice(_DENSITIES)
    for name, axis in AXES.items():
        if name in draw or not axis.when(draw) or rng.random() >= max(density, _LEAST.get(name, 0)):
            continue
        choices = list(settings_of(draw) if name == "settings" else axis.choices)[1:]
        if not choices:
            continue
        choice = rng.choice(choices)
        if choice not in axis.refused or rng.random() < _REFUSED_SHARE:
            draw[name] = choice
    return draw


def value(draw: Draw, name: str) -> Any:
    axis = AXES[name]
    choices = settings_of(draw) if name == "settings" else axis.choices
    return choices[draw.get(name, axis.usual)]


def fields(draw: Draw, file: str) -> dict[str, Any]:
    """The fields of a file that have an axis of their own."""
    found = {name.partition(" ")[2]: value(draw, name) for name in AXES if name.startswith(f"{file} ")}
    return {name: content for name, content in found.items() if content is not ABSENT}


def refusable(draw: Draw) -> dict[str, str]:
    """The choices of a folder that an export may refuse, with the reasons."""
    reasons = {
        f"{name}: {choice}": AXES[name].refused[choice] for name, choice in draw.items() if choice in AXES[name].refused
    }
    if draw.get("tokenizer files") == "old" and (choice := draw.get(f"{TOKENIZER} add_bos_token")) is not None:
        reasons[f"{TOKENIZER} add_bos_token: {choice}"] = "beside older files it takes away the tokens around a text"
    return reasons


def shown(draw: Draw) -> str:
    """A folder in a line: its family, its task and what is unusual about it."""
    rest = "; ".join(f"{name}: {choice}" for name, choice in draw.items() if name not in {"family", "task"})
    return f"{draw['family']}, {draw['task']}: {rest or 'nothing unusual'}"
