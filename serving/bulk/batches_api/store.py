"""Files and jobs on disk: a folder that one process has locked, with an SQLite database and the files.

    lock            held with flock for as long as the process lives
    jobs.sqlite     the table of files and the table of jobs; each change is on the disk when its method returns
    incoming/       uploads on their way
    files/          what the database lists, and what unfinished jobs have written so far

A file is moved into `files/` before the database lists it, and removed before it leaves the database, so that the
change can be recorded on a full disk. Leftovers of a crash are removed at the next start. Methods block; they are
called in one thread.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import sqlite3
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import msgspec

from serving.bulk.batches_api.records import UNFINISHED, BatchesApiJob, JobState, StoredFile
from serving.bulk.files import lock, move
from serving.errors import Conflict, InvalidRequest, ObjectNotFound, Overloaded, StartupError, StorageFull
from serving.models.staging_dir import sync

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from serving.bulk.batches_api.records import Problem
    from serving.settings import Settings

log = logging.getLogger("bertserve.jobs")

INPUT_PURPOSE = "batch"
OUTPUT_PURPOSE = "batch_output"

_VERSION = 1
_SCHEMA = """
CREATE TABLE files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL, expires_at INTEGER NOT NULL, record BLOB NOT NULL);
CREATE TABLE jobs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, state TEXT NOT NULL,
    input_file_id TEXT NOT NULL, bytes INTEGER NOT NULL, ended_at INTEGER, record BLOB NOT NULL);
"""
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_ROOM_FOR_DATABASE = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE}
"""SQLite's codes: the second is every failed write but ENOSPC, including quotas."""
_DAY_S = 86_400
_UNFINISHED = f"({', '.join(repr(str(state)) for state in UNFINISHED)})"
_MODE, _FILE_MODE = 0o700, 0o600
"""No other user of the machine can read what clients have sent."""

