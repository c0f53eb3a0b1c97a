"""The runner of all benchmarks: command line, figures file and page.

A benchmark is a declaration: a subclass of `Benchmark` names what is measured, step by step, and what its page shows.
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

from bertserve.loadtest.benchmarks.server_process import BertServer
from bertserve.loadtest.benchmarks.show import rendered
from bertserve.loadtest.benchmarks.store import Store
from bertserve.loadtest.benchmarks.turns import Turn, measure_round, round_name
from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.generator.child import Child
from bertserve.loadtest.generator.workload import find_bundle
from bertserve.loadtest.report import machine
from bertserve.loadtest.report.progress import Progress
from bertserve.serving.host import available_cpus
from bertserve.serving.options import OptionParser

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from bertserve.loadtest.benchmarks.server_process import ServerProcess
    from bertserve.loadtest.benchmarks.store import Step
    from bertserve.loadtest.generator.workload import Bundle

_INTERRUPTED = 130
_Opened = TypeVar("_Opened")


@dataclass(slots=True, frozen=True)
class Option:
    """An option of one benchmark. Its type is that of the default, or `kind`; a number must be positive.

    An option whose default is False takes no value; one whose default is a tuple takes several.
    """

    flag: str
    default: Any
    help: str
    kind: Callable[[str], Any] | None = None

    @property
    def name(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")

    def add(self, parser: argparse.ArgumentParser) -> None:
        if self.default is False:
            parser.add_argument(self.flag, action="store_true", help=self.help)
            return
        several = isinstance(self.default, tuple)
        example = next(iter(self.default), "") if several else self.default
        kind = self.kind or (Path if isinstance(example, Path) else type(example))
        nargs = "+" if several else None
        parser.add_argument(self.flag, type=kind, nargs=nargs, default=self.default, help=self.help)


class Benchmark:
    """Base class of the benchmarks. The page is the template `<name>.md.j2` beside the module.

    Attributes:
        name: On the command line.
        purpose: The question that it answers, in one line.
        out: File of its figures; empty for `docs/benchmarks/<name>.json`.
        rounds: Default number of interleaved rounds; 0 if that is no option.
        seconds: Default length of a measurement; 0 if that is no option.
        models: Default model repository; empty if none is served.
        tokens: Default lengths of the texts; None if they are no option.
        own: Its own options.
        errors: Exceptions that end a run with their message.
    """

    name: ClassVar[str]
    purpose: ClassVar[str]
    out: ClassVar[str] = ""
    rounds: ClassVar[int] = 0
    seconds: ClassVar[float] = 0.0
    models: ClassVar[str] = "models"
    tokens: ClassVar[tuple[int, ...] | None] = None
    own: ClassVar[tuple[Option, ...]] = ()
    errors: ClassVar[tuple[type[Exception], ...]] = (BenchError,)

    def __init__(self, options: argparse.Namespace) -> None:
        """Takes the options of the command line; starts nothing before the first missing step."""
        self.options = options
        self.stack = contextlib.ExitStack()
        self.store = Store(options.out, {})
        self.progress = Progress(0.0)
        self.drawn: dict[str, str] = {}
        self._opened: dict[object, Any] = {}

    @property
    def bundle(self) -> Bundle:
        return find_bundle(self.options.models, self.options.precision)

    def say(self, words: str) -> None:
        self.progress.say(words)

    def opened(self, key: object, made: Callable[[], contextlib.AbstractContextManager[_Opened]]) -> _Opened:
        """A resource by key: opened on first use, closed at the end."""
        if key not in self._opened:
            self.say(f"starting {key}")
            self._opened[key] = self.stack.enter_context(made())
        found: _Opened = self._opened[key]
        return found

    def server(self, *words: str, threads: int = 0) -> BertServer:
        """The server with these command-line options, which runs until the end."""
        options, cores = self.options, threads or available_cpus()
        made = partial(BertServer, options.models, options.precision, cores, *words)
        return self.opened(("the server", *words), made)

    @cached_property
    def client(self) -> Child:
        """The client of the closed loop."""
        return self.stack.enter_context(Child("bertserve.loadtest.generator.client"))

    def asked(
        self,
        name: str,
        server: ServerProcess,
        place: tuple[str, int, str],
        size: int,
        texts: Mapping[int, Sequence[str]],
    ) -> Callable[..., Turn]:
        """Tells the client how to send requests; returns a function from tokens and connections to a turn.

        Args:
            name: Prefix of its samples, before the number of connections.
            server: Server whose CPU time is counted.
            place: The client's form, the port, and the endpoint.
            size: Numbers in an answer.
            texts: Texts by their number of tokens.
        """
        form, port, endpoint = place
        way: dict[str, Any] = {"way": name, "form": form, "port": port, "endpoint": endpoint}
        self.client.ask("open", hidden_size=size, texts=texts, **way)

        def turn(tokens: int, connections: int, seconds: float = 0.0, *, is_frozen: bool = False) -> Turn:
            arguments = {"way": name, "tokens": tokens, "connections": connections}
            seconds = seconds or self.options.seconds
            return Turn(f"{name} {connections}", self.client, arguments, seconds, server, is_frozen)

        return turn

    def raw_engine(self, bundle: Bundle, ids: dict[int, list[list[int]]]) -> Child:
        """A bare loop around ONNX Runtime with a bundle's artifact and token ids by length, in its own process."""
        raw = self.stack.enter_context(Child("bertserve.loadtest.benchmarks.raw_engine"))
        opened: dict[str, Any] = {"artifact": str(bundle.artifact), "names": list(bundle.inputs), "texts": ids}
        raw.ask("open", threads=available_cpus(), cores=os.cpu_count(), **opened)
        return raw

    def model_facts(self) -> dict[str, str]:
        """The served model: figures of two models never share a table."""
        bundle = self.bundle
        digest = hashlib.sha256(bundle.artifact.read_bytes()).hexdigest()
        return {"model": bundle.model, "version": str(bundle.version), bundle.artifact.name: digest}

    def facts(self) -> dict[str, Any]:
        """Facts that all measurements of one table must share."""
        return {**(self.model_facts() if self.models else {}), "seconds": self.options.seconds}

    def steps(self) -> Iterator[Step]:
        """Names of all steps and their measurements, in order; each may need those before it.

        By default the steps are the rounds: all subjects in turns, length by length.
        """
        for number in range(1, self.options.rounds + 1):
            for tokens in self.options.tokens:
                yield round_name(number, tokens), partial(self.measure, number, tokens)

    def turns(self, tokens: int) -> Iterable[Turn]:
        """A round at one length; the two sides of a ratio are neighbors, because the machine's speed drifts."""
        raise NotImplementedError(f"{self.name} has no turns of {tokens} tokens")

    def measure(self, number: int, tokens: int) -> dict[str, Any]:  # noqa: ARG002  for those whose rounds differ
        """Measures a round: the samples by subject, as JSON values."""
        return measure_round(list(self.turns(tokens)), self.say)

    def figures(self, store: Store) -> dict[str, Any]:  # noqa: ARG002  for templates that need no more
        """Values for the template besides the store, as far as measured."""
        return {}

    def plots(self, store: Store) -> dict[str, str]:  # noqa: ARG002  for pages without
        """SVG files beside the page, `<page>-<name>.svg`, or `<page>.svg` without a name."""
        return {}

    def page(self, store: Store) -> str:
        """The page in Markdown."""
        known = {"store": store, "steps": store.steps, "plots": self.drawn}
        return rendered(type(self), self.name, **known, **self.figures(store))

    def show(self, store: Store) -> str:
        """Writes the page and its plots; returns the text for the terminal."""
        self.drawn = self.plots(store)
        text, path = self.page(store), store.path.with_suffix(".md")
        path.write_text(text, encoding="utf-8")
        for name, svg in self.drawn.items():
            path.with_name(f"{path.stem}{'-' if name else ''}{name}.svg").write_text(svg, encoding="utf-8")
        return f"{text}\nwritten: {store.path} and {path}"


