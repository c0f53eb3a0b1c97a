from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest

from serving.bulk.errors import BatchError
from serving.bulk.predictor import Model, Prediction
from serving.bulk.ray_store import OwnedRayJobStore, RayJob
from serving.bulk.sources import Columns, InputFile, Part, Row
from tests.support.no_room import no_room

if TYPE_CHECKING:
    from pathlib import Path

    from serving.bulk.answers import AnswerColumn

FILE = InputFile("/docs.jsonl", "jsonl", 100, 1, whole_ids=True)
JOB = RayJob((FILE,), Columns(("text",), "id"), "parquet", 3, "embed", "0" * 64, {"truncate": False})
PART = Part(2, 6, [Row("a", 60, "", 0.7), Row(None, 70, "null", 0.8), Row("b", 80, "", 0.9)])


@pytest.fixture(scope="module")
def column(tasks_repository: Path) -> AnswerColumn:
    return Model(tasks_repository, "embed").column


def predictions() -> list[Prediction]:
    first, last = np.arange(32, dtype=np.float32), np.ones(32, np.float32)
    return [Prediction(first, tokens=3), Prediction(reason="null"), Prediction(last, tokens=4)]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("form", ["parquet", "jsonl", "npy"])
def test_a_part_holds_rows_with_their_ids_and_rejected_ones_lie_apart(
    form: str, tmp_path: Path, column: AnswerColumn
) -> None:
    """In every format the same rows; what is rejected says why."""
    job = msgspec.structs.replace(JOB, format=form)
    with OwnedRayJobStore(tmp_path / "out", job) as store:
        entry = store.write(job, 0, PART, predictions(), column)
        assert list(store.finished()) == [(0, 2)]
    assert (entry.rows, entry.rejected, entry.tokens, entry.progress) == (3, 1, 7, 0.9)
    stem = tmp_path / "out" / "parts" / "part-00000-00002"
    if form == "npy":
        vectors = np.load(stem.with_suffix(".npy"))
        rows = lines(stem.with_suffix(".rows.jsonl"))
    else:
        path = stem.with_suffix(f".{form}")
        rows = pq.read_table(path).to_pylist() if form == "parquet" else lines(path)
        vectors = np.array([row.pop("embedding") for row in rows])
    assert rows == [{"row": 6, "id": 60}, {"row": 8, "id": 80}]
    np.testing.assert_array_equal(vectors, [predictions()[0].answer, predictions()[2].answer])
    assert lines(tmp_path / "out" / "rejected" / "part-00000-00002.jsonl") == [
        {"file": "/docs.jsonl", "row": 7, "id": 70, "reason": "null"}
    ]


def test_a_part_whose_files_changed_is_not_finished(tmp_path: Path, column: AnswerColumn) -> None:
    """Whatever happened to it: it is made again."""
    for spoil in ("remove", "change"):
        with OwnedRayJobStore(tmp_path / spoil, JOB) as store:
            store.write(JOB, 0, PART, predictions(), column)
            (path,) = (tmp_path / spoil / "parts").iterdir()
            path.unlink() if spoil == "remove" else path.write_bytes(path.read_bytes()[:-1])
            assert store.finished() == {}


def test_a_folder_holds_one_job(tmp_path: Path) -> None:
    """Another one is refused by what differs, and so are a second process and a folder of something else."""
    with OwnedRayJobStore(tmp_path / "out", JOB), pytest.raises(BatchError, match="another process is writing"):
        OwnedRayJobStore(tmp_path / "out", JOB).__enter__()
    other = msgspec.structs.replace(JOB, part_rows=4, format="npy")
    with pytest.raises(BatchError, match="holds the output of another job: format, part_rows differ;"):
        OwnedRayJobStore(tmp_path / "out", other).__enter__()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").touch()
    with pytest.raises(BatchError, match="contains files that are not the output of a job"):
        OwnedRayJobStore(tmp_path / "full", JOB)


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    """Half-written files, and its count of attempts."""
    with OwnedRayJobStore(tmp_path / "out", JOB) as store:
        assert [store.attempted(0, 0), store.attempted(0, 0)] == [0, 1]
        (tmp_path / "out" / ".job" / "staging" / "half").touch()
    with OwnedRayJobStore(tmp_path / "out", JOB) as store:
        assert store.attempted(0, 0) == 0
        assert list((tmp_path / "out" / ".job" / "staging").iterdir()) == []


def test_a_part_for_which_there_is_no_room_leaves_nothing(tmp_path: Path, column: AnswerColumn) -> None:
    """What the disk still took of it is given back at once, not when the job goes on."""
    with OwnedRayJobStore(tmp_path / "out", JOB) as store:
        with no_room(10), pytest.raises(OSError, match="too large"):
            store.write(JOB, 0, PART, predictions(), column)
        assert [path.name for path in (tmp_path / "out").rglob("*") if path.is_file()] == ["job.json"]
        assert store.write(JOB, 0, PART, predictions(), column).rows == 3
