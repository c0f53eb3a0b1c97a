"""Clients that ask a server again and again while something happens to it."""

from __future__ import annotations

import contextlib
import itertools
import threading
from typing import TYPE_CHECKING, Generic, TypeVar

from tests.support.clients import Refused
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.clients import Answer, Transport

T = TypeVar("T")


class Asker(threading.Thread, Generic[T]):
    """Asks until it is told to stop, or until a call fails in any way but a refusal (`failure`)."""

    def __init__(self, ask: Callable[[], T], rest_s: float) -> None:
        super().__init__(daemon=True)
        self._ask, self._rest_s = ask, rest_s
        self.told_to_stop = threading.Event()
        self.answers: list[T] = []
        self.refused: list[Refused] = []
        self.failure: Exception | None = None

    def run(self) -> None:
        while not self.told_to_stop.wait(self._rest_s):
            try:
                self.answers.append(self._ask())
            except Refused as refused:
                self.refused.append(refused)
            except Exception as error:  # noqa: BLE001  kept for the test to comparator
                self.failure = error
                return


@contextlib.contextmanager
def asking(*asks: Callable[[], T], rest_s: float = 0.0) -> Iterator[list[Asker[T]]]:
    """Calls each function in a thread of its own while the block runs, which begins when each has an answer."""
    askers = [Asker(ask, rest_s) for ask in asks]
    for asker in askers:
        asker.start()
    try:
        wait_for_more(askers, 1)
        yield askers
    finally:
        for asker in askers:
            asker.told_to_stop.set()
        for asker in askers:
            asker.join()


def wait_for_more(askers: list[Asker[T]], count: int, seconds: float = 10.0) -> None:
    """Waits until each has so many more answers, or one has failed."""
    before = [len(asker.answers) for asker in askers]
    wait_for(
        lambda: (
            failures(askers)
            or all(len(asker.answers) >= had + count for asker, had in zip(askers, before, strict=True))
        ),
        "answers for every client",
        seconds,
    )


def failures(askers: list[Asker[T]]) -> list[Exception]:
    return [asker.failure for asker in askers if asker.failure is not None]


def numbered_texts(client: Transport, number: int) -> Callable[[], tuple[str, Answer]]:
    """Asks with a text of its own each time, and returns it with the answer."""
    numbers = itertools.count(1)

    def ask() -> tuple[str, Answer]:
        text = f"client {number} asks for the {next(numbers)}. time"
        return text, client.embed([text])

    return ask
