"""Queries alone and beside a bulk job, in turns: what each costs the other, measured and simulated."""

from __future__ import annotations

import contextlib
import http.client
import json
import statistics
import tempfile
import threading
import time
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from loadtest.benchmarks.drive import SLO_MS, drive, even, find_capacity, mixed_texts
from loadtest.benchmarks.runner import Benchmark, Page
from loadtest.benchmarks.scheduling.simulated import asked
from loadtest.benchmarks.server_process import HOST, BertServer
from loadtest.generator.messages import Target
from loadtest.report.sample import Spread
from loadtest.report.tables import MET, Table
from serving.host import available_cpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from loadtest.benchmarks.drive import Workload
    from loadtest.benchmarks.runner import Part
    from loadtest.benchmarks.store import Step, Store

LOAD, OVERLOAD = 0.5, 2.0
"""Of the capacity: what queries ask for."""

MOST_P99, LEAST_REST, SHARE, NEAR = 1.1, 0.8, 0.05, 0.01
ALONE, BESIDE, BULK_ALONE = "queries alone", "queries beside bulk", "bulk alone"

_CLIENTS, _TEXTS = 8, 8
_PRIORITY = {"Content-Type": "application/json", "X-Request-Priority": "4"}
_PATIENCE_S = 120.0
_SETTLED_S = 6.0
"""So long after the last query bulk work has the device as it likes."""

_SIMULATED_S = "120"
_OK = 200


class BulkJob:
    """Clients that always have a request of bulk work under way, while the block runs."""

    def __init__(self, port: int, workload: Workload) -> None:
        self._port = port
        texts = [text for kind in workload.kinds for text in kind.texts]
        self._bodies = [
            json.dumps({"inputs": texts[at :: len(texts) // _TEXTS][:_TEXTS]}) for at in range(len(texts) // _TEXTS)
        ]
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(client,)) for client in range(_CLIENTS)]
        self.answered: list[float] = []
        self.failed = 0

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def per_s(self, begin: float, end: float) -> float:
        """Texts answered a second between two moments of `time.perf_counter`."""
        return _TEXTS * sum(begin <= at < end for at in list(self.answered)) / (end - begin)

    def _ask(self, client: int) -> None:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=_PATIENCE_S)
        number = client
        with contextlib.closing(connection):
            while not self._ended.is_set():
                connection.request("POST", "/embed", self._bodies[number % len(self._bodies)], _PRIORITY)
                reply = connection.getresponse()
                reply.read()
                if reply.status == _OK:
                    self.answered.append(time.perf_counter())
                else:
                    self.failed += 1
                number += _CLIENTS


