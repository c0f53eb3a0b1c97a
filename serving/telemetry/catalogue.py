"""Every metric of a running server: name, kind, labels and help text.

The metrics and `docs/reference/metrics.md` are made from these entries; a test compares them with a running server.
Names end in their unit: `_seconds`, `_bytes`, `_tokens`; counters end in `_total`. The values of every label are
bounded: by the error tree, the states, or the models of the repository.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Kind = Literal["counter", "gauge", "histogram"]


class Metric(NamedTuple):
    """A metric; a histogram's name is without `_bucket`, `_sum` and `_count`.

    `labels` describes the values of each label, where its name does not; a histogram's `le` is not listed.
    """

    name: str
    kind: Kind
    text: str
    labels: Mapping[str, str] = {}


_MODEL = {"model": "", "version": ""}
_FORM = {**_MODEL, "task": "", "precision": ""}
_REFUSED = {"reason": "`queue_full` and `predicted_late` (429), `hopeless` (504), `not_ready` (503)"}
_PROTOCOL = "`http`, `grpc`"

REQUESTS = Metric(
    "bertserve_requests_total",
    "counter",
    "Requests by outcome.",
    {
        "reason": "`ok`, or the reason of an error",
        "model": "its name, or empty if rejected before it was known",
        "protocol": _PROTOCOL,
    },
)
REQUEST_SECONDS = Metric(
    "bertserve_request_seconds",
    "histogram",
    "Latency of answered requests, from arrival to answer. This and the next three metrics exclude bulk work.",
    {"model": "", "protocol": _PROTOCOL},
)
TOKENIZE_SECONDS = Metric("bertserve_tokenize_seconds", "histogram", "Tokenization time per request.")
QUEUE_SECONDS = Metric(
    "bertserve_queue_seconds", "histogram", "Queue time per request: the longest wait of its texts for an engine."
)
COMPUTE_SECONDS = Metric(
    "bertserve_compute_seconds", "histogram", "Compute time per request: the longest of its batches."
)
TOKENS = Metric("bertserve_tokens_total", "counter", "Tokens computed, without padding.")
TRUNCATED = Metric("bertserve_truncated_tokens_total", "counter", "Tokens removed by truncation.")

CACHE_TEXTS = Metric(
    "bertserve_cache_texts_total",
    "counter",
    "Texts looked up in the response cache. Duplicates within a request count once.",
    {"result": "`hit`: served from the cache; `shared`: computed for another request; `miss`: computed"},
)

QUEUE_TEXTS = Metric(
    "bertserve_queue_texts",
    "gauge",
    "Texts queued for an engine. Excludes bulk work, as do the queue, predicted wait, admitted, rejections and deadline"
    " miss metrics below.",
)
PREDICTED_WAIT = Metric(
    "bertserve_predicted_wait_seconds",
    "gauge",
    "Predicted time to finish all work in the server, which is the wait of a new request. Use it for autoscaling."
    " Excludes engine restarts, because more replicas do not shorten them.",
)
ADMITTED_TOKENS = Metric(
    "bertserve_admitted_tokens",
    "gauge",
    "Tokens in flight: admitted and not yet answered. Also suitable for autoscaling.",
)
ADMITTED_LIMIT = Metric("bertserve_admitted_limit_tokens", "gauge", "Maximum tokens in flight.")
REFUSALS = Metric(
    "bertserve_refusals_total",
    "counter",
    "Requests rejected at admission.",
    _REFUSED,
)
DEADLINE_MISSES = Metric(
    "bertserve_deadline_misses_total",
    "counter",
    "Admitted requests that missed their deadline, by stage.",
    {"where": "`queue`, `engine`, `finish`"},
)

BULK_ADMITTED_TOKENS = Metric("bertserve_bulk_admitted_tokens", "gauge", "Tokens of bulk work in flight.")
BULK_ADMITTED_LIMIT = Metric("bertserve_bulk_admitted_limit_tokens", "gauge", "Maximum tokens of bulk work in flight.")
BULK_REFUSALS = Metric(
    "bertserve_bulk_refusals_total",
    "counter",
    "Bulk requests rejected at admission.",
    _REFUSED,
)
DEVICE_SECONDS = Metric(
    "bertserve_device_seconds_total",
    "counter",
    "Device time used by batches. A batch on a narrow lane counts in proportion to the lane's share of the device.",
    {"class": "`online`, `bulk`"},
)

BATCH_SIZE = Metric("bertserve_batch_size", "histogram", "Texts per batch.")
PADDING = Metric("bertserve_padding_tokens_total", "counter", "Padding tokens computed.")
PREDICTED_SECONDS = Metric("bertserve_batch_predicted_seconds_total", "counter", "Predicted time of all batches.")
ACTUAL_SECONDS = Metric("bertserve_batch_actual_seconds_total", "counter", "Actual time of all batches on their lanes.")

STATE = Metric(
    "bertserve_state",
    "gauge",
    "1 for the server's current state, 0 for the others.",
    {"state": "`starting`, `warming`, `ready`, `degraded`, `draining`, `stopped`, `failed`"},
)
ENGINE = Metric(
    "bertserve_engine_info",
    "gauge",
    "1 for the running engine. Absent while it starts.",
    {"engine": "its name", "version": "of its library"},
)
ENGINE_REJECTED = Metric(
    "bertserve_engine_rejected",
    "gauge",
    "1 if a faster engine is not used, else 0. `/status`, `/info` and the log give the reason.",
    {"engine": "its name"},
)
GPUS = Metric(
    "bertserve_gpus",
    "gauge",
    "GPUs assigned to the models, by state. Both are 0 on a CPU.",
    {"state": "`working`, or `missing` while its engine starts or was abandoned"},
)
ENGINE_RESTARTS = Metric(
    "bertserve_engine_restarts_total", "counter", "Exits of the engine process, including during loading and warm-up."
)
NON_FINITE = Metric(
    "bertserve_non_finite_outputs_total", "counter", "Answers withheld because they contained NaN or infinity."
)
MODEL = Metric("bertserve_model_info", "gauge", "1 for each model and its served artifact.", _FORM)
UNPROVEN = Metric(
    "bertserve_model_unproven",
    "gauge",
    "1 for a model whose artifact was not compared with PyTorch, else 0.",
    _MODEL,
)
VERSION = Metric("bertserve_model_version", "gauge", "Served version of a model.", {"model": ""})
SWAPS = Metric(
    "bertserve_swaps_total",
    "counter",
    "Hot swaps of model versions, by outcome.",
    {"outcome": "`switched`; `refused`: rejected permanently; `failed`: transient error, such as too little memory"},
)
RELOADS = Metric(
    "bertserve_last_reload_successful",
    "gauge",
    "1 if the last reload of these files succeeded, 0 if it failed and the previous content is still in use.",
    {"files": "`API keys`, `certificates`"},
)
CERTIFICATE = Metric(
    "bertserve_certificate_expiry_timestamp_seconds",
    "gauge",
    "Expiry of the certificate in use, in seconds since 1970. 0 without TLS.",
)
BUILD = Metric("bertserve_build_info", "gauge", "1 for the server's version.", {"version": "of bertserve"})
CONNECTIONS = Metric("bertserve_connections", "gauge", "Open client connections.", {"protocol": _PROTOCOL})
FRONTS = Metric("bertserve_fronts", "gauge", "Front processes that are up; 0 if one process does all.")
FRONT_RESTARTS = Metric("bertserve_front_restarts_total", "counter", "Front processes that ended and were replaced.")
FRONT_CPU = Metric("bertserve_front_cpu_seconds_total", "counter", "CPU time of all front processes.")
FRONT_MEMORY = Metric("bertserve_front_resident_memory_bytes", "gauge", "Resident memory of all front processes.")
BUFFERS = Metric(
    "bertserve_buffer_bytes",
    "gauge",
    "Memory used for request bodies (receiving, queued or decompressed) and unread replies.",
)
BUFFER_REFUSALS = Metric(
    "bertserve_buffer_refusals_total",
    "counter",
    "Requests rejected with 503 because the buffers were full (`--buffer-limit-mb`).",
)
_PORTS = "`clients`, `probes`"
CONNECTIONS_LIMIT = Metric(
    "bertserve_connections_limit",
    "gauge",
    "Maximum open connections.",
    {"ports": "`clients` (HTTP and gRPC together), `probes` (the metrics port)"},
)
CONNECTIONS_REFUSED = Metric(
    "bertserve_connections_refused_total",
    "counter",
    "New connections rejected.",
    {
        "ports": _PORTS,
        "reason": "`full`: the limit is reached and none is idle",
    },
)
CONNECTIONS_DISPLACED = Metric(
    "bertserve_connections_displaced_total",
    "counter",
    "Idle connections closed to make room for new ones.",
    {"ports": _PORTS},
)

LOG_LOST = Metric(
    "bertserve_log_lines_lost_total",
    "counter",
    "Log lines that could not be written: the reader stalls, the pipe is closed or the disk is full.",
)
SPANS_DROPPED = Metric(
    "bertserve_trace_spans_dropped_total",
    "counter",
    "Spans dropped.",
    {"reason": "`queue_full`, `export_failed`, `rejected` by the collector"},
)

SERVER: Sequence[Metric] = (
    *(REQUESTS, REQUEST_SECONDS, TOKENIZE_SECONDS, QUEUE_SECONDS, COMPUTE_SECONDS, TOKENS, TRUNCATED, CACHE_TEXTS),
    *(QUEUE_TEXTS, PREDICTED_WAIT, ADMITTED_TOKENS, ADMITTED_LIMIT),
    *(BULK_ADMITTED_TOKENS, BULK_ADMITTED_LIMIT, BULK_REFUSALS, DEVICE_SECONDS),
    *(REFUSALS, DEADLINE_MISSES, BATCH_SIZE, PADDING, PREDICTED_SECONDS, ACTUAL_SECONDS),
    *(STATE, ENGINE, ENGINE_REJECTED, GPUS, ENGINE_RESTARTS, NON_FINITE),
    *(MODEL, UNPROVEN, VERSION, SWAPS, RELOADS, CERTIFICATE, BUILD, BUFFERS, BUFFER_REFUSALS),
    *(FRONTS, FRONT_RESTARTS, FRONT_CPU, FRONT_MEMORY),
    *(CONNECTIONS, CONNECTIONS_LIMIT, CONNECTIONS_REFUSED, CONNECTIONS_DISPLACED),
    *(LOG_LOST, SPANS_DROPPED),
)
"""Metrics of the server itself."""

ENGINE_PROCESS_NAMESPACE = "bertserve_engine"
_OF_ENGINE = f"{ENGINE_PROCESS_NAMESPACE}_process"

PROCESS: Sequence[Metric] = (
    Metric("process_cpu_seconds_total", "counter", "CPU time of the server process."),
    Metric("process_resident_memory_bytes", "gauge", "Resident memory of the server process."),
    Metric("process_open_fds", "gauge", "Open file descriptors of the server process."),
    Metric("process_max_fds", "gauge", "File descriptors that the server process may open."),
    Metric(f"{_OF_ENGINE}_cpu_seconds_total", "counter", "CPU time of the engine process."),
    Metric(f"{_OF_ENGINE}_resident_memory_bytes", "gauge", "Resident memory of the engine process."),
)
"""Process metrics of Prometheus's client library; its other ones are left out."""
