"""OpenVINO on the CPU.

OpenVINO prepares kernels for each number of tokens in a batch, padding included. A new number takes some milliseconds
and 3 to 5 MB, which it keeps. A change of shape takes about a millisecond on top of the computation. So batches are
padded to a small set of token counts, the small ones of which are warmed up. A single short text would suffer most from
the change. So the most common lengths have static-shape graphs, if the model is small enough to be held several times.
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

from bertserve.serving import host
from bertserve.serving.engine.base import check_interface, read_artifact, verified_bytes, write_kernels
from bertserve.serving.engine.batches import Padder
from bertserve.serving.engine.cpu.backend import CpuBackend
from bertserve.serving.errors import BundleError, EngineFault
from bertserve.serving.records import IDS, MASK, POSITIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from bertserve.serving.engine.base import Batch
    from bertserve.serving.engine.batches import Tensors
    from bertserve.serving.engine.specs import KernelFiles, ModelSpec
    from bertserve.serving.records import Array, TensorSpec
    from bertserve.serving.scheduling.cost import CostPoint

log = logging.getLogger("bertserve.engine")

VERSION = str(ov.__version__)

ACTIVATION_GROUP = 64
"""Activations that share a scale if weights have 8 bits.

Measured on the demo model: 32 takes 10% longer for no benefit; 128 gains 8% but breaks batch invariance.
"""

_OPTIONS: Mapping[str, object] = {
    # Containers share cores: two servers that pin their threads would pin them to the same cores.
    "ENABLE_CPU_PINNING": False,
    # bf16, on a CPU that has it, gains at most 8% and makes outputs depend on the node.
    "INFERENCE_PRECISION_HINT": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": ACTIVATION_GROUP,
}
"""Options of every compiled graph."""

_IN_FLOATS: Mapping[str, object] = {"LP_TRANSFORMS_MODE": False, "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
"""Additional options for CPUs whose 8-bit products saturate: 8-bit values are multiplied in fp32."""

_TYPES = {"f32": "float32", "i32": "int32"}

_UNWRITTEN = np.finfo(np.float32).min
"""Sentinel in the output before inference. With one thread OpenVINO reports no error, and the last output would pass
for the next."""

_FINGERPRINT_BYTES = 64

_SHORT_STEP, _SHORT_TOKENS, _STEP = 8, 32, 16
"""Steps in tokens: counts up to `_SHORT_TOKENS` are rounded up by `_SHORT_STEP`, others by `_STEP`. Above
`_SHORT_TOKENS`, 16 is as fast as 8, and 32 is a tenth slower."""
_SIGNIFICANT_BITS = 4

_MAX_TOKENS = 512
"""Maximum padded tokens per inference. More are no faster, and memory grows with the largest batch."""
_ALONE = (8, 16, 24, 32)
"""Lengths in tokens with a static-shape graph."""
_WARM_TOKENS = 128
"""Padded tokens of the largest batch to warm up; above, the first use of a shape is cheap in comparison. The wide lane
gets few batches, so only single texts are warmed up there."""


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
    """Prepares the small shapes of texts of these lengths on all lanes in parallel."""
    # The binding initializes its own data at the first inference of a process, and releases the GIL meanwhile. Two
    # concurrent first inferences may deadlock.
    lanes[0].warm_up(lengths[:1], lone=True)
    with ThreadPoolExecutor(len(lanes)) as pool:
        list(pool.map(lambda lane: lane.warm_up(lengths, lone=len(lanes) > 1 and lane is lanes[0]), lanes))


def load(model: ModelSpec, threads: Sequence[int], *, alone: bool = True) -> list[OpenVinoModel]:
    """Loads the model once for each number of threads, from one read of the file, without warm-up.

    Args:
        model: Model to load.
        threads: Threads of each lane, the wide one's first.
        alone: Whether to build static-shape graphs for the most common lengths, if they help.
    """
    try:
        with verified_bytes(model) as data:
            # OpenVINO finds external weights only by the graph's path; it maps them.
            graph = ov.Core().read_model(model.path if model.data_sha256 else data)
            _check_tensors(model, graph)
            graphs = _alone(model, graph, threads[0]) if alone else {}
            return _lanes(model, threads, partial(ov.Core().compile_model, graph), graphs)
    except RuntimeError as error:
        raise BundleError(f"{model.path}: OpenVINO cannot load it: {_reason(error)}") from error


def recall(model: ModelSpec, threads: Sequence[int], kernels: KernelFiles) -> list[OpenVinoModel]:
    """Restores what `load` makes without static-shape graphs from a file of `keep`, in a third of the time.

    Returns an empty list if there is no file, or if it is from another artifact, library version or processor.
    """
    if not kernels.read:
        return []
    try:
        content = read_artifact(Path(kernels.read), kernels.sha256)
        if not content.startswith(_fingerprint(model)):
            log.info("the cached kernels of %s are for another artifact, processor or library: recompiling", model.name)
            return []
        # One tensor, which all graphs hold and read their weights from; from bytes, each would make a copy.
        blob = ov.Tensor(np.frombuffer(content, np.uint8, offset=_FINGERPRINT_BYTES))
        return _lanes(model, threads, partial(ov.Core().import_model, blob), {})
    except (OSError, BundleError, RuntimeError) as error:
        log.warning("the cached kernels of %s cannot be read: %s", model.name, error)
        return []


def keep(model: ModelSpec, lane: OpenVinoModel, path: str) -> None:
    """Writes a lane's compiled graph for the server to collect; a start without it is only slower.

    The number of threads is set when the file is read, so one file serves all lanes.
    """
    try:
        write_kernels(path, _fingerprint(model) + lane.compiled())
    except (OSError, RuntimeError) as error:
        log.warning("cannot cache the kernels of %s: %s", model.name, error)


def _fingerprint(model: ModelSpec) -> bytes:
    """Returns a digest of everything that affects a compiled graph; OpenVINO does not check that itself."""
    parts = (model.sha256, VERSION, host.cpu(), *map(str, sorted(_OPTIONS.items())))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest().encode()


def _lanes(
    model: ModelSpec,
    threads: Sequence[int],
    compiled: Callable[[str, dict[str, object]], ov.CompiledModel],
    alone: Mapping[int, ov.CompiledModel],
) -> list[OpenVinoModel]:
    wide, *narrow = threads
    # A single text runs on the wide lane; the narrow lanes are streams over one copy of the weights.
    models = [OpenVinoModel(model, compiled("CPU", _options(wide)), alone)]
    if narrow:
        streams = compiled("CPU", _options(len(narrow), streams=len(narrow)))
        models += [OpenVinoModel(model, streams, {}) for _ in narrow]
    return models


def _reason(error: RuntimeError) -> str:
    """Returns the message of OpenVINO's only error class, without lines that name its source files."""
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
    """One model on one lane: a dynamic-shape graph, and static-shape graphs for the most common lengths."""

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
        """Returns the outputs, cropped to the batch's own size."""
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
            tensors = _pad(tensors, *self._shape(rows, length), self._pad_id)
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
            raise RuntimeError("inference stopped without an error")
        return request

    def trim(self) -> None:
        """Does nothing: OpenVINO keeps the buffers of its largest batch, which `_MAX_TOKENS` bounds."""

    def compiled(self) -> bytes:
        """Returns the dynamic-shape graph as OpenVINO exports it."""
        return bytes(self._request.get_compiled_model().export_model().getvalue())

    def _length(self, tokens: int) -> int:
        return min(_few(tokens), self._max_length)

    def _shape(self, rows: int, tokens: int) -> tuple[int, int]:
        """Returns the rows and the length in tokens that a batch is padded to."""
        length = self._length(tokens)
        # At most a quarter more rows: three long texts are not worth a fourth. A text of the maximum length gets none
        # if that length is not a multiple of the step.
        enough = (count for count in range(rows, rows * 5 // 4 + 1) if _few(count * length) == count * length)
        return next(enough, rows), length

    def warm_up(self, lengths: Iterable[int], *, lone: bool) -> None:
        """Prepares the small shapes of these lengths in tokens; with `lone`, those of single texts only.

        A model that is not batch-invariant is not padded, and has too many shapes to prepare.
        """
        padded = {self._length(tokens) for tokens in lengths}
        most = {length: 1 if lone else max(1, _WARM_TOKENS // length) for length in padded}
        shapes = {self._shape(rows, length) for length in padded for rows in range(1, most[length] + 1)}
        for shape in sorted(shapes) if self._rounds else ():
            tensors = {name: np.zeros(shape, np.int32) for name in self._inputs}
            tensors[MASK][:] = 1
            self._infer(tensors)


def _alone(model: ModelSpec, graph: ov.Model, threads: int) -> dict[int, ov.CompiledModel]:
    """Returns the static-shape graphs of the most common lengths.

    A model with fixed activation ranges gets none. Dynamic-shape graphs in their place took as long, and 100 MB each.
    """
    if not model.small or _has_ranges(graph):
        return {}
    return {
        length: ov.Core().compile_model(_fix_length(graph, length), "CPU", _options(threads))
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
    """Whether activations are quantized to fixed ranges.

    Then the last digit decides how a number is rounded. OpenVINO orders the sums of a static-shape graph differently,
    so its outputs would differ from those of the graph that runs batches: cosines of 0.997 were measured.
    """
    return any(operator.get_type_name() == "FakeQuantize" for operator in graph.get_ops())


def _fix_length(graph: ov.Model, length: int) -> ov.Model:
    copy = graph.clone()
    copy.reshape({port: [1, -1 if _name(port) == POSITIONS else length] for port in copy.inputs})
    return copy


def _few(tokens: int) -> int:
    """Rounds a number of tokens up to one of a small set.

    >>> [_few(tokens) for tokens in (3, 8, 9, 33, 127, 129, 257, 1000)]
    [8, 8, 16, 48, 128, 144, 288, 1024]
    """
    step = _SHORT_STEP if tokens <= _SHORT_TOKENS else _STEP
    step = max(step, 1 << max(0, (tokens - 1).bit_length() - _SIGNIFICANT_BITS))
    return -(-tokens // step) * step


def _pad(tensors: Tensors, rows: int, length: int, pad_id: int) -> Tensors:
    """Pads the tensors to more rows, which repeat the first one, and to a greater length."""
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
    """Returns an output without the padding, as a copy: OpenVINO overwrites it with the next one."""
    values = request.get_output_tensor(index).data[:rows]
    return np.array(values[:, :length] if spec.shape[1] == -1 else values)
