"""`make bench-peers`: our server beside those that a user would pick instead, in one run on this machine.

    python -m loadtest.benchmarks.peers --models build/peers/models --tokens 8 32 128 --out docs/benchmarks/peers.json

What was measured is kept in the file named by --out after each round: the same command goes on where it was
ended, so that a comparison can be made in several sittings (--minutes).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loadtest.benchmarks.ending import in_order
from loadtest.benchmarks.peers import page, servers, store
from loadtest.benchmarks.peers.rounds import Rounds
from loadtest.benchmarks.peers.subjects import SERVERS, subjects
from loadtest.benchmarks.server.subjects import LENGTHS
from loadtest.errors import BenchError
from loadtest.generator.child import Child
from loadtest.generator.workload import find_bundle, make_texts
from loadtest.report import machine

if TYPE_CHECKING:
    from collections.abc import Sequence

_TEXTS_PER_LENGTH = 200
_SHOWN_PACKAGES = {
    "triton": ("nvidia-pytriton", "numpy", "onnxruntime", "openvino", "tokenizers"),
    "infinity": ("infinity_emb", "torch", "transformers", "sentence-transformers", "optimum-onnx", "onnxruntime"),
    "fastapi": ("fastapi", "uvicorn", "onnxruntime", "tokenizers"),
}


@dataclass(slots=True, frozen=True)
class Settings:
    """What a run is told.

    Attributes:
        models: A model repository with INT8 artifacts for both CPU engines.
        environments: Holds the peers' virtual environments.
        lengths: Tokens of the texts.
        rounds: Rounds that each length shall have in the end.
        seconds: Length of a measurement.
        minutes: No round is started that would end later.
        out: The file of the samples; the page and the plot stand beside it.
        fresh: Whether what the file holds is thrown away.
    """

    models: Path
    environments: Path
    lengths: tuple[int, ...]
    rounds: int
    seconds: float
    minutes: float
    out: Path
    fresh: bool


def run(settings: Settings) -> store.Store:
    """Measures what is missing and returns everything.

    Raises:
        BenchError: A server does not start, a reply is wrong, or the file holds something else.
    """
    kit = servers.kit_of(settings.models, settings.environments)
    facts = store.Facts(machine.facts(), _model(kit), settings.seconds)
    found = store.Store(facts) if settings.fresh else store.read(settings.out, facts)
    found.versions = {name: _versions(settings.environments / name, names) for name, names in _SHOWN_PACKAGES.items()}
    missing = [length for length in settings.lengths if len(found.lengths.get(length, [])) < settings.rounds]
    if missing:
        _measure(settings, kit, found, missing)
    return found


def _measure(settings: Settings, kit: servers.Kit, found: store.Store, lengths: Sequence[int]) -> None:
    fp32 = find_bundle(settings.models, "fp32")
    texts = {tokens: make_texts(kit.ort.path, tokens, _TEXTS_PER_LENGTH) for tokens in lengths}
    started, longest = time.perf_counter(), 0.0
    with contextlib.ExitStack() as stack:
        places = {name: servers.place(kit, name) for name in SERVERS}
        for name, place in places.items():
            _show(f"starting {name}")
            stack.enter_context(place.server)
        modules = {
            "fp32": "loadtest.benchmarks.raw_engine",
            "raw": "loadtest.benchmarks.raw_engine",
            "client": "loadtest.benchmarks.peers.client",
        }
        children = {name: stack.enter_context(Child(module)) for name, module in modules.items()}
        rounds = Rounds(subjects(kit.ort.model), places, children)
        _show("comparing the vectors")
        rounds.open(fp32, kit.ort, texts, kit.threads)
        found.likeness = {name: min(cosine, found.likeness.get(name, 1.0)) for name, cosine in rounds.likeness.items()}
        found.idle_percent = rounds.idle_percent
        for number in range(1, settings.rounds + 1):
            for tokens in [tokens for tokens in lengths if len(found.lengths.get(tokens, [])) < number]:
                begun = time.perf_counter()
                if longest and begun - started + longest > 60 * settings.minutes:
                    _show(f"no time for another round within {settings.minutes:g} minutes: run it again to go on")
                    return
                _show(f"round {number} of {settings.rounds}")
                samples = rounds.run(tokens, settings.seconds, _show)
                found.lengths.setdefault(tokens, []).append(samples)
                found.write(settings.out)
                longest = max(longest, time.perf_counter() - begun)


def _model(kit: servers.Kit) -> dict[str, str]:
    digests = {
        bundle.artifact.name: hashlib.sha256(bundle.artifact.read_bytes()).hexdigest()
        for bundle in (kit.ort, kit.openvino)
    }
    return {"model": kit.ort.model, "version": str(kit.ort.version), **digests}


def _versions(environment: Path, packages: Sequence[str]) -> dict[str, str]:
    """The versions in another environment, as its own interpreter tells them."""
    python = environment / "bin" / "python"
    if not python.exists():
        raise BenchError(f"{environment} is no virtual environment; make it with `make bench-peers`")
    code = "import importlib.metadata as m, sys; print(*[m.version(name) for name in sys.argv[1:]])"
    told = subprocess.run([python, "-c", code, *packages], check=True, capture_output=True, text=True)
    return dict(zip(packages, told.stdout.split(), strict=True))


def parse(argv: Sequence[str] | None) -> Settings:
    """The settings that a command line names."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.benchmarks.peers", description=__doc__.partition("\n")[0])
    parser.add_argument("--models", type=Path, default=Path("build/peers/models"), help="model repository")
    parser.add_argument("--environments", type=Path, default=Path("build/peers"), help="the peers' environments")
    parser.add_argument("--tokens", type=int, nargs="+", default=LENGTHS, help="lengths of the texts")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that each length shall have (default: 5)")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a measurement (default: 2)")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no round that would end later")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/peers.json"), help="file of the samples")
    parser.add_argument("--fresh", action="store_true", help="throw away what the file holds")
    given = parser.parse_args(argv)
    if given.rounds < 1 or min(given.seconds, given.minutes) <= 0 or min(given.tokens) < 1:
        parser.error("--rounds, --seconds, --minutes and --tokens must be positive")
    words = vars(given)
    return Settings(lengths=tuple(words.pop("tokens")), **words)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the comparison; returns 0 once it is measured, whatever the verdict, and 1 where it cannot be."""
    settings = parse(argv)
    words = sys.argv[1:] if argv is None else argv
    try:
        with in_order():
            found = run(settings)
    except BenchError as error:
        print(f"bench-peers: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if found.lengths:
        page.write(found, settings.out, shlex.join(["python", "-m", "loadtest.benchmarks.peers", *words]))
        print(f"written: {settings.out}, its page and its plot")
    return 0


def _show(progress: str) -> None:
    print(progress, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
