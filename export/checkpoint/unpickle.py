"""Converts a pickled weight file to safetensors in a separate process.

    python -P -m bertserve.export.checkpoint.unpickle SOURCE TARGET [training]

PyTorch's `weights_only` loader builds tensors and plain containers, and rejects all other names in a pickle. From a
training state it takes the model's tensors and plain settings; the few other names in such files become inert objects.
The process can open no further file or socket, and its memory is limited by the file's size. It prints one JSON object:
the `names` of the tensors; half a sentence why the file is `refused`; or the name that the pickle `wanted`. For a
training state, it prints the `shapes` of the tensors and the `settings`.
"""

from __future__ import annotations

import codecs
import io
import json
import os
import re
import resource
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from bertserve.export.checkpoint import safetensors_file
from bertserve.export.checkpoint.safetensors_file import Tensor, unsigned

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import BinaryIO

    from bertserve.export.checkpoint.safetensors_file import Bits

ROOM = 1 << 28
"""Memory beside three times the file's size: the file, its tensors, and one more tensor."""
_TOO_MUCH = "asks for more memory than weights of its size need"
_COPIES = 3
_CPU_S = 600
_LONGEST_TEXT = 4096
_PAGE = resource.getpagesize()
_WANTED = re.compile(r"(?:GLOBAL|global|class|function|Type) `?'?([A-Za-z_][\w.]*\.[\w.]+)")
TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""By the names of safetensors."""


class _Refused(Exception):
    """The content does not belong in weights."""


class _LeftAside:
    """Stands for objects without weights: states of random generators and loss scaling, names from a list."""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, _: object) -> None:
        pass


class _Settings:
    """Stands for an argparse.Namespace, as far as JSON can express it."""

    plain: dict[str, object]

    def __new__(cls) -> Self:
        made = super().__new__(cls)
        made.plain = {}
        return made

    def __setstate__(self, state: object) -> None:
        self.plain = _plain(state)


_OF_TRAININGS: Sequence[tuple[type, str]] = (
    (_Settings, "argparse.Namespace"),
    *(
        (_LeftAside, name)
        for name in (
            # The state of NumPy's generator, by the names of both versions of NumPy.
            *("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"),
            *("numpy.ndarray", "numpy.dtype"),
            # Loss scaling of the first versions.
            *("fp16.loss_scaler.LossScaler", "fp16.loss_scaler.DynamicLossScaler"),
            *("megatron.fp16.loss_scaler.LossScaler", "megatron.fp16.loss_scaler.DynamicLossScaler"),
            # Part of the settings.
            *("megatron.model.enums.ModelType", "megatron.model.enums.PositionEmbeddingType"),
            *("megatron.core.enums.ModelType", "megatron.core.transformer.enums.AttnBackend"),
        )
    ),
)
"""Replacements for the names in a training state (Megatron-LM's checkpointing.py)."""


def main(source: Path, target: Path, *, training: bool = False) -> dict[str, Any]:
    """Converts a file and prints the result."""
    torch.set_num_threads(1)
    _warm_up()
    with source.open("rb") as stream, target.open("wb") as out:
        _confine(os.fstat(stream.fileno()).st_size)
        return convert(stream, out, training=training)


def convert(stream: BinaryIO | io.BytesIO, out: BinaryIO | io.BytesIO, *, training: bool = False) -> dict[str, Any]:
    """The same for open files, without limits."""
    try:
        tensors, settings = _load_training(stream) if training else (_load(stream), {})
        _write(tensors, out)
    except _Refused as refused:
        return {"refused": str(refused)}
    except (MemoryError, RecursionError):
        return {"refused": _TOO_MUCH}
    except Exception as error:  # noqa: BLE001  whatever a hostile file makes the loader raise
        return _failure(error)
    if training:
        return {"shapes": {name: list(tensor.shape) for name, tensor in tensors.items()}, "settings": settings}
    return {"names": list(tensors)}


def _warm_up() -> None:
    """Loads a small file of each format, so that no module is imported later."""
    for is_zip in (True, False):
        stream = io.BytesIO()
        torch.save({"a": torch.zeros(2, dtype=torch.bfloat16)}, stream, _use_new_zipfile_serialization=is_zip)
        stream.seek(0)
        _write(_load(stream), io.BytesIO())
    # In pickles of protocol 2, bytes are texts of this encoding.
    codecs.lookup("latin-1")


def _confine(size: int) -> None:
    """Removes all rights that reading weights does not need."""
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * _PAGE
    memory = used + _COPIES * size + ROOM
    # The lowest number that the next file or socket would get.
    files = os.dup(0)
    os.close(files)
    for limit, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_NOFILE, files),
        (resource.RLIMIT_FSIZE, _COPIES * size + ROOM),
        (resource.RLIMIT_CPU, _CPU_S),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (most, most))


