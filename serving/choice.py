"""Which engine runs the models: what `--engine auto` tries, in which order, and why not the ones before.

An engine is taken if the machine can run it and every model has a form for it. One that is named runs or the server
does not start; `auto` goes on to the next, and ends with the CPU. A server that computes on a CPU although there is a
GPU, or should be, is degraded: it answers, at another speed than was meant.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from serving.engine import gpu
from serving.errors import StartupError
from serving.records import ON_A_GPU, EngineChoice, RejectedEngine, UsedCard
from serving.repository import Repository, runs_on_a_gpu, verified

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from serving.bundle import Bundle
    from serving.engine.gpu import Card, Library, Machine
    from serving.settings import Settings

log = logging.getLogger("bertserve")

EngineName = Literal["tensorrt", "ort-cuda", "openvino", "ort-cpu", "fake"]

AUTO: tuple[EngineName, ...] = ("tensorrt", "ort-cuda", "ort-cpu")
"""What is tried, in this order."""


_LEAST_CAPABILITY = {13: (7, 5), 12: (5, 0)}
"""What libraries built for a CUDA still have kernels for, by its major version."""

_MIB = 1 << 20
_WORKING_FACTOR, _WORKING_MIB = 1.3, 500
"""What models take of a card, over their size: buffers and scratch memory, and what CUDA and libraries take at all."""

_VERSION_PARTS = 3


@dataclass(slots=True, frozen=True)
class Choice:
    """What runs the models.

    Attributes:
        engine: As `--engine` calls it.
        repository: The models, each in the form that it runs.
        cards: The GPUs that it runs on; none for a CPU.
        rejected: What was tried before, the best first.
        degraded: Whether it is less than was meant.
    """

    engine: EngineName
    repository: Repository
    cards: tuple[Card, ...] = ()
    rejected: tuple[RejectedEngine, ...] = ()
    degraded: bool = False

    def told(self) -> EngineChoice:
        """The same for whoever asks."""
        cards = [
            UsedCard(card.name, card.uuid, "{}.{}".format(*card.compute_capability), card.memory_bytes)
            for card in self.cards
        ]
        return EngineChoice(self.engine, self.degraded, tuple(cards), self.rejected)

    def tell(self) -> None:
        """Writes into the log what was taken, and why not the others."""
        where = f" on {len(self.cards)} x {self.cards[0].name}" if self.cards else ""
        log.info("engine: %s%s", self.engine, where)
        for rejected in self.rejected if self.degraded or self.cards else ():
            log.warning("not the engine %s: %s", rejected.engine, rejected.reason)

    def where(self, threads: int) -> str:
        """On what it computes, for a line of the log."""
        return f"{len(self.cards)} x {self.cards[0].name}" if self.cards else f"{threads} threads"


class Chooser:
    """Makes the choice, and another one where it turns out to be wrong."""

    def __init__(self, settings: Settings, look: Callable[[], Machine] = gpu.look) -> None:
        """Looks at nothing yet.

        Args:
            settings: What is asked for.
            look: Finds out what GPUs there are; asked once, and only if it matters.
        """
        self._settings = settings
        self._look = look
        self._machine: Machine | None = None
        self._bundles: Sequence[Bundle] = ()
        self._left: list[EngineName] = []
        self._rejected: list[RejectedEngine] = []

    def first(self) -> Choice:
        """The best that there is.

        Raises:
            StartupError: The models must not be served, or nothing can run them.
        """
        asked = self._settings.engine
        self._bundles = verified(self._settings.models, self._settings.cache_dir)
        self._left = list(AUTO) if asked == "auto" else [asked]
        return self._next()

    def instead(self, engine: EngineName, reason: str, *, crashed: bool) -> Choice | None:
        """What takes the place of an engine that was chosen and did not hold; None where nothing shall.

        Args:
            engine: Which.
            reason: Why it failed.
            crashed: Whether it ran and died again and again; else it has not even started.
        """
        self._rejected.append(RejectedEngine(engine, reason))
        if crashed:
            self._left = ["ort-cpu"] if self._settings.cpu_fallback and engine in ON_A_GPU else []
        if not self._left:
            return None
        try:
            choice = self._next()
        except StartupError as error:
            log.warning("nothing can take the place of the engine %s: %s", engine, error)
            return None
        choice.tell()
        return choice

    def _next(self) -> Choice:
        while self._left:
            engine = self._left.pop(0)
            try:
                choice = self._opened(engine)
            except StartupError as error:
                if not self._left:
                    raise
                self._rejected.append(RejectedEngine(engine, str(error)))
            else:
                return choice
        raise StartupError("no engine is left")

    def _opened(self, engine: EngineName) -> Choice:
        """An engine with the models for it.

        Raises:
            StartupError: It cannot run here, or a model has no form for it.
        """
        cards = self._cards(engine) if engine in ON_A_GPU else ()
        repository = Repository.of(
            self._bundles,
            self._settings.precision,
            engine=engine,
            card=cards[0].target if cards else "",
            allow_unproven=self._settings.allow_unproven,
            defaults=self._settings.defaults(),
        )
        if cards:
            for problem in self._problems(engine, repository, cards):
                raise StartupError(f"the engine {engine} cannot run here: {problem}")
        wanted = any(rejected.engine in ON_A_GPU for rejected in self._rejected) and self._has_gpu
        degraded = engine not in ON_A_GPU and wanted
        choice = Choice(engine, repository, cards, tuple(self._rejected), degraded)
        repository.engine = choice.told()
        return choice

    def _cards(self, engine: EngineName) -> tuple[Card, ...]:
        """The cards that an engine can use, of the first one's kind: one bundle's engine fits them all."""
        if not runs_on_a_gpu(self._bundles):
            raise StartupError("the bundles hold nothing for a GPU; export with --precision fp16 or --tensorrt")
        if self._machine is None:
            self._machine = self._look()
        machine = self._machine
        if machine.problem:
            raise StartupError(f"the engine {engine} cannot run here: {machine.problem}")
        return tuple(card for card in machine.cards if card.target == machine.cards[0].target)

    @property
    def _has_gpu(self) -> bool:
        """Whether there is one, or one that does not work."""
        return self._machine is not None and (bool(self._machine.cards) or self._machine.broken)

    def _problems(self, engine: EngineName, repository: Repository, cards: Sequence[Card]) -> Iterator[str]:
        """Why an engine cannot run these models on these cards, as far as can be said without trying."""
        machine = self._machine or gpu.Machine()
        if engine == "ort-cuda":
            yield from _library_problems(machine, "ONNX Runtime", machine.libraries.get("ort-cuda"), cards[0])
        for model in repository.models if engine == "tensorrt" else ():
            if (build := model.artifact.engine) is not None:
                library = machine.libraries.get(build.flavour)
                yield from _library_problems(machine, "TensorRT", library, cards[0])
                if library is not None and not _same_version(library.version, build.version):
                    yield (
                        f"{model.artifact.file} was built by TensorRT {build.version}, here is {library.version};"
                        " install that version, or build it here with `bertserve export --tensorrt native`"
                    )
        wanted = sum(model.artifact.size_bytes for model in repository.models) * _WORKING_FACTOR / _MIB + _WORKING_MIB
        for card in cards:
            free, total = card.free_bytes // _MIB, card.memory_bytes // _MIB
            if free < wanted:
                has = f"{free:,} MiB of {total:,} free"
                yield f"{card.name} number {card.ordinal} has {has}, about {wanted:,.0f} are needed"


def _library_problems(machine: Machine, name: str, library: Library | None, card: Card) -> Iterator[str]:
    if library is None or library.problem:
        yield library.problem if library else f"{name} was not looked for"
        return
    if library.cuda > machine.cuda[0]:
        newest = "{}.{}".format(*machine.cuda)
        yield (
            f"the NVIDIA driver is too old: it runs CUDA up to {newest}, {name} {library.version} needs"
            f" {library.cuda}.0; install a newer driver, or {name} for CUDA {machine.cuda[0]}"
        )
    if card.compute_capability < (least := _LEAST_CAPABILITY.get(library.cuda, (0, 0))):
        yield (
            f"{card.name} has compute capability {'{}.{}'.format(*card.compute_capability)}, {name} for CUDA"
            f" {library.cuda} needs {'{}.{}'.format(*least)}"
        )


def _same_version(left: str, right: str) -> bool:
    return left.split(".")[:_VERSION_PARTS] == right.split(".")[:_VERSION_PARTS]
