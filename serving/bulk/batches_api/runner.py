"""Runs jobs: reads their lines, computes the answers, and settles the results in the order of the lines.

A line is settled once: its result is on disk before the database says so, and what the database does not list is
truncated and computed again after a crash. So each line is in exactly one of the two files, in the input's order.

Lines are answered through the ordinary pipeline. Temporary failures (overload, an engine restart, a full disk) are
retried; everything else is the line's answer. The event loop starts and awaits; files are read and written in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from serving.bulk.batches_api.lines import Answer, Line, Lines, Result, Results, check_lines
from serving.bulk.batches_api.records import BatchesApiJob, JobState, Problem
from serving.errors import (
    BertserveError,
    DeadlineExceeded,
    EngineFault,
    InternalError,
    Overloaded,
    StorageFull,
    Unavailable,
)
from serving.logs import fields

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from serving.bulk.batches_api.service import BatchesApiService
    from serving.settings import Settings

T = TypeVar("T")

log = logging.getLogger("bertserve.jobs")

_JOBS_AT_ONCE = 8
_JOBS_OF_ONE_OWNER = 2
_MORE_GIVEN_UP = 8
"""Additional jobs that are cancelled or expired: they only have to be ended, and do not wait for others."""

_AHEAD_LINES = 256
_AHEAD_TEXTS = 1024
_AHEAD_BYTES = 4 << 20
"""Maximum bytes of a job that are begun and not settled; a single line may have more."""

_READ_BYTES = 1 << 20

_SETTLE_S = 0.5
"""Interval of writing and flushing results; after a crash this much computing is repeated."""

_TEXTS_AT_ONCE = 256
"""Maximum texts of all jobs in the pipeline."""

_MAX_LATE = 5
_RETRY_S = 0.25
_LONGEST_RETRY_S = 10.0
_HOUSEKEEPING_S = 30.0

_EXPIRED = ("batch_expired", "This request could not be executed before the completion window expired.")
_CANCELLED = ("batch_cancelled", "This request was not executed because the batch was cancelled.")


class StoppedError(Exception):
    """The server stops; unsettled lines wait for its next start."""


class Retry(Protocol):
    async def __call__(self, work: Callable[[], Awaitable[T]], texts: int) -> T:
        """The result of work with this number of texts, which is repeated while it raises temporary errors.

        Raises:
            BertserveError: A permanent error.
        """


class Prepared(Protocol):
    @property
    def texts(self) -> int: ...

    async def answer(self, retry: Retry) -> Answer: ...


class Endpoint(Protocol):
    """What answers lines."""

    async def prepare(self, line_id: str, body: bytes) -> Prepared:
        """Raises `BertserveError` if the body is invalid."""

    def refusal(self, line_id: str, error: BertserveError) -> Answer:
        """The reply of the route to this error."""


@dataclass(frozen=True, slots=True)
class _Begun:
    line: Line
    texts: int
    task: asyncio.Task[Result]


@dataclass(slots=True)
class _Window:
    """The lines of a job that are begun and not settled, in order; those of `ready` have their results."""

    begun: deque[_Begun] = field(default_factory=deque)
    ready: list[Result] = field(default_factory=list)
    lines: int = 0
    texts: int = 0
    bytes: int = 0
    settled_at: float = field(default_factory=time.monotonic)

    @property
    def has_room(self) -> bool:
        return self.lines < _AHEAD_LINES and self.texts < _AHEAD_TEXTS and self.bytes < _AHEAD_BYTES

    def add(self, begun: _Begun) -> None:
        self.begun.append(begun)
        self.lines += 1
        self.texts += begun.texts
        self.bytes += len(begun.line.body)

    def collect(self) -> None:
        """Takes the results of finished lines, up to the first unfinished one."""
        while self.begun and self.begun[0].task.done():
            self.ready.append(self.begun[0].task.result())
            self.begun.popleft()

    @property
    def due(self) -> bool:
        """Whether results should be settled now: at intervals, and before the window is full."""
        late = time.monotonic() - self.settled_at > _SETTLE_S
        return bool(self.ready) and (late or not self.begun or 2 * len(self.begun) < self.lines)

    def take(self) -> list[Result]:
        taken, self.ready = self.ready, []
        self.lines, self.texts = len(self.begun), sum(begun.texts for begun in self.begun)
        self.bytes = sum(len(begun.line.body) for begun in self.begun)
        self.settled_at = time.monotonic()
        return taken


class _Running:
    """A running job.

    Attributes:
        told: Set when it is cancelled, or the server stops.
    """

    def __init__(self, job: BatchesApiJob) -> None:
        self.job = job
        self.told = asyncio.Event()


class BatchesApiRunner:
    """Runs the jobs of a store.

    Attributes:
        lines: Lines settled since the start: `completed` and `failed`.
    """

    def __init__(
        self,
        jobs: BatchesApiService,
        endpoints: Mapping[str, Endpoint],
        settings: Settings,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`endpoints` are those of jobs, by path; `clock` is in seconds since 1970, as the store's."""
        self._jobs, self._endpoints, self._settings, self._clock = jobs, endpoints, settings, clock
        self._slots, self._entering = asyncio.Semaphore(_TEXTS_AT_ONCE), asyncio.Lock()
        self._running: dict[str, _Running] = {}
        self._stopping, self._changed = asyncio.Event(), asyncio.Event()
        self._room_missing = False
        self.lines = {"completed": 0, "failed": 0}
        jobs.on_change.append(self._on_change)

    async def run(self) -> None:
        """Runs until it is stopped, and then until running work is settled."""
        tasks: dict[asyncio.Task[None], str] = {}
        cleaned_at = float("-inf")
        try:
            while not self._stopping.is_set():
                self._changed.clear()
                for task in [task for task in tasks if task.done()]:
                    self._ended(tasks.pop(task), task)
                try:
                    if time.monotonic() - cleaned_at > _HOUSEKEEPING_S:
                        cleaned_at = time.monotonic()
                        await self._jobs.run(lambda store: store.expire())
                    for job in await self._due():
                        tasks[asyncio.create_task(self._work_off(job))] = job.id
                except (StorageFull, OSError, sqlite3.Error):
                    log.exception("cannot scan files and batches; retrying")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), _HOUSEKEEPING_S)
            if tasks:
                await asyncio.wait(tasks)
        finally:
            self.stop()  # what waits for room waits no longer
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def stop(self) -> None:
        """Begins nothing more; `run` ends when running work is settled."""
        self._stopping.set()
        self._changed.set()
        for running in self._running.values():
            running.told.set()

    def _on_change(self, job: BatchesApiJob) -> None:
        if running := self._running.get(job.id):
            running.job = msgspec.structs.replace(running.job, state=job.state)
            running.told.set()
        self._changed.set()

    def _ended(self, job_id: str, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None:
            self._forget(job_id)
            return
        log.error("cannot process a batch; retrying", extra=fields(batch=job_id), exc_info=error)
        asyncio.get_running_loop().call_later(_LONGEST_RETRY_S, self._forget, job_id)

    def _forget(self, job_id: str) -> None:
        del self._running[job_id]
        self._changed.set()

    async def _due(self) -> list[BatchesApiJob]:
        """Jobs to begin: those to be given up, then of the owners with the fewest running ones, oldest first."""
        waiting = [job for job in await self._jobs.run(lambda store: store.unfinished()) if job.id not in self._running]
        left = max(0, _JOBS_AT_ONCE + _MORE_GIVEN_UP - len(self._running))
        due = [job for job in waiting if self._given_up(job)][:left]
        for job in due:
            waiting.remove(job)
            self._running[job.id] = _Running(job)
        owners = Counter(running.job.owner for running in self._running.values())
        while waiting and len(self._running) < _JOBS_AT_ONCE:
            job = min(waiting, key=lambda job: owners[job.owner])  # of equals the first, which is the oldest
            if owners[job.owner] >= _JOBS_OF_ONE_OWNER:
                break
            waiting.remove(job)
            owners[job.owner] += 1
            due.append(job)
            self._running[job.id] = _Running(job)
        return due

    # One job.

    async def _work_off(self, job: BatchesApiJob) -> None:
        try:
            with contextlib.suppress(StoppedError):
                await self._to_its_end(self._running[job.id])
        finally:
            self._changed.set()

    async def _to_its_end(self, running: _Running) -> None:
        """Runs a job from where it stands. Raises `StoppedError` if the server stops first."""
        jobs, job = self._jobs, running.job
        if not await jobs.in_thread(jobs.store.path(job.input_file_id).exists):
            problem = Problem("missing_input_file", "The input file is gone from the server's disk; upload it again.")
            await self._room(lambda: jobs.run(lambda store: store.end_job(job.id, JobState.FAILED, [problem])))
            return
        if job.in_progress_at is None and not await self._begin_job(running):
            return
        paths = [jobs.store.path(name) for name in (job.output_id, job.error_id)]
        opened = await self._room(lambda: jobs.in_thread(Results, *paths, running.job))
        with contextlib.closing(opened) as results:
            if not results.complete:
                log.error("results of a batch are missing; recomputing the whole batch", extra=fields(batch=job.id))
                await jobs.in_thread(results.clear)
                await self._update(running, position=0, completed=0, failed=0, output_bytes=0, error_bytes=0)
            with contextlib.closing(await self._open_lines(running)) as lines:
                await self._compute(running, results, lines)
            if running.job.settled < running.job.total:
                await self._give_up(running, results)
        state = JobState.EXPIRED if running.job.expired else JobState.COMPLETED
        await self._room(lambda: jobs.run(lambda store: store.end_job(job.id, state)))

    async def _begin_job(self, running: _Running) -> bool:
        """Whether there is anything to compute; a job with invalid input, or a cancelled one, ends here."""
        job, settings = running.job, self._settings
        total = 0
        problems: list[Problem] = []
        state = JobState.CANCELLED
        if job.state is not JobState.CANCELLING:
            state = JobState.FAILED
            total, problems = await self._jobs.in_thread(
                check_lines,
                *(self._jobs.store.path(job.input_file_id), job.endpoint),
                *(settings.batch_max_lines, settings.body_limit_bytes),
            )
        if not total or problems:
            await self._room(lambda: self._jobs.run(lambda store: store.end_job(job.id, state, problems)))
            return False
        running.job = await self._room(lambda: self._jobs.run(lambda store: store.begin_job(job.id, total)))
        return True

    async def _compute(self, running: _Running, results: Results, lines: Lines) -> None:
        """Computes and settles lines until all are done or the job is given up; raises `StoppedError`."""
        window, read = _Window(), deque[Line]()
        try:
            while self._given_up(running.job) is None:
                while window.has_room and not self._stopping.is_set():
                    if not read:
                        read.extend(await self._jobs.in_thread(lines.read, _READ_BYTES))
                    if not read:
                        break
                    window.add(await self._begin(self._endpoints[running.job.endpoint], read.popleft()))
                    await asyncio.sleep(0)  # one line in a turn of the loop: others are not held up
                if not window.lines:
                    break
                await self._wait(running, window.begun[0].task, _SETTLE_S if window.ready else None)
                window.collect()
                if window.due:
                    await self._settle(running, results, window.take())
        finally:
            for begun in window.begun:
                begun.task.cancel()
            await asyncio.gather(*(begun.task for begun in window.begun), return_exceptions=True)
            if window.ready:
                await self._settle(running, results, window.take())
        if self._stopping.is_set() and running.job.settled < running.job.total:
            raise StoppedError

    async def _begin(self, endpoint: Endpoint, line: Line) -> _Begun:
        try:
            prepared = await self._persist(lambda: endpoint.prepare(line.id, line.body), 0)
        except StoppedError:
            raise
        except Exception as error:  # noqa: BLE001  a line's boundary
            return _Begun(line, 1, asyncio.create_task(self._refused(endpoint, line, error)))
        return _Begun(line, prepared.texts, asyncio.create_task(self._answered(endpoint, line, prepared)))

    async def _answered(self, endpoint: Endpoint, line: Line, prepared: Prepared) -> Result:
        try:
            return Result(line, await prepared.answer(self._persist))
        except StoppedError:
            raise
        except Exception as error:  # noqa: BLE001  a line's boundary
            return await self._refused(endpoint, line, error)

    async def _refused(self, endpoint: Endpoint, line: Line, error: Exception) -> Result:
        """The answer for an error; an unexpected one ends its line, and not the job."""
        if not isinstance(error, BertserveError):
            log.error("a line of a batch failed", extra=fields(request_id=line.id), exc_info=error)
            error = InternalError()
        elif isinstance(error, EngineFault) and error.news:
            log.error("a line of a batch crashed two engine processes", extra=fields(request_id=line.id))
        return Result(line, endpoint.refusal(line.id, error.without_traceback()))

    @contextlib.asynccontextmanager
    async def _admitted(self, texts: int) -> AsyncIterator[None]:
        """Holds a slot for each text, one request after another: so two waiting requests cannot deadlock."""
        held, needed = 0, min(texts, _TEXTS_AT_ONCE)
        try:
            if needed:
                async with self._entering:
                    while held < needed:
                        await self._slots.acquire()
                        held += 1
            yield
        finally:
            for _ in range(held):
                self._slots.release()

    async def _persist(self, work: Callable[[], Awaitable[T]], texts: int) -> T:
        late = 0
        wait_s = _RETRY_S
        while True:
            try:
                async with self._admitted(texts):
                    return await work()
            except DeadlineExceeded as error:
                late += 1
                if late == _MAX_LATE:
                    raise
                after_s = error.retry_after_s
            except (Overloaded, Unavailable) as error:
                after_s = error.retry_after_s
            await self._pause(max(after_s or 0.0, wait_s))
            wait_s = min(2 * wait_s, _LONGEST_RETRY_S)

    async def _give_up(self, running: _Running, results: Results) -> None:
        """Writes for each remaining line that it was not computed."""
        code, message = self._given_up(running.job) or _EXPIRED
        if code == _EXPIRED[0] and not running.job.expired:
            await self._update(running, expired=True)
        with contextlib.closing(await self._open_lines(running)) as lines:
            while read := await self._jobs.in_thread(lines.read, _READ_BYTES):
                await self._settle(running, results, [Result(line, None, code, message) for line in read])

    async def _settle(self, running: _Running, results: Results, ready: Sequence[Result]) -> None:
        """Writes results and records them in the database; waits while there is no room."""
        while self._jobs.store.full and self._given_up(running.job) is None:
            self._tell_of_missing_room("the files have reached their total size limit (--batch-disk-mb)")
            await self._pause(_LONGEST_RETRY_S)
        good = sum(result.good for result in ready)
        output_bytes, error_bytes = await self._room(lambda: self._jobs.in_thread(results.append, ready))
        await self._update(
            running,
            position=ready[-1].line.end,
            completed=running.job.completed + good,
            failed=running.job.failed + len(ready) - good,
            output_bytes=output_bytes,
            error_bytes=error_bytes,
        )
        self.lines["completed"] += good
        self.lines["failed"] += len(ready) - good

    async def _update(self, running: _Running, **changes: Any) -> None:  # noqa: ANN401  fields of `BatchesApiJob`
        job_id = running.job.id
        running.job = await self._room(lambda: self._jobs.run(lambda store: store.update(job_id, **changes)))

    async def _open_lines(self, running: _Running) -> Lines:
        return await self._jobs.in_thread(Lines, self._jobs.store.path(running.job.input_file_id), running.job)

    async def _room(self, work: Callable[[], Awaitable[T]]) -> T:
        """The result of the work, which is repeated while the disk is full. May raise `StoppedError`."""
        while True:
            try:
                done = await work()
            except StorageFull as error:
                self._tell_of_missing_room(error.message)
                await self._pause(_LONGEST_RETRY_S)
            else:
                self._room_missing = False
                return done

    def _tell_of_missing_room(self, why: str) -> None:
        if not self._room_missing:
            log.warning("batches are paused, no disk space: %s", why)
        self._room_missing = True

    async def _pause(self, seconds: float) -> None:
        """Waits; raises `StoppedError` if the server stops meanwhile."""
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return
        raise StoppedError

    async def _wait(self, running: _Running, task: asyncio.Task[Result], limit_s: float | None) -> None:
        """Waits for a line's answer, at most `limit_s`, or until the job is given up or the server stops."""
        told = asyncio.create_task(running.told.wait())
        left_s = max(0.0, running.job.expires_at - self._clock())  # a clock may be set: it is looked at now and then
        try:
            timeout_s = min(left_s, _HOUSEKEEPING_S if limit_s is None else limit_s)
            await asyncio.wait({task, told}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            told.cancel()
            running.told.clear()

    def _given_up(self, job: BatchesApiJob) -> tuple[str, str] | None:
        """The code and the sentence for lines that are given up; None before that."""
        if job.state is JobState.CANCELLING:
            return _CANCELLED
        return _EXPIRED if job.expired or self._clock() >= job.expires_at else None
