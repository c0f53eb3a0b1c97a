"""Request and reply types of OpenAI's Files and Batches routes. Times are seconds since 1970."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from serving.bulk.batches_api.records import BatchesApiJob, JobState, Problem, StoredFile

MIN_KEEP_S, MAX_KEEP_S = 3600, 2_592_000


class FileObject(msgspec.Struct):
    """A file; `purpose` is `batch` or `batch_output`."""

    id: str
    bytes: int
    created_at: int
    filename: str
    object: Literal["file"]
    purpose: str
    status: Literal["processed"]
    expires_at: int
    status_details: None = None


class FileList(msgspec.Struct):
    """A page of files."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(msgspec.Struct):
    """A deleted file."""

    id: str
    object: Literal["file"]
    deleted: bool


class ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True):
    """Retention time of a batch's output files, from their creation."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, msgspec.Meta(ge=MIN_KEEP_S, le=MAX_KEEP_S)]


class BatchRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A batch to create.

    Attributes:
        input_file_id: A file that was uploaded with the purpose `batch`.
        endpoint: The endpoint for its lines.
        completion_window: Time limit. Lines that are not computed by then are dropped.
        metadata: Up to 16 pairs, for the client's own use.
        output_expires_after: Null: the retention time of all files.
    """

    input_file_id: str
    endpoint: Literal["/v1/embeddings", "/embed_sparse"]
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchErrors(msgspec.Struct):
    """The first hundred problems of a rejected input file."""

    object: Literal["list"]
    data: list[Problem]


class RequestCounts(msgspec.Struct):
    """Lines of the input, of the output file and of the error file."""

    total: int
    completed: int
    failed: int


class BatchObject(msgspec.Struct):
    """A batch. Its output and error file are named after its end, if they have lines."""

    id: str
    object: Literal["batch"]
    endpoint: str
    input_file_id: str
    completion_window: str
    status: str
    created_at: int
    expires_at: int
    errors: BatchErrors | None
    output_file_id: str | None
    error_file_id: str | None
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(msgspec.Struct):
    """A page of batches."""

    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


def file_object(file: StoredFile) -> FileObject:
    return FileObject(
        *(file.id, file.bytes, file.created_at, file.name, "file", file.purpose, "processed", file.expires_at)
    )


def batch_object(job: BatchesApiJob) -> BatchObject:
    def ended(state: JobState) -> int | None:
        return job.ended_at if job.state is state else None

    return BatchObject(
        id=job.id,
        object="batch",
        endpoint=job.endpoint,
        input_file_id=job.input_file_id,
        completion_window=job.completion_window,
        status=job.state,
        created_at=job.created_at,
        expires_at=job.expires_at,
        errors=BatchErrors("list", job.problems) if job.problems else None,
        output_file_id=job.output_id if job.ended and job.output_bytes else None,
        error_file_id=job.error_id if job.ended and job.error_bytes else None,
        in_progress_at=job.in_progress_at,
        finalizing_at=ended(JobState.COMPLETED),
        completed_at=ended(JobState.COMPLETED),
        failed_at=ended(JobState.FAILED),
        expired_at=ended(JobState.EXPIRED),
        cancelling_at=job.cancelling_at,
        cancelled_at=ended(JobState.CANCELLED),
        request_counts=RequestCounts(job.total, job.completed, job.failed),
        metadata=job.metadata,
    )
