"""What batches cost: tables that were published for cards, and those that a server measured of itself.

A file holds one of three things: a table as in `data/costs`, the answer of a server's `/status`, whose times count as
the server has corrected them since, or what a node keeps in its cache.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from loadtest.capacity.simulator import Variation
from loadtest.errors import BenchError
from serving.scheduling.cost import CostPoint, bucket_index

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_DATA = files("loadtest.capacity") / "data" / "costs"
PUBLISHED = tuple(sorted(Path(entry.name).stem for entry in _DATA.iterdir() if entry.name.endswith(".json")))
"""Names of the tables that come with the program."""

_TAIL = 2.326
_QUARTILES = 1.349
"""Of a normal distribution, in standard deviations: from the mean to the 99th percentile, and between the quartiles."""

_FEW = 6
"""Lengths of texts that are named one by one."""

_ENOUGH = 30
"""Batches of a kind of lane from which on a server's corrections are taken."""


Basis = Literal["measured", "extrapolated", "published", "computed"]
"""`measured` on a machine whole, `extrapolated` from few layers measured on it."""


@dataclass(slots=True, frozen=True)
class BatchCosts:
    """What batches cost, and where that is known from.

    Attributes:
        basis: Where that is from.
        points: Times of batches.
        title: Of what and on what.
        error: Relative, as one standard deviation; 0 where it is not known.
        facts: What it rests on, line by line: URL and kind of each source of a table that was published.
        warm_up: The same before a server corrected them; empty where none did.
        variations: How batches of that server varied, by kind of lane.
        narrow_lanes: Lanes beside the wide one.
        threads: Cores that the engine shares with the server; 0 where it has its own.
        stages: Devices of a pipeline, each with its part of the layers.
    """

    basis: Basis
    points: tuple[CostPoint, ...]
    title: str = ""
    error: float = 0.0
    facts: tuple[str, ...] = ()
    warm_up: tuple[CostPoint, ...] = ()
    variations: Mapping[str, Variation] = field(default_factory=dict)
    narrow_lanes: int = 0
    threads: int = 0
    stages: int = 1

    @property
    def batched(self) -> bool:
        """Whether texts are computed together."""
        return any(point.batch > 1 for point in self.points)

    def in_stages(self, stages: int, transfer_us: float = 0.0) -> BatchCosts:
        """What a server measures of a pipeline of so many such devices, each with its part of the layers.

        A stage takes its part of the time and sends what it has made to the next one, or back, in `transfer_us`. As
        many batches as there are stages are under way at once; each takes as long as all stages together. All lanes of
        a pipeline are alike, and what a server has learned is of the wide one alone.

        Raises:
            BenchError: The points are of several lanes already.
        """
        wide = [msgspec.structs.replace(point, us=point.us + stages * transfer_us) for point in self.points]
        if any(point.kind == "narrow" for point in wide):
            raise BenchError("--stages needs a table of one lane, as of a GPU")
        points = (*wide, *[msgspec.structs.replace(point, kind="narrow") for point in wide])
        title = f"{self.title}, in {stages} stages"
        return BatchCosts(
            self.basis, points, title, self.error, self.facts, narrow_lanes=stages, threads=self.threads, stages=stages
        )

    def provenance(self, lengths: Iterable[int]) -> list[str]:
        """What was published or measured, and what is interpolated for texts of these lengths, line by line."""
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
        lines.append(
            f"INTERPOLATED over sizes: every batch size that is not {self.basis}, linear, and beyond in proportion"
        )
        return lines


def _rule(lengths: Sequence[int], known: Sequence[int]) -> str:
    rules = []
    if lengths[0] < known[0]:
        rules.append(f"below {known[0]} as {known[0]}")
    if any(known[0] < tokens < known[-1] for tokens in lengths):
        rules.append("linear between neighbours")
    if lengths[-1] > known[-1]:
        rules.append(f"above {known[-1]} in proportion")
    return ", ".join(rules)


def find_table(given: str, model: str | None = None) -> BatchCosts:
    """A published table by its name, or the one in a file.

    Args:
        given: One of `PUBLISHED`, or a path.
        model: Which model of a server's `/status`; None: the only one.

    Raises:
        BenchError: There is none, or what is wrong with it, in one line.
    """
    try:
        source = _DATA / f"{given}.json" if given in PUBLISHED else Path(given)
        content = json.loads(source.read_text(encoding="utf-8"))
        return _table(content, Path(given).stem, model)
    except OSError as error:
        known = "" if Path(given).suffix else f" (tables that come with the program: {', '.join(PUBLISHED)})"
        raise BenchError(f"--cost {given}: {error.strerror}{known}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BenchError(f"--cost {given}: no table of costs ({type(error).__name__}: {error})") from error


def _table(content: Any, stem: str, model: str | None) -> BatchCosts:  # noqa: ANN401  whatever a file holds
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
        raise BenchError(f"--cost: name one of the server's models with --model ({names})")
    [model] = models
    rows, engine = model["costs"]["table"], content["engine"]
    seen = {kind: one for kind, one in model["costs"]["corrections"].items() if one["batches"] >= _ENOUGH}
    points = [_point(row, _factor(seen, row)) for row in rows]
    table = _measured(f"{model['name']} {model['precision']}", points, engine["threads"], len(engine["lanes"]) - 1)
    varied = {kind: Variation(one["spread"], one["lasting"]) for kind, one in seen.items()}
    return replace(table, warm_up=tuple(map(_point, rows)) if seen else (), variations=varied)


def _factor(corrections: Mapping[str, Any], row: Mapping[str, Any]) -> float:
    """How far a row of the table was off: its kind of lane on the whole, and its length's bucket within that."""
    correction = corrections.get(row["kind"])
    if correction is None:
        return 1.0
    return float(correction["mean"] * correction["shapes"][bucket_index(row["tokens"])])


def _measured(title: str, points: Sequence[CostPoint], threads: int, lanes: int) -> BatchCosts:
    side_by_side = any(point.kind == "narrow" for point in points)
    return BatchCosts("measured", tuple(points), title, narrow_lanes=lanes if side_by_side else 0, threads=threads)


def _point(row: Mapping[str, Any], factor: float = 1.0) -> CostPoint:
    """A point as `/status` names its parts, or as a node keeps it; `factor` is how far the server has corrected it."""
    texts = row["texts"] if "texts" in row else row["batch"]
    us = row["measured_us"] if "measured_us" in row else row["us"]
    spread_us = row.get("spread_us", 0.0)
    library = str(row.get("library", ""))
    return CostPoint(row["kind"], int(row["tokens"]), int(texts), factor * us, factor * spread_us, library)
