"""Recognizes folders without a supported encoder, and names what they are: other models, parts, formats."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from bertserve.export.errors import ExportError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from bertserve.export.checkpoint.folder import Folder

_CSR = "CSR (a sparse autoencoder over a dense vector)"
_LOOKUP = "a table of weights of words without an encoder"

_MODULES = {"SparseAutoEncoder": _CSR, "SparseStaticEmbedding": _LOOKUP}
"""By the class of a module in modules.json."""

_ADAPTER = "adapter_config.json"
_ADAPTED = {
    "SEQ_CLS": "SequenceClassification",
    "TOKEN_CLS": "TokenClassification",
    "QUESTION_ANS": "QuestionAnswering",
}
"""PEFT's task names, and the PEFT class that loads such an adapter; the default is the class for features."""

_CACHED = "models--*/snapshots"

_OTHER_FORMATS = {
    **dict.fromkeys(("*.onnx", "onnx/*.onnx"), "an ONNX graph"),
    **dict.fromkeys(("openvino_model.xml", "openvino/*.xml"), "an OpenVINO model"),
    "*.gguf": "a llama.cpp file",
    **dict.fromkeys(("*.h5", "saved_model.pb"), "a TensorFlow file"),
    "*.msgpack": "a Flax file",
    "*.ot": "a rust-bert file",
    **dict.fromkeys(("*.pt", "*.pth", "*.ckpt"), "a training state"),
    **dict.fromkeys(("quantize_config.json", "gptq_model*", "*4bit*.safetensors"), "quantized elsewhere"),
}
"""Other weight formats, and what they are. The first one found is named."""

_OTHER_NAMES = dict.fromkeys(("*model*.safetensors", "*model*.bin"), "rename it if these are the weights")


def refuse(folder: Folder) -> None:
    """Rejects models of other kinds and incomplete models.

    Raises:
        ExportError: It is such a model.
    """
    _refuse_cache(folder)
    refuse_adapter(folder)
    if (kind := _kind(folder)) is not None:
        raise folder.error(f"this is {kind}, which cannot be served yet")


def _refuse_cache(folder: Folder) -> None:
    """Names the right folder if one above it in the hub's cache is given."""
    if folder.has("config.json") or folder.has("modules.json"):
        return
    path = folder.path
    caches = sorted(each.parent for below in (path, path / "hub") for each in below.glob(_CACHED))
    if (path / "snapshots").is_dir() and (path / "refs").is_dir():
        caches = [path]
    for cache in caches[:1]:
        kind, _, hub_id = cache.resolve().name.replace("--", "/").partition("/")
        or_by_name = f", or {hub_id} with HF_HUB_OFFLINE=1" if kind == "models" else ""
        raise ExportError(
            f"checkpoint {path}: this is a folder of the Hugging Face cache, not a checkpoint; use "
            f"{_snapshot(cache)}{or_by_name}"
        )


def _snapshot(cache: Path) -> Path:
    main = cache / "refs" / "main"
    commit = main.read_text(encoding="utf-8", errors="replace").strip() if main.is_file() else ""
    if re.fullmatch(r"[0-9a-f]{40}", commit) and (named := cache / "snapshots" / commit).is_dir():
        return named
    return max((cache / "snapshots").iterdir(), key=lambda each: each.stat().st_mtime, default=cache / "snapshots")


def refuse_adapter(folder: Folder) -> None:
    """Rejects PEFT adapters, which Transformers would load on top of their base."""
    if not folder.has(_ADAPTER):
        return
    adapter = folder.object(_ADAPTER)
    kind = f"AutoPeftModelFor{_ADAPTED.get(str(adapter.get('task_type')), 'FeatureExtraction')}"
    raise folder.error(
        f"this is an adapter ({adapter.get('peft_type', 'PEFT')} in {_ADAPTER}) of "
        f"{adapter.get('base_model_name_or_path') or 'another model'}, not a full model; merge the two, then export "
        f'MERGED with the tokenizer files: python -c "from peft import {kind} as M; '
        f"M.from_pretrained('{folder.path}').merge_and_unload().save_pretrained('MERGED')\""
    )


def refuse_config(folder: Folder, config: dict[str, Any]) -> None:
    """Rejects configurations that no encoder family has.

    Raises:
        ExportError: The weights are quantized, or there is a decoder.
    """
    quantized = config.get("quantization_config")
    if quantized is not None:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise folder.error(
            f"its weights are quantized ({method!r} in quantization_config of config.json); "
            "use the original floating-point checkpoint: the export quantizes it"
        )
    for key, kind in (("is_decoder", "a decoder"), ("is_encoder_decoder", "an encoder-decoder")):
        if config.get(key):
            raise folder.error(f"{key} in config.json says that this is {kind}; only encoders are exported")


def kind_of(config: dict[str, Any]) -> str:
    """What a model of an unknown family is by Transformers' lists, as a clause; empty for a text encoder."""
    if config.get("model_type") is None:
        return ": add it to config.json"
    # A slow import, needed only for rejected models.
    from transformers.models.auto import modeling_auto as auto  # noqa: PLC0415

    name = str(config.get("model_type"))
    kinds = {
        "it has an encoder and a decoder": (auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,),
        "it reads images": (
            auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
            auto.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES,
            auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        ),
        "it reads audio": (
            auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
            auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        ),
        "it is a decoder, which generates text": (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,),
    }
    if name in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not config.get("is_encoder_decoder"):
        return ""
    return next((f": {kind}" for kind, lists in kinds.items() if any(name in each for each in lists)), "")


def instead_of_config(folder: Folder) -> str:
    """What a folder without config.json contains instead, as a clause."""
    below = sorted(path.parent.name for path in folder.path.glob("*/config.json"))
    encoders = [name for name in below if folder.has(f"{name}/tokenizer.json") or folder.has(f"{name}/vocab.txt")]
    if encoders:
        return f"; use its subfolder {encoders[0]}, which has one"
    return _held(folder, _OTHER_FORMATS) or "; use the folder that Transformers' save_pretrained wrote"


def instead_of_weights(folder: Folder) -> str:
    """What a folder contains instead of readable weights, as a clause; empty if nothing."""
    return _held(folder, _OTHER_FORMATS | _OTHER_NAMES)


def _held(folder: Folder, patterns: Mapping[str, str]) -> str:
    for pattern, kind in patterns.items():
        if found := sorted(path.relative_to(folder.path) for path in folder.path.glob(pattern)):
            return f", and {found[0]} is not supported ({kind})"
    return ""


def _kind(folder: Folder) -> str | None:
    modules = folder.json("modules.json")
    listed = modules if isinstance(modules, list) else []
    kinds = [str(module.get("type")).rpartition(".")[2] for module in listed if isinstance(module, dict)]
    return next((_MODULES[kind] for kind in kinds if kind in _MODULES), None)
