"""Measured overhead of the server over its engine."""

from __future__ import annotations

import msgspec

from loadtest.capacity.simulator import Overhead

ON_ITS_CORES = Overhead(receive_us=170, token_us=3.25, reply_us=100, batch_us=70, wire_us=175)
"""Overhead of HTTP over the engine alone on a CPU, client included, in docs/benchmarks/main-job.md.

0.54 ms at 8 tokens, 0.93 at 128 (p50, one connection). All of it is CPU time except the transfer to the engine (server
and client: 0.36 ms at 8 tokens).
"""
BESIDE_A_GPU = Overhead(receive_us=225, token_us=0.8, reply_us=135, batch_us=90, wire_us=145)
"""Overhead of HTTP over an engine on a GPU: 0.61 ms at 8 tokens, 0.70 at 128.

p50, one connection, vectors of 768 components. These predate the event loop's busy waiting for single requests;
docs/benchmarks/t4.md shows lower figures with it.
"""


def usual(threads: int) -> Overhead:
    """The overhead for an engine that shares that many cores with the server; 0 for an engine on its own device."""
    return msgspec.structs.replace(ON_ITS_CORES if threads else BESIDE_A_GPU, shared_cores=threads)
