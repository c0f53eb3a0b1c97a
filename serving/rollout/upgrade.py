"""Builds TensorRT engines while another engine serves, and switches to them.

A node whose bundles have no TensorRT engine for its GPU starts with another kind of engine. Meanwhile it builds one for
each served model, including hot-swapped ones. Once every model has one, an engine process with them takes over. After a
failure the server goes on as it is and shows the reason. The next start tries again.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from serving.errors import BundleError, EngineFailed, EngineLost, StartupError
from serving.rollout.engine_choice import BUILT
from serving.rollout.engine_slot import EngineGeneration
from serving.rollout.versions import reason_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.inference.served_models import ServedModel
    from serving.rollout.engine_build import EngineBuilder
    from serving.rollout.engine_choice import Chooser
    from serving.rollout.engine_load import LoadBuilder
    from serving.rollout.engine_slot import EngineSlot

log = logging.getLogger("bertserve.swap")

BUILDING = "building an engine for this GPU; until it serves: "
"""Precedes the reason why there was no engine."""


class Upgrade:
    def __init__(self, chooser: Chooser, builder: EngineBuilder, slot: EngineSlot, loads: LoadBuilder) -> None:
        self._chooser = chooser
        self._builder = builder
        self._slot = slot
        self._loads = loads

    async def run(self) -> None:
        slot = self._slot
        if slot.choice.engine == BUILT:
            return
        if obstacle := self._chooser.build_obstacle():
            log.warning("not building a TensorRT engine: %s", obstacle)
            return
        reasons = [rejected.reason for rejected in slot.choice.rejected if rejected.engine == BUILT]
        slot.reject(BUILT, f"{BUILDING}{''.join(reasons)}")
        try:
            await self._until_it_serves()
        except (BundleError, StartupError, EngineFailed, EngineLost, TimeoutError, OSError) as error:
            reason = reason_of(error)
            log.error("cannot switch to a TensorRT engine: %s", str(error) or reason)  # noqa: TRY400  the message is enough
            slot.reject(BUILT, f"{reason}; the next start retries")
        except Exception:  # boundary of the task: an unforeseen error costs only the new engine
            log.exception("cannot switch to a TensorRT engine")
            slot.reject(BUILT, "cannot build an engine for this GPU; see the log")

    async def _until_it_serves(self) -> None:
        built: set[str] = set()
        while True:
            # What is served is certain only while nobody else switches.
            async with self._slot.turn():
                served = tuple(self._slot.models)
                lacking = await asyncio.to_thread(self._lacking, served)
                # If a model was built and still lacks an engine, the switch says why.
                if built.issuperset(model.bundle.sha256 for model in lacking):
                    if await self._switch(served):
                        return
                    continue
            for model in lacking:
                built.add(model.bundle.sha256)
                await asyncio.to_thread(self._builder.build, model.bundle.path)

    def _lacking(self, served: Sequence[ServedModel]) -> list[ServedModel]:
        return [model for model in served if self._chooser.must_build(model.bundle.path)]

    async def _switch(self, served: Sequence[ServedModel]) -> bool:
        """Switches to the built engines. Returns False if the slot has fallen back to other models meanwhile."""
        slot = self._slot
        choice = await asyncio.to_thread(self._chooser.built, served)
        prepared = await asyncio.to_thread(self._loads.prepare, choice)
        async with slot.beside(prepared.load) as engine:
            await slot.serving()
            if not slot.still_serves(served):
                return False
            # The old tokenizers are kept: their wordpiece caches are warm.
            models = [
                replace(model, index=index, tokenizer=before.tokenizer)
                for model, before, index in zip(choice.repository.models, served, slot.new_indices(), strict=False)
            ]
            slot.switch(EngineGeneration(engine, prepared.load, models, choice.summary()))
            choice.log()
            prepared.cache_kernels()
            return True
