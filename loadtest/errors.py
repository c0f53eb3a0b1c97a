"""What stops a benchmark."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import TYPE_CHECKING

from serving.host import installing

if TYPE_CHECKING:
    import argparse


NEVER_SENT = "never sent"
"""How the faults begin of requests that the generator had no connection for: no server has seen them."""


class BenchError(Exception):
    """The benchmark cannot go on: a wrong reply, a server that does not start, a bundle that is none."""


def check_above_zero(arguments: argparse.Namespace, *names: str) -> None:
    """Raises BenchError where an option that is given is no number above 0, or infinite."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and not 0 < value < math.inf:
            raise BenchError(f"--{name.replace('_', '-')} must be above 0, not {value:g}")


def check_installed(*modules: str) -> None:
    """Raises BenchError where one is missing that the extra `loadtest` brings."""
    for name in modules:
        if find_spec(name) is None:
            raise BenchError(f"the module {name} is missing: {installing('loadtest')}")
