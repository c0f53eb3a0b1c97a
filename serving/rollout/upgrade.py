"""Builds the best engine while another serves, and changes over to it.

A node whose bundles have no TensorRT engine for its GPU starts with what runs. Meanwhile one is built for each model
that is served; when none lacks one any more, an engine process with them comes up beside the one that serves and
takes its place. A version that is swapped to in between is built for too. What fails is said where the other reasons
are, and the server goes on as it is: at the next start it is tried again.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from serving.engine.process.supervisor import EngineFailed
from serving.errors import BundleError, EngineLost, StartupError
from serving.rollout.engine_choice import BUILT
from serving.rollout.versions import reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from serving.engine.process.wire import Load
    from serving.inference.served_models import Repository, ServedModel
    from serving.rollout.engine_build import EngineBuilder
    from serving.rollout.engine_choice import Choice, Chooser
    from serving.rollout.engine_swap import Exchange

log = logging.getLogger("bertserve.swap")

BUILDING = "an engine is being built for this card; until it serves: "
"""Before the reason why there was none."""


class Upgrade:
    """From the engine of the start to the one that is built meanwhile."""

    def __init__(
        self,
        chooser: Chooser,
        builder: EngineBuilder,
        exchange: Exchange,
        repository: Repository,
        beside: Callable[[Choice], tuple[Load, Callable[[], None]]],
    ) -> None:
        """Takes what it works with.

        Args:
            chooser: Says what could run here.
            builder: Builds engines.
            exchange: Brings up engines and switches.
            repository: The models that are served.
            beside: What an engine process is told, and what is to do once it serves; called in a thread.
        """
        self._chooser = chooser
        self._builder = builder
        self._exchange = exchange
        self._repository = repository
        self._beside = beside

    async def run(self) -> None:
        """Does it once, if there is something to do."""
        if self._repository.engine.engine == BUILT:
            return
        if obstacle := self._chooser.build_obstacle():
            log.warning("no TensorRT engine is built: %s", obstacle)
            return
        reasons = [rejected.reason for rejected in self._repository.engine.rejected if rejected.engine == BUILT]
        self.note(BUILT, f"{BUILDING}{''.join(reasons)}")
        try:
            await self._until_it_serves()
        except (BundleError, StartupError, EngineFailed, EngineLost, TimeoutError, OSError) as error:
            reason = reason_of(error)
            log.error("no TensorRT engine takes over: %s", str(error) or reason)  # noqa: TRY400  says it all
            self.note(BUILT, f"{reason}; it is tried again at the next start")
        except Exception:  # its own end of the loop: what nobody foresaw costs the new engine alone
            log.exception("no TensorRT engine takes over")
            self.note(BUILT, "an engine for this card could not be built; the log has the details")

    def note(self, engine: str, reason: str) -> None:
        """Says why an engine does not serve, wherever that is shown."""
        self._chooser.note(engine, reason)
        now = self._repository.engine
        self._repository.engine = msgspec.structs.replace(now, rejected=self._chooser.rejected(now.engine))

    async def _until_it_serves(self) -> None:
        built: set[str] = set()
        while True:
            # What is served is known only while nobody exchanges it.
            async with self._exchange.turn:
                await self._exchange.drained()
                await self._exchange.serving()
                served = tuple(self._repository.models)
                lacking = await asyncio.to_thread(self._lacking, served)
                # One that was built and still lacks an engine: the change-over says why.
                if built.issuperset(model.bundle_sha256 for model in lacking):
                    if await self._change_over(served):
                        return
                    continue
            for model in lacking:
                built.add(model.bundle_sha256)
                await asyncio.to_thread(self._builder.build, model.path)

    def _lacking(self, served: Sequence[ServedModel]) -> list[ServedModel]:
        return [model for model in served if self._chooser.must_build(model.path)]

    async def _change_over(self, served: Sequence[ServedModel]) -> bool:
        """Returns whether the new engine serves; not where others are served by now, which an engine's end brought."""
        choice = await asyncio.to_thread(self._chooser.built, served)
        load, serves = await asyncio.to_thread(self._beside, choice)
        async with self._exchange.beside(load, choice.told()) as engine:
            await self._exchange.serving()
            if not self._exchange.still_serves(served):
                return False
            indices = self._exchange.new_indices()
            # The tokenizers stay: their tables of words are warm.
            models = [
                replace(model, index=index, tokenizer=before.tokenizer)
                for model, before, index in zip(choice.repository.models, served, indices, strict=False)
            ]
            self._exchange.switch(engine, load, models)
            serves()
            return True
