"""Cost tables that a node keeps: read where all is as it was, and else measured anew."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from bertserve.serving import host
from bertserve.serving.engine.specs import EngineChoice
from bertserve.serving.inference.served_models import Repository, ServedModel
from bertserve.serving.models.cost_cache import CostCache
from bertserve.serving.scheduling.cost import CostPoint
from tests.support.tasks import tiny_model, write_bundle
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from pathlib import Path

POINTS = [CostPoint("wide", 8, 1, 100.0, 3.0), CostPoint("narrow", 8, 2, 250.0)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    root = tmp_path_factory.mktemp("models")
    write_bundle(root, tiny_model("tag"))
    return Repository.open(root).models[0]


class Node:
    def __init__(self, root: Path, engine: str = "ort-cpu", **changes: Any) -> None:
        self.choice = EngineChoice(engine)
        self.cache = CostCache(root, **{"threads": 2, "max_batch_tokens": 1024, **changes})

    def read(self, model: ServedModel, *, narrow: bool = True) -> list[CostPoint]:
        return self.cache.read(self.choice, [model], [narrow])[0]

    def write(self, model: ServedModel, points: list[CostPoint]) -> None:
        self.cache.write_table(self.choice, model, points)


def test_what_was_measured_is_read_again(model: ServedModel, tmp_path: Path) -> None:
    Node(tmp_path).write(model, POINTS)
    assert Node(tmp_path).read(model) == POINTS


def test_an_empty_cache_holds_nothing(model: ServedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert Node(tmp_path / "none").read(model) == []
    assert caplog.text == ""


@pytest.mark.parametrize(
    "change", [{"threads": 3}, {"engine": "openvino"}, {"max_batch_tokens": 512}, {"cpu": "another processor"}]
)
def test_another_way_of_running_it_is_measured_anew(
    model: ServedModel, tmp_path: Path, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cores, engine and largest batch decide about costs, and a cache may lie on a volume that moves to a machine."""
    Node(tmp_path).write(model, POINTS)
    if "cpu" in change:
        monkeypatch.setattr(host, "cpu", lambda: change["cpu"])
    assert Node(tmp_path, **{key: value for key, value in change.items() if key != "cpu"}).read(model) == []


def test_engines_keep_their_costs_beside_one_another(model: ServedModel, tmp_path: Path) -> None:
    """Whoever tries another engine does not lose what was measured."""
    Node(tmp_path).write(model, POINTS)
    Node(tmp_path, engine="openvino").write(model, POINTS[:1])
    assert Node(tmp_path).read(model) == POINTS
    assert Node(tmp_path, engine="openvino").read(model, narrow=False) == POINTS[:1]


def test_costs_of_other_lanes_are_measured_anew(model: ServedModel, tmp_path: Path) -> None:
    """A container's memory limit decides which models narrow lanes hold, and may change between two starts."""
    Node(tmp_path).write(model, POINTS)
    assert Node(tmp_path).read(model, narrow=False) == []
    Node(tmp_path).write(model, POINTS[:1])
    assert Node(tmp_path).read(model) == []


@pytest.mark.parametrize(
    "points",
    [
        [],
        POINTS[1:],
        [CostPoint("wide", 0, 1, 5.0)],
        [CostPoint("wide", 8, 1, -5.0)],
        [POINTS[0], CostPoint("narrow", 8, 0, 5.0)],
        [CostPoint("wide", 1 + place, 1 + place, 5.0) for place in range(5000)],
    ],
    ids=["none", "only narrow", "no tokens", "no time", "no texts", "far too many"],
)
def test_costs_that_cannot_be_count_for_nothing(
    model: ServedModel, tmp_path: Path, points: list[CostPoint], caplog: pytest.LogCaptureFixture
) -> None:
    Node(tmp_path).write(model, points)
    caplog.set_level(logging.WARNING, "bertserve")
    assert Node(tmp_path).read(model) == []
    assert "ignoring the cached costs" in caplog.text


def test_a_cache_that_cannot_be_written_costs_a_line(
    model: ServedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file")
    Node(tmp_path / "cache").write(model, POINTS)
    assert "cannot cache the costs" in caplog.text


def test_costs_taken_over_from_another_version_are_not_kept(model: ServedModel, tmp_path: Path) -> None:
    """A version that came by a swap was not measured; kept, the old one's costs would count as its own for ever."""
    node = Node(tmp_path)
    assert node.read(model) == []
    other = replace(model, artifact=msgspec.structs.replace(model.artifact, sha256="0" * 64))
    node.cache.write(node.choice, [other], [POINTS])
    node.cache.write(node.choice, [model], [POINTS])
    wait_for(lambda: Node(tmp_path).read(model) == POINTS, "what was measured")
    assert Node(tmp_path).read(other) == []
