"""Prometheus metrics. Each request is recorded once, from the timings that its client also gets.

The client library's metrics take a lock and several Python functions for each observation, nine times a request; on a
small machine that was a tenth of the server's time for a short text. Here one thread feeds and scrapes them, so an
addition is enough, plus a search for a histogram.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from itertools import accumulate, product
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as PrometheusMetric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from bertserve.serving.engine.kinds import ENGINES
from bertserve.serving.errors import InvalidRequest, reasons
from bertserve.serving.inference.requests import Totals
from bertserve.serving.lifecycle import State
from bertserve.serving.models.statistics import BatchStatistics, Duration
from bertserve.serving.records import BULK
from bertserve.serving.telemetry import catalogue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from bertserve.serving.engine.process.remote_engine import EngineLife
    from bertserve.serving.inference.dispatcher import Dispatcher
    from bertserve.serving.inference.requests import Outcome
    from bertserve.serving.inference.served_models import Repository, ServedModel
    from bertserve.serving.records import ModelIndex
    from bertserve.serving.scheduling.batcher import Assignment
    from bertserve.serving.telemetry.catalogue import Metric

    Values = Mapping[Any, float]
    """The samples of a metric, by the value of its only label, or by those of its labels in order."""

_DECADE = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)

_SECONDS = (
    5e-5,
    *(round(1e-4 * step, 4) for step in range(1, 31)),
    *(round(1e-3 * step, 4) for step in (4, 5, 6, 8)),
    *(round(ten * step, 5) for ten in (1e-2, 1e-1, 1.0) for step in _DECADE),
    *(10.0, 15.0, 30.0, 60.0),
)
"""Every 0.1 ms up to 3 ms, then round numbers in steps of a quarter, up to the longest deadline."""

_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)

_RECENT_BATCHES = 128

_RECENT_REQUESTS = 1000

_ANSWERED = "ok"
"""The outcome of an answered request."""

_PROTOCOLS = ("http", "grpc")

_OF_A_MODEL = (_ANSWERED, *sorted({*reasons()} - {*reasons(InvalidRequest)}))
"""Outcomes that each model has from the start. Client errors appear with the first one."""

_OF_PROCESSES = {metric.name for metric in catalogue.PROCESS}


class Reading(Collector):
    """A counter or gauge that is read when it is scraped.

    `read` returns its value, or a value for each combination of its labels' values (for each value of an only label).
    """

    def __init__(self, metric: Metric, registry: CollectorRegistry, read: Callable[[], float | Values]) -> None:
        self._metric, self._read = metric, read
        self._family = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}[metric.kind]
        registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        values = self._read()
        family = self._family(self._metric.name, self._metric.text, labels=list(self._metric.labels))
        for labels, value in ({(): values} if isinstance(values, int | float) else values).items():
            family.add_metric([labels] if isinstance(labels, str) else labels, value)
        yield family


class Histogram:
    """Counts values by bucket; bounds are ascending and inclusive, and one bucket without a bound is added."""

    def __init__(self, buckets: Sequence[float]) -> None:
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def counts(self) -> Sequence[int]:
        """The count of each bucket alone; last, values beyond the bounds."""
        return tuple(self._counts)

    def take(self) -> tuple[list[int], float]:
        """The counts and the sum; afterwards they are 0."""
        taken = self._counts, self._sum
        self._counts, self._sum = [0] * len(self._counts), 0.0
        return taken

    def add(self, counts: Sequence[int], total: float) -> None:
        self._counts = [own + more for own, more in zip(self._counts, counts, strict=True)]
        self._sum += total

    def exported(self) -> tuple[list[tuple[str, int]], float]:
        """The cumulative buckets of Prometheus, and the sum of the values."""
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(names, accumulate(self._counts), strict=True)), self._sum


class Histograms(Collector):
    """The histograms of a metric, by the values of its labels, created when first used."""

    def __init__(self, metric: Metric, registry: CollectorRegistry, buckets: Sequence[float]) -> None:
        self._metric = metric
        self.by_labels: defaultdict[tuple[str, ...], Histogram] = defaultdict(lambda: Histogram(buckets))
        registry.register(self)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._metric.name, self._metric.text, labels=list(self._metric.labels))
        for labels, histogram in self.by_labels.items():
            family.add_metric(labels, *histogram.exported())
        yield family


class _ProcessMetrics(ProcessCollector):
    """Those metrics of a process that the catalogue has."""

    def collect(self) -> Iterator[PrometheusMetric]:
        return (family for family in super().collect() if family.samples[0].name in _OF_PROCESSES)


class BatchSeen(NamedTuple):
    """One of the last batches; times in microseconds."""

    lane: int
    texts: int
    tokens: int
    padding: int
    predicted_us: float
    occupied_us: float


class Counts(NamedTuple):
    """Counts since the server started.

    Attributes:
        requests: Answered requests.
        errors: Failed requests by reason.
        stages: For each stage of a request the counts of the buckets of `Metrics.bounds`; last, those beyond them.
    """

    requests: int
    errors: Mapping[str, int]
    texts: int
    tokens: int
    truncated: int
    engine_restarts: int
    stages: Mapping[str, Sequence[int]]


class HistogramSince(msgspec.Struct, frozen=True, array_like=True):
    """The values of a histogram since the last time: its index in `Metrics`, its labels, counts and sum."""

    metric: int
    labels: tuple[str, ...]
    counts: list[int]
    sum: float


class CountsSince(msgspec.Struct, frozen=True):
    """What a front process has counted since the last time.

    Attributes:
        requests: By model, protocol and outcome.
        totals: By model and version.
        failures: By v2 name and version.
        counters: Those of `Metrics.total`, by metric and label.
    """

    requests: list[tuple[str, str, str, int]]
    histograms: list[HistogramSince]
    texts: int
    tokens: int
    truncated: int
    totals: list[tuple[str, str, Totals]]
    failures: list[tuple[str, str, Duration]]
    times: list[float]
    counters: dict[str, float]


class Metrics:
    """Every metric of the server, in a registry of its own.

    Attributes:
        totals: Answers of each model, by name and version.
        failures: Failed v2 requests of each model, by v2 name and version.
        recent: The last batches.
        times: Of the last requests in `Counts.stages`, a time for each of its stages in order; microseconds.
    """

    bounds = _SECONDS
    """Upper bounds of the buckets of a request's stages, in seconds."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        # Outcomes exist from the start: a counter that first appears above 0 has no rate.
        self._requests: defaultdict[tuple[str, str], Counter[str]] = defaultdict(
            lambda: Counter(dict.fromkeys(_OF_A_MODEL, 0))
        )
        for protocol in _PROTOCOLS:
            self._requests["", protocol] = Counter(dict.fromkeys(reasons(), 0))
        self._of_requests = [
            Histograms(metric, registry, _SECONDS).by_labels
            for metric in (
                catalogue.REQUEST_SECONDS,
                catalogue.TOKENIZE_SECONDS,
                catalogue.QUEUE_SECONDS,
                catalogue.COMPUTE_SECONDS,
            )
        ]
        self._request = self._of_requests[0]
        self._tokenize, self._queue, self._compute = (each[()] for each in self._of_requests[1:])
        self._texts = self._tokens = self._truncated = self._padding = self._restarts = 0
        self._predicted_s = self._actual_s = 0.0
        self._batches = Histograms(catalogue.BATCH_SIZE, registry, _BATCH_SIZES).by_labels[()]
        self.recent: deque[BatchSeen] = deque(maxlen=_RECENT_BATCHES)
        self.times: deque[float] = deque(maxlen=4 * _RECENT_REQUESTS)
        self._state = State.STARTING
        self.read(catalogue.REQUESTS, self._outcomes)
        self.read(catalogue.TOKENS, lambda: self._tokens)
        self.read(catalogue.TRUNCATED, lambda: self._truncated)
        self.read(catalogue.PADDING, lambda: self._padding)
        self.read(catalogue.PREDICTED_SECONDS, lambda: self._predicted_s)
        self.read(catalogue.ACTUAL_SECONDS, lambda: self._actual_s)
        self.read(catalogue.ENGINE_RESTARTS, lambda: self._restarts)
        self.read(catalogue.STATE, lambda: {state: float(state is self._state) for state in State})
        self._batches_of: Counter[tuple[str, str] | None] = Counter()
        self._ended_of: defaultdict[tuple[str, str] | None, dict[int, Duration]] = defaultdict(dict)
        self._names: dict[ModelIndex, tuple[str, str]] = {}
        self.totals: defaultdict[tuple[str, str], Totals] = defaultdict(Totals)
        self.failures: defaultdict[tuple[str, str], Duration] = defaultdict(Duration)
        self._counters: dict[str, Callable[[], Mapping[str, float]]] = {}
        self._others: Counter[str] = Counter()
        self._taken: Mapping[str, float] = {}
        _ProcessMetrics(registry=registry)

    def count_outcome(self, outcome: Outcome[Any], protocol: str) -> None:
        timings, source = outcome.timings, (outcome.model, protocol)
        self._requests[source][_ANSWERED] += 1
        if outcome.priority != BULK:
            self._tokenize.observe(timings.tokenize_us / 1e6)
            self._queue.observe(timings.queue_us / 1e6)
            self._compute.observe(timings.compute_us / 1e6)
            self._request[source].observe(timings.total_us / 1e6)
            self.times.extend((timings.tokenize_us, timings.queue_us, timings.compute_us, timings.total_us))
        texts = len(outcome.answer)
        self._texts += texts
        self._tokens += outcome.tokens
        self._truncated += outcome.truncated_tokens
        totals = self.totals[outcome.model, outcome.version]
        totals.requests += 1
        totals.total_us += timings.total_us
        totals.last_at = time.time()
        if outcome.cached:
            totals.cached += 1
            totals.cached_us += timings.total_us
        else:
            totals.texts += texts
            totals.tokenize_us += timings.tokenize_us
            totals.queue_us += timings.queue_us
            totals.compute_us += timings.compute_us

    def take(self) -> CountsSince:
        """What was counted since the last time; afterwards what requests have added is 0."""
        counters = {name + label: value for name, read in self._counters.items() for label, value in read().items()}
        before, self._taken = self._taken, counters
        taken = CountsSince(
            requests=[
                (model, protocol, outcome, number)
                for (model, protocol), counts in self._requests.items()
                for outcome, number in counts.items()
                if number
            ],
            histograms=[
                HistogramSince(index, labels, counts, total)
                for index, by_labels in enumerate(self._of_requests)
                for labels, histogram in by_labels.items()
                for counts, total in (histogram.take(),)
                if any(counts)
            ],
            texts=self._texts,
            tokens=self._tokens,
            truncated=self._truncated,
            totals=[(*key, totals) for key, totals in self.totals.items()],
            failures=[(*key, duration) for key, duration in self.failures.items()],
            times=list(self.times),
            counters={name: value - before.get(name, 0.0) for name, value in counters.items()},
        )
        self._texts = self._tokens = self._truncated = 0
        for counted in (self._requests, self.totals, self.failures, self.times):
            counted.clear()
        return taken

    def add(self, since: CountsSince) -> None:
        """Adds what another process has counted."""
        self._others.update(since.counters)
        for model, protocol, outcome, number in since.requests:
            self._requests[model, protocol][outcome] += number
        for each in since.histograms:
            self._of_requests[each.metric][each.labels].add(each.counts, each.sum)
        self._texts += since.texts
        self._tokens += since.tokens
        self._truncated += since.truncated
        self.times.extend(since.times)
        for model, version, more in since.totals:
            self.totals[model, version].add(more)
        for name, version, duration in since.failures:
            failures = self.failures[name, version]
            failures.count += duration.count
            failures.ns += duration.ns

    def refused(self, reason: str, protocol: str, model: str) -> None:
        """Counts an error; `model` is empty if the request was rejected before its model was known."""
        self._requests[model, protocol][reason] += 1

    def batch_started(self, assignment: Assignment) -> None:
        self._batches.observe(len(assignment.items))
        self._padding += assignment.padding
        self._batches_of[self._names.get(assignment.items[0].model)] += 1

    def batch_ended(self, assignment: Assignment, occupied_us: float) -> None:
        predicted_us, texts = assignment.predicted_us, len(assignment.items)
        if occupied_us > 0:
            ended = self._ended_of[self._names.get(assignment.items[0].model)].setdefault(texts, Duration())
            ended.count += 1
            ended.ns += round(occupied_us * 1e3)
            self._predicted_s += predicted_us / 1e6
            self._actual_s += occupied_us / 1e6
        self.recent.append(
            BatchSeen(assignment.lane, texts, assignment.tokens, assignment.padding, predicted_us, occupied_us)
        )

    def engine_died(self) -> None:
        self._restarts += 1

    def state(self, current: State) -> None:
        self._state = current

    def read(self, metric: Metric, read: Callable[[], float | Values]) -> None:
        Reading(metric, self.registry, read)

    def total(self, metric: Metric, read: Callable[[], float | Mapping[str, float]]) -> None:
        """Shows a counter of this process, by its label if it has one, with what other processes have added."""

        def by_label() -> Mapping[str, float]:
            values = read()
            return {"": values} if isinstance(values, int | float) else values

        self._counters[metric.name] = by_label
        self.read(
            metric, lambda: {label: value + self._others[metric.name + label] for label, value in by_label().items()}
        )

    def follow(self, dispatcher: Dispatcher) -> None:
        load = dispatcher.load
        self.read(catalogue.QUEUE_TEXTS, lambda: load().queued_texts)
        self.read(catalogue.PREDICTED_WAIT, lambda: (now := load()).wait_s - now.restart_s)
        self.read(catalogue.ADMITTED_TOKENS, lambda: load().admitted_tokens)
        self.read(catalogue.ADMITTED_LIMIT, lambda: load().admitted_limit)
        self.read(catalogue.NON_FINITE, lambda: load().non_finite)
        self.read(catalogue.REFUSALS, lambda: load().refusals)
        self.read(catalogue.DEADLINE_MISSES, lambda: load().misses)
        self.read(catalogue.BULK_ADMITTED_TOKENS, lambda: load().bulk.admitted_tokens)
        self.read(catalogue.BULK_ADMITTED_LIMIT, lambda: load().bulk.admitted_limit)
        self.read(catalogue.BULK_REFUSALS, lambda: load().bulk.refusals)
        self.read(catalogue.DEVICE_SECONDS, lambda: {name: us / 1e6 for name, us in load().device_us.items()})

    def follow_models(self, repository: Repository) -> None:
        """Exports each model."""
        for source in product([model.name for model in repository.models], _PROTOCOLS):
            self._requests[source], self._request[source]  # both are there from now on
        self.read(
            catalogue.MODEL,
            lambda: {
                (model.name, model.version, model.manifest.task, model.artifact.precision): 1.0
                for model in repository.models
            },
        )
        self.read(
            catalogue.UNPROVEN,
            lambda: {(model.name, model.version): float(not model.proven) for model in repository.models},
        )
        repository.subscribe(lambda: self._name(repository))
        self._name(repository)
        self.read(catalogue.VERSION, lambda: {model.name: float(model.manifest.version) for model in repository.models})

    def _name(self, repository: Repository) -> None:
        """Maps the present indices to versions; an old index may still have batches."""
        self._names |= {model.index: (model.name, model.version) for model in repository.models}

    def batches(self, model: ServedModel) -> int:
        """Number of batches of a model's version that engines were given so far."""
        return self._batches_of[model.name, model.version]

    def batch_statistics(self, model: ServedModel) -> list[BatchStatistics]:
        """The finished batches of a model's version, by size."""
        by_size = sorted(self._ended_of.get((model.name, model.version), {}).items())
        return [BatchStatistics(size, Duration(ended.count), ended, Duration(ended.count)) for size, ended in by_size]

    def follow_engine(self, current: Callable[[], EngineLife | None], repository: Repository) -> None:
        """Exports the running engine, the rejected ones, the number of GPUs, and the engine process."""

        def info() -> Values:
            engine = current()
            return {(engine.ready.engine, engine.ready.version or "none"): 1.0} if engine else {}

        def pid() -> str:
            engine = current()
            return str(engine.pid) if engine else "none"  # no such process: nothing is shown

        def gpus() -> Values:
            gpus, left_out = len(repository.engine.gpus), len(repository.engine.left_out)
            engine = current()
            working = engine.devices if engine and gpus else 0
            return {"working": float(working), "missing": float(gpus + left_out - working)}

        def rejected() -> Values:
            names = {choice.engine for choice in repository.engine.rejected}
            on_gpus = {name for name, kind in ENGINES.items() if kind.on_gpu}
            return {name: float(name in names) for name in sorted(on_gpus | names)}

        self.read(catalogue.ENGINE, info)
        self.read(catalogue.GPUS, gpus)
        self.read(catalogue.ENGINE_REJECTED, rejected)
        _ProcessMetrics(catalogue.ENGINE_PROCESS_NAMESPACE, pid, registry=self.registry)

    def _outcomes(self) -> Values:
        return {
            (reason, *source): count for source, counts in self._requests.items() for reason, count in counts.items()
        }

    def counts(self) -> Counts:
        errors = sum(self._requests.values(), Counter[str]())  # leaves out what is 0
        requests = (Histogram(_SECONDS), *self._request.values())
        return Counts(
            requests=errors.pop(_ANSWERED, 0),
            errors=errors,
            texts=self._texts,
            tokens=self._tokens,
            truncated=self._truncated,
            engine_restarts=self._restarts,
            stages={
                "tokenize": self._tokenize.counts(),
                "queue": self._queue.counts(),
                "compute": self._compute.counts(),
                "request": [sum(bucket) for bucket in zip(*(each.counts() for each in requests), strict=True)],
            },
        )

    def render(self) -> bytes:
        return generate_latest(self.registry)
