"""What stops a benchmark."""

from __future__ import annotations


class BenchError(Exception):
    """The benchmark cannot go on: a wrong reply, a server that does not start, a bundle that is none."""
