"""What artifacts are worth and what an export costs: runs real exports and writes the page of their figures.

    python -m export.benchmarks.exports --out accuracy.md demo=stsb-test.csv minilm-sst2=sst2-test.tsv --random base

Each export is `bertserve export` in a process of its own, with every artifact that this machine can run and
every limit waived, so that a figure beyond its limit stands on the page with the limit's name instead of
ending the run.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from export.checkpoint.source import DEMO, find
from export.errors import ExportError
from export.recipe import FORMS, WAIVABLE
from serving.host import available_cpus
from serving.models.bundle import open_bundle
from serving.options import OptionParser

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

    from serving.models.manifest import Accuracy, Artifact, Manifest

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

_METRICS = """\
Times 100, over public test sets; no artifact has seen any of their texts. PyTorch computes in fp32."""
_ANSWERS = """\
Over the package's own texts, each alone, beside PyTorch alone; INT8 takes its ranges from every second of them.
`agree`: the same label, span or tag. `invariant`: whether a text's answer is the same padded in mixed batches;
only then is it batched. `limits broken`: an export stops at them unless its command line lets them pass, as it did
here. Figures of a TensorRT engine are those of the graph that it was built of, computed on a CPU."""
_COSTS = f"""\
From the command's start to its end, beside whatever else ran on the machine. Memory: the most that the command and
TensorRT's builder had resident together, looked at every {_SAMPLE_S * 1000:.0f} ms."""


@dataclass(slots=True, frozen=True)
class Job:
    """One export to run.

    Attributes:
        name: Of the model, in the tables.
        source: As `bertserve export` takes it.
        options: More words of its command line.
    """

    name: str
    source: str
    options: tuple[str, ...]


@dataclass(slots=True, frozen=True)
class Result:
    """What an export made, and what it took.

    Attributes:
        job: Which one.
        manifest: Of its bundle.
        seconds: From the command's start to its end.
        cpu_seconds: What its threads and children computed in that time, all cores together.
        peak_memory_bytes: Most resident memory of the command and its children together, sampled.
        stages: Each stage and its seconds, in order.
    """

    job: Job
    manifest: Manifest
    seconds: float
    cpu_seconds: float
    peak_memory_bytes: int
    stages: tuple[tuple[str, float], ...]


