"""grpclib as a client: a line of JSON says what to ask, a line of JSON tells what came."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from grpclib.client import Channel, StreamStreamMethod, UnaryUnaryMethod
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import GRPCError


class Bytes(CodecBase):
    __content_subtype__ = "proto"

    def encode(self, message: Any, message_type: Any) -> bytes:
        del message_type
        return bytes(message)

    def decode(self, data: bytes, message_type: Any) -> bytes:
        del message_type
        return data


async def talk(job: dict[str, Any]) -> dict[str, Any]:
    host, _, port = job["address"].rpartition(":")
    good, large, refused = ([bytes.fromhex(one) for one in job[name]] for name in ("good", "large", "refused"))
    found: dict[str, Any] = {}
    async with Channel(host, int(port), codec=Bytes()) as channel:
        infer = UnaryUnaryMethod(channel, job["unary"], bytes, bytes)
        found["good"] = [(await infer(one)).hex() for one in good]
        found["together"] = [reply.hex() for reply in await asyncio.gather(*(infer(good[0]) for _ in range(100)))]
        found["large"] = [(await infer(one)).hex() for one in large]
        for one in refused:
            try:
                await infer(one)
            except GRPCError as error:
                found["refused"] = error.status.name
        async with infer.open() as stream:
            await stream.send_message(large[0], end=True)
            await stream.cancel()
        found["after a cancel"] = [(await infer(good[0])).hex()]
        async with StreamStreamMethod(channel, job["stream"], bytes, bytes).open() as stream:
            for one in good:
                await stream.send_message(one)
            await stream.end()
            found["stream"] = [reply.hex() async for reply in stream]
    return found


print(json.dumps(asyncio.run(talk(json.loads(sys.stdin.readline())))))  # noqa: T201  the answer
