"""The options of ONNX Runtime beside the served ones, without a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from loadtest.benchmarks.levers import SERVED, block, variants

if TYPE_CHECKING:
    from pathlib import Path


def test_each_variant_differs_in_one_thing(tmp_path: Path) -> None:
    """The first one in nothing; one in the graph, the others in the options."""
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "b", "y")]
    node = helper.make_node("BiasGelu", ["x", "b"], ["y"], domain="com.microsoft")
    served = helper.make_model(helper.make_graph([node], "graph", ports[:2], ports[2:])).SerializeToString()
    (tmp_path / "model.onnx").write_bytes(served)
    first, *others = variants(tmp_path / "model.onnx")
    assert (first.name, first.data) == (SERVED, served)
    assert [variant.name for variant in others if variant.data != served] == ["GELU by tanh"]
    assert onnx.load_from_string(others[-1].data).graph.node[0].op_type == "FastGelu"
    for variant in others[:-1]:
        variant.change(ort.SessionOptions())


def test_a_block_measures_a_few_runs_at_least() -> None:
    """However short it is; every text has its turn."""
    fed: list[Any] = []
    sample = block(lambda _, feed: fed.append(feed), [{"a": 1}, {"a": 2}], 0.0)
    assert fed == [{"a": 1}, {"a": 2}] * 2
    assert sample.requests == 4
    assert sample.p50_ms < 1000
