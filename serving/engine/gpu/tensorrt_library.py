"""The two flavors of TensorRT: module, version, log, and the meaning of messages.

`tensorrt_rtx` and `tensorrt` have the same classes; only this file imports them. No runtime may run host code from an
engine.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

Native = Any
"""A module or an object of TensorRT, which is untyped."""

Flavour = Literal["rtx", "enterprise"]

PACKAGES: dict[Flavour, str] = {"rtx": "tensorrt-rtx-cu13", "enterprise": "tensorrt"}
"""Package names for pip."""

NO_DRIVER = (
    "no NVIDIA driver found (CUDA error 35); run this on the machine with the GPU, in a container with access to it"
)

_LONGEST_MESSAGE = 300

_REASONS = (
    (r"cuda ?error:? ?(35|100)\b|error: 35\b|driver version is insufficient", NO_DRIVER),
    (r"FP32 GEMM", "TensorRT does not support FP32 products on this GPU; use the fp16 graph"),
    (r"Plugin not found", "the graph contains operators fused for ONNX Runtime; use the unfused graph"),
    (
        r"OutOfMemory|out of memory|bad_alloc",
        "not enough memory; free some, or build for shorter inputs",
    ),
    (
        r"version tag|not compatible|incompatible|magic tag|different (version|device)|serialization error",
        "the engine does not fit this GPU or version of TensorRT; rebuild it here",
    ),
)


class LibraryMissing(Exception):
    """The flavor is not installed, or is incomplete; the message says what to install."""


def load(flavour: Flavour) -> Native:
    """Imports the module of a flavor; raises LibraryMissing if that fails."""
    try:
        if flavour == "rtx":
            import tensorrt_rtx as library  # noqa: PLC0415  an optional library
        else:
            import tensorrt as library  # noqa: PLC0415  an optional library
    except (ImportError, OSError) as error:
        raise LibraryMissing(f"TensorRT is missing or incomplete ({error}); pip install {PACKAGES[flavour]}") from error
    return library


def logger(library: Native) -> Native:
    """Returns a logger of the library's own class that keeps errors in its list `errors`."""

    class Errors(library.ILogger):  # type: ignore[misc]  # the class is known at run time
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []

        def log(self, severity: Native, message: str) -> None:
            if severity in (library.ILogger.Severity.ERROR, library.ILogger.Severity.INTERNAL_ERROR):
                self.errors.append(message)

    return Errors()


def runtime(library: Native, log: Native) -> Native:
    """Returns a runtime that opens engines; it never runs host code from an engine."""
    made = library.Runtime(log)
    made.engine_host_code_allowed = False
    return made


def reason(messages: Sequence[str]) -> str:
    """Returns one sentence for TensorRT's messages, the first of which is nearest to the cause."""
    text = "\n".join(messages)
    for pattern, sentence in _REASONS:
        if re.search(pattern, text, re.IGNORECASE):
            return sentence
    first = next((" ".join(message.split()) for message in messages if message.strip()), "TensorRT gave no reason")
    return first if len(first) <= _LONGEST_MESSAGE else f"{first[:_LONGEST_MESSAGE]} ..."
