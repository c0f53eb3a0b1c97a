"""Jobs on a real Ray: the command, killed and repeated, and the examples of docs/guides/bulk.md."""

from __future__ import annotations

import contextlib
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bertserve.serving.bulk.cli import _rate, main
from bertserve.serving.bulk.ray_job import _PartPredictor, _read, _Run
from bertserve.serving.bulk.ray_store import RayJob, RayJobStore
from tests.support.models import ROOT
from tests.support.ray_nodes import LIMIT_S, TOKEN, RayNode
from tests.support.server import environment
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

RAY_FOLDER = re.compile("bertserve-ray-[0-9a-f]+")
ROWS, PART_ROWS = 300, 10
WORDS = ["it", "is", "a", "text", "and", "not", "on", "the", "server"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNode]:
    with RayNode(tmp_path_factory.mktemp("ray"), cpus=3) as head:
        yield head


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of mixed lengths; every hundredth has no text."""
    path = tmp_path_factory.mktemp("docs") / "docs.jsonl"
    rng = random.Random(1)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(1, 30))) for _ in range(ROWS)]
    rows = [{"id": 7 * index, "text": None if index % 100 == 50 else text} for index, text in enumerate(texts)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


class Jobs:
    """Runs of the same job: the same command but for where it writes."""

    def __init__(self, models: Path, docs: Path, *options: str) -> None:
        self.words = ["--models", str(models), "--task", "embed", "--input", str(docs), "--id-column", "id"]
        self.words += ["--part-rows", str(PART_ROWS), "--threads", "2", "--engine", "fake", *options]

    def start(self, out: Path, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "bertserve", "batch", *self.words, "--out", str(out), *options]
        return subprocess.Popen(
            command, cwd=ROOT, env=environment(TOKEN), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def finish(self, out: Path, code: int = 3, *options: str) -> tuple[str, str]:
        process = self.start(out, *options)
        said = process.communicate(timeout=LIMIT_S)
        assert process.returncode == code, said
        return said


def finished(out: Path) -> int:
    folder = out / ".job" / "parts"
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def digests(out: Path) -> dict[str, str]:
    manifest = json.loads((out / "manifest.json").read_text())
    return {name: digest for part in manifest["parts"] for name, digest in part["files"].items()}


def check_rows(out: Path) -> None:
    """Every row is there once, in its order, with its id."""
    tables = [pq.read_table(path) for path in sorted((out / "parts").iterdir())]
    rows = [(row["row"], row["id"]) for table in tables for row in table.select(["row", "id"]).to_pylist()]
    assert rows == [(index, 7 * index) for index in range(ROWS) if index % 100 != 50]
    rejected = [
        json.loads(line) for path in sorted((out / "rejected").iterdir()) for line in path.read_text().splitlines()
    ]
    assert [(row["row"], row["reason"]) for row in rejected] == [(index, "null") for index in (50, 150, 250)]


def written_here(out: Path, told: Path, models: Path) -> None:
    """The output of a job that another folder holds, computed and written in this process, without Ray."""
    job = msgspec.json.decode((told / ".job" / "job.json").read_bytes(), type=RayJob)
    run = _Run(job, str(out), str(models), {"threads": 2}, [])
    with RayJobStore.open(out, job) as store:
        write = _PartPredictor(run)
        for part in _read(pa.table({"file": [0]}), run):
            write(part)
        store.conclude()


@pytest.mark.slow
def test_a_job_that_is_killed_goes_on(
    cluster: RayNode, docs: Path, tasks_repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command finishes it; the output is that of an undisturbed run, file by file."""
    jobs, out = Jobs(tasks_repository, docs, "--address", cluster.address), tmp_path / "killed"
    killed = jobs.start(out, "--fake-ms", "40")
    wait_for(lambda: finished(out) >= 3, "some parts", LIMIT_S)
    killed.kill()
    killed.communicate()
    assert finished(out) < 30
    said, progress = jobs.finish(out)
    assert "rows are already done" in progress
    assert "297 rows answered in 30 parts" in said
    assert "3 rows rejected" in said
    check_rows(out)
    written_here(tmp_path / "whole", out, tasks_repository)
    assert digests(out) == digests(tmp_path / "whole")
    assert main([*jobs.words, "--out", str(out)]) == 3
    assert "this run: 0 rows" in capsys.readouterr().out


def test_the_pages_example_for_ray_runs(cluster: RayNode, docs: Path, tasks_repository: Path) -> None:
    """As it stands in docs/guides/bulk.md, in a folder with a model and a file of the names that it uses."""
    run_example("map_batches", cluster.folder, docs, tasks_repository, RAY_ADDRESS=cluster.address)
    table = pq.read_table(cluster.folder / "embedded")
    assert table.num_rows == ROWS
    assert table["error"].null_count == ROWS - 3
    assert table["embedding"].null_count == 3


