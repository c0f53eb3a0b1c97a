"""Gives the models of an engine their places: where they run, under which rules, and what they cost there."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from serving.scheduling.cost import ModelCosts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from serving.engine.process.supervisor import EngineLife
    from serving.inference.dispatcher import Dispatcher
    from serving.inference.served_models import ServedModel
    from serving.records import ModelIndex

T = TypeVar("T")


def place(
    dispatcher: Dispatcher,
    engine: EngineLife,
    models: Sequence[ServedModel],
    taught: Mapping[ModelIndex, ModelCosts] | None = None,
) -> None:
    """Lets an engine take batches from now on.

    Args:
        dispatcher: Who drives it.
        engine: Warm.
        models: What it holds, in its own order.
        taught: Costs whose corrections a model takes over, by its own index; the others start with none.
    """
    scheduler = dispatcher.scheduler
    policy, lanes = scheduler.policy, len(engine.lanes)
    invariant, narrow, costs = list(policy.batch_invariant), list(policy.narrow), list(scheduler.costs)
    for model, points in zip(models, engine.costs, strict=True):
        spec = model.spec()
        own = ModelCosts(
            points,
            narrow_lanes=lanes - 1,
            batched=spec.batch_invariant,
            max_batch_tokens=policy.max_batch_tokens,
            group_tokens=policy.group_tokens,
            min_batch_gain=policy.min_batch_gain,
            padded_to=engine.ready.padded_to if engine.ready else (),
        )
        if taught is not None and model.index in taught:
            own.inherit(taught[model.index])
        _put(invariant, model.index, spec.batch_invariant)
        _put(narrow, model.index, lanes > 1 and (spec.narrow or engine.apart))
        _put(costs, model.index, own)
    scheduler.policy = replace(policy, batch_invariant=invariant, narrow=narrow, apart=engine.apart)
    dispatcher.engine_up(engine, costs, [model.index for model in models])


def _put(values: list[T], index: int, value: T) -> None:
    """Sets an element; what lies between it and the end before is filled with it too, and belongs to no model."""
    values.extend([value] * (index + 1 - len(values)))
    values[index] = value
