"""The output folder of a job: finished parts, rejected rows, and the record to resume a job from.

    parts/part-00000-00000.parquet      rows of the first file's first part; .jsonl, or .npy with .rows.jsonl beside it
    rejected/part-00000-00000.jsonl     rows of that part without an answer, with the reason
    manifest.json                       written last: the job, every file with its SHA-256, and the totals
    .job/                               the same while the job runs: job.json, and an entry for each finished part

A file is written to a staging folder, flushed and renamed, and the entry of a part is written after its files. So a
part with an entry is whole, and any other one is made again with the same name and content.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import shutil
import uuid
from typing import TYPE_CHECKING, Any, Self

import msgspec
import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from bertserve.serving.bulk.errors import BatchError
from bertserve.serving.bulk.sources import Columns, InputFile  # noqa: TC001  msgspec reads the annotations
from bertserve.serving.models.staging_dir import exclusive, sync
from bertserve.serving.models.verified_dir import digest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from bertserve.serving.bulk.answers import AnswerColumn
    from bertserve.serving.bulk.sources import Part

_ENTRY = re.compile(r"part-(\d{5,})-(\d{5,})\.json")


class RayJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that decides a job's output; a folder holds the output of one job.

    Attributes:
        bundle: SHA-256 of the manifest of the model's bundle.
        model: The arguments of `serving.bulk.predictor.Model`, besides the path of the repository.
    """

    inputs: tuple[InputFile, ...]
    columns: Columns
    format: str
    part_rows: int
    task: str
    bundle: str
    model: dict[str, Any]


class PartEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A finished part.

    Attributes:
        file: Index of its input file.
        rows: Number of rows.
        tokens: Tokens that the model read.
        progress: Share of the input file up to its end, from 0 to 1.
        files: Name below the output folder to SHA-256.
    """

    file: int
    part: int
    rows: int
    rejected: int
    tokens: int
    progress: float
    files: dict[str, str]


class RayJobManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The record of a finished job."""

    job: RayJob
    rows: int
    rejected: int
    tokens: int
    parts: list[PartEntry]


