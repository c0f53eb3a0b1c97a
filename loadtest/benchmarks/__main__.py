"""`python -m loadtest.benchmarks NAME`: runs a benchmark of docs/benchmarks; `--help` lists the names."""

from __future__ import annotations

import sys

from loadtest.benchmarks import runner
from loadtest.benchmarks.fronts import FrontsBenchmark
from loadtest.benchmarks.peers.closed_loop import PeersBenchmark
from loadtest.benchmarks.peers.open_loop import OpenLoopBenchmark
from loadtest.benchmarks.server import ServerBenchmark
from loadtest.benchmarks.t4 import T4Benchmark

BENCHMARKS: tuple[type[runner.Benchmark], ...] = (
    ServerBenchmark,
    PeersBenchmark,
    OpenLoopBenchmark,
    T4Benchmark,
    FrontsBenchmark,
)

if __name__ == "__main__":
    sys.exit(runner.main(BENCHMARKS))
