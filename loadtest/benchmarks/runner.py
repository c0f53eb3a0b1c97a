"""What all benchmarks share: their command line, the file of their figures, their page."""

from __future__ import annotations

import contextlib
import hashlib
import shlex
import signal
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from loadtest.benchmarks.store import Store
from loadtest.benchmarks.turns import round_name
from loadtest.errors import BenchError
from loadtest.generator.workload import find_bundle
from loadtest.report import machine
from loadtest.report.progress import Progress
from loadtest.report.tables import Table, as_markdown, as_text
from serving.options import OptionParser

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from loadtest.benchmarks.store import Step
    from loadtest.generator.workload import Bundle

_INTERRUPTED = 130


@dataclass(slots=True, frozen=True)
class Picture:
    """A plot beside the page, in `<page>-<name>.svg`; without a name in `<page>.svg`."""

    name: str
    svg: str
    words: str = ""

    def path(self, page: Path) -> Path:
        return page.with_name(f"{page.stem}-{self.name}.svg") if self.name else page.with_suffix(".svg")


Part = Table | Picture | str


@dataclass(slots=True, frozen=True)
class Page:
    """What a benchmark shows.

    Attributes:
        title: Its first line.
        method: How it was measured, in sentences.
        parts: Tables, pictures and paragraphs, in reading order.
        verdict: What comes before everything else; may be empty.
        facts: What a reader must know beside the machine.
    """

    title: str
    method: str
    parts: Sequence[Part]
    verdict: str = ""
    facts: dict[str, str] | None = None

    def markdown(self, store: Store) -> str:
        facts = {**store.facts["machine"], **(self.facts or {})}
        parts = [
            f"# {self.title}",
            self.verdict,
            f"Made by `{store.command}`; `{store.path.name}` holds every figure. {self.method}",
            "\n".join(f"- {name}: {value}" for name, value in facts.items()),
            *(_markdown(part, store.path) for part in self.parts),
        ]
        return "\n\n".join(filter(None, parts)) + "\n"

    def text(self) -> str:
        """What a terminal shows of it."""
        return "\n\n".join(filter(None, [self.verdict, *(as_text(p) for p in self.parts if isinstance(p, Table))]))

    def write(self, store: Store) -> None:
        """Writes the page and its plots beside the file of the figures."""
        for part in self.parts:
            if isinstance(part, Picture):
                part.path(store.path).write_text(part.svg, encoding="utf-8")
        store.path.with_suffix(".md").write_text(self.markdown(store), encoding="utf-8")


def _markdown(part: Part, page: Path) -> str:
    if isinstance(part, Table):
        return as_markdown(part)
    if isinstance(part, Picture):
        return f"![{part.words or part.name}]({part.path(page).name})"
    return part


class Benchmark(ABC):
    """One of the benchmarks: what it measures, step by step, and its page.

    Attributes:
        name: On the command line.
        purpose: What it answers, in a line.
        out: Where its figures are kept in docs/benchmarks, without `.json`.
        rounds: How often what is compared is measured in turns, by default.
        seconds: Length of a measurement, by default.
        models: The model repository, by default.
        tokens: Lengths of the texts, by default; None where they are no option.
        probe_s: Length of a run of its search for a capacity, by default; None where there is none.
        length: The one length of the texts, where they are none.
        precision: The artifact's, whatever the command line says; None where that decides.
    """

    name: ClassVar[str]
    purpose: ClassVar[str]
    out: ClassVar[str] = ""
    rounds: ClassVar[int]
    seconds: ClassVar[float]
    models: ClassVar[str] = "models"
    tokens: ClassVar[tuple[int, ...] | None] = None
    probe_s: ClassVar[float | None] = None
    length: ClassVar[int] = 8
    precision: ClassVar[str | None] = None

    def __init__(self, options: argparse.Namespace) -> None:
        """Takes the options of the command line; nothing is started before the first step that is missing."""
        self.options = options
        if self.precision is not None:
            options.precision = self.precision
        self.stack = contextlib.ExitStack()
        self.store = Store(options.out, {})
        self.progress: Progress | None = None

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> tuple[str, ...]:
        """Adds options of its own, and returns the names of those that must be positive."""
        if cls.probe_s is None:
            return ()
        parser.add_argument("--probe-s", type=float, default=cls.probe_s, help="a run of a search (%(default)s)")
        return ("probe_s",)

    @property
    def bundle(self) -> Bundle:
        return find_bundle(self.options.models, self.options.precision)

    def say(self, words: str) -> None:
        """Shows the progress."""
        if self.progress is not None:
            self.progress.say(words)

    def model_facts(self) -> dict[str, str]:
        """What is served: figures of two models never stand in one table."""
        bundle = self.bundle
        digest = hashlib.sha256(bundle.artifact.read_bytes()).hexdigest()
        return {"model": bundle.model, "version": str(bundle.version), bundle.artifact.name: digest}

    def facts(self) -> dict[str, Any]:
        """What all measurements must have in common to stand in one table."""
        return {**self.model_facts(), "seconds": self.options.seconds}

    def steps(self) -> Iterator[Step]:
        """The names of all steps and what measures each of them, in order; each may need those before it.

        Without others they are the rounds: everything that is compared, in turns, length by length.
        """
        lengths = getattr(self.options, "tokens", (self.length,))
        for number in range(1, self.options.rounds + 1):
            for tokens in lengths:
                yield round_name(number, tokens), partial(self.measure, number, tokens)

    def measure(self, number: int, tokens: int) -> dict[str, Any]:
        """A round: the samples by subject, as JSON values."""
        raise NotImplementedError(f"{self.name} has no rounds: {number}, {tokens}")

    @abstractmethod
    def page(self, store: Store) -> Page:
        """The page, as far as it has been measured."""

    def failed(self, store: Store) -> bool:
        """Whether a promise was broken, which the exit code says; figures alone break none."""
        return not store.steps


