"""`bertserve batch` beside the raw engine over the same texts, and its memory over the rows that it has written."""

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
from loadtest.benchmarks.runner import Benchmark, Option, Page, Part, Picture
from loadtest.benchmarks.server_process import program
from loadtest.benchmarks.show import chart
from loadtest.errors import BenchError
from loadtest.generator.workload import sentence_words
from loadtest.report.sample import Spread
from loadtest.report.tables import MET, Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from loadtest.benchmarks.store import Step, Store
    from loadtest.generator.child import Child

_LEAST_WORDS, _MOST_WORDS = 6, 250
_SHORT_WORDS = (1, 8)
_BATCH_TOKENS = (1, 256, 512, 1024, 2048, 4096)
"""Padded tokens of the raw engine's batches that are tried; of 1 each text is a batch."""

_TRIED_TEXTS = 400
_PART_ROWS = 2048
_RAW_LIMIT_S = 900.0
_LEAST_SHARE, _MOST_GROWTH = 0.95, 1.1
_KINDS = {"driver": "the command's", "engine": "the engine's", "rest": "the rest of Ray"}
"""Processes of a job, and what tables call them."""

_LOG_LETTERS = 1000
_SETTLED = 0.1
"""Memory counts from this share of the rows on: the engine and a first part are there then."""


