"""Stored files and batch jobs, with the states of a job.

    validating ─► in_progress ─► completed, or expired when its time is over
         │             └───────► cancelling ─► cancelled
         ├─► failed      the input file is invalid, and nothing is computed
         └─► cancelling

No job stays in OpenAI's state `finalizing`: results are complete when the last line is. Times are whole seconds since
1970.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class JobState(StrEnum):
    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


UNFINISHED = (JobState.VALIDATING, JobState.IN_PROGRESS, JobState.CANCELLING)


class StoredFile(msgspec.Struct, frozen=True):
    """A file that was uploaded, or that a job has written.

    Attributes:
        owner: The owner's key; see `owner_of`.
        name: The client's name for it; it never names anything here.
        purpose: `batch` or `batch_output`.
    """

    id: str
    owner: str
    name: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int


class Problem(msgspec.Struct, frozen=True):
    """Why an input file is rejected.

    Attributes:
        line: Counted from 1; None for the whole file.
        param: The invalid field, if it is one.
    """

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchesApiJob(msgspec.Struct, frozen=True, kw_only=True):
    """A batch job.

    Attributes:
        expires_at: When lines that are not computed are given up.
        keep_output_s: How long its output files are kept; None: as long as any.
        ended_at: When it reached its last state.
        expired: Whether it expired before its last line was computed.
        total: Lines of its input.
        completed: Lines in its output file.
        failed: Lines in its error file.
        position: Settled bytes of the input; the rest is computed after a restart.
        output_bytes: Size of the output file at that position; it is truncated to that after a restart.
        error_bytes: The same for the error file.
    """

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    state: JobState = JobState.VALIDATING
    metadata: dict[str, str] | None = None
    keep_output_s: int | None = None
    in_progress_at: int | None = None
    cancelling_at: int | None = None
    ended_at: int | None = None
    expired: bool = False
    problems: list[Problem] = []
    total: int = 0
    completed: int = 0
    failed: int = 0
    position: int = 0
    output_bytes: int = 0
    error_bytes: int = 0

    @property
    def ended(self) -> bool:
        return self.state not in UNFINISHED

    @property
    def settled(self) -> int:
        """Lines that are in one of the two files."""
        return self.completed + self.failed

    @property
    def key(self) -> str:
        """The base of the names of its files and lines."""
        return self.id.removeprefix("batch_")

    @property
    def output_id(self) -> str:
        return f"file-{self.key}-output"

    @property
    def error_id(self) -> str:
        return f"file-{self.key}-error"
