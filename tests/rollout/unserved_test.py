"""When versions are tried again, and what the watch takes meanwhile."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from serving.engine.process.worker import _lacked_memory
from serving.errors import BundleError
from serving.rollout.repository_watch import RepositoryWatch
from serving.rollout.unserved import TRIES, UnservedVersions

if TYPE_CHECKING:
    from serving.rollout.versions import Versions

KEY = ("minilm", 2)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def versions_after(first_pause_s: float, clock: Clock) -> UnservedVersions:
    return UnservedVersions(Path("models"), None, first_pause_s, clock)


def test_pauses_grow_and_end() -> None:
    """Twice as long each time, never above ten minutes, and after the last try there is none."""
    unserved = versions_after(60.0, Clock())
    pauses = [unserved.fail(KEY, "it died", served=1) for _ in range(TRIES)]
    assert pauses == [60, 120, 240, 480, 600, 600, 600, None]
    unserved.leave_out(KEY, "given up")
    assert not unserved.waits(KEY)
    assert unserved.fail(KEY, "it died", served=1) == 60  # it has changed, and is new


def test_a_seldom_look_is_the_shortest_pause() -> None:
    """Whoever looks once an hour tries once an hour."""
    unserved = versions_after(3600.0, Clock())
    assert [unserved.fail(KEY, "it died", served=1) for _ in range(2)] == [3600, 3600]


def test_what_nobody_watches_is_not_tried_again() -> None:
    """Neither where the repository is not watched, nor a version older than the one that serves."""
    for first_pause_s, served in ((0.0, 1), (60.0, 3)):
        unserved = versions_after(first_pause_s, Clock())
        assert unserved.fail(KEY, "it died", served=served) == 0
        assert not unserved.waits(KEY)
        assert unserved.when(KEY, served=served) == "no automatic retry"


def test_a_version_waits_until_its_time_has_come() -> None:
    """And says so meanwhile; what served since starts anew."""
    clock = Clock()
    unserved = versions_after(10.0, clock)
    assert not unserved.waits(KEY)
    unserved.fail(KEY, "it died", served=1)
    clock.now = 9.5
    assert unserved.waits(KEY)
    assert unserved.when(KEY, served=1) == f"retrying in 1 s (attempt 2 of {TRIES})"
    clock.now = 10.0
    assert not unserved.waits(KEY)
    assert unserved.fail(KEY, "it died", served=1) == 20
    unserved.forget(KEY)
    assert unserved.when(KEY, served=1) == "no automatic retry"
    assert unserved.fail(KEY, "it died", served=1) == 10


def test_nothing_older_is_taken_while_the_newest_waits(tmp_path: Path) -> None:
    """A version in between would be replaced a moment later."""
    for version in ("2", "3", "4"):
        (tmp_path / "m" / version).mkdir(parents=True)
    versions = SimpleNamespace(unserved=SimpleNamespace(waits=lambda key: key == ("m", waiting)))

    class Complete(RepositoryWatch):
        """One for which every version is complete, but for the newest."""

        def _is_due(self, name: str, version: int) -> bool:  # noqa: ARG002  as it is called
            return version != 4

    watch = Complete(tmp_path, cast("Versions", versions), 1.0)
    waiting = 3
    assert watch.look("m", 1) is None
    waiting = 2
    assert watch.look("m", 1) == 3


def test_memory_that_is_short_is_told_from_what_is_wrong() -> None:
    """By the words of the library underneath, at whatever depth."""

    def refused(cause: Exception) -> BundleError:
        error = BundleError("cannot be loaded")
        error.__cause__ = cause
        return error

    deep = RuntimeError("warm-up")
    deep.__cause__ = RuntimeError("BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer")
    assert _lacked_memory(refused(deep))
    assert _lacked_memory(refused(RuntimeError("Exception during loading: std::bad_alloc")))
    assert _lacked_memory(refused(RuntimeError("cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY (CUDA error 2)")))
    assert not _lacked_memory(refused(RuntimeError("No Op registered for Gelu")))
    assert not _lacked_memory(BundleError("weights.onnx does not match its SHA-256 in the manifest"))
