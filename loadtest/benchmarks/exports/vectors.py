"""Measures sparse vectors and bge-m3's three outputs beside dense vectors of the same layers, on a bare ONNX Runtime.

`vectors_serving` compares the server with another one. The checkpoints have random weights in the shapes of MiniLM with
a vocabulary of 30,522 words, and of bge-m3.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from export.errors import ExportError
from export.recipe import WAIVABLE
from loadtest.benchmarks.exports import random_checkpoints, vectors_serving
from loadtest.benchmarks.exports.random_checkpoints import Sizes
from loadtest.benchmarks.peers.who import ENVIRONMENTS, versions_in
from loadtest.benchmarks.raw_engine import session_options
from loadtest.benchmarks.runner import Benchmark, Option
from loadtest.errors import BenchError
from serving.children import module_command
from serving.host import available_cpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from loadtest.benchmarks.store import Step, Store

MINILM = Sizes(layers=6, width=384, heads=12, vocabulary=30522)
M3 = Sizes(layers=24, width=1024, heads=16, vocabulary=4096)
"""Lookups cost the same in a vocabulary of any size, so this one is small."""

SHAPES = ((1, 32), (1, 128), (8, 32), (8, 128))
M3_SHAPES = ((1, 32), (1, 128))
"""Texts and tokens of a batch."""

MEMORY_SHAPE = (8, 512)
_ACTIVE = 200
"""Mean weights of a text, about as many as OpenSearch's document encoders give."""

_PEAK = """
import json, resource, sys
import numpy as np, onnxruntime as ort
from loadtest.benchmarks.raw_engine import session_options
def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) << 10
session = ort.InferenceSession(sys.argv[1], session_options("served", int(sys.argv[2]), 0))
def run(rows, tokens):
    ids = np.ones((rows, tokens), np.int32)
    session.run(None, {each.name: ids * (each.name != "token_type_ids") for each in session.get_inputs()})
run(1, 8)
idle = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
run(int(sys.argv[3]), int(sys.argv[4]))
print(status("VmHWM") - idle)
"""


class VectorsBenchmark(Benchmark):
    """Cells of two models in turns; peak memory in processes of their own."""

    name = "vectors"
    out = "build/vectors.json"
    purpose = "cost of sparse vectors and of several outputs beside dense vectors"
    rounds = 15
    seconds = 6.0
    models = ""
    errors = (BenchError, ExportError)
    own = (Option("--precisions", ("int8", "fp32"), "Precisions of the bge-m3 shape."), ENVIRONMENTS)

    def facts(self) -> dict[str, Any]:
        return {"onnxruntime": ort.__version__, "threads": available_cpus()}

    def steps(self) -> Iterator[Step]:
        yield "sparse", self._sparse
        for precision in self.options.precisions:
            yield f"outputs {precision}", partial(self._outputs, precision)
        yield "serving", self._serving

    def _sparse(self) -> dict[str, Any]:
        with TemporaryDirectory(prefix="bertserve-vectors-") as name:
            folder = Path(name)
            source = _splade(folder / "splade")
            sparse = self._exported(source, folder, "embed_sparse", "int8")
            dense = self._exported(source, folder, "embed", "int8")
            head = folder / "head.onnx"
            head.write_bytes(_products(sparse))
            cells = [
                {"texts": rows, "tokens": tokens, **self._cell({"sparse": sparse, "dense": dense}, head, rows, tokens)}
                for rows, tokens in SHAPES
            ]
            return {"cells": cells, "peak_bytes": {"sparse": _peak(sparse), "dense": _peak(dense)}}

    def _outputs(self, precision: str) -> dict[str, Any]:
        with TemporaryDirectory(prefix="bertserve-vectors-") as name:
            folder = Path(name)
            source = _m3(folder / "m3")
            graphs = {
                "all": self._exported(source, folder, "embed", precision, "--outputs", "dense,sparse,tokens"),
                "dense": self._exported(source, folder, "embed", precision, "--outputs", "dense"),
            }
            cells = [
                {"texts": rows, "tokens": tokens, **self._cell(graphs, None, rows, tokens)}
                for rows, tokens in M3_SHAPES
            ]
            return {"cells": cells}

    def _serving(self) -> dict[str, Any]:
        environment = self.options.environments / vectors_serving.PEER
        versions = versions_in(environment, vectors_serving.PACKAGES)
        with TemporaryDirectory(prefix="bertserve-vectors-") as name:
            folder = Path(name)
            source = _splade(folder / "splade")
            bundle = self._exported(source, folder, "embed_sparse", "int8", "--precision", "fp32").parent
            measured = vectors_serving.measure(self, source, bundle, MINILM.vocabulary, environment)
            return {"versions": versions, **measured}

    def _exported(self, source: Path, folder: Path, task: str, precision: str, *words: str) -> Path:
        """The artifact of an export; all limits are waived, because random weights break some."""
        out = folder / f"models-{task}-{'-'.join(words)}"
        command = module_command("bertserve", "export", str(source), "--task", task, "--out", str(out), *words)
        command += ["--precision", precision]
        command += [word for limit in WAIVABLE for word in ("--allow", limit)]
        self.say(" ".join(["exporting", task, precision, *words]))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ExportError(done.stderr.strip())
        (artifact,) = out.glob(f"*/1/model.{precision}.onnx")
        return artifact

    def _cell(self, graphs: dict[str, Path], head: Path | None, rows: int, tokens: int) -> dict[str, float]:
        """Median milliseconds of each graph, measured in turns."""
        runs = {name: _runner(path, rows, tokens) for name, path in graphs.items()}
        if head is not None:
            runs["head"] = _runner(head, rows, tokens)
        times: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(self.options.rounds + 1):
            for name, run in runs.items():
                started = time.perf_counter()
                run()
                if number:
                    times[name].append((time.perf_counter() - started) * 1e3)
        return {f"{name}_ms": statistics.median(found) for name, found in times.items()}

    def figures(self, store: Store) -> dict[str, Any]:
        sparse = store.steps.get("sparse")
        cells = sparse["cells"] if sparse else ()
        ratios = [cell["sparse_ms"] / (cell["dense_ms"] + cell["head_ms"]) for cell in cells]
        outputs = store.named("outputs ")
        found = {"sparse": sparse, "ratios": ratios, "outputs": outputs, "memory_shape": MEMORY_SHAPE}
        serving = store.steps.get("serving")
        return {**found, "served": serving and vectors_serving.figures(serving), "serving": vectors_serving}