def _load(stream: BinaryIO | io.BytesIO) -> dict[str, torch.Tensor]:
    return _check(_unpickle(stream))


def _unpickle(stream: BinaryIO | io.BytesIO) -> dict[object, object]:
    content = torch.load(stream, map_location="cpu", weights_only=True)
    if not isinstance(content, dict):
        raise _Refused(f"has {type(content).__name__}, not a dict of tensors")
    return content


def _load_training(stream: BinaryIO | io.BytesIO) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    with torch.serialization.safe_globals([*_OF_TRAININGS]):
        content = _unpickle(stream)
    if not isinstance(content.get("model"), dict):
        raise _Refused("has no Megatron-LM model (key `model`)")
    settings = _plain({name: content.get(name) for name in ("checkpoint_version", "iteration") if name in content})
    if isinstance(trained := content.get("args"), _Settings):
        settings["args"] = trained.plain
    return _check(dict(_leaves("", content["model"]))), settings


def _leaves(prefix: str, value: object) -> Iterator[tuple[object, object]]:
    """The leaves of nested dictionaries, by names with dots."""
    if not isinstance(value, dict):
        yield prefix, value
        return
    for name, inner in value.items():
        yield from _leaves(f"{prefix}.{name}" if prefix else str(name), inner)


def _plain(state: object) -> dict[str, object]:
    """Numbers and short texts by name."""
    found: dict[str, object] = {}
    for name, value in state.items() if isinstance(state, dict) else ():
        short = isinstance(value, str) and len(value) <= _LONGEST_TEXT
        small = isinstance(value, int) and abs(value) < 1 << 63
        if (
            isinstance(name, str)
            and len(name) <= _LONGEST_TEXT
            and (value is None or isinstance(value, float) or short or small)
        ):
            found[name] = value
    return found


def _check(content: Mapping[object, object]) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise _Refused(f"has {type(tensor).__name__} under {str(name)[:80]!r}, not a tensor under a name")
        if tensor.layout != torch.strided or tensor.dtype not in TYPES:
            raise _Refused(f"has {str(name)[:80]!r} as {tensor.dtype} in layout {tensor.layout}")
        tensors[name] = tensor
    return tensors


def _write(tensors: Mapping[str, torch.Tensor], out: BinaryIO | io.BytesIO) -> None:
    stored = {
        name: Tensor(TYPES[tensor.dtype], tuple(tensor.shape), partial(_bits, tensor))
        for name, tensor in tensors.items()
    }
    safetensors_file.write(stored, out)


def _bits(tensor: torch.Tensor) -> Bits:
    whole = np.asarray(tensor.detach().contiguous().view(-1).view(torch.uint8))
    return whole.view(unsigned(TYPES[tensor.dtype])).reshape(tensor.shape)


def _failure(error: Exception) -> dict[str, Any]:
    message = " ".join(str(error).split())
    if (wanted := _WANTED.search(message)) is not None and "nsupported" in message:
        return {"wanted": wanted[1]}
    if "allocate" in message or "memory" in message:
        return {"refused": _TOO_MUCH}
    cause = message.rpartition("WeightsUnpickler error: ")[2].partition(" This is an internal")[0]
    return {"refused": f"is damaged, truncated or not PyTorch weights: {cause[:120] or 'it is empty'}"}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]), training=sys.argv[3:] == ["training"])))  # noqa: T201  the answer
