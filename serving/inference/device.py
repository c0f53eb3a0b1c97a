"""What computes requests, as the pipeline sees it: the dispatcher, or in a front its way to the core process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bertserve.serving.errors import DeadlineExceeded
    from bertserve.serving.records import EncodedText, ModelIndex, Row


class Rows(Protocol):
    """The rows of a request's texts, and their timings; see `PendingRequest`.

    Attributes:
        rows: The row of every output for each text.
        cached: Whether no engine computed any of them for this request.
    """

    @property
    def rows(self) -> Sequence[Row]: ...

    @property
    def cached(self) -> bool: ...

    @property
    def queue_us(self) -> float: ...

    @property
    def compute_us(self) -> float: ...

    @property
    def submitted(self) -> float: ...


class Admitted(Protocol):
    """The right of a request to hold tokens; see `Permit`."""

    @property
    def deadline(self) -> float: ...

    @property
    def priority(self) -> int: ...

    @property
    def model(self) -> ModelIndex: ...

    def reserve(self, tokens: int, now: float) -> None: ...

    def add_after(self, after_us: float, behind_us: float, deadline: float) -> None: ...

    def release(self) -> None: ...


P = TypeVar("P", bound=Admitted)


class Device(Protocol[P]):
    """See the module."""

    def permit(
        self, model: ModelIndex, tokens: int, texts: int, arrival: float, timeout_ms: float | None, priority: int
    ) -> P:
        """See `Admission.permit`; `run` admits the request."""

    async def admit(
        self,
        model: ModelIndex,
        sizes: Sequence[int],
        *,
        longest: int | None,
        arrival: float,
        timeout_ms: float | None,
        priority: int,
    ) -> P:
        """See `Admission.admit`."""

    async def reserve(self, tokens: int) -> P:
        """See `Admission.reserve`."""

    async def run(self, permit: P, texts: Sequence[EncodedText]) -> Rows: ...

    def missed(self, permit: P, where: str = "queue") -> DeadlineExceeded: ...