class BulkBesideOnlineBenchmark(Benchmark):
    """Bulk work of the queries' own lengths, always more than the server can do."""

    name = "bulk-beside-online"
    purpose = "queries beside a saturating bulk job: their p99, what bulk work gets, its share under overload"
    rounds = 5
    seconds = 15.0
    probe_s = 8.0

    @cached_property
    def _workload(self) -> Workload:
        return mixed_texts(self.bundle)

    @cached_property
    def _server(self) -> BertServer:
        repository = self.bundle.path.parents[1]
        return self.stack.enter_context(BertServer(repository, self.bundle.precision, available_cpus()))

    @property
    def _target(self) -> Target:
        return Target("http", HOST, self._server.http_port, self.bundle.model)

    def _status(self) -> Any:  # noqa: ANN401  JSON
        connection = http.client.HTTPConnection(HOST, self._server.http_port, timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", "/status")
            return json.loads(connection.getresponse().read())

    def steps(self) -> Iterator[Step]:
        yield "capacity", self._capacity
        for number in range(1, self.options.rounds + 1):
            subjects: list[tuple[str, Callable[[int], dict[str, float]]]] = [
                (ALONE, partial(self._queries, LOAD)),
                (BESIDE, partial(self._beside, LOAD)),
                (BULK_ALONE, self._bulk_alone),
            ]
            for subject, found in subjects if number % 2 else subjects[::-1]:
                yield f"turn {number} {subject}", partial(found, number)
        for number in range(1, self.options.rounds // 2 + 1):
            yield f"turn {number} overload", partial(self._beside, OVERLOAD, number)
        yield "simulated", self._simulated

    def _capacity(self) -> dict[str, Any]:
        rate = 0.8 * 1e6 / statistics.fmean(self._cost_us(tokens) for tokens in self._workload.tokens)
        return find_capacity(self._target, self._workload, self.options.probe_s, rate)

    def _cost_us(self, tokens: int) -> float:
        """What the server's own table says of the nearest length on the wide lane."""
        rows = [row for row in _costs(self._costs_status)["table"] if row["kind"] == "wide" and row["texts"] == 1]
        nearest = min(rows, key=lambda row: abs(row["tokens"] - tokens))
        return float(nearest["measured_us"]) * tokens / float(nearest["tokens"])

    @cached_property
    def _costs_status(self) -> Any:  # noqa: ANN401  JSON
        return self._status()

    def _queries(self, load: float, number: int) -> dict[str, float]:
        seconds = self.options.seconds
        rate = load * float(self.store.steps["capacity"]["capacity_per_s"])
        requests, _ = drive(self._target, self._workload, even(seconds), rate, number)
        return requests.figures(seconds, SLO_MS)

    def _beside(self, load: float, number: int) -> dict[str, float]:
        with BulkJob(self._server.http_port, self._workload) as job:
            # Both have begun before anything counts, as the queries alone follow upon others.
            drive(self._target, self._workload, even(2.0), LOAD * self.store.steps["capacity"]["capacity_per_s"], 1000)
            before, begin = self._status()["device_ms"], time.perf_counter()
            found = self._queries(load, number)
            end, after = time.perf_counter(), self._status()["device_ms"]
        spent = {name: after[name] - before[name] for name in after}
        found["bulk_per_s"], found["bulk_failed"] = job.per_s(begin, end), float(job.failed)
        found["bulk_share"] = spent["bulk"] / sum(spent.values())
        return found

    def _bulk_alone(self, _: int) -> dict[str, float]:
        with BulkJob(self._server.http_port, self._workload) as job:
            time.sleep(_SETTLED_S)
            begin = time.perf_counter()
            time.sleep(self.options.seconds)
            end = time.perf_counter()
        return {"bulk_per_s": job.per_s(begin, end), "bulk_failed": float(job.failed)}

    def _simulated(self) -> dict[str, Any]:
        """The same by `bertserve simulate`, with the table that this server has measured and corrected."""
        capacity = float(self.store.steps["capacity"]["capacity_per_s"])
        low, high = min(self._workload.tokens), max(self._workload.tokens)
        with tempfile.TemporaryDirectory() as folder:
            costs = Path(folder) / "status.json"
            costs.write_text(json.dumps(self._status()), encoding="utf-8")
            words = ("--cost", str(costs), "--tokens", f"{low}-{high}", "--duration", _SIMULATED_S)
            load, overload = (f"{share * capacity:.1f}" for share in (LOAD, OVERLOAD))
            mix = ("--bulk", f"{low}-{high}")
            return {
                ALONE: asked(*words, "--rate", load),
                BESIDE: asked(*words, "--rate", load, *mix),
                BULK_ALONE: asked(*words, "--rate", "0.01", *mix),
                "overload": asked(*words, "--rate", overload, *mix),
            }

    def page(self, store: Store) -> Page:
        method = (
            f"Texts of 6 to 250 words of real English in even steps, Poisson arrivals at {LOAD:g} of the capacity, over"
            f" HTTP; {_CLIENTS} clients send bulk requests of {_TEXTS} of them, each as soon as the last is answered."
            " Clients and generator share the cores with the server."
            f" Capacity is the highest rate at which p99 is at most {SLO_MS:g} ms. Blocks of"
            f" {store.facts['seconds']:g} s alternate; medians, least to greatest in brackets, ratios within a round."
        )
        parts: list[Part] = [
            table for table in (_beside_table(store), _overload_table(store), _simulated_table(store)) if table
        ]
        facts = {"model": f"{store.facts['model']} version {store.facts['version']}"}
        if "capacity" in store.steps:
            facts["capacity"] = f"{store.steps['capacity']['capacity_per_s'] or 0:.1f} queries a second"
        return Page("Bulk beside online", method, parts, facts=facts)


def _costs(status: Any) -> Any:  # noqa: ANN401  JSON
    [model] = [model for model in status["models"] if model["costs"]]
    return model["costs"]


def _turns(store: Store, subject: str) -> dict[int, Any]:
    ends = f" {subject}"
    named = store.named("turn ").items()
    return {int(name.removesuffix(ends)): found for name, found in named if name.endswith(ends)}


def _spread(values: Sequence[float], decimals: int) -> str:
    return Spread.of(list(values)).text(decimals) if values else "-"


def _beside_table(store: Store) -> Table | None:
    alone, beside, bulk = (_turns(store, subject) for subject in (ALONE, BESIDE, BULK_ALONE))
    numbers = sorted(alone.keys() & beside.keys() & bulk.keys())
    if not numbers:
        return None
    ratios = {name: [beside[number][name] / alone[number][name] for number in numbers] for name in ("p50_ms", "p99_ms")}
    rest = [beside[n]["bulk_per_s"] / ((1 - LOAD) * bulk[n]["bulk_per_s"]) for n in numbers]
    rows = [
        [subject, *(_spread([of[n][name] for n in numbers], 1) for name in ("p50_ms", "p99_ms")), texts]
        for subject, of, texts in (
            (ALONE, alone, "-"),
            (BESIDE, beside, _spread([beside[n]["bulk_per_s"] for n in numbers], 1)),
        )
    ]
    rows.append([BULK_ALONE, "-", "-", _spread([bulk[n]["bulk_per_s"] for n in numbers], 1)])
    rows.append(["ratio, and of what is left", *(_spread(ratios[name], 2) for name in ratios), _spread(rest, 2)])
    met = [MET[statistics.median(ratios["p99_ms"]) <= MOST_P99], MET[statistics.median(rest) >= LEAST_REST]]
    rows.append(["as asked", "", *met])
    unanswered = sum(
        of[n]["refused_per_s"] + of[n]["missed_per_s"] + of[n]["failed_otherwise"]
        for of in (alone, beside)
        for n in numbers
    )
    failed = sum(of[n]["bulk_failed"] for of in (beside, bulk) for n in numbers)
    note = (
        f"Asked: p99 at most {MOST_P99:g} times that without bulk work, which gets at least {100 * LEAST_REST:g}% of"
        f" what is left, {100 * (1 - LOAD):g}% of what it does alone. {len(numbers)} rounds; queries without an answer:"
        f" {unanswered:g} a second; bulk requests that failed: {failed:g}."
    )
    return Table("At half of the capacity", note, ("", "p50 ms", "p99 ms", "bulk texts/s"), rows, words=1)


def _overload_table(store: Store) -> Table | None:
    found = list(_turns(store, "overload").values())
    if not found:
        return None
    share = statistics.median(run["bulk_share"] for run in found)
    figures = [
        _spread([run[name] for run in found], 1)
        for name in ("offered_per_s", "good_per_s", "refused_per_s", "bulk_per_s")
    ]
    rows = [[*figures, _spread([100 * run["bulk_share"] for run in found], 1), MET[share >= SHARE - NEAR]]]
    note = (
        f"Queries at {OVERLOAD:g} times the capacity. Asked: bulk work has its {100 * SHARE:g}% of the device's time."
    )
    head = ("offered/s", "answered in time/s", "refused/s", "bulk texts/s", "bulk, % of the device", "as asked")
    return Table("While queries overload the server", note, head, rows)


def _simulated_table(store: Store) -> Table | None:
    if "simulated" not in store.steps:
        return None
    found = store.steps["simulated"]
    alone_per_s = found[BULK_ALONE]["bulk_per_s"]
    rows = []
    for subject, run in found.items():
        texts = f"{run['bulk_per_s']:.1f}" if run["bulk_per_s"] is not None else "-"
        of_rest = f"{run['bulk_per_s'] / (1 - LOAD) / alone_per_s:.2f}" if subject == BESIDE else ""
        ratio = f"{run['p99_ms'] / found[ALONE]['p99_ms']:.2f}" if subject == BESIDE else ""
        times = [f"{run[name]:.1f}" if subject != BULK_ALONE else "-" for name in ("p50_ms", "p99_ms")]
        share = f"{100 * run['bulk_device_share']:.1f}" if run["bulk_device_share"] is not None else "-"
        rows.append([subject, *times, ratio, texts, of_rest, share])
    note = f"A simulation, not a measurement: `bertserve simulate --bulk`, this server's table, {_SIMULATED_S} s each."
    head = ("", "p50 ms", "p99 ms", "p99 ratio", "bulk texts/s", "of what is left", "bulk, % of the device")
    return Table("Simulated", note, head, rows, words=1)
