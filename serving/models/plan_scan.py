"""Looks at the head of a TensorRT engine before the library does.

An engine (a plan) is native code: what keeps a foreign one out is its digest, and the head only tells early and
clearly that a file is none, is cut, or is of another version. Observed in files of TensorRT for RTX 1.7, and for
the magic and the version also told of the enterprise library by its makers (NVIDIA/TensorRT issue 3073):

    bytes 0-3    a letter and `trt`
    bytes 16-23  size of the whole file, little-endian (RTX)
    bytes 24-27  version: major, minor, patch, build
"""

from __future__ import annotations

import struct
from pathlib import Path  # noqa: TC003  part of the public signature
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serving.records import EngineBuild

_HEAD = struct.Struct("<4s12xQ3B")
_MAGIC = b"trt"


class UnfitPlanError(ValueError):
    """The file is not the engine that the manifest describes; the message says why."""


def check_plan_file(path: Path, build: EngineBuild) -> None:
    """Refuses a file that is no engine, is cut, or was built by another version.

    Args:
        path: The file.
        build: What the manifest says of it.

    Raises:
        UnfitPlanError: Worded to follow the file's name.
    """
    with path.open("rb") as file:
        head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or head[1:4] != _MAGIC:
        raise UnfitPlanError("is no TensorRT engine")
    _, size, *version = _HEAD.unpack(head)
    if build.flavour == "rtx" and size != path.stat().st_size:
        raise UnfitPlanError(f"is truncated: {path.stat().st_size} bytes of {size}")
    found = ".".join(map(str, version))
    if found != ".".join(build.version.split(".")[:3]):
        raise UnfitPlanError(f"was built by TensorRT {found}, the manifest says {build.version}")
