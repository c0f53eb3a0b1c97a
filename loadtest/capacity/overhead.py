"""What the server adds to its engine, as it was measured."""

from __future__ import annotations

import msgspec

from loadtest.capacity.simulator import Overhead

ON_ITS_CORES = Overhead(receive_us=170, token_us=3.25, reply_us=100, batch_us=70, wire_us=175)
"""What HTTP adds to the engine alone in docs/benchmarks/main-job.md, client included: 0.54 ms at 8 tokens, 0.93 at 128
(p50, one connection). All but the way to the engine is CPU time there (server and client: 0.36 ms at 8 tokens)."""
BESIDE_A_GPU = Overhead(receive_us=225, token_us=0.8, reply_us=135, batch_us=90, wire_us=145)
"""What HTTP adds to an engine that computes elsewhere: 0.61 ms at 8 tokens, 0.70 at 128 (p50, one connection), vectors
of 768 components. Since the event loop waits awake for lone answers, docs/benchmarks/t4.md has less for these."""


def usual(threads: int) -> Overhead:
    """The overhead beside an engine that shares so many cores with the server; 0 where it has its own device."""
    return msgspec.structs.replace(ON_ITS_CORES if threads else BESIDE_A_GPU, shared_cores=threads)
