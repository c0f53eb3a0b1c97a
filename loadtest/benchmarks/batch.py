"""Compares `bertserve batch` with the raw engine over the same texts, and measures its memory over the rows written."""

from __future__ import annotations

import json
import math
import random
import subprocess
import tempfile
import time
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from loadtest.benchmarks.processes import cpu_s, descendants, resident_bytes
from loadtest.benchmarks.runner import Benchmark, Option
from loadtest.benchmarks.server_process import program
from loadtest.benchmarks.show import chart
from loadtest.errors import BenchError
from loadtest.generator.workload import sentence_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from loadtest.benchmarks.store import Step, Store
    from loadtest.generator.child import Child

_MIN_WORDS, _MAX_WORDS = 6, 250
_BATCH_TOKENS = (1, 256, 512, 1024, 2048, 4096)
"""Batch sizes that the raw engine tries, in padded tokens; at 1 each text is a batch."""

_TRIED_TEXTS = 400
_PART_ROWS = 2048
_RAW_LIMIT_S = 900.0
_KINDS = {"driver": "the command's", "engine": "the engine's", "rest": "the rest of Ray"}
"""Processes of a job, and their names in tables."""

_LOG_LETTERS = 1000
_SETTLED = 0.1
"""Share of the rows after which memory counts: the engine and a first part are loaded by then."""


class BatchBenchmark(Benchmark):
    """Each round: half of the texts by the raw engine, all of them by the job, the other half by the raw engine."""

    name = "batch"
    out = "bulk"
    purpose = "Compare the throughput of `bertserve batch` with the raw engine, and watch its memory."
    rounds = 2
    seconds = 1.0
    own = (
        Option("--texts", 20_000, "Texts per round (default: %(default)s)."),
        Option("--rows", 1_000_000, "Rows of the run whose memory is watched (default: %(default)s)."),
    )

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "texts": self.options.texts, "rows": self.options.rows}

    def steps(self) -> Iterator[Step]:
        yield "batch tokens", self._batch_tokens
        for number in range(1, self.options.rounds + 1):
            yield f"round {number}", self._round
        yield "memory", self._memory

    @cached_property
    def _texts(self) -> list[str]:
        """Consecutive words of real English in random order; lengths are even on a logarithmic scale."""
        dice, words = random.Random(7), sentence_words()
        least, most, twice, texts = math.log(_MIN_WORDS), math.log(_MAX_WORDS), [*words, *words], []
        for _ in range(self.options.texts):
            begin = dice.randrange(len(words))
            texts.append(" ".join(twice[begin : begin + round(math.exp(dice.uniform(least, most)))]))
        return texts

    @cached_property
    def _ids(self) -> list[list[int]]:
        bundle = self.bundle
        tokenizer = Tokenizer.from_str((bundle.path / "tokenizer.json").read_text(encoding="utf-8"))
        tokenizer.enable_truncation(bundle.max_length)
        return [encoding.ids for encoding in tokenizer.encode_batch_fast(self._texts)]

    @cached_property
    def _raw(self) -> Child:
        raw = self.raw_engine(self.bundle, {})
        raw.ask("drain", _RAW_LIMIT_S, texts=self._ids[:_TRIED_TEXTS], batch_tokens=1)  # warms it up
        return raw

    def _drained_s(self, ids: list[list[int]], batch_tokens: int) -> float:
        return float(self._raw.ask("drain", _RAW_LIMIT_S, texts=ids, batch_tokens=batch_tokens))

    def _batch_tokens(self) -> dict[str, list[float]]:
        """The raw engine's texts per second by batch size; the fastest size is the baseline."""
        sizes = _BATCH_TOKENS if self.bundle.batch_invariant else _BATCH_TOKENS[:1]
        rates: dict[str, list[float]] = {str(tokens): [] for tokens in sizes}
        tried = self._ids[:_TRIED_TEXTS]
        for tokens in (*sizes, *sizes[::-1]):
            rates[str(tokens)].append(len(tried) / self._drained_s(tried, tokens))
        return rates

    def _round(self) -> dict[str, Any]:
        rates = self.store.steps["batch tokens"]
        best = int(max(rates, key=lambda tokens: sum(rates[tokens])))
        first = self._drained_s(self._ids[::2], best)
        job = self._job(self._texts, "--precision", self.options.precision, "--truncate")
        second = self._drained_s(self._ids[1::2], best)
        return {"raw_s": [first, second], **{name: job[name] for name in ("seconds", "steady_per_s", "cpu_s")}}

    def _memory(self) -> dict[str, Any]:
        """Memory with the fake engine, which answers at once: only the code around the engine is measured."""
        dice, words = random.Random(1), sentence_words()
        texts = (" ".join(dice.choices(words, k=dice.randint(1, 8))) for _ in range(self.options.rows))
        return self._job(texts, "--engine", "fake", "--precision", "fp32")

    def _job(self, texts: Iterable[str], *options: str) -> dict[str, Any]:
        """Runs a job from its command to its end.

        Returns:
            `seconds`; `steady_per_s`, the rows per second between the end of the first part and that of the last one;
            `cpu_s` by kind of process; `samples`, the rows written and the resident MB by kind of process.

        Raises:
            BenchError: The job failed.
        """
        with tempfile.TemporaryDirectory() as folder:
            source, out, log = Path(folder) / "texts.jsonl", Path(folder) / "out", Path(folder) / "log"
            with source.open("w", encoding="utf-8") as lines:
                lines.writelines(f"{json.dumps({'text': text})}\n" for text in texts)
            command = [str(program()), "batch", "--models", str(self.options.models), "--input", str(source)]
            command += ["--out", str(out), "--part-rows", str(_PART_ROWS), *options]
            used: dict[int, tuple[str, float]] = {}
            samples: list[dict[str, float]] = []
            with log.open("wb") as said:
                begun = time.perf_counter()
                # A session of its own: Ctrl-C reaches the benchmark alone, which then ends the job in order.
                process = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
                try:
                    while process.poll() is None:
                        samples.append(_sample(process.pid, used) | {"rows": float(_PART_ROWS * len(_parts(out)))})
                        time.sleep(self.options.seconds)
                finally:
                    process.terminate()
                    process.wait()
                seconds = time.perf_counter() - begun
            if process.returncode != 0:
                raise BenchError(f"the job ended with {process.returncode}:\n{log.read_text()[-_LOG_LETTERS:]}")
            times = sorted(entry.stat().st_mtime for entry in _parts(out))
            rows = json.loads((out / "manifest.json").read_bytes())["parts"]
        steady = sum(part["rows"] for part in rows[1:]) / (times[-1] - times[0]) if len(times) > 1 else 0.0
        cpu = {kind: sum(seconds for its, seconds in used.values() if its == kind) for kind in _KINDS}
        return {"seconds": seconds, "steady_per_s": steady, "cpu_s": cpu, "samples": samples}

    def figures(self, store: Store) -> dict[str, Any]:
        texts, rows = store.facts["texts"], store.facts["rows"]
        rounds = list(store.named("round ").values())
        found: dict[str, Any] = {"texts": texts, "rows": rows, "rounds": rounds, "kinds": _KINDS}
        if rounds:
            found["raw_per_s"] = [texts / sum(one["raw_s"]) for one in rounds]
            found["job_per_s"] = [texts / one["seconds"] for one in rounds]
            found["steady"] = [one["steady_per_s"] / raw for one, raw in zip(rounds, found["raw_per_s"], strict=True)]
            found["whole"] = [sum(one["raw_s"]) / one["seconds"] for one in rounds]
        if memory := store.steps.get("memory"):
            samples = memory["samples"]
            settled = [sample for sample in samples if sample["rows"] >= _SETTLED * rows] or samples[-1:]
            resident = [sum(sample[kind] for kind in _KINDS) for sample in settled]
            found |= {"settled": settled, "growth": max(resident) / resident[0]}
        return found

    def plots(self, store: Store) -> dict[str, str]:
        memory = store.steps.get("memory")
        return {"": _plot(memory)} if memory else {}