_file_decoder = msgspec.json.Decoder(StoredFile)
_job_decoder = msgspec.json.Decoder(BatchesApiJob)


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Limits of the store.

    Attributes:
        bytes: Maximum bytes of all files.
        files: Maximum number of files, including results.
        jobs: Maximum number of jobs, including ended ones; a new one removes its owner's that ended first, or any.
        keep_s: How long a file is kept, and a job after its end.
    """

    bytes: int
    files: int
    jobs: int
    keep_s: int

    @classmethod
    def of(cls, settings: Settings) -> Self:
        return cls(
            bytes=settings.batch_disk_mb << 20,
            files=settings.batch_max_files,
            jobs=settings.batch_max_jobs,
            keep_s=round(settings.batch_keep_days * _DAY_S),
        )


class BatchesApiStore:
    """The folder.

    Attributes:
        used_bytes: Bytes of all files.
        files: Number of files.
        states: Number of jobs by state.
    """

    def __init__(self, folder: Path, limits: StoreLimits, clock: Callable[[], float] = time.time) -> None:
        """Creates, locks and cleans the folder; `clock` is in Unix seconds.

        Raises:
            StartupError: Another server uses it, it cannot be written, or it holds another database.
        """
        self._folder, self._limits, self._clock = folder, limits, clock
        self._files, self._incoming = folder / "files", folder / "incoming"
        with _usable(folder):
            for directory in (folder, self._files, self._incoming):
                if not directory.is_dir():
                    directory.mkdir(mode=_MODE, parents=True)
                    sync(directory.parent)
            self._lock = _locked(folder)
            try:
                self._open()
            except BaseException:
                os.close(self._lock)
                raise

    def close(self) -> None:
        self._database.close()
        os.close(self._lock)

    def _open(self) -> None:
        path = self._folder / "jobs.sqlite"
        path.touch(mode=_FILE_MODE)  # else a folder that the operator made would let others read it
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")
            self._check_version()
            self._sweep()
            self._count()
        except BaseException:
            self._database.close()
            raise

    def _check_version(self) -> None:
        (version,) = self._database.execute("PRAGMA user_version").fetchone()
        if version == 0:
            self._database.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_VERSION}; COMMIT;")
        else:
            _check_format(self._folder, version)

    def _sweep(self) -> None:
        """Removes leftovers of a crash: files that nothing lists, and entries whose files are gone."""
        listed = {row[0] for row in self._database.execute("SELECT id FROM files")}
        lost = [(file_id,) for file_id in listed if not self.path(file_id).exists()]
        for job in self.unfinished():
            listed |= {job.output_id, job.error_id}
        for path in (*self._incoming.iterdir(), *self._files.iterdir()):
            if path.parent == self._incoming or path.name not in listed:
                path.unlink()
        if lost:
            log.warning("%d batch files are missing from %s and no longer listed", len(lost), self._files)
            self._database.executemany("DELETE FROM files WHERE id = ?", lost)

    # Files.

    def path(self, file_id: str) -> Path:
        """The path of a file by our id."""
        return self._files / file_id

    def new_upload(self) -> Path:
        """The path of an upload until `accept` takes it."""
        return self._incoming / secrets.token_hex(16)

    def accept(self, upload: Path, owner: str, name: str, keep_s: int | None) -> StoredFile:
        """Takes a written and flushed file; it is durable when this returns.

        Raises:
            StorageFull: There are too many files, or the disk is full; then the file is removed.
        """
        now = self._now()
        with contextlib.ExitStack() as undo:
            with self._transaction():
                self._check_files()
                file = StoredFile(
                    *(f"file-{secrets.token_hex(16)}", owner, name, INPUT_PURPOSE, upload.stat().st_size, now),
                    now + min(keep_s or self._limits.keep_s, self._limits.keep_s),
                )
                undo.callback(self._unlink, file.id)
                move(upload, self.path(file.id))
                self._insert(file)
            undo.pop_all()
        return file

    def file(self, owner: str, file_id: str) -> StoredFile:
        """Raises `ObjectNotFound` if there is none, it is another's, or it has expired."""
        row = self._database.execute(
            "SELECT record FROM files WHERE id = ? AND owner = ? AND expires_at > ?", (file_id, owner, self._now())
        ).fetchone()
        if row is None:
            raise ObjectNotFound("file not found: it may have been deleted or have expired")
        return _file_decoder.decode(row[0])

    def list_files(
        self, owner: str, *, after: str | None, limit: int, ascending: bool, purpose: str | None
    ) -> tuple[list[StoredFile], bool]:
        """Files in order of creation, or the reverse, behind the one named `after`; and whether more follow."""
        where, values = "owner = ? AND expires_at > ?", [owner, self._now()]
        if purpose is not None:
            where, values = where + " AND purpose = ?", [*values, purpose]
        rows, more = self._page("files", where, values, after=after, limit=limit, ascending=ascending)
        return [_file_decoder.decode(row) for row in rows], more

    def delete_file(self, owner: str, file_id: str) -> None:
        """Raises `ObjectNotFound`, or `Conflict` while a job reads it."""
        self.file(owner, file_id)
        with self._transaction():
            if job := self._reader_of(file_id):
                raise Conflict(f"{job} is still reading the file; cancel it, or wait until it ends")
            self._unlink(file_id)
            self._database.execute("DELETE FROM files WHERE id = ?", (file_id,))

    # Jobs.

    def create_job(self, job: BatchesApiJob) -> BatchesApiJob:
        """Stores a new job.

        Raises:
            ObjectNotFound: Its input is not a file of its owner.
            InvalidRequest: Its input was not uploaded as one.
            Overloaded: There are too many unfinished jobs.
        """
        file = self.file(job.owner, job.input_file_id)
        if file.purpose != INPUT_PURPOSE:
            raise InvalidRequest(f"the input file must have been uploaded with the purpose `{INPUT_PURPOSE}`")
        with self._transaction():
            (count,) = self._database.execute("SELECT COUNT(*) FROM jobs").fetchone()
            if count >= self._limits.jobs:
                forgotten = self._database.execute(
                    "DELETE FROM jobs WHERE seq = (SELECT seq FROM jobs WHERE ended_at NOT NULL"
                    " ORDER BY owner != ?, ended_at, seq LIMIT 1)",
                    (job.owner,),
                )
                if not forgotten.rowcount:
                    raise Overloaded(f"{count} batches are unfinished, the maximum (--batch-max-jobs); try again later")
            self._database.execute(
                "INSERT INTO jobs (id, owner, state, input_file_id, bytes, record) VALUES (?, ?, ?, ?, 0, ?)",
                (job.id, job.owner, job.state, job.input_file_id, msgspec.json.encode(job)),
            )
        return job

    def job(self, owner: str, job_id: str) -> BatchesApiJob:
        """Raises `ObjectNotFound` if there is none, or it is another's."""
        job = self._job(job_id)
        if job is None or job.owner != owner:
            raise ObjectNotFound("batch not found")
        return job

    def list_jobs(self, owner: str, *, after: str | None, limit: int) -> tuple[list[BatchesApiJob], bool]:
        """The latest jobs, behind the one named `after`, and whether more follow."""
        rows, more = self._page("jobs", "owner = ?", [owner], after=after, limit=limit, ascending=False)
        return [_job_decoder.decode(row) for row in rows], more

    def cancel_job(self, owner: str, job_id: str) -> BatchesApiJob:
        """Raises `Conflict` if it has ended."""
        job = self.job(owner, job_id)
        if job.ended:
            raise Conflict(f"the batch is {job.state} and can no longer be canceled")
        if job.state is JobState.CANCELLING:
            return job
        return self.update(job_id, state=JobState.CANCELLING, cancelling_at=self._now())

    def unfinished(self) -> list[BatchesApiJob]:
        rows = self._database.execute(f"SELECT record FROM jobs WHERE state IN {_UNFINISHED} ORDER BY seq")  # noqa: S608  constants
        return [_job_decoder.decode(row[0]) for row in rows]

    def begin_job(self, job_id: str, total: int) -> BatchesApiJob:
        """Records that its input is valid and has this number of lines."""
        return self.update(job_id, total=total, in_progress_at=self._now(), state=JobState.IN_PROGRESS)

    def update(self, job_id: str, **changes: Any) -> BatchesApiJob:  # noqa: ANN401  fields of `BatchesApiJob`
        """Changes a job; one that is being cancelled stays so until it ends."""
        with self._transaction():
            job = self._found(job_id)
            if job.state is JobState.CANCELLING and changes.get("state") is JobState.IN_PROGRESS:
                changes = {name: value for name, value in changes.items() if name != "state"}
            return self._replace(msgspec.structs.replace(job, **changes))

    def end_job(self, job_id: str, state: JobState, problems: Sequence[Problem] = ()) -> BatchesApiJob:
        """Ends a job, and lists its output files; one that was cancelled meanwhile ends as cancelled."""
        now = self._now()
        with self._transaction():
            job = self._found(job_id)
            if job.state is JobState.CANCELLING:
                state = JobState.CANCELLED
            for file_id, size, kind in (
                (job.output_id, job.output_bytes, "output"),
                (job.error_id, job.error_bytes, "error"),
            ):
                if size:
                    expires_at = now + min(job.keep_output_s or self._limits.keep_s, self._limits.keep_s)
                    name = f"{job.id}_{kind}.jsonl"
                    self._insert(StoredFile(file_id, job.owner, name, OUTPUT_PURPOSE, size, now, expires_at))
            ended = self._replace(msgspec.structs.replace(job, state=state, ended_at=now, problems=list(problems)))
        for file_id, size in ((job.output_id, job.output_bytes), (job.error_id, job.error_bytes)):
            if not size:
                self._unlink(file_id)
        return ended

    def expire(self) -> int:
        """Removes expired files that no job reads, and jobs that ended long ago; counts the files."""
        now = self._now()
        with self._transaction():
            gone = self._database.execute(
                "DELETE FROM files WHERE expires_at <= ? AND id NOT IN"  # noqa: S608  constants
                f" (SELECT input_file_id FROM jobs WHERE state IN {_UNFINISHED}) RETURNING id",
                (now,),
            ).fetchall()
            for (file_id,) in gone:
                self._unlink(file_id)
            self._database.execute("DELETE FROM jobs WHERE ended_at <= ?", (now - self._limits.keep_s,))
        return len(gone)

    # Common parts.

    @property
    def full(self) -> bool:
        """Whether the files have reached their total size."""
        return self.used_bytes >= self._limits.bytes

    def check_room(self, more_bytes: int) -> None:
        """Raises `StorageFull` if this number of bytes, in one more file, would be too much."""
        self._check_files()
        if self.used_bytes + more_bytes > self._limits.bytes:
            raise StorageFull(
                f"the files may use {self._limits.bytes} bytes (--batch-disk-mb), and {self.used_bytes} are in use;"
                " delete files you no longer need"
            )

    def _check_files(self) -> None:
        if self.files >= self._limits.files:
            raise StorageFull(
                f"{self.files} files are stored, the maximum (--batch-max-files); delete files you no longer need"
            )

    def _now(self) -> int:
        return int(self._clock())

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Commits at its end, or rolls everything back; raises `StorageFull` if the disk is full."""
        try:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")
        except sqlite3.OperationalError as error:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            if error.sqlite_errorcode in _NO_ROOM_FOR_DATABASE:
                raise disk_full() from error
            raise
        finally:
            self._count()

    def _count(self) -> None:
        files = self._database.execute("SELECT COUNT(*), TOTAL(bytes) FROM files").fetchone()
        (written,) = self._database.execute("SELECT TOTAL(bytes) FROM jobs").fetchone()
        self.files: int = files[0]
        self.used_bytes: int = round(files[1] + written)
        counts: Mapping[str, int] = dict(self._database.execute("SELECT state, COUNT(*) FROM jobs GROUP BY state"))
        self.states = {str(state): counts.get(state, 0) for state in JobState}

    def _insert(self, file: StoredFile) -> None:
        self._database.execute(
            "INSERT INTO files (id, owner, purpose, bytes, expires_at, record) VALUES (?, ?, ?, ?, ?, ?)",
            (file.id, file.owner, file.purpose, file.bytes, file.expires_at, msgspec.json.encode(file)),
        )

    def _replace(self, job: BatchesApiJob) -> BatchesApiJob:
        written = 0 if job.ended else job.output_bytes + job.error_bytes
        self._database.execute(
            "UPDATE jobs SET state = ?, bytes = ?, ended_at = ?, record = ? WHERE id = ?",
            (job.state, written, job.ended_at, msgspec.json.encode(job), job.id),
        )
        return job

    def _job(self, job_id: str) -> BatchesApiJob | None:
        row = self._database.execute("SELECT record FROM jobs WHERE id = ?", (job_id,)).fetchone()
        return None if row is None else _job_decoder.decode(row[0])

    def _found(self, job_id: str) -> BatchesApiJob:
        if (job := self._job(job_id)) is None:
            raise ObjectNotFound("batch not found")
        return job

    def _reader_of(self, file_id: str) -> str | None:
        row = self._database.execute(
            f"SELECT id FROM jobs WHERE input_file_id = ? AND state IN {_UNFINISHED}",  # noqa: S608  constants
            (file_id,),
        ).fetchone()
        return None if row is None else str(row[0])

    def _page(
        self, table: str, where: str, values: Sequence[Any], *, after: str | None, limit: int, ascending: bool
    ) -> tuple[list[bytes], bool]:
        if after is not None:
            row = self._database.execute(f"SELECT seq FROM {table} WHERE {where} AND id = ?", (*values, after))  # noqa: S608  ours
            if (at := row.fetchone()) is None:
                raise ObjectNotFound("`after` is not the ID of a listed item")
            where, values = f"{where} AND seq {'>' if ascending else '<'} ?", [*values, at[0]]
        rows = self._database.execute(
            f"SELECT record FROM {table} WHERE {where} ORDER BY seq {'ASC' if ascending else 'DESC'} LIMIT ?",  # noqa: S608  ours
            (*values, limit + 1),
        ).fetchall()
        return [row[0] for row in rows[:limit]], len(rows) > limit

    def _unlink(self, file_id: str) -> None:
        self.path(file_id).unlink(missing_ok=True)


def disk_full() -> StorageFull:
    return StorageFull("the server's disk is full; delete files you no longer need")


@contextlib.contextmanager
def room_on_disk() -> Iterator[None]:
    """Raises `StorageFull` if a write in the block meets a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise disk_full() from error
        raise


