"""OpenVINO on the CPU.

OpenVINO prepares its kernels for each shape of the inputs: a shape costs a few milliseconds when it is first
seen, and about one more than the computation whenever it differs from the one before. So batches are padded
to few shapes, the small ones of which are warmed up; and a lone short text, which would feel the change most,
has graphs of its own whose shape never changes, where the model is small enough to be held several times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import openvino as ov

from serving.engine.base import check_interface, verified
from serving.engine.batches import Padder
from serving.engine.cpu.backend import CpuBackend
from serving.errors import BundleError, EngineFault
from serving.records import IDS, MASK, POSITIONS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from serving.engine.batches import Tensors
    from serving.records import Array, Batch, ModelSpec, TensorSpec

VERSION = str(ov.__version__)

ACTIVATION_GROUP = 64
"""Activations that share a scale where weights have 8 bits.

Measured on the demo model: 32 costs 10% more time for nothing, 128 gains 8% and loses a batch's invariance.
"""

_TYPES = {"f32": "float32", "i32": "int32"}

_UNWRITTEN = np.finfo(np.float32).min
"""Put where an answer goes. With one thread OpenVINO reports no error: the last answer would pass for the next."""

_LENGTH_STEP = 8
_SIGNIFICANT_BITS = 4
_ALONE = (8, 16, 24, 32)
"""Lengths in tokens that have a graph of their own."""
_WARM_TOKENS = 128
"""Padded tokens of the largest batch that is warmed up; beyond it the first sight of a shape is cheap in comparison."""


class OpenVinoBackend(CpuBackend):
    name = "openvino"

    def __init__(self, models: Sequence[ModelSpec], threads: int) -> None:
        super().__init__(models, threads, _warm)


def _warm(model: ModelSpec, threads: Sequence[int]) -> list[OpenVinoModel]:
    lanes = load(model, threads)
    for lane in lanes:
        lane.warm_up(range(1, model.max_length + 1))
    return lanes


def load(model: ModelSpec, threads: Sequence[int]) -> list[OpenVinoModel]:
    """The model once for each number of threads, from one reading of the file; none of them is warm."""
    try:
        with verified(model) as data:
            # Only by its path does it find weights that are not in the graph; it maps them.
            graph = ov.Core().read_model(model.path if model.data_sha256 else data)
            _check_tensors(model, graph)
            wide, *narrow = threads
            # A lone text runs on the wide lane; the narrow ones are streams over one copy of the weights.
            models = [OpenVinoModel(model, _compile(graph, wide), _alone(model, graph, wide))]
            if narrow:
                streams = _compile(graph, len(narrow), streams=len(narrow))
                models += [OpenVinoModel(model, streams, {}) for _ in narrow]
            return models
    except RuntimeError as error:
        raise BundleError(f"{model.path}: OpenVINO cannot load it: {_reason(error)}") from error


def _reason(error: RuntimeError) -> str:
    """What went wrong, without the lines that name OpenVINO's own source files; it raises no other class."""
    lines = [line for line in str(error).splitlines() if not line.startswith(("Exception from ", "Check "))]
    return " ".join(" ".join(lines).split())


def _check_tensors(model: ModelSpec, graph: ov.Model) -> None:
    inputs = [(_name(port), _dtype(port)) for port in graph.inputs]
    check_interface(model, inputs, [(_name(port), _dtype(port), _shape(port)) for port in graph.outputs])


def _dtype(port: ov.Output) -> str | None:
    return _TYPES.get(port.get_element_type().get_type_name())


def _name(port: ov.Output) -> str:
    return str(port.get_any_name())


def _shape(port: ov.Output) -> tuple[int, ...]:
    return tuple(size.get_length() if size.is_static else -1 for size in port.get_partial_shape())


