"""Which connection gives way to a new one."""

from __future__ import annotations

from bertserve.serving.net.connection_limiter import ConnectionLimiter


class Connection:
    def __init__(self, name: str, idle_since: float | None, gone: list[str], *, used: bool = True) -> None:
        self._name, self._idle_since, self._used, self._gone = name, idle_since, used, gone

    def idle_since(self) -> tuple[bool, float] | None:
        return None if self._idle_since is None or self._name in self._gone else (self._used, self._idle_since)

    def close_if_idle(self) -> None:
        self._gone.append(self._name)


def test_those_never_used_give_way_first() -> None:
    """Then those that have been idle the longest; never one with something under way, or idle for a moment only."""
    gone: list[str] = []
    limiter = ConnectionLimiter(0, clock=lambda: 100.0)
    connections = [
        Connection("busy", None, gone),
        Connection("used long ago", 1.0, gone),
        Connection("used lately", 50.0, gone),
        Connection("never used", 90.0, gone, used=False),
        Connection("just used", 99.9, gone),
    ]
    limiter.follow(lambda: connections)
    taken = [limiter.take() is not None for _ in range(4)]
    assert (taken, gone) == ([True, True, True, False], ["never used", "used long ago", "used lately"])
    assert (limiter.displaced, limiter.refused) == (3, 1)
