"""A client of `ModelInfer` that spends no more than gRPC itself: bytes go in and bytes come out.

`python -m loadtest.grpc_client` measures when asked (see child.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import struct
import threading
import time
from typing import TYPE_CHECKING, Any

import grpc

from loadtest.child import answer
from loadtest.errors import BenchError
from loadtest.sample import Window, sample_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from loadtest.sample import Exchange

METHOD = "/inference.GRPCInferenceService/ModelInfer"
_CHANNELS = 4
_SILENCE_S = 10.0
_BYTES_FIELD = 2  # wire type of protobuf's length-delimited fields


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:  # noqa: PLR2004  seven bits a byte, as protobuf has it
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | _BYTES_FIELD) + _varint(len(data)) + data


def request_bytes(model: str, text: str) -> bytes:
    """A `ModelInferRequest` of the Open Inference Protocol: one text in the input `text` BYTES [1, 1].

    Written by hand, field numbers as in the protocol's `grpc_service.proto`, so that no generated code is
    needed to know the server by.
    """
    data = text.encode()
    tensor = _field(1, b"text") + _field(2, b"BYTES") + _field(3, _varint(1) * 2)
    return _field(1, model.encode()) + _field(5, tensor) + _field(7, struct.pack("<I", len(data)) + data)


class ReplyCheck:
    """Looks whether replies hold one embedding.

    `raw_output_contents`, the last field of a `ModelInferResponse`, holds the vector as little-endian FP32;
    what stands before it is equal in every reply of a model, so all have one size.
    """

    def __init__(self, hidden_size: int) -> None:
        """Expects vectors of so many numbers."""
        self._format = struct.Struct(f"<{hidden_size}f")
        self._start = _field(6, bytes(self._format.size))[: -self._format.size]
        self._tail = len(self._start) + self._format.size
        self._size = 0

    def check(self, reply: bytes) -> None:
        """Checks a reply.

        Raises:
            BenchError: It holds no embedding, or another size than the first one.
        """
        self._size = self._size or len(reply)
        if len(reply) != self._size or not reply.startswith(self._start, -self._tail):
            raise BenchError(f"a wrong reply over gRPC ({len(reply)} bytes, the first one had {self._size})")

    def vector(self, reply: bytes) -> list[float]:
        """The embedding in a reply that was checked."""
        return list(self._format.unpack(reply[-self._format.size :]))


class GrpcClient:
    """Requests to one server, by length of their texts."""

    def __init__(self) -> None:
        """Starts with nothing; see `open`."""
        self._target = ""
        self._requests: dict[int, list[bytes]] = {}
        self._check = ReplyCheck(0)

    def open(self, target: str, model: str, hidden_size: int, texts: dict[str, list[str]]) -> None:
        """Makes the requests.

        Args:
            target: `host:port` of the server.
            model: Its model.
            hidden_size: Numbers in an embedding.
            texts: Texts by their number of tokens.
        """
        self._target = target
        self._check = ReplyCheck(hidden_size)
        self._requests = {
            int(tokens): [request_bytes(model, text) for text in group] for tokens, group in texts.items()
        }

    def vector(self, tokens: int) -> list[float]:
        """The server's embedding of the first text of that length."""
        with _channel(self._target) as channel:
            return self._check.vector(_call(channel.unary_unary(METHOD), self._requests[tokens][0], self._check))

    def measure(self, connections: int, tokens: int, warm_up_s: float, seconds: float) -> dict[str, Any]:
        """Keeps so many calls under way, on a few channels; returns a `Sample`'s fields."""
        requests = self._requests[tokens]
        with contextlib.ExitStack() as stack:
            count = min(connections, _CHANNELS)
            calls: list[Call] = [stack.enter_context(_channel(self._target)).unary_unary(METHOD) for _ in range(count)]
            for call in calls:
                _call(call, requests[0], self._check)  # connects
            cpu = time.process_time()
            window = Window.after(time.perf_counter(), warm_up_s, seconds)
            exchanges = (
                one_by_one(calls[0], requests, self._check, window.end)
                if connections == 1
                else SideBySide(calls, requests, self._check, window.end).run(connections)
            )
            cpu_s = time.process_time() - cpu
        return dataclasses.asdict(sample_of(exchanges, window, cpu_s))


Call = Any  # grpc.UnaryUnaryMultiCallable, generic in its stubs and plain at run time


def _channel(target: str) -> grpc.Channel:
    # Without a pool of its own a channel would share its connection with every other one to this address.
    return grpc.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)])


def _call(call: Call, request: bytes, check: ReplyCheck) -> bytes:
    try:
        reply: bytes = call(request, timeout=_SILENCE_S)
    except grpc.RpcError as error:
        raise BenchError(f"a call over gRPC failed: {error}") from error
    check.check(reply)
    return reply


def one_by_one(call: Call, requests: Sequence[bytes], check: ReplyCheck, end: float) -> list[Exchange]:
    """Calls when the last call has its reply, until `end` (seconds, `time.perf_counter`)."""
    clock = time.perf_counter
    exchanges: list[Exchange] = []
    for request in itertools.cycle(requests):
        sent = clock()
        _call(call, request, check)
        done = clock()
        exchanges.append((sent, done))
        if done >= end:
            break
    return exchanges


class SideBySide:
    """Keeps calls under way; each one's end starts the next, on the threads that gRPC has anyway."""

    def __init__(self, calls: Sequence[Call], requests: Sequence[bytes], check: ReplyCheck, end: float) -> None:
        """Prepares; see `run`.

        Args:
            calls: The method, on each channel.
            requests: What to send, over and over.
            check: For every reply.
            end: When to start nothing more, in seconds on the clock `time.perf_counter`.
        """
        self._calls = calls
        self._supply: Iterator[bytes] = itertools.cycle(requests)
        self._check = check
        self._end = end
        self._exchanges: list[Exchange] = []
        self._failure: BenchError | None = None
        self._ended = threading.Semaphore(0)

    def run(self, count: int) -> list[Exchange]:
        """Keeps `count` calls under way until the end, then waits for those under way.

        Raises:
            BenchError: A call failed or its reply is wrong.
        """
        for place in range(count):
            self._start(self._calls[place % len(self._calls)])
        for _ in range(count):
            limit_s = max(0.0, self._end - time.perf_counter()) + 2 * _SILENCE_S
            if not self._ended.acquire(timeout=limit_s):
                raise BenchError("a call over gRPC never ended")
            if self._failure is not None:
                raise self._failure
        return self._exchanges

    def _start(self, call: Call) -> None:
        sent = time.perf_counter()
        future = call.future(next(self._supply), timeout=_SILENCE_S)
        future.add_done_callback(lambda done: self._finish(call, sent, done))

    def _finish(self, call: Call, sent: float, future: Any) -> None:  # noqa: ANN401  untyped at run time
        done = time.perf_counter()
        try:
            self._check.check(future.result())
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            self._failure = BenchError(f"a call over gRPC failed: {error}")
        except BenchError as error:
            self._failure = error
        self._exchanges.append((sent, done))
        if self._failure is None and done < self._end:
            self._start(call)
        else:
            self._ended.release()


if __name__ == "__main__":
    client = GrpcClient()
    answer({"open": client.open, "vector": client.vector, "measure": client.measure})
