"""Checkpoints of TensorFlow, written byte by byte as its own reader expects them, and BERT's in Google's layout."""

from __future__ import annotations

import json
import re
import struct
from typing import TYPE_CHECKING

import google_crc32c
import torch
from safetensors import torch as safetensors_torch

from tests.support.checkpoints import vocabulary, write_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

TYPES = {
    "torch.float32": 1,
    "torch.float64": 2,
    "torch.int32": 3,
    "torch.int64": 9,
    "torch.bfloat16": 14,
    "torch.float16": 19,
}
"""TensorFlow's numbers of types."""
MAGIC = 0xDB4775248B80FB57
RESTART = 16
"""Names from one restart point of a block to the next."""


def masked(content: bytes) -> int:
    """A checksum as LevelDB stores it."""
    crc = google_crc32c.value(content)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def varint(value: int) -> bytes:
    """A number of protocol buffers and of LevelDB."""
    content = bytearray()
    while value > 127:
        content.append(value & 127 | 128)
        value >>= 7
    return bytes([*content, value])


def message(*fields: tuple[int, int | bytes]) -> bytes:
    """A protocol buffer of integers and of bytes, by their fields' numbers."""
    content = b""
    for number, value in fields:
        if isinstance(value, int):
            content += varint(number << 3) + varint(value)
        else:
            content += varint(number << 3 | 2) + varint(len(value)) + value
    return content


def header(shards: int = 1, *, endianness: int = 0, least_reader: int = 0) -> bytes:
    return message((1, shards), (2, endianness), (3, message((1, 1), (2, least_reader))))


def entry(
    kind: int, shape: Iterable[int], offset: int, content: bytes, *, shard: int = 0, slices: bytes = b""
) -> bytes:
    """BundleEntryProto of a variable whose bytes are `content`."""
    dims = message(*((2, message((1, size))) for size in shape))
    fields = message((1, kind), (2, dims), (3, shard), (4, offset), (5, len(content)))
    checksum = varint(6 << 3 | 5) + struct.pack("<I", masked(content))
    return fields + checksum + (message((7, slices)) if slices else b"")


def block(pairs: Iterable[tuple[bytes, bytes]], *, compression: int = 0) -> bytes:
    content, restarts, last = b"", [], b""
    for count, (key, value) in enumerate(pairs):
        shared = 0
        if count % RESTART == 0:
            restarts.append(len(content))
        else:
            while shared < min(len(key), len(last)) and key[shared] == last[shared]:
                shared += 1
        content += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        last = key
    restarts = restarts or [0]
    content += struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts)) + bytes([compression])
    return content + struct.pack("<I", masked(content))


def table(pairs: Mapping[bytes, bytes], *, each: int = 40, compression: int = 0) -> bytes:
    """A table, with so many names in a block."""
    ordered, content, handles = sorted(pairs.items()), b"", []
    for start in range(0, len(ordered), each):
        made = block(ordered[start : start + each], compression=compression)
        handles.append((ordered[start : start + each][-1][0], varint(len(content)) + varint(len(made) - 5)))
        content += made
    last = []
    for made in (block([]), block(handles)):
        last.append(varint(len(content)) + varint(len(made) - 5))
        content += made
    return content + b"".join(last).ljust(40, b"\0") + struct.pack("<Q", MAGIC)


def write_bundle(folder: Path, prefix: str, variables: Mapping[str, torch.Tensor], *, shards: int = 1) -> None:
    """Writes a checkpoint; variables that follow one another lie in different files."""
    files, pairs = [b""] * shards, {b"": header(shards)}
    for number, (name, tensor) in enumerate(sorted(variables.items())):
        content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        shard = number % shards
        pairs[name.encode()] = entry(TYPES[str(tensor.dtype)], tensor.shape, len(files[shard]), content, shard=shard)
        files[shard] += content
    (folder / f"{prefix}.index").write_bytes(table(pairs))
    for shard, content in enumerate(files):
        (folder / f"{prefix}.data-{shard:05d}-of-{shards:05d}").write_bytes(content)


HEADS = {
    "cls.predictions.bias": "cls/predictions/output_bias",
    "classifier.weight": "output_weights",
    "classifier.bias": "output_bias",
    "qa_outputs.weight": "cls/squad/output_weights",
    "qa_outputs.bias": "cls/squad/output_bias",
}
"""What Google's run_pretraining.py, run_classifier.py and run_squad.py call the variables of heads."""


def variables_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Transformers' tensors as Google's modeling.py names and shapes them."""
    made = {}
    for name, tensor in tensors.items():
        *path, last = re.sub(r"layer\.(\d+)", r"layer_\1", name).split(".")
        if name in HEADS:
            made[HEADS[name]] = tensor
        elif path[-1] == "LayerNorm":
            made["/".join([*path, {"weight": "gamma", "bias": "beta"}[last]])] = tensor
        elif path[-1].endswith("_embeddings"):
            made["/".join(path)] = tensor
        elif path[-1] == "decoder":
            continue  # the word embeddings, and a bias that has a name of its own
        else:
            made["/".join([*path, {"weight": "kernel"}.get(last, last)])] = tensor.T if last == "weight" else tensor
    return made


def write_google_bert(folder: Path, source: Path, *, shards: int = 1, dtype: torch.dtype | None = None) -> Path:
    """Writes a checkpoint of Transformers in Google's layout, as training with LAMB leaves it."""
    folder.mkdir()
    variables = variables_of(safetensors_torch.load_file(source / "model.safetensors"))
    slots = {f"{name}/{slot}": torch.rand(2) for name in variables for slot in ("adam_m", "adam_v", "LAMB", "LAMB_1")}
    counters = {"global_step": torch.tensor(7038), "loss_scale": torch.tensor(1.0), "beta1_power": torch.tensor(0.9)}
    sequence = {
        "cls/seq_relationship/output_weights": torch.rand(2, 32),
        "cls/seq_relationship/output_bias": torch.rand(2),
    }
    stored = {name: tensor.to(dtype or torch.float32) for name, tensor in variables.items()} | slots | counters
    write_bundle(folder, "model.ckpt-7038", stored | sequence, shards=shards)
    settings = json.loads((source / "config.json").read_text())
    of_google = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act")
    of_google += ("max_position_embeddings", "type_vocab_size", "vocab_size", "initializer_range")
    write_json(folder / "bert_config.json", {name: settings[name] for name in of_google})
    (folder / "vocab.txt").write_text("\n".join(vocabulary()) + "\n")
    return folder
