from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bertserve.serving.bulk.answers import _plain
from bertserve.serving.bulk.errors import BatchError
from bertserve.serving.bulk.predictor import Model, Predictor
from bertserve.serving.bulk.ray_store import RayJob, RayJobStore, _values
from bertserve.serving.bulk.sources import Columns, InputFile, Part, Row
from bertserve.serving.tasks import TASKS
from tests.support.no_room import no_room

if TYPE_CHECKING:
    from pathlib import Path

    from bertserve.serving.bulk.answers import AnswerColumn

FILE = InputFile("/docs.jsonl", "jsonl", 100, 1, whole_ids=True)
JOB = RayJob((FILE,), Columns(("text",), "id"), "parquet", 3, "embed", "0" * 64, {"truncate": False})
PART = Part(2, 6, [Row("a", 60, "", 0.7), Row(None, 70, "null", 0.8), Row("b", 80, "", 0.9)])


@pytest.fixture(scope="module")
def column(tasks_repository: Path) -> AnswerColumn:
    return Model(tasks_repository, "embed").column


VECTORS = np.stack([np.arange(32, dtype=np.float32), np.ones(32, np.float32)])


@pytest.fixture
def answers(column: AnswerColumn) -> pa.Table:
    vectors = column.array([VECTORS[0], None, VECTORS[1]])
    return pa.table({"embedding": vectors, "error": [None, "null", None], "tokens": [3, 0, 4]})


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("form", ["parquet", "jsonl", "npy"])
def test_a_part_holds_rows_with_their_ids_and_rejected_ones_lie_apart(
    form: str, tmp_path: Path, column: AnswerColumn, answers: pa.Table
) -> None:
    """In every format the same rows; what is rejected says why."""
    job = msgspec.structs.replace(JOB, format=form)
    with RayJobStore.open(tmp_path / "out", job) as store:
        entry = store.write(0, PART, answers, column)
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
    np.testing.assert_array_equal(vectors, VECTORS)
    assert lines(tmp_path / "out" / "rejected" / "part-00000-00002.jsonl") == [
        {"file": "/docs.jsonl", "row": 7, "id": 70, "reason": "null"}
    ]


@pytest.mark.parametrize("task", TASKS)
def test_arrow_changes_no_digit_of_an_answer(task: str, tasks_repository: Path) -> None:
    """JSONL has the model's own numbers: those of 32 bits are not written with 64."""
    model = Model(tasks_repository, task, threads=1)
    pairs = 2 in model._task.texts
    texts = [f"{text} [MASK]" for text in ("a text", "the server", "it is on")]
    predictions = Predictor(model).predict([(text, "is it a text") if pairs else text for text in texts])
    answers = [each.answer for each in predictions]
    found = orjson.dumps(list(_values(model.column.array(answers))), option=orjson.OPT_SERIALIZE_NUMPY)
    assert found == orjson.dumps([_plain(answer) for answer in answers], option=orjson.OPT_SERIALIZE_NUMPY)


def test_a_part_whose_files_changed_is_not_finished(tmp_path: Path, column: AnswerColumn, answers: pa.Table) -> None:
    """Whatever happened to it: it is made again."""
    for spoil in ("remove", "change"):
        with RayJobStore.open(tmp_path / spoil, JOB) as store:
            store.write(0, PART, answers, column)
            (path,) = (tmp_path / spoil / "parts").iterdir()
            path.unlink() if spoil == "remove" else path.write_bytes(path.read_bytes()[:-1])
            assert store.finished() == {}


def test_a_folder_holds_one_job(tmp_path: Path) -> None:
    """Another one is refused by what differs, and so are a second process and a folder of something else."""
    with RayJobStore.open(tmp_path / "out", JOB), pytest.raises(BatchError, match="another process is writing"):
        RayJobStore.open(tmp_path / "out", JOB).__enter__()
    other = msgspec.structs.replace(JOB, part_rows=4, format="npy")
    with pytest.raises(BatchError, match="holds the output of another job: format, part_rows differ;"):
        RayJobStore.open(tmp_path / "out", other).__enter__()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").touch()
    with pytest.raises(BatchError, match="contains files that are not the output of a job"):
        RayJobStore.open(tmp_path / "full", JOB).__enter__()


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    """Half-written files, and its count of attempts."""
    with RayJobStore.open(tmp_path / "out", JOB) as store:
        assert [store.attempted(0, 0), store.attempted(0, 0)] == [0, 1]
        (tmp_path / "out" / ".job" / "staging" / "half").touch()
    with RayJobStore.open(tmp_path / "out", JOB) as store:
        assert store.attempted(0, 0) == 0
        assert list((tmp_path / "out" / ".job" / "staging").iterdir()) == []


def test_a_part_for_which_there_is_no_room_leaves_nothing(
    tmp_path: Path, column: AnswerColumn, answers: pa.Table
) -> None:
    """What the disk still took of it is given back at once, not when the job goes on."""
    with RayJobStore.open(tmp_path / "out", JOB) as store:
        with no_room(10), pytest.raises(OSError, match="too large"):
            store.write(0, PART, answers, column)
        assert [path.name for path in (tmp_path / "out").rglob("*") if path.is_file()] == ["job.json"]
        assert store.write(0, PART, answers, column).rows == 3
