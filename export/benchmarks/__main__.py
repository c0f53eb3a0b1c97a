"""`python -m export.benchmarks NAME`: what is measured of exports, by the runner of all benchmarks."""

from __future__ import annotations

import sys

from export.benchmarks.compatibility import CompatibilityBenchmark
from export.benchmarks.exports import ExportsBenchmark
from export.benchmarks.gpu import GpuBenchmark
from loadtest.benchmarks.runner import main

BENCHMARKS = (ExportsBenchmark, CompatibilityBenchmark, GpuBenchmark)

if __name__ == "__main__":
    sys.exit(main(BENCHMARKS, prog="export.benchmarks"))
