"""A job on Ray Data: tasks read parts, actors with an engine each answer and write them, this process counts.

Ray distributes the parts, applies backpressure to readers, restarts crashed actors, and repeats what they had begun.
This is safe because a part is always the same rows, under the same name, with the same content.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from bertserve.serving.bulk import sources
from bertserve.serving.bulk.errors import BatchError
from bertserve.serving.bulk.predictor import BatchPredictor
from bertserve.serving.bulk.ray_store import PartEntry, RayJob, RayJobStore
from bertserve.serving.engine.base import DeviceLost
from bertserve.serving.engine.process.worker import DEVICE_LOST
from bertserve.serving.host import available_cpus
from bertserve.serving.models.staging_dir import StagingDir

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from bertserve.serving.bulk.predictor import Prediction

_MAX_ATTEMPTS = 5
"""Maximum engine crashes on one part in a run; then the job ends. Ray itself would go on for ever."""

_OBJECT_STORE_BYTES = 256 << 20
"""Shared memory of a local Ray, for a few waiting parts."""

_READER_CPUS = 0.1
"""Reading takes little beside an engine, and must find room on a cluster that actors fill."""


class RayWorkers(msgspec.Struct, frozen=True):
    """Where a job runs.

    Attributes:
        address: Address of a Ray cluster; None starts a local one for this job.
        actors: Maximum number of engines; None for as many as fit.
        threads: CPUs of each; None for all of this machine, or of the smallest node of a cluster.
        gpus: GPUs of each.
    """

    address: str | None = None
    actors: int | None = None
    threads: int | None = None
    gpus: float = 0.0


class _Run(msgspec.Struct, frozen=True):
    """The parameters of readers and actors."""

    job: RayJob
    out: str
    models: str
    settings: dict[str, Any]
    finished: list[tuple[int, int]]


def run(
    job: RayJob,
    out: Path,
    models: Path,
    settings: dict[str, Any],
    finished: Mapping[tuple[int, int], PartEntry],
    on: RayWorkers,
) -> Iterator[PartEntry]:
    """Computes unfinished parts and yields the entry of each once it is written.

    The caller owns the output folder. On a cluster every node must have it and the models under the same paths.
    `settings` are those of the engine, as `Model` takes them.

    Raises:
        BatchError: A reader or an engine failed for good, or there is no such cluster.
    """
    ray = _import_ray(local=on.address is None)
    with _session(ray, on):
        threads, most = _shape(ray, on)
        told = _Run(job, str(out.absolute()), str(models.absolute()), settings | {"threads": threads}, list(finished))
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        # A row holds a part. Each is a block of its own, so that an actor begins as soon as one part is read.
        context.target_max_block_size = 1
        files = ray.data.from_items([{"file": index} for index in range(len(job.inputs))])
        read = files.map_batches(_read, fn_args=[told], batch_size=1, batch_format="pyarrow", num_cpus=_READER_CPUS)
        written = read.map_batches(
            _PartPredictor,
            fn_constructor_args=[told],
            batch_size=1,
            batch_format="pyarrow",
            num_cpus=threads,
            num_gpus=on.gpus or None,
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=most),
        )
        try:
            for row in written.iter_rows():
                yield msgspec.json.decode(row["entry"], type=PartEntry)
        except ray.exceptions.RayError as error:
            raise BatchError(_reason(error)) from error


def _import_ray(*, local: bool) -> Any:  # noqa: ANN401  a module that is an optional installation
    """Ray, which reads these variables when it is imported: no telemetry, and only errors in its log."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal"}
    if local:
        # Its ports are open to the machine and perhaps the network: clients without the token are rejected.
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        # Reports of its processes for a dashboard that does not run.
        os.environ |= {"RAY_enable_metrics_collection": "0", "RAY_task_events_report_interval_ms": "0"}
    import ray  # noqa: PLC0415  slow to import, and told first what not to do
    import ray.data  # noqa: PLC0415  likewise

    logging.getLogger("ray").setLevel(logging.ERROR)
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # what ends a job is raised, too
    return ray


