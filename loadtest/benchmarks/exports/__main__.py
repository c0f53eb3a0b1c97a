"""`python -m loadtest.benchmarks.exports NAME`: benchmarks that need the exporter, run by the common runner."""

from __future__ import annotations

import sys

from loadtest.benchmarks.exports.compatibility import CompatibilityBenchmark
from loadtest.benchmarks.exports.exports import ExportsBenchmark
from loadtest.benchmarks.exports.gpu import GpuBenchmark
from loadtest.benchmarks.runner import main

BENCHMARKS = (ExportsBenchmark, CompatibilityBenchmark, GpuBenchmark)

if __name__ == "__main__":
    sys.exit(main(BENCHMARKS, prog="loadtest.benchmarks.exports"))
