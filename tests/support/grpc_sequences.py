"""Seeded sequences of a gRPC client's frames: legal ones, by the `h2` library, and what mutations make of them."""

from __future__ import annotations

import gzip
import itertools
import random
import struct
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import h2.config
import h2.connection
import h2.settings

from bertserve.loadtest.generator.frames import CONTINUATION, DATA, HEADERS, PREFACE, frame, prefixed, split
from tests.support.clients import MODEL_INFER, infer_request
from tests.support.http2 import request_fields
from tests.support.models import NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from random import Random

SERVICE = MODEL_INFER.rpartition("/")[0]
STREAM_INFER, LIVE = f"{SERVICE}/ModelStreamInfer", f"{SERVICE}/ServerLive"
OK, INVALID_ARGUMENT, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL = 0, 3, 4, 8, 12, 13
WINDOW = 1 << 20

UNFINISHED = None
"""The status of a call whose client says no end, or gives it up."""

Part = bytes | list[tuple[str, str]]
"""What a call sends in one go: data, or trailers."""


@dataclass
class PlannedCall:
    """A call, and what it must come to.

    Attributes:
        path: Its method.
        fields: What its headers have else, and what of the usual they have otherwise.
        parts: What follows its headers.
        status: Of gRPC, or `UNFINISHED`.
        ids: Of its messages that are answered, in their order.
        ended: Whether the client ends it.
        given_up: Whether the client resets it.
    """

    path: str = MODEL_INFER
    fields: dict[str, str | None] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    status: int | None = OK
    ids: list[str] = field(default_factory=list)
    ended: bool = True
    given_up: bool = False


@dataclass
class Sequence:
    """What a client sends."""

    client: h2.connection.H2Connection
    calls: dict[int, PlannedCall]
    data: bytes


# Calls.


def _message(identity: str, *texts: str, model: str = NAME) -> bytes:
    return prefixed(infer_request(texts, identity, model).SerializeToString())


def _infer(rng: Random, identity: str) -> PlannedCall:
    texts = [rng.choice(["one", "two words", ""]) for _ in range(rng.choice([1, 1, 3]))]
    return PlannedCall(parts=[_message(identity, *texts)], ids=[identity])


def _compressed(rng: Random, identity: str) -> PlannedCall:
    call = _infer(rng, identity)
    name, compress = rng.choice([("gzip", gzip.compress), ("deflate", zlib.compress)])
    call.fields["grpc_encoding"] = name
    call.parts = [prefixed(compress(infer_request(["small"], identity).SerializeToString()), compressed=True)]
    return call


def _stream(rng: Random, identity: str) -> PlannedCall:
    ids = [f"{identity}.{number}" for number in range(rng.randrange(4))]
    return PlannedCall(STREAM_INFER, parts=[_message(one, "in a stream") for one in ids], ids=ids)


def _live(_: Random, __: str) -> PlannedCall:
    return PlannedCall(LIVE, parts=[prefixed(b"")])


def _wrong_fields(rng: Random, identity: str) -> PlannedCall:
    call = _infer(rng, identity)
    changes: list[tuple[int, str, dict[str, str | None]]] = [
        (UNIMPLEMENTED, "/no/method", {}),
        (UNIMPLEMENTED, MODEL_INFER, {"content_type": rng.choice(["application/json", "text/html", None])}),
        (UNIMPLEMENTED, MODEL_INFER, {"method": rng.choice(["GET", "PUT"])}),
        (INVALID_ARGUMENT, MODEL_INFER, {"grpc_timeout": rng.choice(["1", "", "x", "123456789S"])}),
        (DEADLINE_EXCEEDED, MODEL_INFER, {"grpc_timeout": "0n"}),
        (RESOURCE_EXHAUSTED, MODEL_INFER, {"x_large": "v" * 17_000}),
        (OK, MODEL_INFER, {"te": None, "x_more": "v" * rng.randrange(3000), "grpc_timeout": "60S"}),
    ]
    call.status, call.path, fields = rng.choice(changes)
    call.fields |= fields
    return call


