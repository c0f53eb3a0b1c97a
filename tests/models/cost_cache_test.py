"""Cost tables that a node keeps: read where all is as it was, and else measured anew."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from serving.models import node
from serving.models.cost_cache import CostCache, KeptCosts
from serving.models.repository import Repository, ServedModel
from serving.records import EngineChoice
from serving.scheduling.cost import CostPoint
from serving.settings import Settings
from tests.support.tasks import tiny_model, write_bundle
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from pathlib import Path

POINTS = [CostPoint("wide", 8, 1, 100.0, 3.0), CostPoint("narrow", 8, 2, 250.0)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """A model that is served."""
    root = tmp_path_factory.mktemp("models")
    write_bundle(root, tiny_model("tag"))
    return Repository.open(root).models[0]


def cache(root: Path, **changes: Any) -> CostCache:
    """A cache for one way of running models."""
    return CostCache(root, **{"engine": "ort-cpu", "threads": 2, "max_batch_tokens": 1024, **changes})


def test_what_was_measured_is_read_again(model: ServedModel, tmp_path: Path) -> None:
    """To the last digit."""
    cache(tmp_path).write(model, POINTS)
    assert cache(tmp_path).read(model) == POINTS


def test_an_empty_cache_holds_nothing(model: ServedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Which is no fault."""
    assert cache(tmp_path / "none").read(model) == []
    assert caplog.text == ""


@pytest.mark.parametrize("change", [{"threads": 3}, {"engine": "openvino"}, {"max_batch_tokens": 512}])
def test_another_way_of_running_it_is_measured_anew(model: ServedModel, tmp_path: Path, change: dict[str, Any]) -> None:
    """Cores, engine and largest batch decide about costs."""
    cache(tmp_path).write(model, POINTS)
    assert cache(tmp_path, **change).read(model) == []


def test_another_device_is_measured_anew(model: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache may lie on a volume that moves from machine to machine."""
    cache(tmp_path).write(model, POINTS)
    monkeypatch.setattr(node, "device", lambda: "another processor")
    assert cache(tmp_path).read(model) == []


def test_engines_keep_their_costs_beside_one_another(model: ServedModel, tmp_path: Path) -> None:
    """Whoever tries another engine does not lose what was measured."""
    cache(tmp_path).write(model, POINTS)
    cache(tmp_path, engine="openvino").write(model, POINTS[:1])
    assert cache(tmp_path).read(model) == POINTS
    assert cache(tmp_path, engine="openvino").read(model) == POINTS[:1]


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
    """The log says so in a line."""
    cache(tmp_path).write(model, points)
    caplog.set_level(logging.WARNING, "bertserve")
    assert cache(tmp_path).read(model) == []
    assert "count for nothing" in caplog.text


def test_a_cache_that_cannot_be_written_costs_a_line(
    model: ServedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing else: the server runs on."""
    (tmp_path / "cache").write_text("a file")
    cache(tmp_path / "cache").write(model, POINTS)
    assert "were not kept" in caplog.text


def test_costs_taken_over_from_another_version_are_not_kept(model: ServedModel, tmp_path: Path) -> None:
    """A version that came by a swap was not measured; kept, the old one's costs would count as its own for ever."""
    settings = Settings(models=tmp_path, cache_dir=tmp_path / "cache", threads=2)
    choice = EngineChoice("ort-cpu")
    kept = KeptCosts(settings)
    assert kept.read(choice, [model]) == [[]]
    other = replace(model, artifact=msgspec.structs.replace(model.artifact, sha256="0" * 64))
    kept.write(choice, [other], [POINTS])
    kept.write(choice, [model], [POINTS])
    wait_for(lambda: KeptCosts(settings).read(choice, [model]) == [POINTS], "what was measured")
    assert KeptCosts(settings).read(choice, [other]) == [[]]
