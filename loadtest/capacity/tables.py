"""Tables of batch costs: published for GPUs, or measured by a server.

A file contains one of three things: a table as in `data/costs`, the reply of a server's `/status` (with the server's
corrections applied), or a node's cached table.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bertserve.loadtest.capacity.simulator import Variation
from bertserve.loadtest.errors import BenchError
from bertserve.serving.scheduling.cost import CostPoint, bucket_index

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_DATA = files("bertserve.loadtest.capacity") / "data" / "costs"
PUBLISHED = tuple(sorted(Path(entry.name).stem for entry in _DATA.iterdir() if entry.name.endswith(".json")))
"""Names of the built-in tables."""

_TAIL = 2.326
_QUARTILES = 1.349
"""Quantiles of a normal distribution in standard deviations: mean to 99th percentile, and interquartile range."""

_FEW = 6
"""Maximum number of text lengths that are listed individually."""

_ENOUGH = 30
"""Minimum batches on a kind of lane before a server's corrections are used."""


Basis = Literal["measured", "published"]


@dataclass(slots=True, frozen=True)
class BatchCosts:
    """Batch costs and their origin.

    Attributes:
        basis: Kind of origin.
        points: Batch times.
        title: Model and device.
        facts: Basis of the costs, one line each: URL and kind of each source of a published table.
        warm_up: The points before a server's corrections; empty without corrections.
        variations: Variation of batches in that server, by kind of lane.
        narrow_lanes: Lanes in addition to the wide one.
        threads: Cores that the engine shares with the server; 0 if it has its own.
    """

    basis: Basis
    points: tuple[CostPoint, ...]
    title: str = ""
    facts: tuple[str, ...] = ()
    warm_up: tuple[CostPoint, ...] = ()
    variations: Mapping[str, Variation] = field(default_factory=dict)
    narrow_lanes: int = 0
    threads: int = 0

    @property
    def batched(self) -> bool:
        """Whether texts are batched."""
        return any(point.batch > 1 for point in self.points)

    def provenance(self, lengths: Iterable[int]) -> list[str]:
        """What was published or measured, and what is interpolated for these text lengths, one line each."""
        known = sorted({point.tokens for point in self.points if point.kind == "wide"})
        sizes = {
            tokens: sorted({p.batch for p in self.points if p.kind == "wide" and p.tokens == tokens})
            for tokens in known
        }
        listed = "; ".join(f"{tokens} tokens x {', '.join(map(str, sizes[tokens]))} texts" for tokens in known)
        lines = [f"{self.basis}: {listed}", *(f"source: {fact}" for fact in self.facts)]
        between = sorted(set(lengths) - set(known))
        if between:
            shown = ", ".join(map(str, between)) if len(between) <= _FEW else f"{between[0]} to {between[-1]}"
            lines.append(f"INTERPOLATED over lengths: {shown} tokens ({_rule(between, known)})")
        lines.append(f"INTERPOLATED over batch sizes: linear if not {self.basis}, proportional beyond the largest")
        return lines


def _rule(lengths: Sequence[int], known: Sequence[int]) -> str:
    rules = []
    if lengths[0] < known[0]:
        rules.append(f"below {known[0]}: as {known[0]}")
    if any(known[0] < tokens < known[-1] for tokens in lengths):
        rules.append("linear between neighbors")
    if lengths[-1] > known[-1]:
        rules.append(f"above {known[-1]}: proportional")
    return ", ".join(rules)


def find_table(given: str, model: str | None = None) -> BatchCosts:
    """A published table by its name, or the table in a file.

    Args:
        given: One of `PUBLISHED`, or a path.
        model: Model in a server's `/status`; None: the only one.

    Raises:
        BenchError: There is no such table, or the file is invalid; the message is one line.
    """
    try:
        source = _DATA / f"{given}.json" if given in PUBLISHED else Path(given)
        content = json.loads(source.read_text(encoding="utf-8"))
        return _table(content, Path(given).stem, model)
    except OSError as error:
        known = "" if Path(given).suffix else f"; built-in tables: {', '.join(PUBLISHED)}"
        raise BenchError(f"--cost {given}: {error.strerror}{known}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BenchError(f"--cost {given}: not a cost table ({type(error).__name__}: {error})") from error


def _table(content: Any, stem: str, model: str | None) -> BatchCosts:  # noqa: ANN401  any JSON value
    if "sources" in content:
        return _published(content)
    if "models" in content:
        return _of_status(content, model)
    threads = content["fingerprint"]["threads"]
    return _measured(stem, [_point(row) for row in content["points"]], threads, threads)


def _published(content: Mapping[str, Any]) -> BatchCosts:
    sources = tuple(f"{one['url']} ({one['what']})" for one in content["sources"].values())
    points = tuple(_published_point(row) for row in content["points"])
    return BatchCosts("published", points, content["title"], facts=sources)


def _published_point(row: Mapping[str, Any]) -> CostPoint:
    tail_ms = max(0.0, row.get("p99_ms", row["ms"]) - row["ms"])
    return CostPoint("wide", row["tokens"], row["texts"], row["ms"] * 1e3, tail_ms * 1e3 / _TAIL * _QUARTILES)


def _of_status(content: Mapping[str, Any], name: str | None) -> BatchCosts:
    models = [model for model in content["models"] if model["costs"] and name in {None, model["name"]}]
    if len(models) != 1:
        names = ", ".join(model["name"] for model in content["models"])
        raise BenchError(f"--cost: the server has several models; choose one with --model: {names}")
    [model] = models
    rows, engine = model["costs"]["table"], content["engine"]
    seen = {kind: one for kind, one in model["costs"]["corrections"].items() if one["batches"] >= _ENOUGH}
    points = [_point(row, _factor(seen, row)) for row in rows]
    table = _measured(f"{model['name']} {model['precision']}", points, engine["threads"], len(engine["lanes"]) - 1)
    varied = {kind: Variation(one["spread"], one["lasting"]) for kind, one in seen.items()}
    return replace(table, warm_up=tuple(map(_point, rows)) if seen else (), variations=varied)


def _factor(corrections: Mapping[str, Any], row: Mapping[str, Any]) -> float:
    """The correction factor of a row: that of its kind of lane times that of its length bucket."""
    correction = corrections.get(row["kind"])
    if correction is None:
        return 1.0
    return float(correction["mean"] * correction["shapes"][bucket_index(row["tokens"])])


def _measured(title: str, points: Sequence[CostPoint], threads: int, lanes: int) -> BatchCosts:
    side_by_side = any(point.kind == "narrow" for point in points)
    return BatchCosts("measured", tuple(points), title, narrow_lanes=lanes if side_by_side else 0, threads=threads)


def _point(row: Mapping[str, Any], factor: float = 1.0) -> CostPoint:
    """A point in the format of `/status` or of a node's cache; `factor` is the server's correction."""
    texts = row["texts"] if "texts" in row else row["batch"]
    us = row["measured_us"] if "measured_us" in row else row["us"]
    spread_us = row.get("spread_us", 0.0)
    library = str(row.get("library", ""))
    return CostPoint(row["kind"], int(row["tokens"]), int(texts), factor * us, factor * spread_us, library)
