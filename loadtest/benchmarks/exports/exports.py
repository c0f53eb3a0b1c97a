"""Measures what artifacts are worth and what an export costs: runs real exports and writes the page of their figures.

    python -m bertserve.loadtest.benchmarks.exports exports --labelled demo=stsb-test.csv minilm-sst2=sst2-test.tsv

Each export is `bertserve export` in a process of its own, with every artifact that this machine can run. All limits
are waived: a figure beyond its limit stands on the page with the limit's name and does not end the run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bertserve.export.errors import ExportError
from bertserve.export.recipe import ARTIFACTS, WAIVABLE
from bertserve.loadtest.benchmarks.exports import random_checkpoints
from bertserve.loadtest.benchmarks.runner import Benchmark, Option
from bertserve.loadtest.errors import BenchError
from bertserve.serving.engine.children import module_command
from bertserve.serving.host import installed_versions
from bertserve.serving.models.bundle import open_bundle

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bertserve.loadtest.benchmarks.store import Step, Store

_RANDOM_FORMS = ("fp32", "int8", "fp16")
_PACKAGES = ("onnxruntime", "openvino", "tensorrt_rtx_cu13", "torch", "transformers")


class ExportsBenchmark(Benchmark):
    """A step is an export."""

    name = "exports"
    out = "docs/benchmarks/accuracy.json"
    purpose = "Measure the accuracy of INT8, OpenVINO and fp16, and the time and memory of an export."
    models = ""
    errors = (BenchError, ExportError)
    own = (
        Option("--labelled", (), "Checkpoints, each with its labeled text: SOURCE=FILE.", str),
        Option("--random", (), f"BERT models with random weights: {', '.join(random_checkpoints.WHOLE)}.", str),
    )

    def facts(self) -> dict[str, Any]:
        return {"packages": {name: installed_versions(name).get(name, "missing") for name in _PACKAGES}}

    def steps(self) -> Iterator[Step]:
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        for word in self.options.labelled:
            source, _, reference = word.partition("=")
            engine = ("--tensorrt", "t4", "--tensorrt-precision", "int8", "--reference", reference)
            yield f"export {Path(source).name}", partial(_export, source, folder, tuple(ARTIFACTS), engine)
        for size in self.options.random:
            yield f"export bert-{size}", partial(_export_random, size, folder)

    def figures(self, store: Store) -> dict[str, Any]:
        exports = store.named("export ")
        artifacts = [(name, artifact) for name, found in exports.items() for artifact in found["artifacts"]]
        changes: dict[tuple[Any, ...], dict[str, float]] = {}
        for name, artifact in artifacts:
            for found in artifact["accuracy"]:
                key = (name, found["metric"], found["examples"], found["reference"], found["pytorch"])
                changes.setdefault(key, {})[artifact["file"]] = found["artifact"] - found["pytorch"]
        files = list(dict.fromkeys(file for found in changes.values() for file in found))
        every = [change for found in changes.values() for change in found.values()]
        return {"exports": exports, "artifacts": artifacts, "changes": changes, "files": files, "every": every}


def _export_random(size: str, folder: Path) -> dict[str, Any]:
    source = random_checkpoints.write(folder / f"bert-{size}", "bert", "embed", random_checkpoints.WHOLE[size])
    return _export(str(source), folder, _RANDOM_FORMS, ("--tensorrt", "t4"))


def _export(source: str, folder: Path, forms: Sequence[str], options: Sequence[str]) -> dict[str, Any]:
    """Runs an export and opens its bundle; raises ExportError with the export's own message if it failed."""
    name, repository = Path(source).name, folder / "models"
    command = module_command("bertserve", "export", source, "--name", name, "--out", str(repository))
    command += [word for form in forms for word in ("--precision", form)]
    command += [word for limit in WAIVABLE for word in ("--allow", limit)]
    started = time.perf_counter()
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, *options], **pipes) as child:
        for line in child.stdout or ():
            sys.stdout.write(line)
        said = child.stderr.read().strip() if child.stderr else ""
        # Peak of the command and of everything that it waited for, such as TensorRT's builder.
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - started
        if child.returncode != 0:
            raise ExportError(f"{name}: {said}")
    bundle = open_bundle(max((repository / name).iterdir(), key=lambda path: int(path.name)))
    artifacts = [
        {
            "file": artifact.file,
            "size_bytes": artifact.total_bytes,
            "parity": msgspec.to_builtins(artifact.evidence.parity),
            "accuracy": msgspec.to_builtins(artifact.evidence.accuracy),
            "batch_invariant": artifact.evidence.batch_invariant,
            "waived": list(artifact.waived),
        }
        for artifact in bundle.manifest.artifacts
    ]
    cost = {"seconds": seconds, "cpu_seconds": used.ru_utime + used.ru_stime, "peak_bytes": used.ru_maxrss << 10}
    return {"date": datetime.now(UTC).date().isoformat(), "artifacts": artifacts, **cost}
