"""OpenVINO on the CPU.

OpenVINO prepares its kernels for each number of tokens in a batch, padding included: a new one costs some milliseconds
and 3 to 5 MB, which it keeps, and a change of shape about a millisecond more than the computation. So batches are
padded to few such numbers, the small ones of which are warmed up; and a lone short text, which would feel the change
most, has graphs of its own whose shape never changes, where the model is small enough to be held several times.
"""

from __future__ import annotations

import hashlib
import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import openvino as ov

from serving import host
from serving.engine.base import check_interface, read_artifact, verified_bytes, write_kernels
from serving.engine.batches import Padder
from serving.engine.cpu.backend import CpuBackend
from serving.errors import BundleError, EngineFault
from serving.records import IDS, MASK, POSITIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from serving.engine.base import Batch
    from serving.engine.batches import Tensors
    from serving.engine.specs import KernelFiles, ModelSpec
    from serving.records import Array, TensorSpec
    from serving.scheduling.cost import CostPoint

log = logging.getLogger("bertserve.engine")

VERSION = str(ov.__version__)

ACTIVATION_GROUP = 64
"""Activations that share a scale where weights have 8 bits.

Measured on the demo model: 32 costs 10% more time for nothing, 128 gains 8% and loses a batch's invariance.
"""

_OPTIONS: Mapping[str, object] = {
    # Containers share cores: two servers that pin their threads would pin them to the same ones.
    "ENABLE_CPU_PINNING": False,
    # bf16, where a CPU has it, gains at most 8%; the answers would depend on the node that gives them.
    "INFERENCE_PRECISION_HINT": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": ACTIVATION_GROUP,
}
"""Of every compiled graph."""

