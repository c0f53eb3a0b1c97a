"""Reads a pickled weight file in a process of its own, and writes its tensors as safetensors.

    python -P -m export.checkpoint.unpickle SOURCE TARGET

PyTorch's `weights_only` loader builds tensors and plain containers, and refuses every other name that a pickle asks
for. Around it, this process can open no further file or socket, and has no more memory than a file of that size needs.
It answers with one JSON object: the `names` of the tensors, or half a sentence that says why the file is `refused`, or
the name that the pickle `wanted`.
"""

from __future__ import annotations

import io
import json
import os
import re
import resource
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import BinaryIO

ROOM = 1 << 28
"""Bytes beside three times the file's: the file as it is read, its tensors, and one tensor more."""
_TOO_MUCH = "asks for more memory than weights of its size need"
_COPIES = 3
_CPU_S = 600
_PAGE = resource.getpagesize()
_WANTED = re.compile(r"(?:GLOBAL|global|class|function|Type) `?'?([A-Za-z_][\w.]*\.[\w.]+)")
_TYPES = {
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
"""As safetensors calls them."""


class _Refused(Exception):
    """The content is none that weights have."""


def main(source: Path, target: Path) -> dict[str, Any]:
    """Converts a file, and says how it went."""
    torch.set_num_threads(1)
    _warm_up()
    with source.open("rb") as stream, target.open("wb") as out:
        _confine(os.fstat(stream.fileno()).st_size)
        return convert(stream, out)


def convert(stream: BinaryIO | io.BytesIO, out: BinaryIO | io.BytesIO) -> dict[str, Any]:
    """The same for open files, without a bound around it."""
    try:
        tensors = _load(stream)
        _write(tensors, out)
    except _Refused as refused:
        return {"refused": str(refused)}
    except (MemoryError, RecursionError):
        return {"refused": _TOO_MUCH}
    except Exception as error:  # noqa: BLE001  whatever a hostile file makes the loader raise
        return _failure(error)
    return {"names": list(tensors)}


def _warm_up() -> None:
    """Loads a small file of either format, so that no module has to be opened later."""
    for is_zip in (True, False):
        stream = io.BytesIO()
        torch.save({"a": torch.zeros(2, dtype=torch.bfloat16)}, stream, _use_new_zipfile_serialization=is_zip)
        stream.seek(0)
        _write(_load(stream), io.BytesIO())


def _confine(size: int) -> None:
    """Takes away what reading weights does not need."""
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
    content = torch.load(stream, map_location="cpu", weights_only=True)
    if not isinstance(content, dict):
        raise _Refused(f"holds {type(content).__name__} and not tensors by name")
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise _Refused(f"holds {type(tensor).__name__} under {str(name)[:80]!r}, and not a tensor under a name")
        if tensor.layout != torch.strided or tensor.dtype not in _TYPES:
            raise _Refused(f"holds {str(name)[:80]!r} as {tensor.dtype} in the layout {tensor.layout}")
    return dict(content)


def _write(tensors: Mapping[str, torch.Tensor], out: BinaryIO | io.BytesIO) -> None:
    """Tensor by tensor: a second copy of all of them would take as much memory as the first."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    out.write(struct.pack("<Q", len(text)) + text)
    for tensor in tensors.values():
        out.write(np.asarray(tensor.detach().contiguous().view(-1).view(torch.uint8)).data)


def _failure(error: Exception) -> dict[str, Any]:
    message = " ".join(str(error).split())
    if (wanted := _WANTED.search(message)) is not None and "nsupported" in message:
        return {"wanted": wanted[1]}
    if "allocate" in message or "memory" in message:
        return {"refused": _TOO_MUCH}
    cause = message.rpartition("WeightsUnpickler error: ")[2].partition(" This is an internal")[0]
    return {"refused": f"is damaged, cut, or no weights of PyTorch: {cause[:120] or 'it is empty'}"}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]))))  # noqa: T201  the answer
