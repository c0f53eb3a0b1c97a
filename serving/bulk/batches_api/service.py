"""The store for the event loop: a thread of its own, limited uploads, and notifications."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING, Self, TypeVar

from serving.bulk.batches_api.store import BatchesApiStore, StoreLimits, room_on_disk
from serving.bulk.files import write_all
from serving.errors import BodyTooLarge

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from serving.bulk.batches_api.records import BatchesApiJob, StoredFile
    from serving.settings import Settings

T = TypeVar("T")

_FILE_THREADS = 4
"""Threads of its own, so that a slow disk does not block the tokenizer."""


class BatchesApiService:
    """Files and jobs.

    Attributes:
        store: Its counts may be read anywhere; only `run` calls its methods.
        limit_bytes: Maximum size of an uploaded file.
        on_change: Called with a job that a client has created or cancelled.
    """

    def __init__(self, store: BatchesApiStore, limit_bytes: int) -> None:
        self.store = store
        self.limit_bytes = limit_bytes
        self.on_change: list[Callable[[BatchesApiJob], None]] = []
        self._database_thread = ThreadPoolExecutor(1, "jobs")
        self._file_threads = ThreadPoolExecutor(_FILE_THREADS, "files")
        self._arriving_bytes = 0
        self._arriving = Lock()

    @classmethod
    def open(cls, settings: Settings) -> BatchesApiService | None:
        """Opens the folder of the settings, if there is one; raises `StartupError` if it cannot be used."""
        if settings.batch_dir is None:
            return None
        return cls(BatchesApiStore(settings.batch_dir, StoreLimits.of(settings)), settings.batch_file_mb << 20)

    async def run(self, work: Callable[[BatchesApiStore], T]) -> T:
        """Works with the store in its thread. Work that was begun is finished, even if the caller is cancelled."""
        return await asyncio.get_running_loop().run_in_executor(self._database_thread, work, self.store)

    async def in_thread(self, work: Callable[..., T], *arguments: Any) -> T:  # noqa: ANN401  those of `work`
        """Works with files. A cancelled caller waits for the thread, which may write to what is closed next."""
        running = asyncio.get_running_loop().run_in_executor(self._file_threads, work, *arguments)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait({running})
            raise

    async def create(self, job: BatchesApiJob) -> BatchesApiJob:
        """See `BatchesApiStore.create_job`."""
        return self._changed(await self.run(lambda store: store.create_job(job)))

    async def cancel(self, owner: str, job_id: str) -> BatchesApiJob:
        """See `BatchesApiStore.cancel_job`."""
        return self._changed(await self.run(lambda store: store.cancel_job(owner, job_id)))

    def _changed(self, job: BatchesApiJob) -> BatchesApiJob:
        for listener in self.on_change:
            listener(job)
        return job

    def close(self) -> None:
        """Ends the threads after their current work, and unlocks the folder."""
        self._file_threads.shutdown()
        self._database_thread.shutdown()
        self.store.close()

    def take_arriving(self, size: int) -> None:
        """Counts bytes of incoming uploads; raises `StorageFull` if there are too many."""
        with self._arriving:
            self.store.check_room(self._arriving_bytes + size)
            self._arriving_bytes += size

    def give_arriving(self, size: int) -> None:
        with self._arriving:
            self._arriving_bytes -= size


class Upload:
    """An incoming file; leaving the `async with` block removes it unless it was accepted."""

    def __init__(self, jobs: BatchesApiService) -> None:
        self._jobs = jobs
        self._path = jobs.store.new_upload()
        self._handle: int | None = None
        self._size = 0

    async def __aenter__(self) -> Self:
        self._jobs.take_arriving(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._jobs.in_thread(self._drop)

    def write(self, data: bytes | memoryview) -> None:
        """Blocks.

        Raises:
            BodyTooLarge: The file is too large.
            StorageFull: There is no room for it.
        """
        if self._size + len(data) > self._jobs.limit_bytes:
            raise BodyTooLarge(f"the file is larger than {self._jobs.limit_bytes} bytes (--batch-file-mb)")
        with room_on_disk():
            self._jobs.take_arriving(len(data))
            self._size += len(data)
            if self._handle is None:
                self._handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            write_all(self._handle, data)

    async def accept(self, owner: str, name: str, keep_s: int | None) -> StoredFile:
        """Keeps the file; see `BatchesApiStore.accept`."""
        await self._jobs.in_thread(self._flush)
        return await self._jobs.run(lambda store: store.accept(self._path, owner, name, keep_s))

    def _flush(self) -> None:
        self.write(b"")  # a file without a byte is a file, too
        if self._handle is not None:
            with room_on_disk():
                os.fsync(self._handle)

    def _drop(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
        self._path.unlink(missing_ok=True)
        self._jobs.give_arriving(self._size)