class RayJobStore:
    """One job's output folder: `open` it to lead the job; writers of parts only need its path."""

    def __init__(self, out: Path, job: RayJob) -> None:
        self._out = out
        self._of = job
        self._job = out / ".job"
        self._entries = self._job / "parts"
        self._staging = self._job / "staging"
        self._attempts = self._job / "attempts"

    @classmethod
    @contextlib.contextmanager
    def open(cls, out: Path, job: RayJob) -> Iterator[Self]:
        """The folder for a new job, or to resume the same one. No other process uses it in the `with` block.

        Raises:
            BatchError: It holds another job, or another process uses it.
        """
        store = cls(out, job)
        if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not store._job.is_dir())):
            raise BatchError(f"{out} contains files that are not the output of a job; use another folder", exit_code=2)
        for folder in (store._entries, store._staging, store._attempts, out / "parts", out / "rejected"):
            folder.mkdir(parents=True, exist_ok=True)
        with exclusive(store._job, store._refuse_second):
            store._check_job()
            for folder in (store._staging, store._attempts):  # left by a killed process
                shutil.rmtree(folder)
                folder.mkdir()
            yield store

    def _refuse_second(self) -> None:
        raise BatchError(f"another process is writing to {self._out}; wait for it, or use another folder")

    def finished(self) -> dict[tuple[int, int], PartEntry]:
        """The whole parts, by file and part; removes the entry of a part whose files have changed."""
        entries = {}
        for path in sorted(self._entries.iterdir()):
            if _ENTRY.fullmatch(path.name):
                entry = msgspec.json.decode(path.read_bytes(), type=PartEntry)
                files = [(self._out / name, sha256) for name, sha256 in entry.files.items()]
                if all(path.exists() and digest(path) == sha256 for path, sha256 in files):
                    entries[entry.file, entry.part] = entry
                else:
                    path.unlink()
        return entries

    def write(self, file: int, part: Part, answers: pa.Table, column: AnswerColumn) -> PartEntry:
        """Writes a part's files, then its entry. `answers` are of `BatchPredictor`, with a column `tokens`."""
        job, name, source = self._of, _name(file, part.number), self._of.inputs[file]
        reasons = [row.reason or error for row, error in zip(part.rows, answers["error"].to_pylist(), strict=True)]
        answered = [index for index, reason in enumerate(reasons) if not reason]
        head = pa.table({"row": pa.array([part.first_row + index for index in answered], pa.int64())})
        if len(job.inputs) > 1:
            head = head.append_column("file", pa.array([source.path] * len(answered), pa.string()))
        if job.columns.id:
            kind = pa.int64() if source.whole_ids else pa.string()
            head = head.append_column(job.columns.id, pa.array([part.rows[index].id for index in answered], kind))
        values = answers[column.name].combine_chunks().take(pa.array(answered, pa.int64()))
        files = {f"parts/{name}{suffix}": data for suffix, data in _encode(job.format, head, values, column).items()}
        rejected: list[dict[str, Any]] = []
        for index, (row, reason) in enumerate(zip(part.rows, reasons, strict=True)):
            if reason:
                own = {"id": row.id} if job.columns.id else {}
                rejected.append({"file": source.path, "row": part.first_row + index, **own, "reason": reason})
        if rejected:
            files[f"rejected/{name}.jsonl"] = _lines(rejected)
        for path, data in files.items():
            self._write(self._out / path, data)
        entry = PartEntry(
            file,
            part.number,
            len(part.rows),
            len(rejected),
            sum(answers["tokens"].to_pylist()),
            part.rows[-1].progress,
            {path: hashlib.sha256(data).hexdigest() for path, data in files.items()},
        )
        self._write(self._entries / f"{name}.json", msgspec.json.encode(entry))
        return entry

    def attempted(self, file: int, part: int) -> int:
        """Counts an attempt at a part in this run; returns the number of earlier ones."""
        with (self._attempts / _name(file, part)).open("ab") as attempts:
            before = attempts.tell()
            attempts.write(b".")
        return before

    def _write(self, path: Path, data: bytes) -> None:
        staged = self._staging / uuid.uuid4().hex
        try:
            staged.write_bytes(data)
            sync(staged)
            staged.replace(path)
            sync(path.parent)
        except BaseException:
            staged.unlink(missing_ok=True)
            raise

    def _check_job(self) -> None:
        path = self._job / "job.json"
        if not path.exists():
            self._write(path, msgspec.json.encode(self._of))
            return
        before, now = msgspec.json.decode(path.read_bytes()), msgspec.to_builtins(self._of)
        if changed := [name for name in now if orjson.dumps(before.get(name)) != orjson.dumps(now[name])]:
            raise BatchError(
                f"{self._out} holds the output of another job: {', '.join(changed)}"
                f" differ{'s' if len(changed) == 1 else ''}; use another folder, or remove this one",
                exit_code=2,
            )

    def concluded(self, finished: Mapping[tuple[int, int], PartEntry]) -> RayJobManifest | None:
        """The manifest of a job that ended before; None if parts of it are not finished any more."""
        path = self._out / "manifest.json"
        if not path.exists():
            return None
        manifest = msgspec.json.decode(path.read_bytes(), type=RayJobManifest)
        return manifest if {(entry.file, entry.part) for entry in manifest.parts} == finished.keys() else None

    def conclude(self) -> RayJobManifest:
        """Writes the manifest of a job whose parts are all finished."""
        parts = [entry for _, entry in sorted(self.finished().items())]
        manifest = RayJobManifest(
            self._of,
            sum(entry.rows for entry in parts),
            sum(entry.rejected for entry in parts),
            sum(entry.tokens for entry in parts),
            parts,
        )
        self._write(self._out / "manifest.json", msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")
        return manifest


def _name(file: int, part: int) -> str:
    return f"part-{file:05}-{part:05}"


def _encode(form: str, head: pa.Table, answers: pa.Array, column: AnswerColumn) -> dict[str, bytes]:
    """The files of a part, by suffix."""
    stream = io.BytesIO()
    if form == "parquet":
        # Numbers of a vector hardly repeat: a dictionary takes four times the time and more room.
        dictionary = head.column_names if column.width else True
        pq.write_table(head.append_column(column.name, answers), stream, use_dictionary=dictionary)
        return {".parquet": stream.getvalue()}
    rows = head.to_pylist()
    if form == "jsonl":
        return {".jsonl": _lines([row | {column.name: each} for row, each in zip(rows, _values(answers), strict=True)])}
    np.save(stream, _values(answers), allow_pickle=False)
    return {".npy": stream.getvalue(), ".rows.jsonl": _lines(rows)}


def _values(array: pa.Array) -> Any:  # noqa: ANN401  a sequence, of NumPy's numbers where they are of 32 bits
    """The values of an array. As Python's numbers, float32 would be written with the digits of float64."""
    if pa.types.is_fixed_size_list(array.type):
        return _values(array.flatten()).reshape(-1, array.type.list_size)
    if pa.types.is_list(array.type):
        values, ends = _values(array.flatten()), np.cumsum(array.value_lengths())
        return [values[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    if pa.types.is_struct(array.type):
        names, fields = array.type.names, map(_values, array.flatten())
        return [dict(zip(names, each, strict=True)) for each in zip(*fields, strict=True)]
    return array.to_numpy() if pa.types.is_float32(array.type) else array.to_pylist()


def _lines(rows: Sequence[dict[str, Any]]) -> bytes:
    return b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY) for row in rows)
