"""`python -m loadtest.benchmarks NAME`: runs a benchmark of docs/benchmarks; `--help` lists the names."""

from __future__ import annotations

import sys

from loadtest.benchmarks import runner
from loadtest.benchmarks.batch import BatchBenchmark
from loadtest.benchmarks.fleet import FleetBenchmark
from loadtest.benchmarks.fronts import FrontsBenchmark
from loadtest.benchmarks.hostile.benchmark import HostileBenchmark
from loadtest.benchmarks.mlperf import MlperfBenchmark
from loadtest.benchmarks.peers.closed_loop import PeersBenchmark
from loadtest.benchmarks.peers.open_loop import OpenLoopBenchmark
from loadtest.benchmarks.rolling.benchmark import RollingBenchmark
from loadtest.benchmarks.scheduling import SchedulingBenchmark, SimulatedBenchmark
from loadtest.benchmarks.server import ServerBenchmark
from loadtest.benchmarks.swap import SwapBenchmark
from loadtest.benchmarks.t4 import T4Benchmark
from loadtest.benchmarks.wires.benchmark import WiresBenchmark

BENCHMARKS: tuple[type[runner.Benchmark], ...] = (
    ServerBenchmark,
    PeersBenchmark,
    OpenLoopBenchmark,
    MlperfBenchmark,
    SchedulingBenchmark,
    SimulatedBenchmark,
    RollingBenchmark,
    FleetBenchmark,
    SwapBenchmark,
    T4Benchmark,
    WiresBenchmark,
    FrontsBenchmark,
    HostileBenchmark,
    BatchBenchmark,
)

if __name__ == "__main__":
    sys.exit(runner.main(BENCHMARKS))
