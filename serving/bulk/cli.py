"""`bertserve batch`: answers files of texts."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertserve.serving.bulk.errors import BatchError
from bertserve.serving.bulk.progress import ProgressLine
from bertserve.serving.engine.kinds import ENGINES, SETTINGS
from bertserve.serving.host import installing
from bertserve.serving.options import OptionParser, positive
from bertserve.serving.tasks import TASKS

if TYPE_CHECKING:
    from types import FrameType

    from bertserve.serving.bulk.ray_store import PartEntry, RayJobManifest
    from bertserve.serving.bulk.sources import InputFile

_FAILED, _REJECTED, _INTERRUPTED, _ENDED = 1, 3, 130, 143

_PART_ROWS, _PART_ROWS_OF_TOKENS = 2048, 128

_WHOLE_RATE = 10.0
"""Rates in rows per second from which they are shown as whole numbers; slower ones have two digits."""


def main(argv: list[str]) -> int:
    """Runs a job and returns the exit code.

    0 every row is answered, 1 failed, 2 not understood, 3 some rows are rejected, 130 or 143 interrupted.
    """
    # Set before tokenizers is imported: its thread pool would compete with the engine for its cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        return _run(_parser().parse_args(argv))
    except SystemExit as end:
        return int(end.code or 0)
    except (KeyboardInterrupt, _Ended) as end:
        reason, code = ("stopped by SIGTERM", _ENDED) if isinstance(end, _Ended) else ("interrupted", _INTERRUPTED)
        reason += "; run the same command to resume"
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {"ray", "pyarrow", "pandas"}:
            raise
        reason, code = f"the module {error.name} is missing: {installing('batch')}", _FAILED
    except BatchError as error:
        reason, code = " ".join(str(error).split()), error.exit_code
    except OSError as error:
        reason, code = f"{error.filename or 'the output'}: {error.strerror or error}", _FAILED
    sys.stderr.write(f"bertserve batch: {reason}\n")
    return code


class _Ended(BaseException):
    """SIGTERM. Like `KeyboardInterrupt`, not an `Exception`."""


def _end(_: int, __: FrameType | None) -> None:
    raise _Ended


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="bertserve batch",
        description="Run a model over every row of text files, on this machine or a Ray cluster.",
    )
    add = parser.add_argument
    add("--models", type=Path, default=Path("models"), metavar="DIR", help="Model repository (default: models).")
    add("--model", metavar="NAME", help="Name of the model (default: the only one for the task).")
    add("--task", help=f"Task: {', '.join(TASKS)} (default: the model's).")
    add("--options", type=_object, default={}, metavar="JSON", help='Options of the task, such as {"top_k": 3}.')
    add(
        "--input",
        type=Path,
        nargs="+",
        required=True,
        metavar="PATH",
        help="Files or folders of Parquet, JSONL, CSV or TXT.",
    )
    add("--column", action="append", metavar="NAME", help="Column of texts (default: text). Give two for text pairs.")
    add("--id-column", metavar="NAME", help="Column of IDs to copy to the output (default: row numbers only).")
    add("--out", type=Path, required=True, metavar="DIR", help="Output folder. The same job resumes in its folder.")
    add("--format", choices=("parquet", "jsonl", "npy"), default="parquet", help="Output format (default: parquet).")
    add("--truncate", action="store_true", help="Truncate texts that are too long (default: reject them).")
    add("--prompt-name", metavar="NAME", help="Name of the model's prompt to put before each text.")
    add("--part-rows", type=positive, metavar="N", help=f"Rows per output file (default: {_PART_ROWS}).")
    add("--address", metavar="HOST:PORT", help="Address of a Ray cluster (default: a local Ray for this job).")
    add("--actors", type=positive, metavar="N", help="Maximum engines (default: 1, or all that a cluster can hold).")
    add("--threads", type=positive, metavar="N", help="CPU cores per engine (default: all of a machine).")
    add("--gpus", type=float, default=0.0, metavar="N", help="GPUs per engine (default: 0).")
    add("--engine", choices=("auto", *ENGINES), default="auto", help="Engine that runs the model (default: auto).")
    add(
        "--precision",
        choices=("auto", "fp32", "fp16", "int8"),
        default="auto",
        help="Precision of the artifact (default: auto).",
    )
    add("--cache-dir", type=Path, metavar="DIR", help="Cache directory of this node, with proofs and engines.")
    add("--allow-unproven", action="store_true", help="Use an unproven artifact if there is no other.")
    for name, setting in SETTINGS.items():
        add(f"--{name.replace('_', '-')}", type=type(setting.default), default=setting.default, help=argparse.SUPPRESS)
    return parser


def _object(argument: str) -> dict[str, Any]:
    try:
        content = json.loads(argument)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return content


def _run(options: argparse.Namespace) -> int:
    from bertserve.serving.bulk import ray_job  # noqa: PLC0415  what it needs may be missing
    from bertserve.serving.bulk.predictor import Model  # noqa: PLC0415  likewise
    from bertserve.serving.bulk.ray_store import RayJob, RayJobStore  # noqa: PLC0415  likewise
    from bertserve.serving.bulk.sources import Columns, find  # noqa: PLC0415  likewise

    columns = Columns(tuple(options.column or ["text"]), options.id_column)
    inputs = find(options.input, columns)
    chosen = {
        "model": options.model,
        "options": options.options,
        "truncate": options.truncate,
        "prompt_name": options.prompt_name,
        "engine": options.engine,
        "precision": options.precision,
        "allow_unproven": options.allow_unproven,
    }
    settings = {
        "cache_dir": options.cache_dir,
        **{name: getattr(options, name) for name in SETTINGS},
    }
    model = Model(options.models, options.task, **chosen, **settings)
    model.check_columns(len(columns.texts))
    if model.ignored:
        sys.stderr.write(f"bertserve batch: ignored options: {model.ignored}\n")
    column = model.column
    if options.format == "npy" and (column.nested or column.width is None):
        raise BatchError(
            "--format npy needs the task embed, with one vector per row; choose another format", exit_code=2
        )
    rows = options.part_rows or (_PART_ROWS_OF_TOKENS if column.nested and column.width else _PART_ROWS)
    job = RayJob(tuple(inputs), columns, options.format, rows, model.task, model.served.bundle.sha256, chosen)
    workers = ray_job.RayWorkers(options.address, options.actors, options.threads, options.gpus)
    with RayJobStore.open(options.out, job) as store:
        finished = store.finished()
        with _Progress(inputs, list(finished.values())) as progress:
            manifest = store.concluded(finished)
            if manifest is None:
                signal.signal(signal.SIGTERM, _end)
                for entry in ray_job.run(job, options.out, options.models, settings, finished, workers):
                    progress.add(entry)
                manifest = store.conclude()
    progress.report(manifest, options.out)
    return _REJECTED if manifest.rejected else 0


class _Progress(ProgressLine):
    """The progress of a job, by the bytes of its inputs."""

    def __init__(self, inputs: list[InputFile], finished: list[PartEntry]) -> None:
        super().__init__(sys.stderr)
        self._next = time.monotonic() + self._every_s
        self._inputs = inputs
        self._reached: dict[int, dict[int, float]] = {}
        self._rows = self._tokens = 0
        self._begun = time.monotonic()
        self._before = 0.0
        for entry in finished:
            self._count(entry)
        self._kept, self._rows, self._tokens = self._rows, 0, 0
        self._before = self._share()
        if self._kept:
            sys.stderr.write(f"{self._kept:,} rows are already done\n")

    def _count(self, entry: PartEntry) -> None:
        self._rows += entry.rows
        self._tokens += entry.tokens
        self._reached.setdefault(entry.file, {})[entry.part] = entry.progress

    def _share(self) -> float:
        """The finished share of all bytes, from 0 to 1."""
        total = sum(file.size_bytes for file in self._inputs)
        done = 0.0
        for index, reached in self._reached.items():
            ends = [reached[part] for part in sorted(reached)]
            done += len(ends) / (max(reached) + 1) * ends[-1] * self._inputs[index].size_bytes
        return done / total if total else 1.0

    def add(self, entry: PartEntry) -> None:
        self._count(entry)
        seconds, share = time.monotonic() - self._begun, self._share()
        left = seconds * (1 - share) / (share - self._before) if share > self._before else 0.0
        self.say(
            f"{share:4.0%}  {self._kept + self._rows:,} rows  {self._tokens:,} tokens"
            f"  {_rate(self._rows, seconds)}  {_duration(left)} left",
            share,
        )

    def report(self, manifest: RayJobManifest, out: Path) -> None:
        """Prints the result and its folder."""
        seconds = time.monotonic() - self._begun
        rate = f", {_rate(self._rows, seconds)}" if self._rows else ""
        print(f"{manifest.rows - manifest.rejected:,} rows answered in {len(manifest.parts)} parts in {out}/parts")
        if manifest.rejected:
            print(f"{manifest.rejected:,} rows rejected, with the reasons in {out}/rejected")
        print(f"{manifest.tokens:,} tokens in all; this run: {self._rows:,} rows in {_duration(seconds)}{rate}")


def _rate(rows: int, seconds: float) -> str:
    rate = rows / seconds
    return f"{rate:,.0f} rows/s" if rate >= _WHOLE_RATE else f"{rate:.2g} rows/s"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