def _runner(path: Path, rows: int, tokens: int) -> Callable[[], object]:
    """Runs a graph on a batch, with the server's session options."""
    threads = available_cpus()
    session = ort.InferenceSession(str(path), session_options("served", threads, threads))
    ids = np.random.default_rng(0).integers(1000, 4000, (rows, tokens), dtype=np.int32)
    known = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    known["x"] = np.random.default_rng(0).integers(0, 255, (rows, tokens, MINILM.width), dtype=np.uint8)
    given = {each.name: known[each.name] for each in session.get_inputs()}
    return lambda: session.run(None, given)


def _splade(folder: Path) -> Path:
    """A masked language model whose bias leaves `_ACTIVE` words above 0 in the mean."""
    import torch  # noqa: PLC0415  slow to import
    import transformers  # noqa: PLC0415
    from safetensors.torch import load_file, save_file  # noqa: PLC0415  needs PyTorch

    random_checkpoints.write(folder, "bert", "fill_mask", MINILM)
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    ids = torch.randint(1000, MINILM.vocabulary, (16, 32), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        largest = model(ids).logits.amax(1).flatten()
    shift = largest.sort().values[-_ACTIVE * len(ids)]
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors["cls.predictions.bias"] -= shift
    save_file(tensors, folder / "model.safetensors")
    return folder


def _m3(folder: Path) -> Path:
    """An encoder with bge-m3's two layers beside it."""
    import torch  # noqa: PLC0415  slow to import

    random_checkpoints.write(folder, "bert", "embed", M3)
    made = torch.Generator().manual_seed(0)
    for name, columns in (("sparse", 1), ("colbert", M3.width)):
        weight = torch.randn(columns, M3.width, generator=made) / M3.width**0.5
        torch.save({"weight": weight, "bias": torch.zeros(columns)}, folder / f"{name}_linear.pt")
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (kind, path) in enumerate((("Transformer", ""), ("Pooling", "1_Pooling")))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": M3.width, "pooling_mode_cls_token": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def _products(sparse: Path) -> bytes:
    """A graph of the sparse artifact's products with the vocabulary alone, in the artifact's blocks of words."""
    from export.checkpoint.sparse import BLOCK  # noqa: PLC0415

    made, rng = [], np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(np.array(value), name)
        for name, value in (("scale", np.float32(0.02)), ("zero", np.uint8(128)))
    ]
    for at in range(0, MINILM.vocabulary, BLOCK):
        width = min(BLOCK, MINILM.vocabulary - at)
        block = rng.integers(-127, 127, (MINILM.width, width), dtype=np.int8)
        weights.append(numpy_helper.from_array(block, f"w{at}"))
        weights.append(numpy_helper.from_array(np.full(width, 0.01, np.float32), f"s{at}"))
        names = ["x", f"w{at}", "scale", f"s{at}", "zero"]
        made.append(helper.make_node("MatMulIntegerToFloat", names, [f"y{at}"], domain="com.microsoft"))
    outputs = [helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, None) for node in made]
    shape: list[str | int | None] = ["texts", "tokens", MINILM.width]
    graph = helper.make_graph(
        made, sparse.stem, [helper.make_tensor_value_info("x", TensorProto.UINT8, shape)], outputs, weights
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())


def _peak(path: Path) -> int:
    """Peak resident bytes of a batch above those of a loaded and warm graph."""
    words = [sys.executable, "-c", _PEAK, str(path), str(available_cpus()), *map(str, MEMORY_SHAPE)]
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
