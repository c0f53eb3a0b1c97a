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

    `labels` describes the values of each label; a histogram's `le` is not listed.
    """

    name: str
    kind: Kind
    text: str
    labels: Mapping[str, str] = {}


_SERVED = "a model of the repository"
_MODEL = {"model": _SERVED, "version": "its version"}
_FORM = {**_MODEL, "task": "what it does", "precision": "the artifact's"}
_REFUSED = {"reason": "`queue_full` and `predicted_late` (429), `hopeless` (504), `not_ready` (503)"}
_PROTOCOL = "`http`, `grpc`"

REQUESTS = Metric(
    "bertserve_requests_total",
    "counter",
    "Requests by outcome.",
    {
        "reason": "`ok`, or the reason of an error",
        "model": f"{_SERVED}; empty if rejected before it was known",
        "protocol": f"{_PROTOCOL}, or `batch` for each part of an answered `/v1/batches` line",
    },
)
REQUEST_SECONDS = Metric(
    "bertserve_request_seconds",
    "histogram",
    "Time from a request's arrival to its answer, of those answered. This and the next three leave out bulk work.",
    {"model": _SERVED, "protocol": _PROTOCOL},
)
TOKENIZE_SECONDS = Metric("bertserve_tokenize_seconds", "histogram", "Time to tokenise a request.")
QUEUE_SECONDS = Metric(
    "bertserve_queue_seconds", "histogram", "Longest time that a text of a request waited for an engine."
)
COMPUTE_SECONDS = Metric(
    "bertserve_compute_seconds", "histogram", "Longest time that an engine spent on a batch of a request."
)
TEXTS = Metric("bertserve_texts_total", "counter", "Texts answered.")
TOKENS = Metric("bertserve_tokens_total", "counter", "Tokens computed, padding not counted.")
TEXT_TOKENS = Metric("bertserve_text_tokens", "histogram", "Tokens of a text that an engine was given.")
TRUNCATED = Metric("bertserve_truncated_tokens_total", "counter", "Tokens cut off texts that were too long.")

CACHE_TEXTS = Metric(
    "bertserve_cache_texts_total",
    "counter",
    "Texts of requests beside a cache of answers; equal ones of a request count once.",
    {"result": "`hit`: answered before; `shared`: computed for another request; `miss`: computed"},
)
CACHE_BYTES = Metric("bertserve_cache_bytes", "gauge", "What the cache of answers holds.")

JOBS = Metric(
    "bertserve_batches",
    "gauge",
    "Batches of `/v1/batches` that are kept.",
    {
        "state": "`validating`, `in_progress`, `cancelling`, `completed`, `failed` (the input file is not valid),"
        " `expired`, `cancelled`"
    },
)
JOB_LINES = Metric(
    "bertserve_batch_lines_total",
    "counter",
    "Lines of batches that were settled.",
    {"outcome": "`completed`, or `failed`: an error, or not computed in time"},
)
JOB_FILES = Metric("bertserve_batch_files", "gauge", "Files of `/v1/files` that are kept.")
JOB_BYTES = Metric("bertserve_batch_files_bytes", "gauge", "What they have, and what unfinished batches have written.")

QUEUE_TEXTS = Metric(
    "bertserve_queue_texts",
    "gauge",
    "Texts that wait for an engine. Bulk work counts apart: not here, nor in what is named queue, predicted wait,"
    " admitted, refusals and deadline misses below.",
)
QUEUE_TOKENS = Metric("bertserve_queue_tokens", "gauge", "Tokens of the texts that wait.")
QUEUE_WORK = Metric("bertserve_queue_work_seconds", "gauge", "Predicted time to compute what waits.")
PREDICTED_WAIT = Metric(
    "bertserve_predicted_wait_seconds",
    "gauge",
    "Predicted time to answer all that is here now: the work that a new request finds before it. Scale by this. The"
    " restart of an engine is not counted: more replicas do not shorten it.",
)
UTILIZATION = Metric(
    "bertserve_utilization_ratio",
    "gauge",
    "The predicted wait in proportion to itself and the cost of a text of 64 tokens: 0 while idle, never above 1.",
)
REQUESTS_NOW = Metric("bertserve_requests_in_flight", "gauge", "Requests that wait or are being computed.")
ADMITTED_TOKENS = Metric(
    "bertserve_admitted_tokens", "gauge", "Tokens in flight: admitted, and not answered yet. Scale by this too."
)
ADMITTED_LIMIT = Metric("bertserve_admitted_limit_tokens", "gauge", "Tokens that may be in flight at once.")
REFUSALS = Metric(
    "bertserve_refusals_total",
    "counter",
    "Requests refused at admission.",
    _REFUSED,
)
DEADLINE_MISSES = Metric(
    "bertserve_deadline_misses_total",
    "counter",
    "Requests admitted and not answered in time, by where their deadline met them.",
    {"where": "`queue`, `engine`"},
)

BULK_REQUEST_SECONDS = Metric(
    "bertserve_bulk_request_seconds",
    "histogram",
    "Time from a bulk request's arrival to its answer, of those answered.",
)
BULK_QUEUE_TEXTS = Metric("bertserve_bulk_queue_texts", "gauge", "Texts of bulk work that wait for an engine.")
BULK_QUEUE_TOKENS = Metric("bertserve_bulk_queue_tokens", "gauge", "Tokens of the bulk work that waits.")
BULK_QUEUE_WORK = Metric(
    "bertserve_bulk_queue_work_seconds",
    "gauge",
    "Predicted time to compute the bulk work that waits, on all of the device.",
)
BULK_ADMITTED_TOKENS = Metric("bertserve_bulk_admitted_tokens", "gauge", "Tokens of bulk work in flight.")
BULK_ADMITTED_LIMIT = Metric(
    "bertserve_bulk_admitted_limit_tokens", "gauge", "Tokens of bulk work that may be in flight at once."
)
BULK_REFUSALS = Metric(
    "bertserve_bulk_refusals_total",
    "counter",
    "Bulk requests refused at admission.",
    _REFUSED,
)
BULK_DEADLINE_MISSES = Metric(
    "bertserve_bulk_deadline_misses_total", "counter", "Bulk requests admitted and not answered before their deadline."
)
DEVICE_SECONDS = Metric(
    "bertserve_device_seconds_total",
    "counter",
    "Time of the whole device that batches have taken; a narrow lane counts as its part of it.",
    {"class": "`online`, `bulk`"},
)

BATCH_SIZE = Metric("bertserve_batch_size", "histogram", "Texts in a batch.")
PADDING = Metric("bertserve_padding_tokens_total", "counter", "Tokens of padding that were computed.")
COST_RATIO = Metric(
    "bertserve_batch_cost_ratio", "histogram", "Time for which a batch held its lane, over the time predicted."
)
PREDICTED_SECONDS = Metric("bertserve_batch_predicted_seconds_total", "counter", "Predicted time of all batches.")
ACTUAL_SECONDS = Metric("bertserve_batch_actual_seconds_total", "counter", "Time for which all batches held lanes.")

STATE = Metric(
    "bertserve_state",
    "gauge",
    "1 for the state that the server is in, 0 for the others.",
    {"state": "`starting`, `warming`, `ready`, `degraded`, `draining`, `stopped`, `failed`"},
)
ENGINE = Metric(
    "bertserve_engine_info",
    "gauge",
    "1 for the engine that runs; none while it is being started.",
    {"engine": "its name", "version": "of its library"},
)
ENGINE_REJECTED = Metric(
    "bertserve_engine_rejected",
    "gauge",
    "1 for an engine that would be faster and was not taken, else 0; `/status`, `/info` and the log say why.",
    {"engine": "its name"},
)
GPUS = Metric(
    "bertserve_gpus",
    "gauge",
    "GPUs that the models are meant to run on; both are 0 on a CPU.",
    {"state": "`working`, or `missing` while its engine is being started or was given up"},
)
ENGINE_RESTARTS = Metric(
    "bertserve_engine_restarts_total", "counter", "Deaths of the engine process, also while it loads or warms up."
)
NON_FINITE = Metric(
    "bertserve_non_finite_outputs_total", "counter", "Texts whose answer was NaN or infinite, and so was not sent."
)
MODEL = Metric("bertserve_model_info", "gauge", "1 for each model and the form of it that is served.", _FORM)
UNPROVEN = Metric(
    "bertserve_model_unproven",
    "gauge",
    "1 for a model whose artifact was not compared with PyTorch, else 0.",
    _MODEL,
)
VERSION = Metric(
    "bertserve_model_version", "gauge", "The version of a model that is served.", {"model": "a model of the repository"}
)
SWAPS = Metric(
    "bertserve_swaps_total",
    "counter",
    "Versions of models that were to take the place of others while serving.",
    {
        "outcome": "`switched`; `refused` for good; `failed` for a reason that passes, such as too little memory; or"
        " `rolled_back` because the engine of the new one ended"
    },
)
RELOADS = Metric(
    "bertserve_last_reload_successful",
    "gauge",
    "0 while files that changed cannot be used and what they held before stays in use, else 1.",
    {"files": "`API keys`, `certificates`"},
)
CERTIFICATE = Metric(
    "bertserve_certificate_expiry_timestamp_seconds",
    "gauge",
    "When the certificate in use ends, in seconds since 1970; 0 without TLS.",
)
BUILD = Metric("bertserve_build_info", "gauge", "1 for the version of this server.", {"version": "of bertserve"})
CONNECTIONS = Metric("bertserve_connections", "gauge", "Open connections of clients.", {"protocol": _PROTOCOL})
BUFFERS = Metric(
    "bertserve_buffer_bytes",
    "gauge",
    "Bytes that connections hold of bodies on their way or waiting, inflated bodies and unread replies.",
)
BUFFER_REFUSALS = Metric(
    "bertserve_buffer_refusals_total", "counter", "How often a connection got no room for more such bytes (503)."
)
_PORTS = "`clients` (HTTP and gRPC together), `probes` (the metrics port)"
CONNECTIONS_LIMIT = Metric(
    "bertserve_connections_limit", "gauge", "Connections that may be open at once.", {"ports": _PORTS}
)
CONNECTIONS_REFUSED = Metric(
    "bertserve_connections_refused_total",
    "counter",
    "New connections that were refused because there was no place for them.",
    {"ports": _PORTS, "reason": "`full`: all are taken and none is idle; `peer`: all that one address may have"},
)
CONNECTIONS_DISPLACED = Metric(
    "bertserve_connections_displaced_total",
    "counter",
    "Idle connections that were closed because a new one needed their place.",
    {"ports": _PORTS},
)

LOG_LOST = Metric(
    "bertserve_log_lines_lost_total",
    "counter",
    "Lines of the log that could not be written: their reader stalls, the pipe is closed or the disk is full.",
)
LOG_HIDDEN = Metric(
    "bertserve_log_lines_hidden_total", "counter", "Lines left out because many of their kind came before them."
)
SPANS_EXPORTED = Metric("bertserve_trace_spans_exported_total", "counter", "Spans that the collector has taken.")
SPANS_DROPPED = Metric(
    "bertserve_trace_spans_dropped_total",
    "counter",
    "Spans that were made and not taken.",
    {"reason": "`queue_full`, `export_failed`, `rejected` by the collector"},
)

SERVER: Sequence[Metric] = (
    *(REQUESTS, REQUEST_SECONDS, TOKENIZE_SECONDS, QUEUE_SECONDS, COMPUTE_SECONDS, TEXTS, TOKENS, TRUNCATED),
    *(TEXT_TOKENS, CACHE_TEXTS, CACHE_BYTES),
    *(JOBS, JOB_LINES, JOB_FILES, JOB_BYTES),
    *(QUEUE_TEXTS, QUEUE_TOKENS, QUEUE_WORK, PREDICTED_WAIT),
    *(UTILIZATION, REQUESTS_NOW, ADMITTED_TOKENS, ADMITTED_LIMIT),
    *(BULK_REQUEST_SECONDS, BULK_QUEUE_TEXTS, BULK_QUEUE_TOKENS, BULK_QUEUE_WORK, BULK_ADMITTED_TOKENS),
    *(BULK_ADMITTED_LIMIT, BULK_REFUSALS, BULK_DEADLINE_MISSES, DEVICE_SECONDS),
    *(REFUSALS, DEADLINE_MISSES, BATCH_SIZE, PADDING, COST_RATIO, PREDICTED_SECONDS, ACTUAL_SECONDS),
    *(STATE, ENGINE, ENGINE_REJECTED, GPUS, ENGINE_RESTARTS, NON_FINITE),
    *(MODEL, UNPROVEN, VERSION, SWAPS, RELOADS, CERTIFICATE, BUILD, BUFFERS, BUFFER_REFUSALS),
    *(CONNECTIONS, CONNECTIONS_LIMIT, CONNECTIONS_REFUSED, CONNECTIONS_DISPLACED),
    *(LOG_LOST, LOG_HIDDEN, SPANS_EXPORTED, SPANS_DROPPED),
)
"""Metrics of the server itself."""

TRITON_SUCCESS = Metric("nv_inference_request_success", "counter", "Requests answered.", _MODEL)
TRITON_FAILURE = Metric("nv_inference_request_failure", "counter", "Requests of v2 that got an error.", _MODEL)
TRITON_COUNT = Metric("nv_inference_count", "counter", "Texts answered.", _MODEL)
TRITON_EXECUTIONS = Metric("nv_inference_exec_count", "counter", "Batches.", _MODEL)
TRITON_REQUEST = Metric(
    "nv_inference_request_duration_us", "counter", "Sum of the times from arrival to answer.", _MODEL
)
TRITON_QUEUE = Metric("nv_inference_queue_duration_us", "counter", "Sum of the times in the queue.", _MODEL)
TRITON_INPUT = Metric("nv_inference_compute_input_duration_us", "counter", "Sum of the times to tokenise.", _MODEL)
TRITON_INFER = Metric("nv_inference_compute_infer_duration_us", "counter", "Sum of the times in an engine.", _MODEL)
TRITON_OUTPUT = Metric(
    "nv_inference_compute_output_duration_us", "counter", "Sum of the times between engine and answer.", _MODEL
)
TRITON_PENDING = Metric(
    "nv_inference_pending_request_count", "gauge", "Requests of which no text has reached an engine yet.", _MODEL
)

TRITON: Sequence[Metric] = (
    *(TRITON_SUCCESS, TRITON_FAILURE, TRITON_COUNT, TRITON_EXECUTIONS, TRITON_REQUEST, TRITON_QUEUE),
    *(TRITON_INPUT, TRITON_INFER, TRITON_OUTPUT, TRITON_PENDING),
)
"""Triton's names, for existing dashboards; the numbers are those of v2's statistics."""


def _process(prefix: str, whose: str) -> Sequence[Metric]:
    return (
        Metric(f"{prefix}_cpu_seconds_total", "counter", f"CPU time of {whose}."),
        Metric(f"{prefix}_resident_memory_bytes", "gauge", f"Resident memory of {whose}."),
        Metric(f"{prefix}_virtual_memory_bytes", "gauge", f"Virtual memory of {whose}."),
        Metric(f"{prefix}_open_fds", "gauge", f"Open file descriptors of {whose}."),
        Metric(f"{prefix}_max_fds", "gauge", f"File descriptors that {whose} may open."),
        Metric(f"{prefix}_start_time_seconds", "gauge", f"When {whose} was started, in seconds since 1970."),
    )


ENGINE_PROCESS_NAMESPACE = "bertserve_engine"

PROCESS: Sequence[Metric] = (
    *_process("process", "the server process"),
    *_process(f"{ENGINE_PROCESS_NAMESPACE}_process", "the engine process, while there is one"),
)
"""Process metrics of Prometheus's client library."""

