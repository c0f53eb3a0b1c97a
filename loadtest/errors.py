"""Errors of benchmarks."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import TYPE_CHECKING

from bertserve.serving.host import installing

if TYPE_CHECKING:
    import argparse


NEVER_SENT = "never sent"
"""Prefix of the faults of requests for which the generator had no free connection. No server has seen them."""


class BenchError(Exception):
    """The benchmark cannot continue: a wrong reply, a server that does not start, an invalid bundle."""


def check_above_zero(arguments: argparse.Namespace, *names: str) -> None:
    """Raises BenchError if one of the given options is not a finite number above 0."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and not 0 < value < math.inf:
            raise BenchError(f"--{name.replace('_', '-')} must be above 0, not {value:g}")


def check_installed(*modules: str) -> None:
    """Raises BenchError if a module of the extra `loadtest` is missing."""
    for name in modules:
        if find_spec(name) is None:
            raise BenchError(f"the module {name} is missing: {installing('loadtest')}")