def parser(
    benchmarks: Sequence[type[Benchmark]], prog: str = "bertserve.loadtest.benchmarks"
) -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = OptionParser(
        prog=f"python -m {prog}",
        description="Run a benchmark on this machine, and write its figures and its page. Each step is saved when it is"
        " measured. Repeat an interrupted command to continue.",
    )
    commands = made.add_subparsers(dest="name", metavar="NAME", required=True)
    for kind in benchmarks:
        command = commands.add_parser(kind.name, help=kind.purpose, description=kind.purpose)
        out = Path(kind.out or f"docs/benchmarks/{kind.name}.json")
        shared = (
            Option("--models", kind.models and Path(kind.models), "Model repository (default: %(default)s)."),
            Option(
                "--precision", kind.models and "auto", "Precision, as for `bertserve serve` (default: %(default)s)."
            ),
            Option("--rounds", kind.rounds, "Number of interleaved rounds (default: %(default)s)."),
            Option("--seconds", float(kind.seconds), "Duration of a measurement, in seconds (default: %(default)s)."),
            Option("--tokens", kind.tokens, "Lengths of the texts, in tokens."),
        )
        always = (
            Option("--out", out, "File for the figures (default: %(default)s)."),
            Option("--minutes", 60.0, "Time limit, in minutes: start no step that would end later (default: 60)."),
            Option("--only", "", "Regular expression: measure only steps whose names match."),
            Option("--again", False, "Repeat measurements that are already in the file."),
            Option("--fresh", False, "Discard the figures in the file."),
            Option("--page-only", False, "Write the page from the file, without a measurement."),
        )
        for option in (*(option for option in shared if option.default), *always, *kind.own):
            option.add(command)
        command.set_defaults(kind=kind)
    return made


def main(
    benchmarks: Sequence[type[Benchmark]],
    argv: Sequence[str] | None = None,
    prog: str = "bertserve.loadtest.benchmarks",
) -> int:
    """Measures what is missing and writes the page.

    Returns:
        0 after the measurement, whatever the figures; 1 if it is impossible.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    made = parser(benchmarks, prog)
    options = made.parse_args(words)
    options.out = options.out.with_suffix(".json")
    for name, value in vars(options).items():
        numbers = value if isinstance(value, (list, tuple)) else [value]
        if any(type(n) in {int, float} and n <= 0 for n in numbers):
            made.error(f"--{name.replace('_', '-')} must be positive")
    benchmark: Benchmark = options.kind(options)
    try:
        with _ending_in_order(), benchmark.progress:
            store = _measured(benchmark, shlex.join(["python", "-m", prog, *words]))
        if store.steps:
            print(benchmark.show(store))
    except benchmark.errors as error:
        print(f"{options.name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    return int(not store.steps)


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
    """Lets SIGTERM leave this block as an exception: servers and children are ended on the way."""
    former = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
