"""The wire protocol between a front process and the core process: frames over one Unix socket.

    frame     := as in `engine.process.wire`; `batch` is the number of a request
    RUN       := arrival f64 | timeout_ms f64, NaN for none | priority u64 | texts as in RUN there
    ROWS      := queue_us f64 | compute_us f64 | submitted f64 | cached u32 | texts u32 | outputs u32 | pad u32
                 | for each output: dtype u32 | ndim u32 | dims u32[texts x ndim] | data
    ASK       := JSON `Asking`; answered by ADMITTED (JSON) or ERROR: admission of texts that wait for the tokenizer,
                 and of those with work after the engine
    LEAVE     := u8, 1 if the deadline has passed: the front waits no longer for a request, or returns its admission
    AFTER     := after_us f64 | behind_us f64 | deadline f64: the arguments of `Permit.add_after`, for an admission
    ERROR     := JSON [name of the class, its attributes]
    all other := JSON

RUN is answered by ROWS, by ERROR, or by MOVED if the version of its model has changed. Connections are passed over a
second socket, one message each: a JSON `Passed`, and the descriptor of the connection (SCM_RIGHTS, unix(7)).
"""

from __future__ import annotations

import math
import struct
from array import array
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import numpy as np

from bertserve.serving import errors
from bertserve.serving.engine.process.wire import HEADER, pack, pack_texts, unpack_texts
from bertserve.serving.engine.specs import EngineChoice  # noqa: TC001  msgspec reads the annotations
from bertserve.serving.errors import BertserveError, InternalError
from bertserve.serving.lifecycle import State  # noqa: TC001
from bertserve.serving.models.manifest import Artifact, Manifest  # noqa: TC001
from bertserve.serving.records import EncodedText
from bertserve.serving.telemetry.metrics import CountsSince  # noqa: TC001

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bertserve.serving.records import ModelIndex, Row

_RUN = struct.Struct("=ddQ")
_RUN_TEXTS = struct.Struct(f"{_RUN.format}II")
_RUN_ONE = struct.Struct(f"{_RUN_TEXTS.format}I")
AFTER = struct.Struct("=ddd")
_ROWS = struct.Struct("=dddIIII")
_ROWS_ONE = struct.Struct(f"{HEADER.format}dddIIIIIII")
_OUTPUT = struct.Struct("=II")
_DTYPES = _FLOAT, _INT = np.dtype(np.float32), np.dtype(np.int32)


class Kind(IntEnum):
    """Kinds of frames. The first group goes to the core, the second to a front, the third in both directions."""

    RUN = 1
    ASK = 2
    LEAVE = 3
    CALL = 4
    UP = 6
    COUNTS = 7
    CLOSED = 8
    IDLE = 9
    FOLLOWED = 10
    LEFT = 11
    AFTER = 12

    SETUP = 32
    ROWS = 33
    ERROR = 34
    ADMITTED = 35
    REPLY = 36
    MODELS = 38
    STATE = 39
    COUNT = 41
    FIND_IDLE = 42
    CLOSE_IDLE = 43
    END = 44
    MOVED = 46

    DEBT = 64


KINDS = {int(kind): kind for kind in Kind}


class Asking(msgspec.Struct, frozen=True, array_like=True):
    """The arguments of `Admission.admit`; without a model, of `Admission.reserve` with `sizes` as tokens."""

    model: int | None
    sizes: list[int]
    longest: int | None = None
    arrival: float = 0.0
    timeout_ms: float | None = None
    priority: int = 0


class AdmittedUntil(msgspec.Struct, frozen=True, array_like=True):
    """Attributes of the `Permit`; the deadline is None for none."""

    deadline: float | None
    shortened: str


class Called(msgspec.Struct, frozen=True):
    """A request that the core answers in place of a front: of HTTP by its route, of gRPC by its method."""

    route: str
    method: str = ""
    path: str = ""
    headers: dict[str, str] = {}
    parameters: dict[str, str] = {}
    body: bytes = b""
    request_id: str = ""


class Replied(msgspec.Struct, frozen=True):
    """The reply to a call: of HTTP, or of gRPC as `body` and trailing `metadata`."""

    body: bytes = b""
    status: int = 200
    content_type: bytes = b""
    head: bytes = b""
    metadata: tuple[tuple[str, str], ...] = ()


class MirroredModel(msgspec.Struct, frozen=True):
    """A `ServedModel` without its tokenizer."""

    index: int
    path: str
    sha256: str
    manifest: Manifest
    artifact: Artifact
    second: Artifact | None
    served: bool


class Models(msgspec.Struct, frozen=True):
    """What the repository serves. `revision` counts its changes."""

    revision: int
    models: list[MirroredModel]
    engine: EngineChoice


class StateNow(msgspec.Struct, frozen=True):
    """The state of the `Lifecycle`."""

    state: State
    accepting: bool


