"""What a request is called in replies and logs."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable

from serving.errors import BertserveError

RecordError = Callable[[BertserveError, str], None]
"""Told of each error that a client gets, and of the request's id."""

_HARMLESS = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_serial = itertools.count(1)
_process = os.urandom(6).hex()


def request_id(given: bytes | None) -> str:
    """The client's id where it is harmless in a log, else one of our own."""
    if given is not None and _HARMLESS.fullmatch(given):
        return given.decode("ascii")
    return f"{_process}-{next(_serial):x}"
