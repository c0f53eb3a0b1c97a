"""What benchmarks beside other servers share: where those are, and the models that all of them serve."""

from __future__ import annotations

import subprocess
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from loadtest.benchmarks.peers.servers import kit_of
from loadtest.benchmarks.runner import Benchmark
from loadtest.errors import BenchError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from loadtest.benchmarks.peers.servers import Kit
    from loadtest.benchmarks.store import Store

_SHOWN_PACKAGES = {
    "triton": ("nvidia-pytriton", "numpy", "onnxruntime", "openvino", "tokenizers"),
    "infinity": ("infinity_emb", "torch", "transformers", "sentence-transformers", "optimum-onnx", "onnxruntime"),
    "fastapi": ("fastapi", "uvicorn", "onnxruntime", "tokenizers"),
}


class PeerBenchmark(Benchmark):
    """A benchmark over the environments that `make bench-peers` installs."""

    models = "build/peers/models"
    tokens: ClassVar[tuple[int, ...] | None] = (8, 32, 128)

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> tuple[str, ...]:
        home = Path("build/peers")
        parser.add_argument("--environments", type=Path, default=home, help="the peers' environments (%(default)s)")
        return ()

    @cached_property
    def kit(self) -> Kit:
        return kit_of(self.options.models, self.options.environments)

    def model_facts(self) -> dict[str, str]:
        return self.kit.facts()

    def versions(self) -> dict[str, dict[str, str]]:
        """What is installed for each peer, package by package: a step."""
        environments = self.options.environments
        return {name: _versions(environments / name, packages) for name, packages in _SHOWN_PACKAGES.items()}


def versions_of(store: Store) -> dict[str, str]:
    """The same as facts of a page."""
    joined = {}
    for name, versions in store.steps["versions"].items():
        joined[name] = ", ".join(f"{package} {version}" for package, version in versions.items())
    return joined


def _versions(environment: Path, packages: Sequence[str]) -> dict[str, str]:
    """The versions in another environment, as its own interpreter reports them."""
    python = environment / "bin" / "python"
    if not python.exists():
        raise BenchError(f"{environment} is no virtual environment; make it with `make bench-peers`")
    code = "import importlib.metadata as m, sys; print(*[m.version(name) for name in sys.argv[1:]])"
    shown = subprocess.run([python, "-c", code, *packages], check=True, capture_output=True, text=True)
    return dict(zip(packages, shown.stdout.split(), strict=True))
