"""A front's side of its socket to the core."""

from __future__ import annotations

import asyncio
import socket
from array import array

import pytest

from bertserve.serving.engine.process.wire import FrameReader
from bertserve.serving.fronts.remote import CoreLink
from bertserve.serving.fronts.wire import KINDS, Kind
from bertserve.serving.records import DEFAULT_PRIORITY, EncodedText, ModelIndex
from tests.support.virtual_time import asynchronous
from tests.support.waiting import turns


async def link_of() -> tuple[CoreLink, socket.socket]:
    """The front's end of its socket, and the core's."""
    ours, core = socket.socketpair()
    ours.setblocking(False)
    _, link = await asyncio.get_running_loop().create_connection(lambda: CoreLink(lambda: None), sock=ours)
    return link, core


@pytest.mark.parametrize("short", [True, False])
@asynchronous
async def test_the_core_admits_a_short_request_with_its_texts(*, short: bool) -> None:
    """It may have a cached answer although its queue is full; texts that wait for the tokenizer are admitted first."""
    link, core = await link_of()
    with core:
        if short:
            permit = link.permit(ModelIndex(0), 3, 1, 0.0, None, DEFAULT_PRIORITY)
            waiting = asyncio.create_task(link.run(permit, [EncodedText(array("i", [1, 2, 3]))]))
        else:
            waiting = asyncio.create_task(link.admit(ModelIndex(0), [4096], longest=512))
        await turns()
        ((kind, *_),) = FrameReader(KINDS).feed(core.recv(4096))
        assert kind is (Kind.RUN if short else Kind.ASK)
        waiting.cancel()
        await turns()
