"""The watch over a model repository, where what it calls fails."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from serving.errors import EngineLost, VersionRefused
from serving.rollout.repository_watch import RepositoryWatch
from tests.support.virtual_time import asynchronous

if TYPE_CHECKING:
    from pathlib import Path

    from serving.rollout.versions import Versions


@pytest.mark.parametrize(("error", "told"), [(VersionRefused("no"), 0), (EngineLost("gone"), 2), (OSError("disk"), 2)])
@asynchronous
async def test_a_look_that_fails_is_not_the_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception, told: int
) -> None:
    """Whatever a swap raises: it is told, unless whoever refused has told it, and the watch goes on."""
    swaps: list[tuple[str, int]] = []
    third = asyncio.Event()

    async def swap(name: str, version: int) -> None:
        swaps.append((name, version))
        if len(swaps) <= 2:
            raise error
        third.set()

    class Always(RepositoryWatch):
        def look(self, name: str, served: int) -> int | None:
            return served + len(name)

    with caplog.at_level(logging.ERROR):
        versions = cast("Versions", SimpleNamespace(served=lambda: {"m": 1}, swap=swap))
        watching = asyncio.create_task(Always(tmp_path, versions, 0.001).run())
        await asyncio.wait_for(third.wait(), 10)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    assert swaps[0] == ("m", 2)
    assert len([one for one in caplog.records if "scan for new versions failed" in one.message]) == told
