"""One LoadGen run in its own process, because LoadGen accepts only one configuration per process.

`python -m loadtest.mlperf.run` serves `run` to a `Child`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loadtest.errors import BenchError
from loadtest.generator.child import answer
from loadtest.generator.messages import Target
from loadtest.mlperf.library import Conversation, Library
from loadtest.mlperf.scenarios import BENCHMARK, SCENARIOS

MODES = {"performance": "PerformanceOnly", "accuracy": "AccuracyOnly"}
"""The modes and their names in LoadGen."""


def run(*, target: dict[str, Any], task: str, data: str | None, scenario: str, mode: str, conf: str, out: str) -> None:
    """Runs a scenario in a mode; LoadGen writes its logs to a directory.

    Args:
        target: The server, as plain values.
        task: One of `library.TASKS`.
        data: File with the samples; None: the built-in ones.
        scenario: One of `scenarios.SCENARIOS`.
        mode: One of `MODES`.
        conf: Settings file.
        out: Directory of the logs.

    Raises:
        BenchError: LoadGen is not installed, or the server did not answer every request.
    """
    try:
        import mlperf_loadgen as loadgen  # noqa: PLC0415  an extra's package
    except ImportError:
        raise BenchError("MLPerf LoadGen is not installed: pip install mlcommons-loadgen") from None
    way = SCENARIOS[scenario]
    settings = loadgen.TestSettings()
    if settings.FromConfig(conf, BENCHMARK, way.name):
        raise BenchError(f"LoadGen does not take {conf}")
    settings.scenario = getattr(loadgen.TestScenario, way.name)
    settings.mode = getattr(loadgen.TestMode, MODES[mode])
    logs = loadgen.LogSettings()
    logs.log_output.outdir = out
    logs.enable_trace = False
    conversation = Conversation(Target.read(target), Library.read(task, Path(data) if data else None))
    size = len(conversation.library.samples)
    with way.system(conversation) as asked:
        system = loadgen.ConstructSUT(asked.issue, lambda: None)
        # The samples are always in memory, so there is nothing to load or unload.
        library = loadgen.ConstructQSL(size, size, lambda _: None, lambda _: None)
        # Names a file that does not exist, so that LoadGen reads no audit configuration from the working directory.
        loadgen.StartTestWithLogSettings(system, library, settings, logs, str(Path(out, "no-audit.config")))
        loadgen.DestroyQSL(library)
        loadgen.DestroySUT(system)
    if asked.failure is not None:
        raise asked.failure


if __name__ == "__main__":
    answer({"run": run})