def run_example(what: str, folder: Path, docs: Path, repository: Path, **extra: str) -> None:
    page = (ROOT / "docs/guides/bulk.md").read_text(encoding="utf-8")
    (example,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if what in block)
    models = folder / "models" / "embed"
    shutil.copytree(repository / "embed", models)
    rows = [json.loads(line) for line in docs.read_text().splitlines()]
    pq.write_table(pa.Table.from_pylist(rows), folder / "docs.parquet")
    (folder / "example.py").write_text(example)
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=folder,
        env=environment(extra | TOKEN),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def undisturbed(docs: Path, tasks_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files of a job on a Ray of its own that nothing happens to."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    Jobs(tasks_repository, docs).finish(out)
    check_rows(out)
    return digests(out)


@pytest.fixture(scope="module")
def orphans() -> Iterator[list[psutil.Process]]:
    """Processes whose driver was killed; all of them end by themselves."""
    processes: list[psutil.Process] = []
    yield processes
    # Ray's agents first wait for a minute to tell of it.
    assert psutil.wait_procs(processes, timeout=2 * LIMIT_S)[1] == []


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_a_kill_loses_nothing(
    number: int,
    docs: Path,
    tasks_repository: Path,
    undisturbed: dict[str, str],
    orphans: list[psutil.Process],
    tmp_path: Path,
) -> None:
    """Of the driver, an actor or the whole tree, at a random moment, of a job on a Ray of its own."""
    jobs, out, rng = Jobs(tasks_repository, docs), tmp_path / "out", random.Random(number)
    victim = ("driver", "actor", "tree")[number % 3]
    process = jobs.start(out, "--fake-ms", "60")
    at = rng.randint(0 if victim != "actor" else 1, 20)
    wait_for(lambda: finished(out) >= at, f"{at} parts", LIMIT_S)
    time.sleep(0.2 * rng.random())  # within a part
    tree = psutil.Process(process.pid).children(recursive=True)
    (ray,) = {found for child in tree for found in RAY_FOLDER.findall(name_of(child))}
    kill(process, tree, victim)
    said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == (3 if victim == "actor" else -signal.SIGKILL), said
    orphans += tree
    if victim != "actor":
        assert finished(out) < ROWS // PART_ROWS
        jobs.finish(out)
    if victim != "driver":  # Ray's processes write there until they notice
        assert not Path("/tmp", ray).exists()  # noqa: S108  where Ray works
    check_rows(out)
    assert digests(out) == undisturbed


def kill(process: subprocess.Popen[str], tree: list[psutil.Process], victim: str) -> None:
    if victim == "actor":
        (actor,) = (child for child in tree if "MapWorker" in name_of(child))
        actor.kill()
        return
    process.kill()
    for child in tree if victim == "tree" else []:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def name_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


@pytest.mark.slow
def test_sigterm_ends_a_job_that_goes_on(docs: Path, tasks_repository: Path, tmp_path: Path) -> None:
    """With its exit code, and nothing left behind."""
    jobs = Jobs(tasks_repository, docs)
    process = jobs.start(tmp_path / "out", "--fake-ms", "60")
    wait_for(lambda: finished(tmp_path / "out") >= 2, "some parts", LIMIT_S)
    tree = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 143
    assert said.splitlines()[-1] == "bertserve batch: stopped by SIGTERM; run the same command to resume"
    assert psutil.wait_procs(tree, timeout=60)[1] == []
    jobs.finish(tmp_path / "out")
    check_rows(tmp_path / "out")


@pytest.mark.slow
def test_a_text_that_always_kills_its_engine_ends_the_job(tasks_repository: Path, tmp_path: Path) -> None:
    """After some attempts, with the rows among which it is; what is finished stays. A column may have any name."""
    from bertserve.serving.bulk.predictor import Model  # noqa: PLC0415  for this test alone

    word = Model(tasks_repository, "embed").encode("server")[0].ids[1]
    rows = [{"id": index, "error": "server" if index == 25 else "a text"} for index in range(30)]
    path = tmp_path / "docs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    jobs = Jobs(tasks_repository, path, "--column", "error")
    _, said = jobs.finish(tmp_path / "out", 1, "--fake-faults", f"{word}:exit")
    last = said.splitlines()[-1]
    assert last == f"bertserve batch: the engine died 5 times on rows 20 to 29 of {path}", said
    jobs.finish(tmp_path / "out", 0)


@pytest.mark.slow
def test_a_cluster_of_two_nodes_shares_a_job(
    docs: Path, tasks_repository: Path, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    """Both nodes compute, and the output is that of one machine."""
    (tmp_path / "head").mkdir()
    (tmp_path / "other").mkdir()
    with (
        RayNode(tmp_path / "head", cpus=3) as head,
        RayNode(tmp_path / "other", cpus=3, head=head) as other,
    ):
        jobs = Jobs(tasks_repository, docs, "--address", head.address)
        process = jobs.start(tmp_path / "out", "--fake-ms", "400")
        for node in (head, other):
            wait_for(lambda node=node: computes(node), "an engine on each node", LIMIT_S)  # type: ignore[misc]  default arguments of a lambda
        said = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 3, said
    check_rows(tmp_path / "out")
    assert digests(tmp_path / "out") == undisturbed


def computes(node: RayNode) -> bool:
    """Whether an engine is at work on a part there: Ray names a process by the task that it runs."""
    names = map(name_of, node.processes())
    return any("MapWorker" in name and "submit" in name for name in names)


@pytest.mark.parametrize(("rows", "said"), [(3, "0.3 rows/s"), (47, "4.7 rows/s"), (12_340, "1,234 rows/s")])
def test_a_slow_rate_is_no_zero(rows: int, said: str) -> None:
    """A job of a few rows tells how fast it was."""
    assert _rate(rows, 10.0) == said
