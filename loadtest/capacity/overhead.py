"""Overhead of the server over its engine: all constants of `bertserve simulate`."""

from __future__ import annotations

import msgspec

from bertserve.loadtest.capacity.simulator import Overhead

_CORE = Overhead(core_us=44, core_token_us=0.125)
"""Core process beside several front processes: 45 us of CPU time a text at 8 tokens, 60 us at 128.

In docs/benchmarks/fronts.md, the core takes 0.3 to 0.4 times as much as one process at 128 connections. One process
takes 116 and 137 us (`BESIDE_A_GPU`).
"""
ON_ITS_CORES = msgspec.structs.replace(_CORE, receive_us=170, token_us=3.25, reply_us=100, batch_us=70, wire_us=175)
"""Overhead of HTTP over the engine alone on a CPU, client included, in docs/benchmarks/main-job.md.

0.54 ms at 8 tokens, 0.93 at 128 (p50, one connection). All of it is CPU time except the transfer to the engine (server
and client: 0.36 ms at 8 tokens).
"""
BESIDE_A_GPU = msgspec.structs.replace(_CORE, receive_us=63, text_us=13, token_us=0.175, reply_us=38, wire_us=250)
"""Overhead of HTTP over an engine on a GPU, as in docs/benchmarks/fronts.md: one process under load, or each front.

A request of one text takes 116 us of CPU time at 8 tokens, 137 us at 128, its share of a batch included. Each further
text adds about an eighth, and its tokens. `wire_us` is the remainder of a lone text's 0.39 ms in docs/benchmarks/t4.md.
"""


def usual(threads: int, fronts: int = 1) -> Overhead:
    """The overhead for an engine that shares that many cores with the server; 0 for an engine on its own device."""
    return msgspec.structs.replace(ON_ITS_CORES if threads else BESIDE_A_GPU, shared_cores=threads, fronts=fronts)
