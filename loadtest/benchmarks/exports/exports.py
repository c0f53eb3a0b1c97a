"""What artifacts are worth and what an export costs: runs real exports and writes the page of their figures.

    python -m loadtest.benchmarks.exports exports --labelled demo=stsb-test.csv minilm-sst2=sst2-test.tsv

Each export is `bertserve export` in a process of its own, with every artifact that this machine can run and
every limit waived, so that a figure beyond its limit stands on the page with the limit's name instead of
ending the run.
"""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from export.checkpoint.source import DEMO, find
from export.errors import ExportError
from export.recipe import FORMS, WAIVABLE
from loadtest.benchmarks.processes import Peaks, tree_bytes
from loadtest.benchmarks.runner import Benchmark, Option, Page, Part
from loadtest.benchmarks.show import figure, table
from loadtest.errors import BenchError
from serving.host import installed
from serving.models.bundle import open_bundle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from loadtest.benchmarks.store import Step, Store

_RANDOM: dict[str, dict[str, Any]] = {
    "base": {},
    "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
}
"""Where the sizes differ from those that Transformers takes by itself."""
_RANDOM_FORMS = ("fp32", "int8", "fp16")
_PACKAGES = ("onnxruntime", "openvino", "tensorrt_rtx_cu13", "torch", "transformers")
_STAGE = re.compile(r" {2}(?P<title>\S.*?) +(?P<seconds>\d+\.\d) s\n")
_SAMPLE_S = 0.1
_MIB, _GB = 1 << 20, 1e9

_METRICS = "Times 100, over public test sets; no artifact has seen any of their texts. PyTorch computes in fp32."
_ANSWERS = """\
Over the package's own texts, each alone, beside PyTorch alone; INT8 takes its ranges from every second of them.
`agree`: the same label, span or tag. `invariant`: whether a text's answer is the same padded in mixed batches;
only then is it batched. `limits broken`: an export stops at them unless its command line lets them pass, as it did
here. Figures of a TensorRT engine are those of the graph that it was built of, computed on a CPU."""
_COSTS = f"""\
From the command's start to its end, beside whatever else ran on the machine. Memory: the most that the command and
TensorRT's builder had resident together, looked at every {_SAMPLE_S * 1000:.0f} ms."""


class ExportsBenchmark(Benchmark):
    """A step is an export."""

    name = "exports"
    out = "accuracy"
    purpose = "what INT8, OpenVINO and fp16 cost in accuracy, and what an export costs"
    models = ""
    errors = (BenchError, ExportError)
    own = (
        Option("--labelled", (), "checkpoints, each with its labelled text: SOURCE=FILE", str),
        Option("--random", (), f"BERTs of random weights: {', '.join(_RANDOM)}", str),
    )

    def facts(self) -> dict[str, Any]:
        return {"packages": {name: installed(name).get(name, "missing") for name in _PACKAGES}}

    def steps(self) -> Iterator[Step]:
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        for word in self.options.labelled:
            source, _, reference = word.partition("=")
            engine = ("--tensorrt", "t4", "--tensorrt-precision", "int8", "--reference", reference)
            yield f"export {Path(source).name}", partial(_export, source, folder, tuple(FORMS), engine)
        for size in self.options.random:
            yield f"export bert-{size}", partial(_export_random, size, folder)

    def page(self, store: Store) -> Page:
        exports = [{"model": name, **found} for name, found in store.named("export ").items()]
        artifacts = [{"model": one["model"], **artifact} for one in exports for artifact in one["artifacts"]]
        metrics = [{**artifact, **metric} for artifact in artifacts for metric in artifact["accuracy"]]
        parts: list[Part] = [_metrics(metrics)] if metrics else []
        parts += [_answers(artifacts), *_costs(exports)]
        facts = {"Date": min(one["date"] for one in exports), **store.facts["packages"]}
        return Page("Every artifact beside PyTorch, and what an export costs", "", parts, facts=facts)


def _export_random(size: str, folder: Path) -> dict[str, Any]:
    checkpoint = random_checkpoint(size, folder / f"bert-{size}")
    return _export(str(checkpoint), folder, _RANDOM_FORMS, ("--tensorrt", "t4"))


