"""A graph during an export: large tensors stay in files and are mapped on demand.

A protocol buffer holds less than 2 GiB, and a step that changes some matrices should not hold the others. So each
step's output is written at once, and a graph between two steps refers to the files of earlier ones (ONNX external
data). `write` makes one whole of it.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, version_converter

from bertserve.serving.engine.specs import DATA_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from pathlib import Path
    from typing import Any, BinaryIO

    from numpy.typing import NDArray

LARGEST_FILE = 2**31 - 2**24
"""Maximum bytes of a graph with its weights inside; larger ones have a weight file."""

MAPPED = 1 << 27
"""The same for ONNX Runtime on a CPU, which keeps two copies of weights inside the graph, but maps a weight file."""

_LARGE = 1024
"""Minimum bytes of a tensor outside its graph. Smaller ones may be shapes, which many steps read."""
_PAGE = 4096
"""Alignment of tensors, so that each can be mapped."""


class GraphEditor:
    """A graph that a step changes."""

    def __init__(self, source: Path, target: Path) -> None:
        """Opens the graph `source`, to be saved or written as `target`, which may be the same."""
        self._source, self._target = source, target
        suffix = DATA_SUFFIX if source.parent == target.parent else ".made"
        self._made = source.with_name(f"{target.name}{suffix}")
        if source != target:
            self._made.unlink(missing_ok=True)
        self.model = onnx.load(source, load_external_data=False)
        self._index()

    @property
    def graph(self) -> onnx.GraphProto:
        return self.model.graph

    def _index(self) -> None:
        self._tensors = {tensor.name: tensor for tensor in self.graph.initializer}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> NDArray[Any]:
        """A constant, read-only; mapped if large."""
        tensor = self._tensors[name]
        if tensor.data_location != TensorProto.EXTERNAL:
            return numpy_helper.to_array(tensor)
        place = {entry.key: entry.value for entry in tensor.external_data}
        file, kind = self._source.with_name(place["location"]), helper.tensor_dtype_to_np_dtype(tensor.data_type)
        return np.asarray(np.memmap(file, kind, "r", int(place.get("offset", 0)), tuple(tensor.dims)))

    def __setitem__(self, name: str, array: NDArray[Any] | np.generic) -> None:
        whole = np.asarray(array, order="C")
        if whole.nbytes < _LARGE:
            made = numpy_helper.from_array(whole, name)
        else:
            made = TensorProto(name=name, data_type=helper.np_dtype_to_tensor_dtype(whole.dtype), dims=whole.shape)
            with self._made.open("ab") as file:
                _put(made, whole, file, self._made.name)
        if name not in self._tensors:
            self._tensors[name] = self.graph.initializer.add()
        self._tensors[name].CopyFrom(made)

    def __delitem__(self, name: str) -> None:
        self.graph.initializer.remove(self._tensors.pop(name))

    def joined(self, names: Iterable[str], most: int | None = None) -> NDArray[np.float32]:
        """Concatenates matrices into one product with the same activations; of wider ones some columns of each."""
        matrices = [self[name] for name in names]
        step = 1 if most is None else -(-sum(matrix.shape[1] for matrix in matrices) // most)
        return np.concatenate([matrix[:, ::step] for matrix in matrices], axis=1)

    def of_type(self, kind: int) -> list[str]:
        """Names of the constants of one type, a number of `TensorProto.DataType`."""
        return [tensor.name for tensor in self.graph.initializer if tensor.data_type == kind]

    def lift_constants(self) -> None:
        """Turns `Constant` nodes into initializers."""
        for node in [node for node in self.graph.node if node.op_type == "Constant"]:
            tensor = next((a.t for a in node.attribute if a.name == "value"), None)
            if tensor is not None:
                self.graph.initializer.add().CopyFrom(tensor)
                self.graph.initializer[-1].name = node.output[0]
                self.graph.node.remove(node)
        self._index()

    def keep(self, names: Collection[str]) -> None:
        """Removes every constant but these."""
        # Copied first: clearing the list deletes the content of its own elements.
        copies = [TensorProto.FromString(t.SerializeToString()) for t in self.graph.initializer if t.name in names]
        del self.graph.initializer[:]
        self.graph.initializer.extend(copies)
        self._index()

    def drop_unused(self) -> None:
        """Removes unused constants."""
        used = {name for node in self.graph.node for name in node.input}
        self.keep(used | {value.name for value in self.graph.output})

    def share_equal(self) -> None:
        """Merges equal constants: layers that share weights are traced with a copy for each."""
        unique: dict[tuple[int, tuple[int, ...], bytes], str] = {}
        names = {}
        for tensor in self.graph.initializer:
            content = hashlib.sha256(self[tensor.name].tobytes()).digest()
            names[tensor.name] = unique.setdefault((tensor.data_type, tuple(tensor.dims), content), tensor.name)
        for node in self.graph.node:
            node.input[:] = [names.get(name, name) for name in node.input]
        self.keep(set(names.values()))

    def convert(self, opset: int, ir_version: int) -> None:
        """Converts the graph to a later version of ONNX's operators."""
        self.model = version_converter.convert_version(self.model, opset)
        self.model.ir_version = ir_version
        self._index()

    def move_out(self) -> None:
        """Moves large tensors from the graph into its file."""
        for tensor in self.graph.initializer:
            if tensor.data_location != TensorProto.EXTERNAL and tensor.ByteSize() >= _LARGE:
                self[tensor.name] = self[tensor.name]

    def save(self) -> None:
        """Saves the graph for a further step, in the folder of its source."""
        onnx.save(self.model, self._target)

    def write(self, largest: int | None = None) -> None:
        """Writes the whole graph: one file or, above `largest` bytes, with a weight file.

        The editor cannot be used any more. The limit is at most `LARGEST_FILE`.
        """
        limit = LARGEST_FILE if largest is None else min(largest, LARGEST_FILE)
        outside = [tensor for tensor in self.graph.initializer if tensor.data_location == TensorProto.EXTERNAL]
        beside = self._target.with_name(f"{self._target.name}{DATA_SUFFIX}")
        if self.model.ByteSize() + sum(self[tensor.name].nbytes for tensor in outside) > limit:
            self._write_beside(beside)
        else:
            for tensor in outside:
                content = self[tensor.name].tobytes()
                del tensor.external_data[:]
                tensor.ClearField("data_location")
                tensor.raw_data = content
            beside.unlink(missing_ok=True)
        onnx.save(self.model, self._target)
        if self._made != beside:
            self._made.unlink(missing_ok=True)

    def _write_beside(self, beside: Path) -> None:
        self.move_out()
        partial = beside.with_name(f"{beside.name}.partial")
        with partial.open("wb") as file:
            for tensor in self.graph.initializer:
                if tensor.data_location == TensorProto.EXTERNAL:
                    _put(tensor, self[tensor.name], file, beside.name)
        partial.replace(beside)


def _put(tensor: TensorProto, array: NDArray[Any], file: BinaryIO, name: str) -> None:
    """Appends a tensor's data to a file, and stores its position in the tensor."""
    file.write(bytes(-file.tell() % _PAGE))
    place = {"location": name, "offset": file.tell(), "length": array.nbytes}
    file.write(array.data.cast("B"))
    del tensor.external_data[:]
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in place.items():
        tensor.external_data.add(key=key, value=str(value))


def copy(source: Path, target: Path, largest: int | None = None) -> None:
    """Writes a graph under another name; `largest` as for `GraphEditor.write`."""
    GraphEditor(source, target).write(largest)
