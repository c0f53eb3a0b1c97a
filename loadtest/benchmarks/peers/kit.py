"""What benchmarks beside other servers share: where those are, and the models that all of them serve."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from loadtest.benchmarks.peers.servers import kit_of
from loadtest.benchmarks.runner import Benchmark

if TYPE_CHECKING:
    import argparse

    from loadtest.benchmarks.peers.servers import Kit


class PeerBenchmark(Benchmark):
    """A benchmark over the environments that `make bench-peers` installs."""

    models = "build/peers/models"
    tokens = (8, 32, 128)

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