def run(job: Job, repository: Path) -> Result:
    """Runs an export and opens its bundle.

    Raises:
        ExportError: The export failed; the sentence is its own.
    """
    command = [sys.executable, "-P", "-m", "bertserve", "export", job.source, "--name", job.name]
    command += ["--out", str(repository), *job.options]
    stages, started, computed = [], time.perf_counter(), _children_cpu_s()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        with _Memory(child.pid) as memory:
            for line in child.stdout or ():
                sys.stdout.write(line)
                if stage := _STAGE.fullmatch(line):
                    stages.append((stage["title"], float(stage["seconds"])))
            child.wait()
        seconds = time.perf_counter() - started
        if child.returncode != 0:
            raise ExportError(f"{job.name}: {child.stderr.read().strip() if child.stderr else ''}")
    bundle = open_bundle(max((repository / job.name).iterdir(), key=lambda path: int(path.name)))
    return Result(job, bundle.manifest, seconds, _children_cpu_s() - computed, memory.peak_bytes, tuple(stages))


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class _Memory:
    """Watches the memory of a process and of everything that it started."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.peak_bytes = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            self.peak_bytes = max(self.peak_bytes, sum(map(_resident, _tree(self._pid))))


def _tree(pid: int) -> list[int]:
    try:
        lists = [(task / "children").read_text().split() for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
    return [pid, *(below for children in lists for child in children for below in _tree(int(child)))]


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def random_checkpoint(size: str, folder: Path) -> Path:
    """Writes a BERT of random weights, of the sizes that its paper calls base and large.

    Its tokenizer is the demo model's, whose vocabulary is BERT's own.

    Args:
        size: `base` or `large`.
        folder: Where to; made.
    """
    # Slow to import, and needed here alone.
    import torch  # noqa: PLC0415
    from transformers.models.bert import BertConfig, BertModel  # noqa: PLC0415

    torch.manual_seed(0)
    BertModel(BertConfig(**_RANDOM[size])).save_pretrained(folder)
    shutil.copy(find(DEMO).path / "tokenizer.json", folder)
    return folder


def page(results: Sequence[Result], words: Sequence[str]) -> str:
    """The figures as Markdown."""
    figures = [
        _accuracy_row(result, artifact, figure)
        for result in results
        for artifact in result.manifest.artifacts
        for figure in artifact.evidence.accuracy
    ]
    parity = [_parity_row(result, artifact) for result in results for artifact in result.manifest.artifacts]
    costs = [
        (
            r.job.name,
            ", ".join(a.file for a in r.manifest.artifacts),
            f"{r.seconds:.0f}",
            f"{r.cpu_seconds:.0f}",
            _gb(r.peak_memory_bytes),
        )
        for r in results
    ]
    stages = [(r.job.name, title, f"{seconds:.1f}") for r in results for title, seconds in r.stages]
    return "\n".join(
        [
            "# Every artifact beside PyTorch, and what an export costs",
            "",
            f"Made by `python -m export.benchmarks.exports {' '.join(words)}`.",
            "",
            *(f"- {name}: {value}" for name, value in _facts().items()),
            "",
            *_metrics(figures),
            "## Raw answers and decisions",
            "",
            _ANSWERS,
            "",
            *_table(
                (
                    *("model", "artifact", "MiB", "max diff", "cosine mean", "p1", "min", "agree"),
                    *("invariant", "limits broken"),
                ),
                parity,
                text=2,
            ),
            "",
            "## Time and memory of an export",
            "",
            _COSTS,
            "",
            *_table(("model", "artifacts", "seconds", "CPU seconds", "peak GB"), costs, text=2),
            "",
            *_table(("model", "stage", "seconds"), stages, text=2),
            "",
        ]
    )


def _metrics(figures: Sequence[Sequence[str]]) -> list[str]:
    """The section on labelled text; none where no export was given any."""
    head = ("model", "artifact", "metric", "over", "PyTorch", "artifact's", "difference")
    return ["## The task's own metric", "", _METRICS, "", *_table(head, figures, text=4), ""] if figures else []


def _facts() -> dict[str, str]:
    cpu = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    facts = {
        "Date": datetime.now(UTC).date().isoformat(),
        "CPU": f"{cpu[1] if cpu else platform.processor()}, {available_cpus()} cores",
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / _GB:.1f} GB",
        "Python": platform.python_version(),
    }
    return facts | {name: importlib.metadata.version(name) for name in _PACKAGES}


def _accuracy_row(result: Result, artifact: Artifact, figure: Accuracy) -> tuple[str, ...]:
    return (
        result.job.name,
        artifact.file,
        figure.metric,
        f"{figure.examples} of {figure.reference}",
        f"{figure.pytorch:.2f}",
        f"{figure.artifact:.2f}",
        f"{figure.artifact - figure.pytorch:+.2f}",
    )


def _parity_row(result: Result, artifact: Artifact) -> tuple[str, ...]:
    size = f"{artifact.total_bytes / _MIB:.1f}"
    parity = artifact.evidence.parity
    if parity is None:
        return (result.job.name, artifact.file, size, "not run here", *[""] * 6)
    cosines = (parity.cosine_mean, parity.cosine_p01, parity.cosine_min)
    return (
        result.job.name,
        artifact.file,
        size,
        f"{parity.max_abs_difference:.1e}",
        *("-" if value is None else f"{value:.5f}" for value in cosines),
        "-" if parity.agreement is None else f"{100 * parity.agreement:.1f}%",
        "yes" if artifact.evidence.batch_invariant else "no",
        ", ".join(artifact.waived) or "none",
    )


def _gb(size: int) -> str:
    return f"{size / _GB:.2f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, text: int) -> list[str]:
    """A table whose first `text` columns are words, the others figures."""
    rule = ["---" if column < text else "---:" for column in range(len(head))]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *rows)]


def _jobs(options: argparse.Namespace, folder: Path) -> Iterable[Job]:
    waived = [word for limit in WAIVABLE for word in ("--allow", limit)]
    for word in options.models:
        source, _, reference = word.partition("=")
        forms = [option for form in FORMS for option in ("--precision", form)]
        engine = ("--tensorrt", "t4", "--tensorrt-precision", "int8")
        yield Job(Path(source).name, source, (*forms, *waived, *engine, "--reference", reference))
    for size in options.random:
        forms = [option for form in _RANDOM_FORMS for option in ("--precision", form)]
        checkpoint = random_checkpoint(size, folder / f"bert-{size}")
        yield Job(checkpoint.name, str(checkpoint), (*forms, *waived, "--tensorrt", "t4"))


def main(argv: list[str]) -> int:
    """Runs the exports one after another: 0 done, 1 failed with one line on stderr."""
    parser = OptionParser(prog="python -m export.benchmarks.exports", description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="SOURCE=FILE", help="a checkpoint and its labelled text")
    parser.add_argument("--random", action="append", default=[], choices=_RANDOM, help="a BERT of random weights")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the page to write")
    options = parser.parse_args(argv)
    words = [re.sub(r"[^=\s]*/", "", word) for word in argv]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for job in _jobs(options, Path(folder)):
                results.append(run(job, Path(folder) / "models"))
                # After each, since all of them take long.
                options.out.write_text(page(results, words), encoding="utf-8")
        except ExportError as error:
            sys.stderr.write(f"export.benchmarks.exports: {error}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
