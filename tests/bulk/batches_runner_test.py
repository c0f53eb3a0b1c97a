"""BatchesApiService over a real folder and database, with an endpoint and a clock that the tests hold."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from serving.bulk.batches_api import runner as runner_module
from serving.bulk.batches_api.lines import Answer
from serving.bulk.batches_api.records import BatchesApiJob, JobState
from serving.bulk.batches_api.runner import BatchesApiRunner
from serving.bulk.batches_api.service import BatchesApiService, Upload
from serving.bulk.batches_api.store import BatchesApiStore, StoreLimits
from serving.errors import (
    EngineFault,
    EngineLost,
    InvalidRequest,
    NotReady,
    ObjectNotFound,
    Overloaded,
    StartupError,
    StorageFull,
)
from serving.settings import Settings
from tests.support.batches import lines_of, request_line
from tests.support.no_room import no_room
from tests.support.virtual_time import asynchronous
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from serving.bulk.batches_api.runner import Retry
    from serving.errors import BertserveError

LIMITS = StoreLimits(bytes=1 << 20, files=20, jobs=3, keep_s=1000)
DAY_S = 86_400
T = TypeVar("T")


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0
        self.looks = 0

    def __call__(self) -> float:
        self.looks += 1
        return self.now


class Line:
    texts = 1

    def __init__(self, body: dict[str, Any], work: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        self._body, self._work = body, work

    async def answer(self, retry: Retry) -> Answer:
        await retry(lambda: self._work(self._body), 1)
        return Answer(200, lambda: [json.dumps(self._body).encode()])


class Endpoint:
    """Answers with the line's own body, when `work` has let it pass; the second line is read at the second try."""

    def __init__(self, work: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        self._work, self._asked = work, set[str]()

    async def prepare(self, line_id: str, body: bytes) -> Line:
        assert line_id.startswith("batch_req_")
        if line_id not in self._asked and line_id.endswith("_2"):
            self._asked.add(line_id)
            raise Overloaded("later")
        return Line(json.loads(body), self._work)

    def refusal(self, line_id: str, error: BertserveError) -> Answer:
        return Answer(error.http_status, lambda: [json.dumps({"id": line_id, "reason": error.reason}).encode()])


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What passes is tried again at once, and results are settled often."""
    for name in ("_RETRY_S", "_LONGEST_RETRY_S", "_SETTLE_S"):
        monkeypatch.setattr(runner_module, name, 0.001)


def job_of(file_id: str, clock: Clock, name: str = "batch_a", owner: str = "me") -> BatchesApiJob:
    times = {"created_at": int(clock()), "expires_at": int(clock()) + DAY_S}
    return BatchesApiJob(
        id=name, owner=owner, endpoint="/v1/embeddings", input_file_id=file_id, completion_window="24h", **times
    )


def some_lines(count: int) -> bytes:
    return lines_of([request_line(f"r-{n}", {"n": n}) for n in range(count)])


async def uploaded(jobs: BatchesApiService, count: int, owner: str = "me") -> str:
    async with Upload(jobs) as upload:
        upload.write(some_lines(count))
        return (await upload.accept(owner, "input", None)).id


async def stored(jobs: BatchesApiService, look: Callable[[BatchesApiStore], T]) -> T:
    async with asyncio.timeout(20):
        while not (found := await jobs.run(look)):  # noqa: ASYNC110  it is on a disk
            await asyncio.sleep(0.002)
    return found


async def worked_off(
    jobs: BatchesApiService, endpoint: Endpoint, clock: Clock, reached: Callable[[BatchesApiJob], bool]
) -> BatchesApiJob:
    """The only job once a runner has brought it so far; the runner is stopped."""
    runner = BatchesApiRunner(jobs, {"/v1/embeddings": endpoint}, Settings(), clock)
    running = asyncio.create_task(runner.run())
    job = await stored(jobs, lambda store: job if reached(job := store.job("me", "batch_a")) else None)
    assert job is not None
    runner.stop()
    await asyncio.wait_for(running, 20)
    return job


def read(jobs: BatchesApiService, file_id: str) -> list[dict[str, Any]]:
    path = jobs.store.path(file_id)
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


@contextlib.contextmanager
def jobs_in(folder: Path, clock: Clock, limits: StoreLimits = LIMITS) -> Iterator[BatchesApiService]:
    jobs = BatchesApiService(BatchesApiStore(folder, limits, clock), 1 << 20)
    try:
        yield jobs
    finally:
        jobs.close()


@pytest.fixture
def jobs(tmp_path: Path, clock: Clock) -> Iterator[BatchesApiService]:
    with jobs_in(tmp_path, clock) as opened:
        yield opened


async def at_once(_: dict[str, Any]) -> None:
    """Lets every line pass."""


def only(count: int) -> Callable[[dict[str, Any]], Awaitable[None]]:
    """Lets so many lines pass; the others are tried again."""

    async def some(body: dict[str, Any]) -> None:
        if body["n"] >= count:
            raise NotReady("not now")

    return some


@asynchronous
async def test_a_job_whose_time_is_over_expires(jobs: BatchesApiService, clock: Clock) -> None:
    """What is done by then is its output; every other line says why it is not."""
    await jobs.create(job_of(await uploaded(jobs, 50), clock))

    async def some(body: dict[str, Any]) -> None:
        if body["n"] == 20:
            clock.now += DAY_S
        if body["n"] >= 20:
            raise NotReady("not now")

    job = await worked_off(jobs, Endpoint(some), clock, lambda job: job.ended)
    assert (job.state, job.total) == (JobState.EXPIRED, 50)
    output, errors = read(jobs, job.output_id), read(jobs, job.error_id)
    assert [line["custom_id"] for line in output + errors] == [f"r-{n}" for n in range(50)]
    assert len(output) <= 20
    assert {line["error"]["code"] for line in errors} == {"batch_expired"}
    assert (job.completed, job.failed) == (len(output), len(errors))


@asynchronous
async def test_a_line_that_ends_engines_is_named_in_the_log(
    jobs: BatchesApiService, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Once: it is the line's answer, and others with the same text are refused without a word."""

    async def deadly(body: dict[str, Any]) -> None:
        if body["n"]:
            raise EngineFault("ended two", news=body["n"] == 1)

    await jobs.create(job_of(await uploaded(jobs, 3), clock))
    job = await worked_off(jobs, Endpoint(deadly), clock, lambda job: job.ended)
    errors = [line["response"] for line in read(jobs, job.error_id)]
    assert [error["body"]["reason"] for error in errors] == ["engine_fault"] * 2
    (record,) = [record for record in caplog.records if "crashed two engine processes" in record.getMessage()]
    assert record.__dict__["fields"]["request_id"] == "batch_req_a_2"


@asynchronous
async def test_what_passes_is_waited_for(jobs: BatchesApiService, clock: Clock) -> None:
    """Overload and restarts, however many, are no line's answer; other errors and bugs are."""
    asked: dict[int, int] = {}

    async def moody(body: dict[str, Any]) -> None:
        n = body["n"]
        asked[n] = asked.get(n, 0) + 1
        if n == 1:
            raise InvalidRequest("wrong")
        if n == 3 and asked[n] < 4:
            raise EngineLost("gone")
        if n == 4 and asked[n] < 10:
            raise Overloaded("later")
        if n == 5:
            raise ValueError("a bug")

    await jobs.create(job_of(await uploaded(jobs, 7), clock))
    job = await worked_off(jobs, Endpoint(moody), clock, lambda job: job.ended)
    assert job.state is JobState.COMPLETED
    assert [line["custom_id"] for line in read(jobs, job.output_id)] == ["r-0", "r-2", "r-3", "r-4", "r-6"]
    errors = [line["response"] for line in read(jobs, job.error_id)]
    assert [(error["status_code"], error["body"]["reason"]) for error in errors] == [
        (422, "invalid_request"),
        (500, "internal"),
    ]
    assert (asked[3], asked[4]) == (4, 10)


@asynchronous
async def test_a_stopped_runner_leaves_what_the_next_one_goes_on_with(tmp_path: Path, clock: Clock) -> None:
    """What is settled is not asked again; what was written and not settled is cut off, and computed once more."""
    asked: list[int] = []
    stuck = 30

    async def counted(body: dict[str, Any]) -> None:
        if body["n"] >= stuck:
            raise NotReady("not now")
        asked.append(body["n"])

    with jobs_in(tmp_path, clock) as jobs:
        await jobs.create(job_of(await uploaded(jobs, 60), clock))
        job = await worked_off(jobs, Endpoint(counted), clock, lambda job: job.completed == stuck)
        with jobs.store.path(job.output_id).open("ab") as file:
            file.write(b'{"a line that the server was writing when it was ki')
        (tmp_path / "files" / "file-of-nobody").write_text("left by a crash")
        (tmp_path / "incoming" / "half").write_text("the same")
    stuck = 60
    with jobs_in(tmp_path, clock) as jobs:
        assert {path.name for path in (tmp_path / "files").iterdir()} & {"file-of-nobody"} == set()
        assert list((tmp_path / "incoming").iterdir()) == []
        job = await worked_off(jobs, Endpoint(counted), clock, lambda job: job.ended)
        assert [line["custom_id"] for line in read(jobs, job.output_id)] == [f"r-{n}" for n in range(60)]
        assert sorted(asked) == list(range(60))


@pytest.mark.parametrize("settled", [0, 5])
@asynchronous
async def test_an_input_that_is_gone_fails_its_job(tmp_path: Path, clock: Clock, settled: int) -> None:
    """Where an operator or a restored backup has lost it: the job ends and says so, what is computed stays."""
    with jobs_in(tmp_path, clock) as jobs:
        await jobs.create(job_of(await uploaded(jobs, 9), clock))
        job = await worked_off(jobs, Endpoint(only(settled)), clock, lambda job: job.completed == settled)
        jobs.store.path(job.input_file_id).unlink()
    with jobs_in(tmp_path, clock) as jobs:
        job = await worked_off(jobs, Endpoint(at_once), clock, lambda job: job.ended)
        assert (job.state, [problem.code for problem in job.problems]) == (JobState.FAILED, ["missing_input_file"])
        assert len(read(jobs, job.output_id)) == job.completed == settled
        with pytest.raises(ObjectNotFound):
            await jobs.run(lambda store: store.file("me", job.input_file_id))


@asynchronous
async def test_results_that_are_gone_are_computed_again(tmp_path: Path, clock: Clock) -> None:
    """All of them: a part would not be known from the whole."""
    stuck = 10

    with jobs_in(tmp_path, clock) as jobs:
        await jobs.create(job_of(await uploaded(jobs, 20), clock))
        job = await worked_off(jobs, Endpoint(only(stuck)), clock, lambda job: job.completed == stuck)
        jobs.store.path(job.output_id).unlink()
    with jobs_in(tmp_path, clock) as jobs:
        job = await worked_off(jobs, Endpoint(at_once), clock, lambda job: job.ended)
        assert [line["custom_id"] for line in read(jobs, job.output_id)] == [f"r-{n}" for n in range(20)]
        assert (job.completed, job.failed) == (20, 0)


@asynchronous
async def test_a_full_disk_is_waited_for(
    tmp_path: Path, jobs: BatchesApiService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results that were written in part are cut off and written again; uploads are refused and leave nothing."""
    writes = os.write
    left = 3

    def full(handle: int, data: bytes) -> int:
        nonlocal left
        if left and Path(f"/proc/self/fd/{handle}").readlink().name.endswith(("-output", "-error")) and len(data) > 20:
            left -= 1
            writes(handle, data[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        return writes(handle, data)

    await jobs.create(job_of(await uploaded(jobs, 30), clock))
    monkeypatch.setattr(os, "write", full)
    job = await worked_off(jobs, Endpoint(at_once), clock, lambda job: job.ended)
    assert [line["custom_id"] for line in read(jobs, job.output_id)] == [f"r-{n}" for n in range(30)]
    assert left == 0

    def none(_: int, __: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", none)
    with pytest.raises(StorageFull):
        await uploaded(jobs, 3)
    assert list((tmp_path / "incoming").iterdir()) == []


@asynchronous
async def test_a_disk_without_room_for_the_database(tmp_path: Path, clock: Clock) -> None:
    """A file that cannot be listed does not stay, and one that is deleted makes its room free all the same."""
    with jobs_in(tmp_path, clock) as jobs:
        file_id = await uploaded(jobs, 3)
        path = jobs.store.path(file_id)
        upload = tmp_path / "incoming" / "whole"
        upload.write_text("written before the disk was full")
        for attempt in (
            lambda: jobs.store.accept(upload, "me", "name", None),
            lambda: jobs.store.create_job(job_of(file_id, clock)),
            lambda: jobs.store.delete_file("me", file_id),
        ):
            assert list((tmp_path / "files").iterdir()) == [path]
            with no_room(), pytest.raises(StorageFull):
                attempt()
        assert list((tmp_path / "files").iterdir()) == []
    with jobs_in(tmp_path, clock) as jobs:
        assert (jobs.store.files, jobs.store.used_bytes, sum(jobs.store.states.values())) == (0, 0, 0)


@asynchronous
async def test_nothing_is_closed_under_a_thread(jobs: BatchesApiService) -> None:
    """Who is cancelled while a thread works with a file waits for it: the file's number may be another's at once."""
    begun, end = threading.Event(), threading.Event()

    def write() -> None:
        begun.set()
        end.wait(20)

    task = asyncio.create_task(jobs.in_thread(write))
    await asyncio.to_thread(begun.wait, 20)
    task.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not task.done()
    end.set()
    with pytest.raises(asyncio.CancelledError):
        await task


@asynchronous
async def test_a_server_that_fails_ends_without_room(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job with results for which there is no room does not keep it."""
    monkeypatch.setattr(runner_module, "_SETTLE_S", 1000.0)
    limits = StoreLimits(bytes=len(some_lines(9)), files=20, jobs=3, keep_s=1000)

    with jobs_in(tmp_path, clock, limits) as jobs:
        looks: list[int] = []
        await jobs.create(job_of(await uploaded(jobs, 9), clock))
        assert jobs.store.full

        async def only_the_first(body: dict[str, Any]) -> None:
            if body["n"]:
                looks.append(clock.looks)
                await asyncio.Event().wait()

        running = asyncio.create_task(
            BatchesApiRunner(jobs, {"/v1/embeddings": Endpoint(only_the_first)}, Settings(), clock).run()
        )
        # The runner looks at the clock when it waits for the first line, has it, and waits for the second.
        await until(lambda: len(looks) == 8 and clock.looks == looks[-1] + 3, "the result of the first line")
        running.cancel()
        ended, _ = await asyncio.wait({running}, timeout=10)
        assert ended


@asynchronous
async def test_bounds_on_all_files_together(tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """A batch whose results fill them waits until one is deleted; uploads on their way count, too."""
    limits = StoreLimits(bytes=14_000, files=20, jobs=3, keep_s=1000)

    with jobs_in(tmp_path, clock, limits) as jobs:
        spare = await uploaded(jobs, 50)
        file_id = await uploaded(jobs, 60)
        with pytest.raises(StorageFull):
            await uploaded(jobs, 80)
        await jobs.create(job_of(file_id, clock))

        async def delete_when_full() -> None:
            await until(lambda: "batches are paused, no disk space" in caplog.text, "the batch to wait")
            await jobs.run(lambda store: store.delete_file("me", spare))

        deleted = asyncio.create_task(delete_when_full())

        async def the_last_when_full(body: dict[str, Any]) -> None:
            if body["n"] >= 40:
                await until(lambda: jobs.store.full, "the results of the others to fill the store")

        job = await worked_off(jobs, Endpoint(the_last_when_full), clock, lambda job: job.ended)
        await deleted
        assert (job.state, job.completed) == (JobState.COMPLETED, 60)


@asynchronous
async def test_files_and_jobs_go_when_their_time_is_over(tmp_path: Path, jobs: BatchesApiService, clock: Clock) -> None:
    """From the disk as from the lists; an input that a job still reads stays until it has ended."""
    file_id = await uploaded(jobs, 3)
    await jobs.create(job_of(file_id, clock))
    clock.now += LIMITS.keep_s + 1
    assert await jobs.run(lambda store: store.expire()) == 0
    with pytest.raises(ObjectNotFound):
        await jobs.run(lambda store: store.file("me", file_id))
    job = await worked_off(jobs, Endpoint(at_once), clock, lambda job: job.ended)
    assert await jobs.run(lambda store: store.expire()) == 1
    clock.now += LIMITS.keep_s + 1
    assert await jobs.run(lambda store: store.expire()) == 1
    assert list((tmp_path / "files").iterdir()) == []
    assert (jobs.store.files, jobs.store.used_bytes, sum(jobs.store.states.values())) == (0, 0, 0)
    with pytest.raises(ObjectNotFound):
        await jobs.run(lambda store: store.job("me", job.id))


@asynchronous
async def test_a_new_job_takes_the_place_of_the_one_that_ended_first(jobs: BatchesApiService, clock: Clock) -> None:
    """One of its owner's rather than another's; where none has ended it is refused."""
    file_id = await uploaded(jobs, 1)
    others = await uploaded(jobs, 1, "other")
    await jobs.create(job_of(others, clock, "batch_o", "other"))
    for name in ("batch_b", "batch_c"):
        await jobs.create(job_of(file_id, clock, name))
    with pytest.raises(Overloaded):
        await jobs.create(job_of(file_id, clock, "batch_d"))
    await jobs.run(lambda store: store.end_job("batch_o", JobState.FAILED))
    await jobs.run(lambda store: store.end_job("batch_b", JobState.FAILED))
    for name in ("batch_d", "batch_e"):
        await jobs.create(job_of(file_id, clock, name))
        listed, more = await jobs.run(lambda store: store.list_jobs("me", after=None, limit=10))
        kept, _ = await jobs.run(lambda store: store.list_jobs("other", after=None, limit=10))
        assert (listed[0].id, listed[-1].id, more) == (name, "batch_c", False)
        assert [job.id for job in kept] == (["batch_o"] if name == "batch_d" else [])


@pytest.mark.parametrize("state", ["validating", "in progress"])
@asynchronous
async def test_a_job_cancelled_before_it_began(jobs: BatchesApiService, clock: Clock, state: str) -> None:
    """Ends as cancelled, also where the server ended between the two."""
    await jobs.create(job_of(await uploaded(jobs, 4), clock))
    if state == "in progress":
        await jobs.run(lambda store: store.begin_job("batch_a", 4))
    await jobs.cancel("me", "batch_a")
    job = await worked_off(jobs, Endpoint(at_once), clock, lambda job: job.ended)
    assert (job.state, job.completed) == (JobState.CANCELLED, 0)
    assert len(read(jobs, job.error_id)) == (4 if state == "in progress" else 0)


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (lambda folder: (folder / "jobs.sqlite").write_text("no database " * 1000), "jobs.sqlite cannot be used"),
        (lambda folder: (folder / "files").write_text(""), "File exists"),
        (lambda folder: BatchesApiStore(folder, LIMITS), "another server uses this folder"),
    ],
)
def test_a_folder_that_cannot_be_used(tmp_path: Path, prepare: Callable[[Path], object], said: str) -> None:
    held = prepare(tmp_path)
    with pytest.raises(StartupError, match=said):
        BatchesApiStore(tmp_path, LIMITS)
    if isinstance(held, BatchesApiStore):
        held.close()
        BatchesApiStore(tmp_path, LIMITS).close()


@asynchronous
async def test_others_may_not_read_the_folder(tmp_path: Path, jobs: BatchesApiService) -> None:
    """Also where the operator has made it for all to read."""
    tmp_path.chmod(0o755)  # noqa: ASYNC240  nothing waits yet
    await uploaded(jobs, 1)
    entries = {entry.name: entry.stat().st_mode & 0o077 for entry in os.scandir(tmp_path)}
    assert entries == dict.fromkeys(
        ("files", "incoming", "lock", "jobs.sqlite", "jobs.sqlite-wal", "jobs.sqlite-shm"), 0
    )


@asynchronous
async def test_a_clock_that_is_set_ends_what_is_stuck(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set forward, a job's time is over though nothing of it moves; set back, a new job is the latest all the same."""
    monkeypatch.setattr(runner_module, "_HOUSEKEEPING_S", 0.01)

    with jobs_in(tmp_path, clock, StoreLimits(bytes=1 << 20, files=20, jobs=3, keep_s=10 * DAY_S)) as jobs:
        file_id = await uploaded(jobs, 2)
        await jobs.create(job_of(file_id, clock))

        async def stuck(body: dict[str, Any]) -> None:
            looks = clock.looks
            await until(lambda: clock.looks > looks + 9, "the runner to wait for the lines")
            clock.now += DAY_S * body["n"]
            await asyncio.Event().wait()

        job = await worked_off(jobs, Endpoint(stuck), clock, lambda job: job.ended)
        assert (job.state, job.failed) == (JobState.EXPIRED, 2)
        clock.now -= 3 * DAY_S
        await jobs.create(job_of(file_id, clock, "batch_b"))
        listed, _ = await jobs.run(lambda store: store.list_jobs("me", after=None, limit=10))
        assert [job.id for job in listed] == ["batch_b", "batch_a"]


@asynchronous
async def test_owners_take_turns(tmp_path: Path, clock: Clock) -> None:
    """Many jobs of one do not keep another's waiting, and one that is cancelled or too old waits for none of them."""
    limits = StoreLimits(bytes=1 << 20, files=20, jobs=20, keep_s=1000)

    with jobs_in(tmp_path, clock, limits) as jobs:
        file_id = await uploaded(jobs, 2)
        for n in range(10):
            await jobs.create(job_of(file_id, clock, f"batch_a{n}"))
        runner = BatchesApiRunner(jobs, {"/v1/embeddings": Endpoint(only(0))}, Settings(), clock)
        running = asyncio.create_task(runner.run())
        other = await uploaded(jobs, 1, "other")
        await jobs.create(job_of(other, clock, "batch_o", "other"))

        def begun(store: BatchesApiStore) -> set[str]:
            found = {job.id for job in store.unfinished() if job.state is JobState.IN_PROGRESS}
            return found if "batch_o" in found else set()

        assert await stored(jobs, begun) <= {"batch_a0", "batch_a1", "batch_o"}
        ended = ("batch_a5", "batch_a6")
        await jobs.cancel("me", ended[0])
        await jobs.run(lambda store: store.update(ended[1], expires_at=0))
        await jobs.create(job_of(file_id, clock, "batch_a10"))
        await stored(jobs, lambda store: not {*ended} & {job.id for job in store.unfinished()})
        runner.stop()
        await running
        cancelled, expired = await jobs.run(lambda store: [store.job("me", name) for name in ended])
        assert (cancelled.state, expired.state) == (JobState.CANCELLED, JobState.EXPIRED)