_IN_FLOATS: Mapping[str, object] = {"LP_TRANSFORMS_MODE": False, "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
"""Beside them where 8-bit products lose some of a sum: what is rounded to 8 bits is multiplied in fp32."""

_TYPES = {"f32": "float32", "i32": "int32"}

_UNWRITTEN = np.finfo(np.float32).min
"""Put where an answer goes. With one thread OpenVINO reports no error: the last answer would pass for the next."""

_FINGERPRINT_BYTES = 64

_SHORT_STEP, _SHORT_TOKENS, _STEP = 8, 32, 16
"""Tokens: numbers up to `_SHORT_TOKENS` are rounded up by the one, others by the other. Beyond them 16 are as fast as
the 8 below; 32 are a tenth slower."""
_SIGNIFICANT_BITS = 4

_MAX_TOKENS = 512
"""Padded tokens that are computed at once. More of them are no faster, and memory grows with the largest batch."""
_ALONE = (8, 16, 24, 32)
"""Lengths in tokens that have a graph of their own."""
_WARM_TOKENS = 128
"""Padded tokens of the largest batch that is warmed up; beyond it the first sight of a shape is cheap in comparison.
The wide lane gets few batches: only lone texts are warmed up there."""


class OpenVinoBackend(CpuBackend):
    def __init__(self, models: Sequence[ModelSpec], threads: int) -> None:
        super().__init__(models, threads, _warm)

    def labelled(self, costs: list[list[CostPoint]]) -> list[list[CostPoint]]:
        return [[msgspec.structs.replace(point, library="openvino") for point in points] for points in costs]


def _warm(model: ModelSpec, threads: Sequence[int]) -> list[OpenVinoModel]:
    lanes = load(model, threads)
    warm_up(lanes, range(1, model.max_length + 1))
    return lanes


def warm_up(lanes: Sequence[OpenVinoModel], lengths: Sequence[int]) -> None:
    """Prepares the small shapes of texts of these lengths on all lanes at once."""
    # The binding sets up data of its own at the first inference of a process, and gives up the GIL meanwhile: two first
    # ones at once may wait for each other for ever.
    lanes[0].warm_up(lengths[:1], lone=True)
    with ThreadPoolExecutor(len(lanes)) as pool:
        list(pool.map(lambda lane: lane.warm_up(lengths, lone=len(lanes) > 1 and lane is lanes[0]), lanes))


def load(model: ModelSpec, threads: Sequence[int], *, alone: bool = True) -> list[OpenVinoModel]:
    """The model once for each number of threads, from one reading of the file; none of them is warm.

    Args:
        model: What to load.
        threads: Of each lane, the wide one's first.
        alone: Whether the commonest lengths have graphs of their own, where that is of use.
    """
    try:
        with verified_bytes(model) as data:
            # Only by its path does it find weights that are not in the graph; it maps them.
            graph = ov.Core().read_model(model.path if model.data_sha256 else data)
            _check_tensors(model, graph)
            graphs = _alone(model, graph, threads[0]) if alone else {}
            return _lanes(model, threads, partial(ov.Core().compile_model, graph), graphs)
    except RuntimeError as error:
        raise BundleError(f"{model.path}: OpenVINO cannot load it: {_reason(error)}") from error


def recall(model: ModelSpec, threads: Sequence[int], kernels: KernelFiles) -> list[OpenVinoModel]:
    """What `load` makes without graphs for lone texts, from what `keep` has written: it takes a third of the time.

    Empty where there is nothing, or what there is was made of another artifact, by another library or elsewhere.
    """
    if not kernels.read:
        return []
    try:
        content = read_artifact(Path(kernels.read), kernels.sha256)
        if not content.startswith(_fingerprint(model)):
            log.info(
                "the cached kernels of %s are of another artifact, processor or library: compiling anew", model.name
            )
            return []
        # A tensor of its own, which all its graphs hold and read their weights from; of bytes each makes a copy.
        blob = ov.Tensor(np.frombuffer(content, np.uint8, offset=_FINGERPRINT_BYTES))
        return _lanes(model, threads, partial(ov.Core().import_model, blob), {})
    except (OSError, BundleError, RuntimeError) as error:
        log.warning("the cached kernels of %s cannot be read: %s", model.name, error)
        return []


def keep(model: ModelSpec, lane: OpenVinoModel, path: str) -> None:
    """Writes the compiled graph of a lane for the server to take; a start without it is only slower.

    How many threads compute it is said when it is read, so that one file serves all lanes.
    """
    try:
        write_kernels(path, _fingerprint(model) + lane.compiled())
    except (OSError, RuntimeError) as error:
        log.warning("the kernels of %s were not kept: %s", model.name, error)


def _fingerprint(model: ModelSpec) -> bytes:
    """A digest of all that decides about a compiled graph: OpenVINO does not look whether one is its own."""
    parts = (model.sha256, VERSION, host.cpu(), *map(str, sorted(_OPTIONS.items())))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest().encode()


def _lanes(
    model: ModelSpec,
    threads: Sequence[int],
    compiled: Callable[[str, dict[str, object]], ov.CompiledModel],
    alone: Mapping[int, ov.CompiledModel],
) -> list[OpenVinoModel]:
    wide, *narrow = threads
    # A lone text runs on the wide lane; the narrow ones are streams over one copy of the weights.
    models = [OpenVinoModel(model, compiled("CPU", _options(wide)), alone)]
    if narrow:
        streams = compiled("CPU", _options(len(narrow), streams=len(narrow)))
        models += [OpenVinoModel(model, streams, {}) for _ in narrow]
    return models


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
        most = max(1, _MAX_TOKENS // self._length(length)) if self._rounds else rows
        if rows <= most:
            return self._outputs_of(tensors, length)
        parts = [{name: values[at : at + most] for name, values in tensors.items()} for at in range(0, rows, most)]
        outputs = [self._outputs_of(part, length) for part in parts]
        return [np.concatenate(arrays) for arrays in zip(*outputs, strict=True)]

    def _outputs_of(self, tensors: Tensors, length: int) -> list[Array]:
        rows = len(tensors[IDS])
        if self._rounds:
            tensors = _grown(tensors, *self._shape(rows, length), self._pad_id)
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

    def compiled(self) -> bytes:
        """The graph for every shape, as OpenVINO exports it."""
        return bytes(self._request.get_compiled_model().export_model().getvalue())

    def _length(self, tokens: int) -> int:
        return min(_few(tokens), self._max_length)

    def _shape(self, rows: int, tokens: int) -> tuple[int, int]:
        """Rows and length in tokens that a batch is padded to."""
        length = self._length(tokens)
        # At most a quarter more rows: three long ones are not worth a fourth, nor is the longest text, of odd length.
        enough = (count for count in range(rows, rows * 5 // 4 + 1) if _few(count * length) == count * length)
        return next(enough, rows), length

    def warm_up(self, lengths: Iterable[int], *, lone: bool) -> None:
        """Prepares the small shapes of these lengths in tokens, of `lone` texts alone; unpadded there are too many."""
        padded = {self._length(tokens) for tokens in lengths}
        most = {length: 1 if lone else max(1, _WARM_TOKENS // length) for length in padded}
        shapes = {self._shape(rows, length) for length in padded for rows in range(1, most[length] + 1)}
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
    return {
        length: ov.Core().compile_model(_fixed(graph, length), "CPU", _options(threads))
        for length in _ALONE
        if length <= model.max_length
    }


def _options(threads: int, streams: int = 1) -> dict[str, object]:
    return {
        **_OPTIONS,
        **(_IN_FLOATS if host.saturates() else {}),
        "PERFORMANCE_HINT": "LATENCY" if streams == 1 else "THROUGHPUT",
        "NUM_STREAMS": streams,
        "INFERENCE_NUM_THREADS": threads,
    }


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


def _few(tokens: int) -> int:
    """The number of tokens rounded up to one of few.

    >>> [_few(tokens) for tokens in (3, 8, 9, 33, 127, 129, 257, 1000)]
    [8, 8, 16, 48, 128, 144, 288, 1024]
    """
    step = _SHORT_STEP if tokens <= _SHORT_TOKENS else _STEP
    step = max(step, 1 << max(0, (tokens - 1).bit_length() - _SIGNIFICANT_BITS))
    return -(-tokens // step) * step


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