def check(folder: Path) -> None:
    """Raises `StartupError` if a store's folder could not be opened, as far as that is visible without a change."""
    with _usable(folder):
        if folder.exists():
            if not folder.is_dir():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            if (folder / "lock").exists():
                os.close(_locked(folder))
            if (path := folder / "jobs.sqlite").exists():
                address = f"{path.absolute().as_uri()}?immutable=1"
                with contextlib.closing(sqlite3.connect(address, uri=True)) as database:
                    (version,) = database.execute("PRAGMA user_version").fetchone()
                _check_format(folder, version or _VERSION)
        there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
        with tempfile.TemporaryFile(dir=there):
            pass


@contextlib.contextmanager
def _usable(folder: Path) -> Iterator[None]:
    """Raises `StartupError` if the block meets a folder or a database that cannot be used."""
    try:
        yield
    except OSError as error:
        raise StartupError(f"--batch-dir {folder}: {error.strerror}") from error
    except sqlite3.Error as error:
        raise StartupError(f"--batch-dir {folder}: jobs.sqlite cannot be used: {error}") from error


def _check_format(folder: Path, version: int) -> None:
    if version != _VERSION:
        raise StartupError(
            f"--batch-dir {folder}: written by another version of the server (format {version}, this one reads"
            f" {_VERSION}); use another folder"
        )


def _locked(folder: Path) -> int:
    """The descriptor that locks the folder."""
    try:
        return lock(folder / "lock", os.O_RDWR | os.O_CREAT)
    except BlockingIOError:
        raise StartupError(
            f"--batch-dir {folder}: another server uses this folder; give each server its own, or stop the other"
        ) from None
