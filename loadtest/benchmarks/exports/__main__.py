"""`python -m bertserve.loadtest.benchmarks.exports NAME`: benchmarks that need the exporter."""

from __future__ import annotations

import sys

from bertserve.loadtest.benchmarks.exports.compatibility import CompatibilityBenchmark
from bertserve.loadtest.benchmarks.exports.exports import ExportsBenchmark
from bertserve.loadtest.benchmarks.exports.gpu import GpuBenchmark
from bertserve.loadtest.benchmarks.runner import main

BENCHMARKS = (ExportsBenchmark, CompatibilityBenchmark, GpuBenchmark)

if __name__ == "__main__":
    sys.exit(main(BENCHMARKS, prog="bertserve.loadtest.benchmarks.exports"))
