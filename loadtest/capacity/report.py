"""The report of a sizing, for people and as JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from export.pages.tables import Table, untitled
from loadtest.capacity.candidates import PRICES_FROM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadtest.capacity.encoder import Encoder
    from loadtest.capacity.plan import SizingLoad, SizingPlan

_HEAD = (
    "candidate",
    "precision",
    "basis",
    "devices",
    "fronts",
    "bound by",
    "busy",
    "p50 ms",
    "p99 ms",
    "GB",
    "watts",
    "USD/h",
    "USD/M texts",
    "USD/M tokens",
)
_DASH = "-"


@dataclass(slots=True, frozen=True)
class Sizing:
    """All candidates under one load.

    Attributes:
        encoder: The served encoder.
        load: The load.
        plans: One for each candidate and precision.
        notes: Assumptions and omissions.
    """

    encoder: Encoder
    load: SizingLoad
    plans: Sequence[SizingPlan]
    notes: Sequence[str] = ()

    @property
    def cheapest(self) -> SizingPlan | None:
        """The cheapest plan that holds; None if none does."""
        return _cheapest(self.plans)

    @property
    def holds(self) -> bool:
        """Whether any candidate holds the objective."""
        return any(plan.replicas for plan in self.plans)

    def asked(self) -> str:
        """The load in one line."""
        load = self.load
        return f"{load.rate:g} texts/s, {load.lengths.fact}, {load.objective}"

    def verdict(self) -> str:
        """The result in one sentence."""
        best = self.cheapest
        if best is None:
            none = "no candidate meets the SLO"
            return f"{none} at any count" if not self.holds else "no candidate that meets it has a price; set --price"
        answer = f"cheapest that meets {self.load.objective}: {_offer(best)}"
        unrounded = _cheapest([plan for plan in self.plans if plan.precision != "int8"])
        if unrounded is None or unrounded is best:
            return answer
        return f"{answer}; without INT8: {_offer(unrounded)}"

    def unknown(self) -> list[str]:
        """Assumptions and unknowns."""
        lines = [
            *self.encoder.notes,
            *self.notes,
            "arrivals are Poisson, one text per request; a load balancer assigns each to a random replica",
            "with a GPU, each process of a server has its own core: the server, its engine, each front process",
            "the server's own time per text is that of one machine; on a slower CPU the front bounds earlier",
            "watts are the power limits of the devices, without hosts; activation memory is estimated",
            f"prices are examples from {PRICES_FROM} in USD, without the hosts of GPUs; set yours with --price",
            "no spare replicas are included; add some for rollouts and failures",
        ]
        if any(plan.memory.devices > 1 for plan in self.plans):
            lines.append(
                "split weights: layers are spread evenly over devices, and transfers of activations are free, "
                "so the latency is a lower bound"
            )
        if any(plan.precision == "int8" for plan in self.plans):
            lines.append("INT8 may break its accuracy limits for this model; `bertserve export` verifies it")
        if any(plan.costs.basis == "computed" for plan in self.plans):
            lines.append("a computed time can be off by more than its error; measure before you buy")
        return lines

    def facts(self) -> list[str]:
        """The basis of the costs; each fact lists the candidates that it applies to."""
        names: dict[str, list[str]] = {}
        for plan in self.plans:
            for fact in plan.costs.facts:
                names.setdefault(fact, []).append(f"{plan.name} {plan.precision}")
        return [f"{', '.join(named)}: {fact}" for fact, named in names.items()]

    def table(self) -> Table:
        """A table with one row per plan."""
        return untitled(_HEAD, [_cells(plan, self.load) for plan in self.plans], words=3)

    def remarks(self) -> list[str]:
        """Why each failing candidate fails, and which ones need front processes."""
        said = ((plan, _reason(plan, self.load) or _advice(plan)) for plan in self.plans)
        return [f"{plan.name} {plan.precision}: {remark}" for plan, remark in said if remark]

    def lines(self) -> list[str | Table]:
        """The terminal output."""
        encoder = self.encoder
        return [
            f"{encoder.name}: {encoder.layers} layers of size {encoder.hidden}, {words(encoder.parameters)} parameters",
            self.asked(),
            "",
            self.table(),
            "",
            *self.remarks(),
            self.verdict(),
            "",
            *self.facts(),
            "",
            *(f"unknown or assumed: {line}" for line in self.unknown()),
        ]

    def plain(self) -> dict[str, Any]:
        """The sizing as plain JSON values."""
        load, best = self.load, self.cheapest
        return {
            "encoder": {
                "name": self.encoder.name,
                "layers": self.encoder.layers,
                "hidden_size": self.encoder.hidden,
                "parameters": self.encoder.parameters,
            },
            "load": {
                "rate_per_s": load.rate,
                "mean_tokens": load.lengths.mean,
                "lengths": load.lengths.fact,
                "objective": {"percent": load.objective.percent, "limit_ms": load.objective.limit_ms},
                "seed": load.seed,
            },
            "candidates": [_plain(plan, load) for plan in self.plans],
            "currency": "USD",
            "cheapest": None if best is None else {"name": best.name, "precision": best.precision},
            "unknown": self.unknown(),
        }


def _cheapest(plans: Sequence[SizingPlan]) -> SizingPlan | None:
    holding = [plan for plan in plans if plan.price_per_hour is not None]
    return min(holding, key=lambda plan: (plan.price_per_hour or 0.0, plan.devices), default=None)


def _offer(plan: SizingPlan) -> str:
    price = f"{plan.price_per_hour:g} USD per hour ({plan.costs.basis})"
    option = f" with --front-processes {plan.fronts}" if plan.fronts > 1 else ""
    return f"{_count(plan)} x {plan.device.title} in {plan.precision}{option}, {price}"


def _plain(plan: SizingPlan, load: SizingLoad) -> dict[str, Any]:
    run, memory = plan.run, plan.memory
    price = plan.per_million_texts(load.rate)
    return {
        "name": plan.name,
        "title": plan.device.title,
        "precision": plan.precision,
        "basis": plan.costs.basis,
        "error": plan.costs.error or None,
        "facts": list(plan.costs.facts),
        "holds": plan.replicas > 0,
        "replicas": plan.replicas,
        "devices": plan.devices,
        "devices_of_a_replica": memory.devices,
        "bound": plan.bound,
        "front_processes": plan.fronts,
        "advice": _advice(plan) or None,
        "utilisation": None if run is None else run.utilisation,
        "p50_ms": None if run is None else _finite(run.p50_ms),
        "p99_ms": None if run is None else _finite(run.p99_ms),
        "objective_ms": None if run is None else _finite(run.slo_ms),
        "weights_gb": memory.weights_bytes / 1e9,
        "watts": plan.watts,
        "price_per_hour": plan.price_per_hour,
        "per_million_texts": price,
        "per_million_tokens": None if price is None else price / load.lengths.mean,
        "why_not": _reason(plan, load) or None,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _cells(plan: SizingPlan, load: SizingLoad) -> tuple[str, ...]:
    """The cells of a plan's row, in the order of `_HEAD`."""
    run, price = plan.run, plan.per_million_texts(load.rate)
    basis = f"{plan.costs.basis} ±{100 * plan.costs.error:.0f}%" if plan.costs.error else plan.costs.basis
    return (
        plan.name,
        plan.precision,
        basis,
        _count(plan) if plan.replicas else "none",
        str(plan.fronts),
        plan.bound or _DASH,
        _DASH if run is None or not plan.replicas else f"{100 * run.utilisation:.0f}%",
        _DASH if run is None else _ms(run.p50_ms),
        _DASH if run is None else _ms(run.p99_ms),
        f"{plan.memory.weights_bytes / 1e9:.1f}",
        _DASH if plan.watts is None else f"{plan.watts:,.0f}",
        _DASH if plan.price_per_hour is None else f"{plan.price_per_hour:,.2f}",
        _DASH if price is None else f"{price:,.3f}",
        _DASH if price is None else f"{price / load.lengths.mean:,.5f}",
    )