@contextlib.contextmanager
def _session(ray: Any, on: RayWorkers) -> Iterator[None]:  # noqa: ANN401  a module
    """Ray while the block runs: the cluster's, or a local one for the block."""
    if on.address is not None:
        try:
            with _silence():
                ray.init(address=on.address, logging_level="error", log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise BatchError(f"cannot reach a Ray cluster at {on.address}: {' '.join(str(error).split())}") from error
        try:
            yield
        finally:
            ray.shutdown()
        return
    # A short path: Ray's sockets are far below it. The next job removes what a killed one has left.
    with StagingDir(Path("/tmp"), "bertserve-ray-", 0o700) as staging:  # noqa: S108  a name that cannot be guessed
        try:
            with _silence():
                ray.init(
                    num_cpus=(on.threads or available_cpus()) * (on.actors or 1) + 1,
                    include_dashboard=False,
                    logging_level="error",
                    log_to_driver=False,
                    object_store_memory=_OBJECT_STORE_BYTES,
                    _node_ip_address="127.0.0.1",
                    _temp_dir=str(staging.path),
                )
            yield
        finally:
            ray.shutdown()


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Suppresses output of Ray's C++ part at start, and its handler of SIGTERM."""
    sys.stderr.flush()
    kept, handler = os.dup(2), signal.getsignal(signal.SIGTERM)
    try:
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123  no file of ours
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        signal.signal(signal.SIGTERM, handler)


def _shape(ray: Any, on: RayWorkers) -> tuple[int, int]:  # noqa: ANN401  a module
    """Threads of an actor, and the number of actors."""
    if on.address is None:
        return on.threads or available_cpus(), on.actors or 1
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    if not nodes:
        raise BatchError(f"the Ray cluster at {on.address} has no CPU")
    # A node keeps a part of a CPU for readers, if it has more than one.
    spare = [max(1, int(node["CPU"] - _READER_CPUS)) for node in nodes]
    threads = on.threads or min(spare)
    most = on.actors or max(1, sum(cpus // threads for cpus in spare))
    return threads, most


def _reason(error: BaseException) -> str:
    """The exception of a reader or an actor, which Ray quotes among words of its own; otherwise Ray's last line."""
    if raised := re.findall(r"BatchError: (.+)", str(error)):
        return str(raised[-1])
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _read(table: pa.Table, told: _Run) -> Iterator[pa.Table]:
    """The parts of a file, one per row."""
    job = told.job
    for index in table["file"].to_pylist():
        finished = {part for file, part in told.finished if file == index}
        for part in sources.parts(job.inputs[index], job.columns, job.part_rows, finished):
            content = pa.array([msgspec.msgpack.encode(part)], pa.large_binary())
            yield pa.table({"file": [index], "part": content})


class _PartPredictor(BatchPredictor):
    """An actor: an engine that answers parts, and writes the answers."""

    def __init__(self, told: _Run) -> None:
        job = self._job = told.job
        texts = sources.numbered(len(job.columns.texts))
        super().__init__(texts, models=told.models, task=job.task, **job.model, **told.settings)
        if self._predictor.model.served.bundle.sha256 != job.bundle:
            raise BatchError(f"the model in {told.models} on {os.uname().nodename} differs from the job's model")
        self._store = RayJobStore(Path(told.out), job)

    def __call__(self, table: pa.Table) -> pa.Table:
        (row,) = table.to_pylist()
        file, part = row["file"], msgspec.msgpack.decode(row["part"], type=sources.Part)
        if self._store.attempted(file, part.number) >= _MAX_ATTEMPTS:
            begin, end = part.first_row, part.first_row + len(part.rows)
            raise BatchError(
                f"the engine died {_MAX_ATTEMPTS} times on rows {begin} to {end - 1} of {self._job.inputs[file].path}"
            )
        try:
            answers = super().__call__(part.texts(len(self._columns)))
        except DeviceLost:
            os._exit(DEVICE_LOST)
        entry = self._store.write(file, part, answers, self._predictor.model.column)
        return pa.table({"entry": [msgspec.json.encode(entry)]})

    def _answered(self, table: pa.Table, predictions: Sequence[Prediction]) -> pa.Table:
        tokens = pa.array([each.tokens for each in predictions], pa.int64())
        return super()._answered(table, predictions).append_column("tokens", tokens)