class Setup(msgspec.Struct, frozen=True):
    """The first frame to a front.

    Attributes:
        settings: As JSON.
        host: Address of the HTTP port.
        slot: The front's place in the shared buffer budget.
    """

    settings: str
    log_format: Literal["text", "json"]
    log_level: str
    host: str
    slot: int
    models: Models
    state: StateNow


class Passed(msgspec.Struct, frozen=True, array_like=True):
    """A connection that the core has accepted for a front, and its number."""

    port: str
    number: int


class FrontCounts(msgspec.Struct, frozen=True):
    """What a front has counted since the last time.

    Attributes:
        number: Of the COUNT that this answers; 0 if nobody asked.
    """

    number: int
    counts: CountsSince


class Rows(NamedTuple):
    """The rows of a request; see `inference.pipeline.Rows`."""

    rows: Sequence[Row]
    queue_us: float
    compute_us: float
    submitted: float
    cached: bool


class Running(msgspec.Struct, frozen=True):
    """A RUN frame."""

    arrival: float
    timeout_ms: float | None
    priority: int
    texts: Sequence[EncodedText]


def pack_json(kind: Kind, value: Any = None, *, number: int = 0) -> bytes:  # noqa: ANN401  what msgspec writes
    return pack(kind, msgspec.json.encode(value), batch=number)


def pack_run(
    number: int,
    model: ModelIndex,
    texts: Sequence[EncodedText],
    arrival: float,
    timeout_ms: float | None,
    priority: int,
) -> bytes:
    head = _RUN.pack(arrival, math.nan if timeout_ms is None else timeout_ms, priority)
    return pack(Kind.RUN, head + pack_texts(texts), model=model, batch=number)


def unpack_running(payload: bytes) -> Running:
    arrival, timeout_ms, priority, count, typed = _RUN_TEXTS.unpack_from(payload)
    if count == 1 and not typed:  # as in `pack_texts`
        texts = [EncodedText(array("i", payload[_RUN_ONE.size :]))]
    else:
        texts = unpack_texts(memoryview(payload)[_RUN.size :])
    return Running(arrival, None if math.isnan(timeout_ms) else timeout_ms, priority, texts)


def pack_rows(
    number: int,
    rows: Sequence[Row],
    queue_us: float,
    compute_us: float,
    submitted: float,
    *,
    cached: bool,
) -> bytes:
    if len(rows) == len(rows[0]) == 1 and rows[0][0].ndim == 1 and rows[0][0].dtype == _FLOAT:  # as in `pack_texts`
        (row,) = rows[0]
        size = _ROWS_ONE.size - HEADER.size + row.nbytes
        head = (size, Kind.ROWS, 0, number, queue_us, compute_us, submitted, cached, 1, 1, 0, 0, 1, len(row))
        return _ROWS_ONE.pack(*head) + row.tobytes()
    parts: list[Any] = [b"", _ROWS.pack(queue_us, compute_us, submitted, cached, len(rows), len(rows[0]), 0)]
    size = _ROWS.size
    for each in zip(*rows, strict=True):
        first = each[0]
        dtype = int(first.dtype == _INT)
        dims = array("I", [dim for row in each for dim in row.shape])
        parts += (_OUTPUT.pack(dtype, first.ndim), dims)
        parts += [row if row.flags.c_contiguous else row.copy() for row in each]
        size += _OUTPUT.size + 4 * len(dims) + sum([row.nbytes for row in each])
    parts[0] = HEADER.pack(size, Kind.ROWS, 0, number)
    return b"".join(parts)


def unpack_rows(payload: bytes) -> Rows:
    """The rows in a ROWS frame, read-only views of the payload."""
    queue_us, compute_us, submitted, cached, texts, outputs, _ = _ROWS.unpack_from(payload)
    at = _ROWS.size
    columns = []
    for _ in range(outputs):
        dtype, ndim = _OUTPUT.unpack_from(payload, at)
        at += _OUTPUT.size
        dims = memoryview(payload)[at : at + 4 * texts * ndim].cast("I").tolist()
        at += 4 * len(dims)
        column: list[Any] = []
        for first in range(0, len(dims), ndim):
            row: np.ndarray[Any, Any] = np.ndarray(dims[first : first + ndim], _DTYPES[dtype], payload, at)
            column.append(row)
            at += row.nbytes
        columns.append(column)
    rows = list(zip(*columns, strict=True))
    return Rows(rows, queue_us, compute_us, submitted, bool(cached))


def pack_error(number: int, error: BertserveError) -> bytes:
    return pack_json(Kind.ERROR, (type(error).__name__, vars(error)), number=number)


def unpack_error(payload: bytes) -> BertserveError:
    name, attributes = msgspec.json.decode(payload, type=tuple[str, dict[str, Any]])
    kind = getattr(errors, name, InternalError)
    error: BertserveError = kind.__new__(kind)
    error.args = (attributes["message"],)
    vars(error).update(attributes)
    return error
