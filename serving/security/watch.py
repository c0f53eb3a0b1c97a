"""Watches files that may change while the server runs, by polling twice a second.

A change takes effect once it has been stable for half a second. This skips files that are being written, and
certificates whose key has not followed yet. Links are followed: Kubernetes changes a mounted Secret by moving a link.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bertserve.serving.errors import CredentialsError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

log = logging.getLogger("bertserve.security")

_POLL_S = 0.5

_Signature = list[tuple[int, int, int, int] | None]


@dataclass(slots=True)
class _Watched:
    what: str
    paths: Sequence[Path]
    reload: Callable[[], Awaitable[str]]
    used: _Signature
    seen: _Signature
    good: bool = True


class FileWatch:
    def __init__(self) -> None:
        self._watched: list[_Watched] = []

    def states(self) -> dict[str, float]:
        """For each group of files 1, or 0 if its current content cannot be used."""
        return {"API keys": 1.0, "certificates": 1.0} | {one.what: float(one.good) for one in self._watched}

    def add(self, what: str, paths: Sequence[Path], reload: Callable[[], Awaitable[str]]) -> None:
        """Watches a group of files that have just been read; `what` is the group's name in the log.

        `reload` reads them again and returns a description of their content for the log. It raises CredentialsError if
        they cannot be used.
        """
        now = _signature(paths)
        self._watched.append(_Watched(what, paths, reload, now, now))

    async def run(self) -> None:
        """Polls until it is cancelled; returns at once if there are no files."""
        while self._watched:
            await asyncio.sleep(_POLL_S)
            for watched in self._watched:
                await _look(watched)


async def _look(watched: _Watched) -> None:
    before, watched.seen = watched.seen, _signature(watched.paths)
    if watched.seen == watched.used or watched.seen != before:
        return
    watched.used, watched.good = watched.seen, False
    try:
        found = await watched.reload()
    except (CredentialsError, OSError) as error:
        log.error("%s: reload failed, keeping the previous ones: %s", watched.what, error)  # noqa: TRY400  our sentence says it all
    else:
        watched.good = True
        log.info("%s: reloaded, %s", watched.what, found)


def _signature(paths: Sequence[Path]) -> _Signature:
    return [_signature_of(path) for path in paths]


def _signature_of(path: Path) -> tuple[int, int, int, int] | None:
    """A value that changes with the file; None if the file cannot be read."""
    try:
        status = os.stat(path)  # noqa: PTH116  twice as fast as Path.stat
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