def parser(benchmarks: Sequence[type[Benchmark]]) -> argparse.ArgumentParser:
    """The command line."""
    made = OptionParser(
        prog="python -m loadtest.benchmarks",
        description="Measure on this machine. Each step is kept in the file named by --out as soon as it is measured: "
        "the same command goes on where it was ended. The page beside the file is written anew each time.",
    )
    commands = made.add_subparsers(dest="name", metavar="NAME", required=True)
    for kind in benchmarks:
        command = commands.add_parser(kind.name, help=kind.purpose, description=kind.purpose)
        command.add_argument("--models", type=Path, default=Path(kind.models), help="model repository (%(default)s)")
        command.add_argument("--precision", default="auto", help="as `bertserve serve` has it (%(default)s)")
        command.add_argument("--rounds", type=int, default=kind.rounds, help="measured in turns (%(default)s)")
        command.add_argument("--seconds", type=float, default=kind.seconds, help="of a measurement (%(default)s)")
        if kind.tokens is not None:
            command.add_argument("--tokens", type=int, nargs="+", default=kind.tokens, help="lengths of the texts")
        out = Path("docs/benchmarks", f"{kind.out or kind.name}.json")
        command.add_argument("--out", type=Path, default=out, help="file of the figures (%(default)s)")
        command.add_argument("--minutes", type=float, default=60.0, help="begin no step that would end later")
        command.add_argument("--only", default="", help="measure only steps whose names hold this")
        command.add_argument("--fresh", action="store_true", help="throw away what the file holds")
        command.add_argument("--page-only", action="store_true", help="measure nothing, write the page anew")
        command.set_defaults(kind=kind, positive=("rounds", "seconds", "minutes", *kind.add_options(command)))
    return made


def main(benchmarks: Sequence[type[Benchmark]], argv: Sequence[str] | None = None) -> int:
    """Measures what is missing and writes the page.

    Returns:
        0 once it is measured, whatever the figures; 1 where it cannot be, or a promise is broken.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    made = parser(benchmarks)
    options = made.parse_args(words)
    if options.out.suffix == ".md":
        options.out = options.out.with_suffix(".json")
    values = {name: getattr(options, name) for name in options.positive}
    if wrong := [name for name, value in values.items() if value is not None and value <= 0]:
        made.error(f"--{wrong[0].replace('_', '-')} must be positive")
    if min(getattr(options, "tokens", None) or [1]) < 1:
        made.error("--tokens must be positive")
    benchmark: Benchmark = options.kind(options)
    try:
        with _ending_in_order(), Progress(0.0) as benchmark.progress:
            store = _measured(benchmark, shlex.join(["python", "-m", "loadtest.benchmarks", *words]))
    except BenchError as error:
        print(f"{options.name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    if store.steps:
        page = benchmark.page(store)
        page.write(store)
        print(page.text())
        print(f"\nwritten: {store.path} and {store.path.with_suffix('.md')}")
    return int(benchmark.failed(store))


def _measured(benchmark: Benchmark, command: str) -> Store:
    options = benchmark.options
    if options.page_only:
        return Store.read(options.out)
    facts = {"machine": machine.facts(), **benchmark.facts()}
    store = Store.open(options.out, facts, fresh=options.fresh)
    store.command = command
    benchmark.store = store
    with benchmark.stack:
        store.fill(benchmark.steps(), options.minutes, lambda name: options.only in name, benchmark.say)
    return store


@contextlib.contextmanager
def _ending_in_order() -> Iterator[None]:
    """Lets SIGTERM leave this block as an exception does: servers and children are ended on the way."""
    former = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