def _export(source: str, folder: Path, forms: Sequence[str], options: Sequence[str]) -> dict[str, Any]:
    """Runs an export and opens its bundle; raises ExportError with the export's own sentence where it failed."""
    name, repository = Path(source).name, folder / "models"
    command = [sys.executable, "-P", "-m", "bertserve", "export", source, "--name", name, "--out", str(repository)]
    command += [word for form in forms for word in ("--precision", form)]
    command += [word for limit in WAIVABLE for word in ("--allow", limit)]
    stages, started, computed = [], time.perf_counter(), _children_cpu_s()
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, *options], **pipes) as child:
        with Peaks(_SAMPLE_S, memory=partial(tree_bytes, child.pid)) as peaks:
            for line in child.stdout or ():
                sys.stdout.write(line)
                if stage := _STAGE.fullmatch(line):
                    stages.append({"stage": stage["title"], "seconds": float(stage["seconds"])})
            child.wait()
        seconds = time.perf_counter() - started
        if child.returncode != 0:
            raise ExportError(f"{name}: {child.stderr.read().strip() if child.stderr else ''}")
    bundle = open_bundle(max((repository / name).iterdir(), key=lambda path: int(path.name)))
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "artifacts": [
            {
                "file": artifact.file,
                "size_bytes": artifact.total_bytes,
                "parity": msgspec.to_builtins(artifact.evidence.parity),
                "accuracy": msgspec.to_builtins(artifact.evidence.accuracy),
                "batch_invariant": artifact.evidence.batch_invariant,
                "waived": list(artifact.waived),
            }
            for artifact in bundle.manifest.artifacts
        ],
        "seconds": seconds,
        "cpu_seconds": _children_cpu_s() - computed,
        "peak_bytes": int(peaks.seen["memory"]),
        "stages": stages,
    }


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def random_checkpoint(size: str, folder: Path) -> Path:
    """Writes a BERT of random weights, of the sizes that its paper calls base and large.

    Its tokenizer is the demo model's, whose vocabulary is BERT's own.
    """
    # Slow to import, and needed here alone.
    import torch  # noqa: PLC0415
    from transformers.models.bert import BertConfig, BertModel  # noqa: PLC0415

    torch.manual_seed(0)
    BertModel(BertConfig(**_RANDOM[size])).save_pretrained(folder)
    shutil.copy(find(DEMO).path / "tokenizer.json", folder)
    return folder


def _metrics(rows: Sequence[dict[str, Any]]) -> Part:
    return table(
        "The task's own metric",
        _METRICS,
        rows,
        ("model", lambda row: row["model"]),
        ("artifact", lambda row: row["file"]),
        ("metric", lambda row: row["metric"]),
        ("over", lambda row: f"{row['examples']} of {row['reference']}"),
        ("PyTorch", figure("pytorch", 2)),
        ("artifact's", figure("artifact", 2)),
        ("difference", lambda row: f"{row['artifact'] - row['pytorch']:+.2f}"),
        words=4,
    )


def _answers(rows: Sequence[dict[str, Any]]) -> Part:
    def parity(cell: Callable[[dict[str, Any]], str], otherwise: str = "") -> Callable[[dict[str, Any]], str]:
        return lambda row: otherwise if row["parity"] is None else cell(row["parity"])

    def of_run(cell: Callable[[dict[str, Any]], str]) -> Callable[[dict[str, Any]], str]:
        return lambda row: "" if row["parity"] is None else cell(row)

    return table(
        "Raw answers and decisions",
        _ANSWERS,
        rows,
        ("model", lambda row: row["model"]),
        ("artifact", lambda row: row["file"]),
        ("MiB", lambda row: f"{row['size_bytes'] / _MIB:.1f}"),
        ("max diff", parity(lambda found: f"{found['max_abs_difference']:.1e}", "not run here")),
        ("cosine mean", parity(figure("cosine_mean", 5))),
        ("p1", parity(figure("cosine_p01", 5))),
        ("min", parity(figure("cosine_min", 5))),
        ("agree", parity(lambda found: "-" if found["agreement"] is None else f"{100 * found['agreement']:.1f}%")),
        ("invariant", of_run(lambda row: "yes" if row["batch_invariant"] else "no")),
        ("limits broken", of_run(lambda row: ", ".join(row["waived"]) or "none")),
        words=2,
    )


def _costs(exports: Sequence[dict[str, Any]]) -> list[Part]:
    whole = table(
        "Time and memory of an export",
        _COSTS,
        exports,
        ("model", lambda one: one["model"]),
        ("artifacts", lambda one: ", ".join(artifact["file"] for artifact in one["artifacts"])),
        ("seconds", figure("seconds", 0)),
        ("CPU seconds", figure("cpu_seconds", 0)),
        ("peak GB", lambda one: f"{one['peak_bytes'] / _GB:.2f}"),
        words=2,
    )
    stages = table(
        "",
        "",
        [(one["model"], stage) for one in exports for stage in one["stages"]],
        ("model", lambda row: row[0]),
        ("stage", lambda row: row[1]["stage"]),
        ("seconds", lambda row: figure("seconds")(row[1])),
        words=2,
    )
    return [whole, stages]