class BatchBenchmark(Benchmark):
    """Each round is half of the texts by the raw engine, all of them by the job, and the other half by the engine."""

    name = "batch"
    out = "bulk"
    purpose = "texts a second of `bertserve batch` beside the raw engine, and its memory over a million rows"
    rounds = 2
    seconds = 1.0

    own = (
        Option("--texts", 20_000, "of a round (%(default)s)"),
        Option("--rows", 1_000_000, "whose memory is watched (%(default)s)"),
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
        return mixed_texts(self.options.texts)

    @cached_property
    def _ids(self) -> list[list[int]]:
        bundle = self.bundle
        tokenizer = Tokenizer.from_str((bundle.path / "tokenizer.json").read_text(encoding="utf-8"))
        tokenizer.enable_truncation(bundle.max_length)
        return [encoding.ids for encoding in tokenizer.encode_batch_fast(self._texts)]

    @cached_property
    def _raw(self) -> Child:
        raw = self.raw_engine({})
        self._drained(raw, self._ids[:_TRIED_TEXTS], _BATCH_TOKENS[0])
        return raw

    def _drained(self, raw: Child, ids: Sequence[list[int]], batch_tokens: int) -> float:
        return float(raw.ask("drain", _RAW_LIMIT_S, texts=ids, batch_tokens=batch_tokens))

    def _batch_tokens(self) -> dict[str, list[float]]:
        """The raw engine's texts a second by the size of its batches, which must not be chosen to its disadvantage."""
        rates: dict[str, list[float]] = {str(tokens): [] for tokens in self._sizes()}
        tried = self._ids[:_TRIED_TEXTS]
        for sizes in (self._sizes(), self._sizes()[::-1]):
            for tokens in sizes:
                rates[str(tokens)].append(len(tried) / self._drained(self._raw, tried, tokens))
        return rates

    def _sizes(self) -> tuple[int, ...]:
        return _BATCH_TOKENS if self.bundle.batch_invariant else _BATCH_TOKENS[:1]

    def _round(self) -> dict[str, Any]:
        best = _best(self.store.steps["batch tokens"])
        halves = (self._ids[::2], self._ids[1::2])
        first = self._drained(self._raw, halves[0], best)
        job = self._job(self._texts, "--precision", self.options.precision, "--truncate")
        second = self._drained(self._raw, halves[1], best)
        return {"raw_s": [first, second], **{name: job[name] for name in ("seconds", "steady_per_s", "cpu_s")}}

    def _memory(self) -> dict[str, Any]:
        """With the fake engine, which answers at once: what is watched is what lies around the engine."""
        dice, words = random.Random(1), sentence_words()
        texts = (" ".join(dice.choices(words, k=dice.randint(*_SHORT_WORDS))) for _ in range(self.options.rows))
        return self._job(texts, "--engine", "fake", "--precision", "fp32")

    def _job(self, texts: Iterable[str], *options: str) -> dict[str, Any]:
        """A job from its command to its end.

        Returns:
            `seconds`; `steady_per_s`, the rows a second between the end of the first part and that of the last one;
            `cpu_s` by kind of process; `samples`, the rows written and the resident MB by kind of process.

        Raises:
            BenchError: It failed.
        """
        with tempfile.TemporaryDirectory() as folder:
            source, out, log = Path(folder) / "texts.jsonl", Path(folder) / "out", Path(folder) / "log"
            with source.open("w", encoding="utf-8") as lines:
                lines.writelines(f"{json.dumps({'text': text})}\n" for text in texts)
            command = [str(program()), "batch", "--models", str(self.options.models), "--input", str(source)]
            command += ["--out", str(out), "--part-rows", str(_PART_ROWS), *options]
            with log.open("wb") as said:
                begun = time.perf_counter()
                # A session of its own: Ctrl-C reaches the benchmark alone, which then ends the job in order.
                process = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
                watch = _Watch(process.pid, out)
                try:
                    while not _ended(process, self.options.seconds):
                        watch.look()
                finally:
                    process.terminate()
                    process.wait()
                seconds = time.perf_counter() - begun
            if process.returncode != 0:
                raise BenchError(f"the job ended with {process.returncode}:\n{log.read_text()[-_LOG_LETTERS:]}")
            times = sorted(entry.stat().st_mtime for entry in _entries(out))
            rows = json.loads((out / "manifest.json").read_bytes())["parts"]
            steady = sum(part["rows"] for part in rows[1:]) / (times[-1] - times[0]) if len(times) > 1 else 0.0
            return {"seconds": seconds, "steady_per_s": steady, "cpu_s": watch.cpu_s(), "samples": watch.samples}

    def page(self, store: Store) -> Page:
        texts, rows = store.facts["texts"], store.facts["rows"]
        method = (
            f"{texts:,} texts of {_LEAST_WORDS} to {_MOST_WORDS} words of real English, as many of each length on a"
            " logarithmic scale, cut at what the model takes. The raw engine is ONNX Runtime with the artifact that the"
            " job runs: a session of one thread a core, and nothing else timed than `InferenceSession.run`. Its texts"
            " are tokenised and sorted by length before, over all of them. A round is half of the texts by the raw"
            " engine, all of them by the job, and the other half by the raw engine; a ratio is that of one round."
        )
        parts: list[Part] = []
        verdicts = []
        if rounds := list(store.named("round ").values()):
            shares = _shares(rounds, texts)
            verdicts.append(
                f"the job computes {shares['steady'].text(3)} of the raw engine's texts a second between its first part"
                f" and its last ({_LEAST_SHARE:g} is asked: {MET[shares['steady'].median >= _LEAST_SHARE]}), and"
                f" {shares['whole'].text(3)} of them from the command to its end"
            )
            parts += [_rates(rounds, texts), _cpu(rounds)]
        if sizes := store.steps.get("batch tokens"):
            cells = [[tokens, Spread.of(rates).text(1)] for tokens, rates in sizes.items()]
            note = (
                f"Padded tokens of a batch, over the first {min(texts, _TRIED_TEXTS)} texts; the job is compared with"
                " the fastest."
            )
            parts.append(Table("The raw engine by its batches", note, ("tokens", "texts/s"), cells))
        if memory := store.steps.get("memory"):
            growth = _growth(memory, rows)
            verdicts.append(
                f"over {rows:,} short rows resident memory grows to {growth:.2f} times that at a tenth of them"
                f" ({_MOST_GROWTH:g} is allowed: {MET[growth <= _MOST_GROWTH]})"
            )
            parts += [Picture("", _plot(memory), "Resident memory over the rows written"), _by_kind(memory, rows)]
        words = "; ".join(verdicts)
        verdict = f"**{words[:1].upper()}{words[1:]}.**" if words else ""
        return Page("`bertserve batch` beside the raw engine", method, parts, verdict)


def mixed_texts(count: int) -> list[str]:
    """Consecutive words of real English; lengths are even on a logarithmic scale, in random order."""
    dice, words = random.Random(7), sentence_words()
    twice = [*words, *words]
    least, most = math.log(_LEAST_WORDS), math.log(_MOST_WORDS)
    texts = []
    for _ in range(count):
        begin = dice.randrange(len(words))
        texts.append(" ".join(twice[begin : begin + round(math.exp(dice.uniform(least, most)))]))
    return texts


class _Watch:
    """What a job's processes use while it runs.

    Attributes:
        samples: The rows written, and the resident MB by kind of process.
    """

    def __init__(self, pid: int, out: Path) -> None:
        self._pid, self._out = pid, out
        self._cpu_s: dict[int, tuple[str, float]] = {}
        self.samples: list[dict[str, float]] = []

    def look(self) -> None:
        """Adds a sample."""
        resident = dict.fromkeys(_KINDS, 0.0)
        for pid in (self._pid, *descendants(self._pid)):
            kind = "driver" if pid == self._pid else _kind(pid)
            resident[kind] += resident_bytes(pid) / 1e6
            self._cpu_s[pid] = (kind, max(cpu_s(pid), self._cpu_s.get(pid, (kind, 0.0))[1]))
        self.samples.append({"rows": float(_PART_ROWS * len(_entries(self._out))), **resident})

    def cpu_s(self) -> dict[str, float]:
        """CPU time by kind of process, as last seen."""
        return {kind: sum(used for its, used in self._cpu_s.values() if its == kind) for kind in _KINDS}


def _kind(pid: int) -> str:
    try:
        return "engine" if b"MapWorker" in Path(f"/proc/{pid}/cmdline").read_bytes() else "rest"
    except OSError:
        return "rest"


def _ended(process: subprocess.Popen[bytes], within_s: float) -> bool:
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _entries(out: Path) -> list[Path]:
    """Of the parts that are written."""
    folder = out / ".job" / "parts"
    return list(folder.iterdir()) if folder.is_dir() else []


def _best(rates: Mapping[str, Sequence[float]]) -> int:
    return int(max(rates, key=lambda tokens: sum(rates[tokens])))


def _shares(rounds: Sequence[dict[str, Any]], texts: int) -> dict[str, Spread]:
    """The job's texts a second divided by the raw engine's."""
    return {
        "whole": Spread.of([sum(one["raw_s"]) / one["seconds"] for one in rounds]),
        "steady": Spread.of([one["steady_per_s"] * sum(one["raw_s"]) / texts for one in rounds]),
    }


def _rates(rounds: Sequence[dict[str, Any]], texts: int) -> Table:
    raw = Spread.of([texts / sum(one["raw_s"]) for one in rounds])
    steady = Spread.of([one["steady_per_s"] for one in rounds])
    whole = Spread.of([texts / one["seconds"] for one in rounds])
    shares = _shares(rounds, texts)
    halves = [seconds for one in rounds for seconds in one["raw_s"]]
    note = (
        f"Medians of {len(rounds)} rounds, least to greatest in brackets. Halves by the raw engine took"
        f" {Spread.of(halves).text(1)} s."
    )
    cells = [
        ["raw engine", raw.text(1), ""],
        ["job, first part to last", steady.text(1), shares["steady"].text(3)],
        ["job, command to end", whole.text(1), shares["whole"].text(3)],
    ]
    return Table("Texts a second", note, ("", "texts/s", "beside the raw engine"), cells, words=1)


def _cpu(rounds: Sequence[dict[str, Any]]) -> Table:
    cells = [[words, Spread.of([one["cpu_s"][kind] for one in rounds]).text(1)] for kind, words in _KINDS.items()]
    return Table("CPU seconds of the job", "", ("process", "s"), cells, words=1)


def _settled(memory: dict[str, Any], rows: int) -> list[dict[str, float]]:
    return [sample for sample in memory["samples"] if sample["rows"] >= _SETTLED * rows] or memory["samples"][-1:]


def _all(sample: dict[str, float]) -> float:
    return sum(sample[kind] for kind in _KINDS)


def _growth(memory: dict[str, Any], rows: int) -> float:
    """The greatest memory of all processes beside that at a tenth of the rows."""
    settled = [_all(sample) for sample in _settled(memory, rows)]
    return max(settled) / settled[0]


def _by_kind(memory: dict[str, Any], rows: int) -> Table:
    settled = _settled(memory, rows)
    cells = [
        [words, f"{settled[0][kind]:.0f}", f"{max(sample[kind] for sample in settled):.0f}"]
        for kind, words in _KINDS.items()
    ]
    note = (
        f"{rows:,} rows of {_SHORT_WORDS[0]} to {_SHORT_WORDS[1]} words in {memory['seconds']:.0f} s, with the fake"
        " engine: what is watched is what lies around the engine. MB; pages that processes share count in each."
    )
    return Table("Resident memory", note, ("process", "at a tenth", "greatest since"), cells, words=1)


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
