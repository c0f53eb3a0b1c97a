"""The priority that a request asks for, alike on every route.

1 goes before 2, and 2 before 3, always; 0 is Triton's word for the default, which is 2.
"""

from __future__ import annotations

from serving.errors import InvalidRequest
from serving.records import DEFAULT_PRIORITY, PRIORITIES


def priority_of(given: object, name: str) -> int:
    """A request's class.

    Args:
        given: What the client said.
        name: Where it said so.

    Raises:
        InvalidRequest: It is no class.
    """
    if given == 0 and not isinstance(given, bool | float):
        return DEFAULT_PRIORITY
    if isinstance(given, int) and not isinstance(given, bool) and given in PRIORITIES:
        return given
    raise InvalidRequest(f"{name} must be 0 for the default, or {PRIORITIES[0]} (first) to {PRIORITIES[-1]} (last)")