def _wrong_message(rng: Random, identity: str) -> PlannedCall:
    whole = _message(identity, "one")
    call = PlannedCall()
    bodies = [
        (UNIMPLEMENTED, b""),
        (UNIMPLEMENTED, whole[: rng.randrange(1, len(whole))]),
        (UNIMPLEMENTED, whole * 2),
        (UNIMPLEMENTED, whole + b"\0"),
        (INTERNAL, b"\1" + whole[1:]),
        (INTERNAL, bytes([rng.randrange(2, 256)]) + whole[1:]),
        (RESOURCE_EXHAUSTED, struct.pack(">BI", 0, rng.choice([(4 << 20) + 1, 2**32 - 1])) + whole[5:]),
        (INVALID_ARGUMENT, prefixed(b"\xff" * rng.randrange(1, 50))),
        (5, _message(identity, "one", model="nobody")),
    ]
    call.status, body = rng.choice(bodies)
    call.parts = [body]
    return call


_KINDS: list[tuple[int, Callable[[Random, str], PlannedCall]]] = [
    *((6, _infer), (1, _compressed), (2, _stream), (2, _live), (2, _wrong_fields), (3, _wrong_message)),
]


def _planned(rng: Random, identity: str) -> PlannedCall:
    weights, kinds = zip(*_KINDS, strict=True)
    (kind,) = rng.choices(kinds, weights)
    call = kind(rng, identity)
    if rng.random() < 0.15:
        call.status, call.ended = UNFINISHED, rng.random() < 0.5
        call.given_up = call.ended
        call.ended = False
    elif rng.random() < 0.1:
        call.parts.append([("x-late", "yes")])
    return call


# Sequences.


class _Writer:
    """Says what calls say, a step of one of them at a time."""

    def __init__(self, rng: Random, seed: int) -> None:
        self._rng = rng
        self.calls: dict[int, PlannedCall] = {}
        config = h2.config.H2Configuration(
            client_side=True, validate_outbound_headers=False, normalize_outbound_headers=False
        )
        self.client = h2.connection.H2Connection(config)
        self.client.local_settings = h2.settings.Settings(client=True, initial_values=self._first_settings())
        self.client.initiate_connection()
        self._planned = [_planned(rng, f"{seed}-{number}") for number in range(rng.choice([1, 1, 2, 3, 5]))]

    def _first_settings(self) -> dict[int, int]:
        codes, rng = h2.settings.SettingCodes, self._rng
        values = {codes.ENABLE_PUSH: 0}
        if rng.random() < 0.2:
            values[codes.INITIAL_WINDOW_SIZE] = rng.choice([0, 1, 100, 2000, WINDOW])
        if rng.random() < 0.1:
            values[codes.HEADER_TABLE_SIZE] = rng.choice([0, 100, 8192])
        if rng.random() < 0.1:
            values[codes.MAX_FRAME_SIZE] = rng.choice([16_384, 1 << 20])
        return values

    def write(self) -> bytes:
        steps = [self._steps(call) for call in self._planned]
        out = [self.client.data_to_send()]
        while steps:
            current = self._rng.choice(steps)
            if next(current, None) is None:
                steps.remove(current)
            if self._rng.random() < 0.1:
                out.append(self._aside())
            out.append(self.client.data_to_send())
        self.client.increment_flow_control_window(WINDOW)
        for stream, call in self.calls.items():
            if not call.given_up:
                self.client.increment_flow_control_window(WINDOW, stream)
        out.append(self.client.data_to_send())
        return b"".join(out)

    def _steps(self, call: PlannedCall) -> Iterator[bool]:
        rng, client = self._rng, self.client
        stream = client.get_next_available_stream_id()
        self.calls[stream] = call
        fields = request_fields(call.path, **call.fields)
        pieces = [piece for part in call.parts for piece in _cut(rng, part)]
        # What RFC 9113 allows: a padded or prioritised HEADERS, its end in it where nothing follows.
        at_once = (
            call.ended
            and not b"".join(piece for piece in pieces if isinstance(piece, bytes))
            and not (pieces and isinstance(pieces[-1], list))
        )
        priority = {"priority_weight": rng.randrange(1, 257)} if rng.random() < 0.1 else {}
        client.send_headers(stream, fields, end_stream=at_once, **priority)
        yield True
        if not at_once:
            for place, piece in enumerate(pieces):
                last = call.ended and place == len(pieces) - 1
                if isinstance(piece, list):
                    client.send_headers(stream, piece, end_stream=True)
                else:
                    padding = rng.randrange(0, 40) if rng.random() < 0.1 else None
                    client.send_data(stream, piece, end_stream=last and rng.random() < 0.8, pad_length=padding)
                yield True
            if call.ended and client.streams[stream].open and not _half_closed(client, stream):
                client.end_stream(stream)
                yield True
        if call.given_up:
            client.reset_stream(stream, rng.choice([0, 8]))
            yield True

    def _aside(self) -> bytes:
        """A frame that changes nothing: h2 writes those that it knows."""
        rng = self._rng
        kind = rng.randrange(4)
        if kind == 0:
            self.client.ping(rng.randbytes(8))
        elif kind == 1:
            self.client.increment_flow_control_window(rng.choice([1, 100, 10_000]))
        elif kind == 2:
            return frame(rng.randrange(0x10, 0x100), rng.randrange(256), rng.choice([0, 1, 99]), rng.randbytes(9))
        else:
            return frame(2, 0, rng.choice([1, 3, 99]), b"\0\0\0\0\x10")
        return self.client.data_to_send()


