"""Validates replies: the fields of the task, one answer per input, finite numbers."""

from __future__ import annotations

import json
import math
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.generator.grpc_messages import fields_in, varints_in
from bertserve.loadtest.generator.routes import OUTPUTS
from bertserve.serving.tasks import TASKS
from bertserve.serving.tasks.replies import WrongError, ordered

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bertserve.loadtest.generator.wire import Reply

_KEPT_BYTES = 64 << 20
_HEAD_LENGTH = b"\r\ninference-header-content-length:"
_NUMBERS = {"FP32": "<f4", "INT64": "<i8", "INT32": "<i4"}


class Answers:
    """Validates the replies to requests of one kind.

    Equal texts have equal answers, so a body that was valid once stays valid. Comparing bytes takes a few microseconds,
    and the generator often shares its cores with the server.
    """

    def __init__(self, protocol: str, task: str) -> None:
        """Expects answers of `task` in the format of the protocol."""
        self._task = task
        self._values = _VALUES[protocol]
        self._check = TASKS[task].load.check
        self._known: dict[bytes, int] = {}
        self._kept = 0
        self._width: int | None = None

    def fault(self, reply: Reply, inputs: int) -> str:
        """A short reason why a reply is invalid, equal for equal reasons; empty if it is valid.

        Args:
            reply: A complete reply.
            inputs: Number of texts, or pairs of texts, in the request.
        """
        if self._known.get(reply.body) == inputs and not reply.fault:
            return ""
        try:
            self.values(reply, inputs)
        except BenchError as error:
            return str(error)
        self._keep(reply.body, inputs)
        return ""

    def values(self, reply: Reply, inputs: int) -> Sequence[Any]:
        """The answer for each input: a vector, or the fields of the result.

        Args:
            reply: A complete reply.
            inputs: Number of inputs, as in `fault`.

        Raises:
            BenchError: The reply is invalid; the message is the reason of `fault`.
        """
        if reply.fault:
            raise BenchError(reply.fault)
        try:
            values = self._values(self._task, reply)
            self._width = self._width_of(values, inputs)
        except WrongError as error:
            raise BenchError(f"wrong answer: {error}") from error
        except (LookupError, TypeError, ValueError, AttributeError, struct.error) as error:
            raise BenchError(f"wrong answer: not an answer of the task {self._task}") from error
        return values

    def _width_of(self, answers: Sequence[Any], inputs: int) -> int:
        """Checks each answer and returns their common width, which must also equal that of earlier replies."""
        if len(answers) != inputs:
            raise WrongError(f"{len(answers)} answers for {inputs} inputs")
        widths = set(map(self._check, answers)) | ({self._width} if self._width is not None else set())
        if len(widths) > 1:
            raise WrongError(f"vectors of {' and '.join(map(str, sorted(widths)))} dimensions from one model")
        return widths.pop()

    def _keep(self, body: bytes, inputs: int) -> None:
        self._kept += len(body)
        if self._kept > _KEPT_BYTES:
            self._known.clear()
            self._kept = len(body)
        self._known[body] = inputs


def _plain(task: str, reply: Reply) -> Sequence[Any]:
    """Answers in the JSON of this server's own routes and of text-embeddings-inference."""
    return TASKS[task].load.answers(json.loads(reply.body))


def _openai(_: str, reply: Reply) -> Sequence[Any]:
    return ordered([(one["index"], one["embedding"]) for one in json.loads(reply.body)["data"]])


def _cohere(_: str, reply: Reply) -> Sequence[Any]:
    return ordered([(one["index"], one["relevance_score"]) for one in json.loads(reply.body)["results"]])


def _v2(task: str, reply: Reply) -> Sequence[Any]:
    """Answers in binary tensors that follow the JSON."""
    at = reply.head.index(_HEAD_LENGTH) + len(_HEAD_LENGTH)
    size = int(reply.head[at : reply.head.index(b"\r\n", at)])
    tensors = {}
    for output in json.loads(reply.body[:size])["outputs"]:
        end = size + output["parameters"]["binary_data_size"]
        tensors[output["name"]] = _tensor(output["datatype"], output["shape"], reply.body[size:end])
        size = end
    return _of_tensors(task, tensors)


def _grpc(task: str, reply: Reply) -> Sequence[Any]:
    """Answers in a `ModelInferResponse`."""
    outputs: list[dict[int, Any]] = []
    blobs = []
    for number, value in fields_in(reply.body):
        if number == 5:  # noqa: PLR2004  field of an output
            outputs.append(dict(fields_in(_bytes(value))))
        elif number == 6:  # noqa: PLR2004  field of its contents
            blobs.append(_bytes(value))
    tensors = {
        output[1].decode(): _tensor(output[2].decode(), varints_in(output[3]), blob)
        for output, blob in zip(outputs, blobs, strict=True)
    }
    return _of_tensors(task, tensors)


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise TypeError
    return value


def _tensor(datatype: str, shape: Sequence[int], blob: bytes) -> Any:  # noqa: ANN401  an array of numbers or strings
    if datatype != "BYTES":
        return np.frombuffer(blob, _NUMBERS[datatype]).reshape(shape)
    texts, at = [], 0
    while at < len(blob):
        (size,) = struct.unpack_from("<I", blob, at)
        at += 4 + size
        texts.append(blob[at - size : at].decode())
    if at != len(blob) or len(texts) != math.prod(shape):
        raise ValueError
    return np.array(texts, dtype=object).reshape(shape)


def _of_tensors(task: str, tensors: dict[str, Any]) -> Sequence[Any]:
    """The answer for each input, from the task's output tensors."""
    columns = [tensors[name] for name in OUTPUTS[task]]
    load = TASKS[task].load
    return [load.row(*row) for row in load.split(*columns)]


_VALUES: dict[str, Callable[[str, Reply], Sequence[Any]]] = {
    "http": _plain,
    "tei": _plain,
    "openai": _openai,
    "cohere-v1": _cohere,
    "cohere-v2": _cohere,
    "v2": _v2,
    "grpc": _grpc,
}
"""For each protocol, the function that extracts the answers from a reply, one per input."""
