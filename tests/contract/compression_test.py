"""Compressed bodies and messages (row 7): read within the limit, counted after inflation."""

from __future__ import annotations

import gzip
import json
import zlib
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest

from tests.support.clients import MODEL_INFER, Grpc, RawConnection, Refused, http_call, post_json, refusal
from tests.support.expected import fake_answers
from tests.support.models import NAME
from tests.support.triton_clients import TritonClient

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.server import Server

LIMIT = 4 << 20
PACK: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}
BODY = json.dumps({"inputs": ["compressed"]}).encode()


def _raw(data: bytes) -> bytes:
    """What many take `deflate` for: no wrapper of zlib's."""
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


def _bomb_in_a_bomb(size: int) -> bytes:
    return gzip.compress(zlib.compress(b" " * size, 9), 9)


HALF = len(BODY) // 2

MEMBERS = gzip.compress(BODY[:HALF]) + gzip.compress(b"") + gzip.compress(BODY[HALF:])
BLANK = b" " * (LIMIT + 1)
WRONG: dict[str, tuple[str, Callable[[], bytes], int]] = {
    # Row 7: what would grow beyond the limit is refused like what is as large from the start.
    **{f"{coding}, limit": (coding, partial(PACK[coding], BLANK[:-1]), 400) for coding in PACK},  # read, and no JSON
    **{f"{coding}, beyond it": (coding, partial(PACK[coding], BLANK), 413) for coding in PACK},
    **{f"{coding}, bomb": (coding, lambda coding=coding: PACK[coding](b" " * (200 << 20)), 413) for coding in PACK},
    "several members beyond it": ("gzip", lambda: gzip.compress(BLANK[: LIMIT // 2]) * 3, 413),
    "bomb in a bomb": ("deflate, gzip", partial(_bomb_in_a_bomb, 20 << 20), 413),
    "large bomb in a bomb": ("deflate, gzip", partial(_bomb_in_a_bomb, 200 << 20), 413),
    # What is not of its encoding is malformed.
    **{
        f"{coding}, {name}": (coding, lambda spoil=spoil, coding=coding: spoil(PACK[coding](BODY)), 400)
        for coding in PACK
        for name, spoil in {
            "cut": lambda body: body[:-1],
            "more": lambda body: body + b"x",
            "twice": lambda body: body * 2,
            "plain": lambda _: b"plain",
            "a byte": lambda _: b"\x1f",
        }.items()
    },
    "garbage": ("gzip", lambda: gzip.compress(BODY) + b"garbage", 400),
    "padding": ("gzip", lambda: gzip.compress(BODY) + bytes(8), 400),
    "members, cut": ("gzip", lambda: MEMBERS[:-9], 400),
    "many members": ("gzip", lambda: gzip.compress(b"") * 1000 + gzip.compress(BODY), 400),
    "raw twice": ("deflate", lambda: _raw(BODY) * 2, 400),
    "other order": ("gzip, deflate", lambda: gzip.compress(zlib.compress(BODY)), 400),
    "empty": ("gzip", lambda: b"", 400),
    # Others are refused, and the reply names those that are read.
    **{
        f"coding {coding}": (coding, lambda: BODY, 415)
        for coding in ("br", "zstd", "gzip, br", "gzip, gzip", "gzip, x-gzip", "x", "compress", "gzip;q=1")
    },
}
"""Encoding, body and status; the bodies are made where they are sent, as together they are large."""


@pytest.mark.parametrize("case", WRONG)
def test_row_7_bodies_that_are_refused(fake_server: Server, case: str) -> None:
    """What follows the last member, what is missing, what grows too large; the next request is answered."""
    encoding, make, status = WRONG[case]
    reply = post_json(fake_server.http, "/embed", make(), {"Content-Encoding": encoding})
    assert reply.status == status
    assert reply.headers.get("accept-encoding") == ("gzip, deflate" if status == 415 else None)
    assert post_json(fake_server.http, "/embed", BODY).status == 200


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", MEMBERS),
        ("x-gzip", MEMBERS),
        ("gzip", gzip.compress(b"") * 900 + gzip.compress(BODY)),
        ("GZIP", gzip.compress(BODY)),
        ("DEFLATE", zlib.compress(BODY)),
        ("deflate", _raw(BODY)),
        ("identity", BODY),
        ("", BODY),
        ("identity, gzip, identity", gzip.compress(BODY)),
        ("deflate, GZIP", gzip.compress(zlib.compress(BODY))),
        ("gzip\tDeflate".replace("\t", ",\t"), _raw(MEMBERS)),
        (" ,gzip,, identity,", gzip.compress(BODY)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_form_of_the_encodings(fake_server: Server, models: Path, encoding: str, body: bytes) -> None:
    """RFC 9110, 8.4, and RFC 1952, 2.2: several members, several codings in the order in which they were applied."""
    reply = post_json(fake_server.http, "/embed", body, {"Content-Encoding": encoding})
    np.testing.assert_allclose(reply.json(), fake_answers(models, ["compressed"]), atol=1e-5)


@pytest.mark.parametrize("request_encoding", [None, "gzip", "deflate"])
@pytest.mark.parametrize("reply_encoding", [None, "gzip", "deflate"])
def test_tritonclient_compresses_over_http(
    fake_server: Server, models: Path, request_encoding: str | None, reply_encoding: str | None
) -> None:
    """Both ways, in each of its encodings."""
    encodings = {"request_compression_algorithm": request_encoding, "response_compression_algorithm": reply_encoding}
    result = TritonClient("http", fake_server).infer(NAME, {"text": ["compressed"]}, **encodings)
    np.testing.assert_allclose(result.as_numpy("embedding"), fake_answers(models, ["compressed"]), atol=1e-5)


def test_replies_are_compressed_only_for_who_asks_for_one_encoding(fake_server: Server) -> None:
    """Libraries that list all they know get the vectors as they are: they hardly shrink."""
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["x"]}
    body = json.dumps({"inputs": [tensor]}).encode()
    for accepted, encoding in (("gzip", "gzip"), ("deflate", "deflate"), ("gzip, deflate, br", None), ("br", None)):
        reply = http_call(fake_server.http, "POST", f"/v2/models/{NAME}/infer", body, {"Accept-Encoding": accepted})
        assert reply.headers.get("content-encoding") == encoding
        unpack: Any = {"gzip": gzip.decompress, "deflate": zlib.decompress, None: bytes}[encoding]
        assert json.loads(unpack(reply.body))["outputs"][0]["shape"] == [1, 384]
    head = f"POST /v2/models/{NAME}/infer HTTP/1.1\r\nHost: test\r\nContent-Length: {len(body)}\r\n"
    with RawConnection(fake_server.http) as connection:  # on two lines it is the same list
        connection.send(f"{head}Accept-Encoding: gzip\r\nAccept-Encoding: br\r\nConnection: close\r\n".encode())
        connection.send(b"Content-Type: application/json\r\n\r\n" + body)
        assert b"content-encoding" not in connection.read_to_end().partition(b"\r\n\r\n")[0].lower()


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_tritonclient_compresses_over_grpc(fake_server: Server, models: Path, algorithm: str) -> None:
    """Compressed messages are read too."""
    text = "compressed " * 100
    result = TritonClient("grpc", fake_server).infer(NAME, {"text": [text]}, compression_algorithm=algorithm)
    np.testing.assert_allclose(result.as_numpy("embedding"), fake_answers(models, [text]), atol=1e-5)


@pytest.mark.parametrize("megabytes", [50, pytest.param(200, marks=pytest.mark.slow)])
def test_row_7_a_message_that_grows_beyond_the_limit(fake_server: Server, megabytes: int) -> None:
    """It is RESOURCE_EXHAUSTED, and the next call is answered."""
    options = [("grpc.max_send_message_length", -1), ("grpc.default_compression_algorithm", 2)]
    with grpc.insecure_channel(fake_server.grpc, options=options) as channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary(MODEL_INFER)(b"\0" * (megabytes << 20), timeout=30)
    assert isinstance(refusal(refused.value), Refused)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    with Grpc(fake_server) as client:
        assert client.embed(["a"]).vectors.shape == (1, 384)
