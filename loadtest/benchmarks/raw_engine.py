"""The raw engine: the server's artifact in a bare loop around ONNX Runtime, as fast as possible on this machine.

`python -m bertserve.loadtest.benchmarks.raw_engine` measures on request (see child.py). Inputs are made before the
clock starts, so only `InferenceSession.run` is timed.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from string import ascii_letters
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort

from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.generator.child import answer
from bertserve.loadtest.report.sample import Window, sample_of
from bertserve.serving import host

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bertserve.loadtest.report.sample import Exchange

_LOG_ERRORS_ONLY = 3

OPTIONS = ("served", "default")
"""`served` copies the session options of the server's engine; `default` keeps ONNX Runtime's own."""

WIDE, NARROW = "wide", "narrow"
"""`WIDE`: one text after the other on one session with all cores. `NARROW`: one single-threaded session per core."""

BATCHED = (f"{WIDE}8", f"{NARROW}2", f"{NARROW}8")
"""Batch sizes to try, by kind of session, if the artifact allows the server to batch."""

Tensors = dict[str, Any]


def ways(*, batch_invariant: bool) -> tuple[str, ...]:
    """The ways to distribute texts over the cores."""
    return (WIDE, NARROW, *(BATCHED if batch_invariant else ()))


def batch_size(way: str) -> int:
    """Texts at a time."""
    return int(way.lstrip(ascii_letters) or 1)


def session_options(options: str, threads: int, cores: int) -> ort.SessionOptions:
    """The options of a session.

    A session as wide as the machine keeps ONNX Runtime's own choice of threads by default, which also binds them to
    cores.
    """
    made = ort.SessionOptions()
    made.log_severity_level = _LOG_ERRORS_ONLY
    if options == "default":
        if threads != cores:
            made.intra_op_num_threads = threads
        return made
    made.intra_op_num_threads = threads
    made.inter_op_num_threads = 1
    made.enable_mem_pattern = False
    made.add_session_config_entry("session.intra_op.spin_duration_us", "1000")
    if host.saturates():
        made.add_session_config_entry("session.x64quantprecision", "1")
    return made


def tensors_of(names: Sequence[str], texts: Sequence[list[int]]) -> Tensors:
    """Inputs of a batch, each int32 [texts, tokens of the longest]; shorter texts are padded with zeros."""
    ids = np.zeros((len(texts), max(map(len, texts))), np.int32)
    mask = np.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = text
        mask[row, : len(text)] = 1
    values = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    if unknown := set(names) - values.keys():
        raise BenchError(f"the graph has inputs that this benchmark does not know: {', '.join(sorted(unknown))}")
    return {name: values[name] for name in names}


class RawEngine:
    """Sessions over one artifact, and the texts to run on them."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._texts: dict[int, list[list[int]]] = {}
        self._sessions: dict[tuple[str, str], list[ort.InferenceSession]] = {}

    def open(self, artifact: str, names: list[str], threads: int, cores: int, texts: dict[str, list[list[int]]]) -> str:
        """Opens every session over an ONNX file and keeps token ids by length; returns ONNX Runtime's version."""
        data = Path(artifact).read_bytes()
        self._names = names
        self._texts = {int(tokens): ids for tokens, ids in texts.items()}
        for options, (way, count, width) in itertools.product(OPTIONS, ((WIDE, 1, threads), (NARROW, threads, 1))):
            own, on = session_options(options, width, cores), ["CPUExecutionProvider"]
            self._sessions[options, way] = [ort.InferenceSession(data, own, providers=on) for _ in range(count)]
        return str(ort.__version__)

    def vectors(self, tokens: int, count: int) -> list[list[float]]:
        """The artifact's answers to the first texts of that length, each computed alone, scaled to length 1."""
        [session] = self._sessions["served", WIDE]
        feeds = [tensors_of(self._names, [ids]) for ids in self._texts[tokens][:count]]
        rows = [session.run(None, feed)[0][0] for feed in feeds]
        return [[float(value) for value in row / np.linalg.norm(row)] for row in rows]

    def measure(self, options: str, way: str, tokens: int, warm_up_s: float, seconds: float) -> dict[str, Any]:
        """Measures one way with one set of options; returns the fields of a `Sample`.

        Latencies are those of whole batches; rates are in texts.
        """
        size, texts = batch_size(way), self._texts[tokens]
        starts = range(0, len(texts) - size + 1, size)
        feeds = [tensors_of(self._names, texts[start : start + size]) for start in starts]
        sessions = self._sessions[options, NARROW if way.startswith(NARROW) else WIDE]
        runs: list[Exchange] = []
        cpu_s = time.process_time()
        window = Window.after(time.perf_counter(), warm_up_s, seconds)
        if len(sessions) == 1:
            # The session counts its caller among its threads, and a bare loop only has the main thread.
            runs = _loop(sessions[0].run, feeds, window.end)
        else:
            turned = [feeds[index:] + feeds[:index] for index in range(len(sessions))]
            with ThreadPoolExecutor(len(sessions)) as pool:
                ends = [window.end] * len(sessions)
                found = pool.map(_loop, [session.run for session in sessions], turned, ends)
                runs = [run for times in found for run in times]
        sample = sample_of(runs, window, time.process_time() - cpu_s)
        counts = {"requests": sample.requests * size, "exchanges": sample.exchanges * size}
        rates = {"per_s": sample.per_s * size, "client_cpu_us": sample.client_cpu_us / size}
        return dataclasses.asdict(sample) | counts | rates


def _loop(run: Callable[..., object], feeds: list[Tensors], end: float) -> list[Exchange]:
    clock, times = time.perf_counter, []
    for feed in itertools.cycle(feeds):
        sent = clock()
        run(None, feed)
        done = clock()
        times.append((sent, done))
        if done >= end:
            break
    return times


if __name__ == "__main__":
    engine = RawEngine()
    answer({name: getattr(engine, name) for name in ("open", "vectors", "measure")})
