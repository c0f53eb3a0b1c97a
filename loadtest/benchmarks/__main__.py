"""`python -m bertserve.loadtest.benchmarks NAME`: runs a benchmark of docs/benchmarks; `--help` lists the names."""

from __future__ import annotations

import sys

from bertserve.loadtest.benchmarks import runner
from bertserve.loadtest.benchmarks.fronts import FrontsBenchmark
from bertserve.loadtest.benchmarks.peers.closed_loop import PeersBenchmark
from bertserve.loadtest.benchmarks.peers.open_loop import OpenLoopBenchmark
from bertserve.loadtest.benchmarks.server import ServerBenchmark
from bertserve.loadtest.benchmarks.t4 import T4Benchmark

BENCHMARKS: tuple[type[runner.Benchmark], ...] = (
    ServerBenchmark,
    PeersBenchmark,
    OpenLoopBenchmark,
    T4Benchmark,
    FrontsBenchmark,
)

if __name__ == "__main__":
    sys.exit(runner.main(BENCHMARKS))
