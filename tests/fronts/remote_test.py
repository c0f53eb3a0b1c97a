"""A front's side of its socket to the core."""

from __future__ import annotations

import asyncio
import socket

import pytest

from bertserve.serving.fronts.remote import CoreLink
from bertserve.serving.records import DEFAULT_PRIORITY, ModelIndex
from tests.support.virtual_time import asynchronous


async def link_of() -> tuple[CoreLink, socket.socket]:
    """The front's end of its socket, and the core's."""
    ours, core = socket.socketpair()
    ours.setblocking(False)
    _, link = await asyncio.get_running_loop().create_connection(lambda: CoreLink(lambda: None), sock=ours)
    return link, core


@pytest.mark.parametrize("crowded", [True, False])
@pytest.mark.parametrize("caches", [True, False])
@pytest.mark.parametrize("short", [True, False])
@asynchronous
async def test_the_core_may_have_the_answer_of_a_short_request(*, short: bool, caches: bool, crowded: bool) -> None:
    """It gives a cached one although its queue is full, so a front does not ask it for an admission first."""
    link, core = await link_of()
    with core:
        link.caches, link.crowded = caches, crowded
        permit = link.admit(
            ModelIndex(0), [1], longest=None, arrival=0.0, timeout_ms=None, priority=DEFAULT_PRIORITY, now=0.0
        )
        assert permit.must_ask(short=short) is (not short or (crowded and not caches))
