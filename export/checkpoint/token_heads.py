"""Reads linear layers beside an encoder of dense vectors: for sparse vectors and those of tokens (bge-m3)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from safetensors import safe_open

from bertserve.export.checkpoint.weights import Weights, readable
from bertserve.export.errors import ExportError
from bertserve.serving.tasks.combined import TASKS
from bertserve.serving.tasks.parts import MultiVector

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from bertserve.export.checkpoint.folder import Folder

OUTPUTS = tuple(TASKS)
FILES = {"sparse": "sparse_linear.pt", "tokens": "colbert_linear.pt"}
"""The file of each output beside the dense one, which needs none."""

_FLOATS = ("F64", "F32", "F16", "BF16")
_MATRIX = 2


@dataclass(slots=True, frozen=True)
class TokenHead:
    """A linear layer with a bias over the vectors of tokens.

    Attributes:
        output: A key of `FILES`.
        columns: Numbers for each token.
        content: Its `weight` and `bias`, as the bytes of a safetensors file.
    """

    output: str
    columns: int
    content: bytes = field(repr=False)
    weights: Weights

    @property
    def task(self) -> str:
        return TASKS[self.output].name

    def tensors(self) -> dict[str, torch.Tensor]:
        """Its `weight` and `bias` in fp32."""
        from safetensors import torch as safetensors_torch  # noqa: PLC0415  slow to import

        return {name: tensor.float() for name, tensor in safetensors_torch.load(self.content).items()}


def read(folder: Folder, hidden_size: int, asked: Sequence[str] | None) -> tuple[TokenHead, ...]:
    """Reads the layers of the requested outputs, in the order of `FILES`; without a request of all that there are.

    Raises:
        ExportError: A file is missing, or holds no such layer.
    """
    there = [output for output, file in FILES.items() if folder.has(file)]
    for output, file in FILES.items():
        other = file.replace(".pt", ".safetensors")
        if output not in there and (asked is None or output in asked) and folder.has(other):
            raise folder.error(
                f"FlagEmbedding reads {file}, not {other}; save its weight and bias with"
                f" torch.save, or remove {output} from --outputs"
            )
    if missing := [output for output in asked or () if output in FILES and output not in there]:
        raise folder.error(
            f"{FILES[missing[0]]} is missing, so there is no output {missing[0]!r}; "
            f"available: {', '.join(['dense', *there])}"
        )
    wanted = [output for output in there if asked is None or output in asked]
    # Each file is read by a process of its own, which takes seconds to start.
    with ThreadPoolExecutor(len(FILES)) as pool:
        return tuple(pool.map(lambda output: _read(folder, output, hidden_size), wanted))


def sides(heads: Sequence[TokenHead], max_length: int) -> MultiVector | None:
    """How a multi-vector output reads queries and documents: alike, without a vector of the first token."""
    if all(head.output != "tokens" for head in heads):
        return None
    return MultiVector(max_length, max_length, mean=True, skips_first=True)


def _read(folder: Folder, output: str, hidden_size: int) -> TokenHead:
    file = FILES[output]
    folder.check_whole(file)
    where = f"checkpoint {folder.path}: {file}"
    with readable(folder.path / file) as path:
        content = path.read_bytes()
        with safe_open(path, framework="numpy") as handle:
            parts = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118  not a mapping
            shapes = {name: list(part.get_shape()) for name, part in parts.items()}
            types = {name: part.get_dtype() for name, part in parts.items()}
    if shapes.keys() != {"weight", "bias"}:
        found = ", ".join(sorted(shapes)) or "no tensors"
        raise ExportError(f"{where} has {found}; it must have weight and bias alone")
    columns = shapes["weight"][0] if output == "tokens" and len(shapes["weight"]) == _MATRIX else 1
    for name, expected in (("weight", [columns, hidden_size]), ("bias", [columns])):
        if shapes[name] != expected or not columns:
            raise ExportError(f"{where}: {name} has shape {shapes[name]}, but the model requires {expected}")
        if types[name] not in _FLOATS:
            raise ExportError(f"{where}: {name} is {types[name]}; only floating-point weights are supported")
    return TokenHead(output, columns, content, Weights(folder, [folder.path / file]))
