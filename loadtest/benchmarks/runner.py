"""The runner of all benchmarks: their command line, the file of their figures, their page.

A benchmark is a declaration: a subclass of `Benchmark` names what is measured, step by step, and how it is shown.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import signal
import sys
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from loadtest.benchmarks.server_process import BertServer
from loadtest.benchmarks.store import Store
from loadtest.benchmarks.turns import round_name
from loadtest.errors import BenchError
from loadtest.generator.child import Child
from loadtest.generator.workload import find_bundle
from loadtest.report import machine
from loadtest.report.progress import Progress
from loadtest.report.tables import Table, as_markdown, as_text
from serving.host import available_cpus
from serving.options import OptionParser

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from loadtest.benchmarks.store import Step
    from loadtest.generator.workload import Bundle

_INTERRUPTED = 130
_Opened = TypeVar("_Opened")


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
    """A page: how it was measured, then tables, pictures and paragraphs in reading order.

    `verdict` comes before everything else; `facts` is what a reader must know beside the machine.
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


@dataclass(slots=True, frozen=True)
class Option:
    """An option of one benchmark. Its type is that of the default, or `kind`; a number must be positive, or `zero`.

    Where the default is False it takes no value, where it is a tuple it takes several.
    """

    flag: str
    default: Any
    help: str
    kind: Callable[[str], Any] | None = None
    zero: bool = False

    @property
    def name(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")

    def add(self, parser: argparse.ArgumentParser) -> None:
        if self.default is False:
            parser.add_argument(self.flag, action="store_true", help=self.help)
            return
        if isinstance(self.default, tuple):
            kind = self.kind or type(next(iter(self.default), ""))
            parser.add_argument(self.flag, type=kind, nargs="+", default=self.default, help=self.help)
            return
        kind = self.kind or type(self.default)
        kind = Path if isinstance(self.default, Path) else kind
        parser.add_argument(self.flag, type=kind, default=self.default, help=self.help)


class Benchmark:
    """One of the benchmarks.

    Attributes:
        name: On the command line.
        purpose: What it answers, in a line.
        out: Where its figures are kept in docs/benchmarks, without `.json`.
        rounds: How often what is compared is measured in turns, by default; 0 where that is no option.
        seconds: Length of a measurement, by default; likewise.
        models: The model repository, by default; empty where none is served.
        tokens: Lengths of the texts, by default; None where they are no option.
        length: The one length of the texts, where they are none.
        precision: The artifact's, whatever the command line says; None where that decides.
        own: Its own options.
    """

    name: ClassVar[str]
    purpose: ClassVar[str]
    out: ClassVar[str] = ""
    rounds: ClassVar[int] = 0
    seconds: ClassVar[float] = 0.0
    models: ClassVar[str] = "models"
    tokens: ClassVar[tuple[int, ...] | None] = None
    length: ClassVar[int] = 8
    precision: ClassVar[str | None] = None
    own: ClassVar[tuple[Option, ...]] = ()
    errors: ClassVar[tuple[type[Exception], ...]] = (BenchError,)
    """What ends a run with its sentence."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Takes the options of the command line; nothing is started before the first step that is missing."""
        self.options = options
        if self.precision is not None:
            options.precision = self.precision
        self.stack = contextlib.ExitStack()
        self.store = Store(options.out, {})
        self.progress: Progress | None = None
        self._opened: dict[object, Any] = {}

    @property
    def bundle(self) -> Bundle:
        return find_bundle(self.options.models, self.options.precision)

    def say(self, words: str) -> None:
        """Shows the progress."""
        if self.progress is not None:
            self.progress.say(words)

    def opened(self, key: object, made: Callable[[], contextlib.AbstractContextManager[_Opened]]) -> _Opened:
        """What was opened under that key; it is made and entered when it is first asked for, and left at the end."""
        if key not in self._opened:
            self.say(f"starting {key}")
            self._opened[key] = self.stack.enter_context(made())
        found: _Opened = self._opened[key]
        return found

    def only(self, key: object, made: Callable[[], contextlib.AbstractContextManager[_Opened]]) -> _Opened:
        """The same, where only one runs at a time."""
        if key not in self._opened:
            self.stack.close()
            self._opened.clear()
        return self.opened(key, made)

    def server(self, *words: str) -> BertServer:
        """The server with these words on its command line."""
        options = self.options
        bert = partial(BertServer, options.models, options.precision, available_cpus(), *words)
        return self.opened(("the server", *words), bert)

    @cached_property
    def client(self) -> Child:
        return self.stack.enter_context(Child("loadtest.generator.client"))

    def raw_engine(self, ids: dict[int, list[list[int]]]) -> Child:
        """A bare loop around ONNX Runtime with the bundle's artifact and token ids by length, in its own process."""
        raw, bundle = self.stack.enter_context(Child("loadtest.benchmarks.raw_engine")), self.bundle
        opened: dict[str, Any] = {"artifact": str(bundle.artifact), "names": list(bundle.inputs), "texts": ids}
        raw.ask("open", threads=available_cpus(), cores=os.cpu_count(), **opened)
        return raw

    def model_facts(self) -> dict[str, str]:
        """What is served: figures of two models never stand in one table."""
        bundle = self.bundle
        digest = hashlib.sha256(bundle.artifact.read_bytes()).hexdigest()
        return {"model": bundle.model, "version": str(bundle.version), bundle.artifact.name: digest}

    def facts(self) -> dict[str, Any]:
        """What all measurements must have in common to stand in one table."""
        return {**(self.model_facts() if self.models else {}), "seconds": self.options.seconds}

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

    def page(self, store: Store) -> Page:
        """The page, as far as it has been measured."""
        raise NotImplementedError(f"{self.name} has no page of its own: {store.path}")

    def show(self, store: Store) -> str:
        """Writes the page; returns what a terminal shows of it."""
        page = self.page(store)
        page.write(store)
        return f"{page.text()}\n\nwritten: {store.path} and {store.path.with_suffix('.md')}"

    def failed(self, store: Store) -> bool:
        """Whether a promise was broken, which the exit code says; figures alone break none."""
        return not store.steps


def model_of(store: Store) -> dict[str, str]:
    """The model as a fact of a page."""
    return {"model": f"{store.facts['model']} version {store.facts['version']}"}


def parser(benchmarks: Sequence[type[Benchmark]], prog: str = "loadtest.benchmarks") -> argparse.ArgumentParser:
    """The command line."""
    made = OptionParser(
        prog=f"python -m {prog}",
        description="Measure on this machine. Each step is kept in the file named by --out as soon as it is measured: "
        "the same command goes on where it was ended. The page beside the file is written anew each time.",
    )
    commands = made.add_subparsers(dest="name", metavar="NAME", required=True)
    for kind in benchmarks:
        command = commands.add_parser(kind.name, help=kind.purpose, description=kind.purpose)
        served = [
            Option("--models", Path(kind.models), "model repository (%(default)s)"),
            Option("--precision", "auto", "as `bertserve serve` has it (%(default)s)"),
        ]
        shared = [
            *(served if kind.models else ()),
            *([Option("--rounds", kind.rounds, "measured in turns (%(default)s)")] if kind.rounds else ()),
            *([Option("--seconds", float(kind.seconds), "of a measurement (%(default)s)")] if kind.seconds else ()),
            Option("--out", Path("docs/benchmarks", f"{kind.out or kind.name}.json"), "the figures (%(default)s)"),
            Option("--minutes", 60.0, "begin no step that would end later"),
            Option("--only", "", "measure only steps whose names match this regular expression"),
            Option("--again", False, "measure them anew, where the file has them already"),
            Option("--fresh", False, "throw away what the file holds"),
            Option("--page-only", False, "measure nothing, write the page anew"),
        ]
        for option in (*shared, *kind.own):
            option.add(command)
        if kind.tokens is not None:
            command.add_argument("--tokens", type=int, nargs="+", default=kind.tokens, help="lengths of the texts")
        command.set_defaults(kind=kind, zero=[option.name for option in kind.own if option.zero])
    return made


def main(
    benchmarks: Sequence[type[Benchmark]], argv: Sequence[str] | None = None, prog: str = "loadtest.benchmarks"
) -> int:
    """Measures what is missing and writes the page.

    Returns:
        0 once it is measured, whatever the figures; 1 where it cannot be, or a promise is broken.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    made = parser(benchmarks, prog)
    options = made.parse_args(words)
    if options.out.suffix == ".md":
        options.out = options.out.with_suffix(".json")
    for name, value in vars(options).items():
        if type(value) in {int, float} and value <= 0 and (value < 0 or name not in options.zero):
            made.error(f"--{name.replace('_', '-')} must be positive")
    if min(getattr(options, "tokens", None) or [1]) < 1:
        made.error("--tokens must be positive")
    benchmark: Benchmark = options.kind(options)
    try:
        with _ending_in_order(), Progress(0.0) as benchmark.progress:
            store = _measured(benchmark, shlex.join(["python", "-m", prog, *words]))
        if store.steps:
            print(benchmark.show(store))
    except benchmark.errors as error:
        print(f"{options.name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
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
        store.fill(benchmark.steps(), options.minutes, options.only, benchmark.say, again=options.again)
    return store


@contextlib.contextmanager
def _ending_in_order() -> Iterator[None]:
    """Lets SIGTERM leave this block as an exception does: servers and children are ended on the way."""
    former = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