class OpenVinoModel:
    """One model on one lane: a graph for every shape, and one each for the commonest."""

    def __init__(self, model: ModelSpec, compiled: ov.CompiledModel, alone: Mapping[int, ov.CompiledModel]) -> None:
        self._padder = Padder(model)
        self._outputs = model.outputs
        self._witness = [spec.dtype for spec in model.outputs].index("float32")
        self._pad_id = model.special_ids.get("pad", 0)
        self._max_length = model.max_length
        self._rounds = model.batch_invariant
        self._request = compiled.create_infer_request()
        self._alone = {length: graph.create_infer_request() for length, graph in alone.items()}
        self._inputs = model.inputs

    def run(self, batch: Batch) -> list[Array]:
        """The outputs, cut to the batch's own size."""
        tensors = self._padder.tensors(batch)
        rows, length = len(batch.texts), batch.padded_length
        if self._rounds:
            tensors = _grown(tensors, _few(rows), self._length(length), self._pad_id)
        try:
            request = self._infer(tensors)
        except RuntimeError as error:
            raise EngineFault(f"OpenVINO: {_reason(error)}") from error
        return [_cut(request, index, spec, rows, length) for index, spec in enumerate(self._outputs)]

    def _infer(self, tensors: Tensors) -> ov.InferRequest:
        rows, length = tensors[IDS].shape
        request = self._alone.get(length, self._request) if rows == 1 else self._request
        request.get_output_tensor(self._witness).data.fill(_UNWRITTEN)
        request.infer(tensors, share_inputs=True, share_outputs=True)
        written = request.get_output_tensor(self._witness).data
        if len(written) != rows or written.flat[0] == _UNWRITTEN:
            raise RuntimeError("it gave up without an error")
        return request

    def _length(self, tokens: int) -> int:
        return min(_few(tokens, _LENGTH_STEP), self._max_length)

    def warm_up(self, lengths: Iterable[int]) -> None:
        """Prepares the small shapes of these lengths in tokens; without padding there are too many."""
        shapes = {(_few(rows), self._length(n)) for n in lengths for rows in range(1, _WARM_TOKENS // n + 1)}
        for shape in sorted(shapes) if self._rounds else ():
            tensors = {name: np.zeros(shape, np.int32) for name in self._inputs}
            tensors[MASK][:] = 1
            self._infer(tensors)


def _alone(model: ModelSpec, graph: ov.Model, threads: int) -> dict[int, ov.CompiledModel]:
    """The graphs of the commonest lengths.

    Where ranges are fixed they would be of no use: graphs for any shape took as long, and 100 MB each.
    """
    if not model.copied or _has_ranges(graph):
        return {}
    return {length: _compile(_fixed(graph, length), threads) for length in _ALONE if length <= model.max_length}


def _compile(graph: ov.Model, threads: int, streams: int = 1) -> ov.CompiledModel:
    options = {
        "PERFORMANCE_HINT": "LATENCY" if streams == 1 else "THROUGHPUT",
        "NUM_STREAMS": streams,
        "INFERENCE_NUM_THREADS": threads,
        # Containers share cores: two servers that pin their threads would pin them to the same ones.
        "ENABLE_CPU_PINNING": False,
        # bf16, where a CPU has it, gains at most 8%; the answers would depend on the node that gives them.
        "INFERENCE_PRECISION_HINT": "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": ACTIVATION_GROUP,
    }
    return ov.Core().compile_model(graph, "CPU", options)


def _has_ranges(graph: ov.Model) -> bool:
    """Whether activations are rounded to fixed ranges.

    Then a last digit decides which way a number is rounded, and a graph for one shape, whose sums OpenVINO orders in
    another way, would answer differently from the graph that runs batches: cosines of 0.997 were seen.
    """
    return any(operator.get_type_name() == "FakeQuantize" for operator in graph.get_ops())


def _fixed(graph: ov.Model, length: int) -> ov.Model:
    copy = graph.clone()
    copy.reshape({port: [1, -1 if _name(port) == POSITIONS else length] for port in copy.inputs})
    return copy


def _few(size: int, step: int = 1) -> int:
    """The size rounded up to one of few: at most an eighth more, or less than `step` more.

    >>> [_few(rows) for rows in (1, 15, 17, 33, 65)]
    [1, 15, 18, 36, 72]
    >>> [_few(tokens, 8) for tokens in (3, 8, 9, 127, 129, 257)]
    [8, 8, 16, 128, 144, 288]
    """
    step = max(step, 1 << max(0, (size - 1).bit_length() - _SIGNIFICANT_BITS))
    return -(-size // step) * step


def _grown(tensors: Tensors, rows: int, length: int, pad_id: int) -> Tensors:
    """The tensors padded to more rows, which repeat the first one, and to a greater length."""
    if tensors[IDS].shape == (rows, length):
        return tensors
    grown = {}
    for name, values in tensors.items():
        width = values.shape[1] if name == POSITIONS else length
        grown[name] = np.full((rows, width), pad_id if name == IDS else 0, np.int32)
        grown[name][: len(values), : values.shape[1]] = values
        grown[name][len(values) :] = grown[name][0]
    return grown


def _cut(request: ov.InferRequest, index: int, spec: TensorSpec, rows: int, length: int) -> Array:
    """An output without the padding; a copy, since OpenVINO writes the next answer over it."""
    values = request.get_output_tensor(index).data[:rows]
    return np.array(values[:, :length] if spec.shape[1] == -1 else values)