def _sample(job: int, used: dict[int, tuple[str, float]]) -> dict[str, float]:
    """Resident MB by kind of process. Also keeps the last seen CPU time of each process, with its kind."""
    resident = dict.fromkeys(_KINDS, 0.0)
    for pid in (job, *descendants(job)):
        kind = "driver" if pid == job else _kind(pid)
        resident[kind] += resident_bytes(pid) / 1e6
        used[pid] = (kind, max(cpu_s(pid), used.get(pid, (kind, 0.0))[1]))
    return resident


def _kind(pid: int) -> str:
    try:
        return "engine" if b"MapWorker" in Path(f"/proc/{pid}/cmdline").read_bytes() else "rest"
    except OSError:
        return "rest"


def _parts(out: Path) -> list[Path]:
    """Entries of the parts written so far."""
    return list((out / ".job" / "parts").glob("*"))


def _plot(memory: dict[str, Any]) -> str:
    kinds = {
        "all": ("blue", tuple(_KINDS)),
        "the engine's": ("green", ("engine",)),
        "the command's": ("orange", ("driver",)),
    }
    lines = {
        name: (colour, [(one["rows"] / 1000, sum(one[kind] for kind in of)) for one in memory["samples"]])
        for name, (colour, of) in kinds.items()
    }
    return chart("Resident memory of a job over its rows", "rows written, thousands", "resident, MB", lines)