def _half_closed(client: h2.connection.H2Connection, stream: int) -> bool:
    return client.streams[stream].state_machine.state.name in {"HALF_CLOSED_LOCAL", "CLOSED"}


def _cut(rng: Random, part: Part) -> list[Part]:
    if isinstance(part, list):
        return [part]
    places = sorted(rng.randrange(len(part) + 1) for _ in range(rng.choice([0, 0, 0, 1, 3])))
    ends = [0, *places, len(part)]
    return [part[start:stop] for start, stop in itertools.pairwise(ends)]


def legal(seed: int) -> Sequence:
    """A sequence that breaks no rule of HTTP/2."""
    rng = random.Random(seed)
    writer = _Writer(rng, seed)
    data = writer.write()
    return Sequence(writer.client, writer.calls, data)


def mutated(seed: int) -> bytes:
    """The bytes of one with a few changes to its frames."""
    rng = random.Random(~seed)
    data = legal(seed).data
    frames = [frame(*one) for one in split(data[len(PREFACE) :])[0]]
    for _ in range(rng.choice([1, 1, 2, 4])):
        _mutate(rng, frames)
    preface = PREFACE if rng.random() < 0.98 else _flipped(rng, PREFACE)
    return preface + b"".join(frames)


def chunks(seed: int, data: bytes) -> list[bytes]:
    """The bytes as the network brings them."""
    rng = random.Random(seed)
    places = sorted(rng.randrange(len(data)) for _ in range(rng.choice([0, 0, 1, 3, 8]))) if data else []
    return [data[start:stop] for start, stop in itertools.pairwise([0, *places, len(data)])]


def _flipped(rng: Random, data: bytes) -> bytes:
    changed = bytearray(data)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _mutate(rng: Random, frames: list[bytes]) -> None:  # noqa: C901, PLR0912  a table of changes
    at = rng.randrange(len(frames))
    one = frames[at]
    payload, kind, flags, stream = one[9:], one[3], one[4], int.from_bytes(one[5:9], "big")
    match rng.randrange(12):
        case 0:
            frames[at] = _flipped(rng, one)
        case 1:
            del frames[at : at + (len(frames) > 1)]
        case 2:
            frames.insert(rng.randrange(len(frames) + 1), one)
        case 3:
            other = rng.randrange(len(frames))
            frames[at], frames[other] = frames[other], one
        case 4:
            frames[at] = frame(rng.randrange(11), flags, stream, payload)
        case 5:
            frames[at] = frame(kind, rng.randrange(256), stream, payload)
        case 6:
            frames[at] = frame(kind, flags, rng.choice([0, 1, 2, 3, 5, 7, 99, 2**31 - 1, 2**32 - 1]), payload)
        case 7:
            frames[at] = frame(kind, flags, stream, payload[: rng.randrange(len(payload) + 1)])
        case 8:
            frames[at] = frame(kind, flags, stream, payload + rng.randbytes(rng.randrange(1, 20)))
        case 9:
            frames[at] = rng.choice([0, 5, len(payload) + 3, 20_000]).to_bytes(3, "big") + one[3:]
        case 10:
            cut = rng.randrange(len(payload) + 1)
            if kind in {HEADERS, DATA} and not flags & 0x28:  # padded or prioritised
                more = CONTINUATION if kind == HEADERS else DATA
                frames[at : at + 1] = [
                    frame(kind, flags & ~(5 if kind == DATA else 4), stream, payload[:cut]),
                    frame(more, flags & (1 if kind == DATA else 4), stream, payload[cut:]),
                ]
        case _:
            frames.insert(
                at + rng.randrange(2),
                frame(
                    rng.randrange(11),
                    rng.randrange(256),
                    rng.choice([0, 1, 3, 2]),
                    rng.randbytes(rng.choice([0, 4, 8, 5, 6])),
                ),
            )
