"""The report of `/status`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from bertserve.serving.scheduling.cost import bucket_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from bertserve.serving.engine.process.remote_engine import EngineLife
    from bertserve.serving.inference.dispatcher import Dispatcher
    from bertserve.serving.inference.served_models import Repository, ServedModel
    from bertserve.serving.lifecycle import Lifecycle
    from bertserve.serving.models.manifest import Artifact
    from bertserve.serving.rollout.engine_slot import EngineSlot
    from bertserve.serving.rollout.versions import Versions
    from bertserve.serving.scheduling.cost import ModelCosts
    from bertserve.serving.telemetry.metrics import BatchSeen, Metrics
    from bertserve.serving.telemetry.recent import Recent

_DIGITS = 1


@dataclass(frozen=True, slots=True)
class Status:
    repository: Repository
    lifecycle: Lifecycle
    dispatcher: Dispatcher
    metrics: Metrics
    recent: Recent
    slot: EngineSlot
    versions: Versions
    fronts: Callable[[], Sequence[Mapping[str, int]] | None]

    def report(self, *, costs: bool = True) -> dict[str, Any]:
        """The report for JSON; times in milliseconds or microseconds by name. The cost tables are slow."""
        load, model_costs = self.dispatcher.load(), self.dispatcher.costs
        others = self.versions.others()
        return {
            "state": self.lifecycle.state,
            "engine": _engine(self.slot.engine),
            "slot": {"state": self.slot.state.name.lower()},
            "choice": msgspec.to_builtins(self.repository.engine),
            "recent": self.recent.report(),
            "totals": self.recent.totals(),
            "queue": {
                "requests": load.requests,
                "texts": load.queued_texts,
                "tokens": load.queued_tokens,
                "work_ms": round(load.queued_work_us / 1e3, _DIGITS),
            },
            "admission": {
                "tokens": load.admitted_tokens,
                "most_tokens": load.admitted_limit,
                "drain_ms": round(load.wait_s * 1e3, _DIGITS),
                "refusals": load.refusals,
                "deadline_misses": load.misses,
            },
            "bulk": {
                "texts": load.bulk.queued_texts,
                "tokens": load.bulk.queued_tokens,
                "work_ms": round(load.bulk.queued_work_us / 1e3, _DIGITS),
                "admitted_tokens": load.bulk.admitted_tokens,
                "most_tokens": load.bulk.admitted_limit,
                "refusals": load.bulk.refusals,
                "deadline_misses": load.bulk.misses,
            },
            "device_ms": {name: round(us / 1e3, _DIGITS) for name, us in load.device_us.items()},
            "lanes": [{"tokens": tokens} for tokens in load.lane_tokens],
            "swaps": self.versions.outcomes,
            "fronts": self.fronts(),
            "batches": _batches(list(self.metrics.recent)),
            "models": [
                {
                    **_model(model),
                    "in_service": self.repository.serves(model.name),
                    "other_versions": [
                        {"version": other.version, "state": other.state, "reason": other.reason}
                        for other in others
                        if other.name == model.name
                    ],
                    "libraries": _libraries(model_costs[model.index]) if model_costs else None,
                    "costs": _costs(model_costs[model.index]) if costs and model_costs else None,
                }
                for model in self.repository.models
            ],
        }


def _engine(engine: EngineLife | None) -> dict[str, Any] | None:
    if engine is None:
        return None
    ready = engine.ready
    lanes = [str(kind) for kind in ready.lanes]
    return {"name": ready.engine, "version": ready.version, "threads": ready.threads, "lanes": lanes}


def _batches(seen: Sequence[BatchSeen]) -> dict[str, Any]:
    tokens, padding = sum(batch.tokens for batch in seen), sum(batch.padding for batch in seen)
    timed = [batch for batch in seen if batch.occupied_us > 0]
    return {
        "count": len(seen),
        "mean_texts": round(sum(batch.texts for batch in seen) / max(1, len(seen)), 2),
        "padding_share": round(padding / max(1, tokens + padding), 4),
        "predicted_ms": round(sum(batch.predicted_us for batch in timed) / 1e3, _DIGITS),
        "actual_ms": round(sum(batch.occupied_us for batch in timed) / 1e3, _DIGITS),
    }


def _model(model: ServedModel) -> dict[str, Any]:
    manifest, artifact = model.manifest, model.artifact
    return {
        "name": model.name,
        "version": model.version,
        "task": manifest.task,
        "also": manifest.also,
        "architecture": manifest.source.architecture,
        "source": manifest.source.name,
        "max_length": manifest.max_length,
        "precision": artifact.precision,
        "target": artifact.target,
        "size_bytes": artifact.total_bytes,
        "batch_invariant": artifact.batch_invariant,
        "parity": _parity(artifact),
        "accuracy": msgspec.to_builtins(artifact.accuracy),
    }


def _parity(artifact: Artifact) -> dict[str, Any] | None:
    if artifact.parity is None:
        return None
    names = ("texts", "max_abs_difference", "cosine_mean", "cosine_min", "agreement")
    return {name: getattr(artifact.parity, name) for name in names}


def _libraries(costs: ModelCosts) -> dict[str, str] | None:
    """The library for texts up to each length, if costs name it."""
    return {str(bucket_for(point.tokens)): point.library for point in costs.points if point.library} or None


def _costs(costs: ModelCosts) -> dict[str, Any]:
    return {
        "corrections": {
            kind: {
                "factor": round(correction.factor, 3),
                "mean": round(correction.mean, 3),
                "shapes": [round(shape, 3) for shape in correction.shapes],
                "overhead_us": round(correction.overhead_us, _DIGITS),
                "spread": round(correction.spread, 3),
                "lasting": round(correction.lasting, 3),
                "batches": correction.batches,
            }
            for kind, correction in zip(("wide", "narrow"), costs.corrections, strict=True)
        },
        "table": [
            {
                "kind": point.kind,
                "tokens": point.tokens,
                "texts": point.batch,
                "library": point.library,
                "measured_us": round(point.us, _DIGITS),
                "spread_us": round(point.spread_us, _DIGITS),
                "predicted_us": round(costs.batch_us(int(point.kind == "narrow"), point.tokens, point.batch), _DIGITS),
            }
            for point in costs.points
        ],
    }