_GPU = {"gpu_uuid": "the GPU"}

GPU_UTILIZATION = Metric("nv_gpu_utilization", "gauge", "Share of time in which a kernel ran, 0 to 1.", _GPU)
GPU_MEMORY_TOTAL = Metric("nv_gpu_memory_total_bytes", "gauge", "Memory of the GPU.", _GPU)
GPU_MEMORY_USED = Metric("nv_gpu_memory_used_bytes", "gauge", "Memory in use.", _GPU)
GPU_POWER = Metric("nv_gpu_power_usage", "gauge", "Power that the GPU draws, in watts.", _GPU)
GPU_POWER_LIMIT = Metric(
    "nv_gpu_power_limit", "gauge", "Power that it may draw, in watts; a T4 slows down at its 70 W.", _GPU
)
GPU_ENERGY = Metric("nv_energy_consumption", "counter", "Energy used since the driver was loaded, in joules.", _GPU)
GPU_TEMPERATURE = Metric("bertserve_gpu_temperature_celsius", "gauge", "Temperature of the GPU.", _GPU)
GPU_CLOCK = Metric("bertserve_gpu_clock_hertz", "gauge", "Clocks of the GPU.", {**_GPU, "clock": "`sm`, `memory`"})
GPU_THROTTLED = Metric(
    "bertserve_gpu_throttled",
    "gauge",
    "1 for each reason for which the GPU is slower now than it could be; a T4 under load is at its `power_cap`.",
    {
        **_GPU,
        "reason": "`power_cap`, `hardware`, `software_thermal`, `hardware_thermal`, `power_brake`",
    },
)

GPU: Sequence[Metric] = (
    *(GPU_UTILIZATION, GPU_MEMORY_TOTAL, GPU_MEMORY_USED, GPU_POWER, GPU_POWER_LIMIT, GPU_ENERGY),
    *(GPU_TEMPERATURE, GPU_CLOCK, GPU_THROTTLED),
)
"""GPU metrics under Triton's names where there are such; absent on a CPU."""