def _count(plan: SizingPlan) -> str:
    """The number of devices, with the number per replica if above 1."""
    if plan.memory.devices > 1:
        return f"{plan.replicas} x {plan.memory.devices} (split)"
    return str(plan.replicas)


def _reason(plan: SizingPlan, load: SizingLoad) -> str:
    """The reason why no number of a candidate holds; empty if one does."""
    if plan.replicas:
        return ""
    if plan.run is None:
        return f"does not fit: {plan.memory.weights_bytes / 1e9:,.0f} GB of weights need more devices than layers"
    return f"no number of devices meets the SLO: the unloaded p{load.objective.percent:g} is {_ms(plan.run.slo_ms)} ms"


def _advice(plan: SizingPlan) -> str:
    """The front processes that save devices; empty if one process is enough."""
    if plan.fronts == 1:
        return ""
    saved = f"{plan.replicas_of_one_process * plan.memory.devices} to {plan.devices}"
    return f"bounded by the front process: add --front-processes {plan.fronts} (devices: {saved})"


def words(parameters: int) -> str:
    """A large number in short form.

    >>> words(108_891_648), words(1_269_161_984)
    ('109 M', '1.3 B')
    """
    billions = parameters / 1e9
    return f"{billions:.1f} B" if billions >= 1 else f"{parameters / 1e6:.0f} M"


def _ms(value: float) -> str:
    return f"{value:,.1f}" if math.isfinite(value) else _DASH
