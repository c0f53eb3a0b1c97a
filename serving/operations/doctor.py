"""`bertserve doctor`: what this machine can run, and whether `bertserve serve` would start with the same settings.

Nothing is loaded. Problems that would stop `serve` are found by its own checks.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.metadata
import json
import os
import platform
import re
import resource
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from bertserve.serving import host
from bertserve.serving.engine.kinds import AUTO, ENGINES
from bertserve.serving.errors import StartupError
from bertserve.serving.host import available_cpus, command, cpu_quota, installing, memory_limit
from bertserve.serving.http.apis.openai_ids import OpenAiIds
from bertserve.serving.inference.served_models import Repository
from bertserve.serving.net.ports import PURPOSES, open_port
from bertserve.serving.rollout.engine_load import within_limit
from bertserve.serving.rollout.model_export import home_of
from bertserve.serving.settings import Settings, flag_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from bertserve.serving.engine.kinds.kind import EngineKind
    from bertserve.serving.inference.served_models import ServedModel

State = Literal["ok", "note", "bad"]

_HELP = """usage: bertserve doctor [--json] [options of `bertserve serve`]

Check what this machine can run, and whether `bertserve serve` would start with the same options, environment and
configuration file. Nothing is loaded or changed.

options:
  -h, --help  Show this help and exit.
  --json      Print the findings as JSON.

Marks: `*` could be better, `!` would stop `serve`. Exit codes: 0 `serve` would start, 1 it would not, 2 an option is
wrong."""

_MARKS = {"ok": " ", "note": "*", "bad": "!"}
_NAME_WIDTH = 16
_WIDTH = 98
_MARGIN = " " * (_NAME_WIDTH + 4)

_PROC = Path("/proc")
_LIBRARIES = (Path("/usr/lib"), Path("/usr/lib64"), Path("/usr/local/cuda/lib64"), Path("/usr/local/lib"))
_GPU_LIBRARIES = ("libcuda.so.1", "libcudart.so.1*", "libnvinfer.so.1*", "libtensorrt_rtx.so*")
_GPU_PACKAGES = ("onnxruntime-gpu", "tensorrt", "tensorrt-cu12", "tensorrt-cu13", "tensorrt-rtx-cu13")
_PACKAGES = (
    "numpy",
    "tokenizers",
    "httptools",
    "uvloop",
    "msgspec",
    "orjson",
    "protobuf",
    "hpack",
    "prometheus-client",
)
_EXPORT_PACKAGES = ("huggingface-hub", "onnx", "onnxruntime", "torch", "transformers")
_INT8 = ("avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm")
_FEW_DESCRIPTORS = 4096
_EVERY_ADDRESS = {"::", "0.0.0.0"}  # noqa: S104  nothing is opened
_NEIGHBOUR_S, _MAX_BYTES = 1.0, 4096
_MIB = 1 << 20


class Finding(NamedTuple):
    """One line of the report. `bad` would stop `serve`; a `note` could be better."""

    topic: str
    name: str
    value: str
    state: State = "ok"
    advice: str = ""


def _finding(topic: str, name: str, value: str, advice: str, *, bad: bool = False) -> Finding:
    """A finding with advice is a `note`, or `bad`."""
    state: State = "ok" if not advice else "bad" if bad else "note"
    return Finding(topic, name, value, state, advice)


def main(argv: list[str]) -> int:
    """Prints the report; returns 0, 1 if something would stop `serve`, 2 for invalid options."""
    if {"-h", "--help"} & set(argv):
        print(_HELP)  # noqa: T201  a command talks to people
        return 0
    try:
        settings = Settings.load([word for word in argv if word != "--json"])
    except StartupError as error:
        print(f"bertserve doctor: {error}", file=sys.stderr)  # noqa: T201  a command talks to people
        return error.exit_code
    findings = [*machine(settings), *gpus(), *engines(settings), *serving_with(settings)]
    ok = all(finding.state != "bad" for finding in findings)
    report = {"ok": ok, "findings": [finding._asdict() for finding in findings]}
    print(json.dumps(report, indent=1) if "--json" in argv else text(findings))  # noqa: T201  a command talks to people
    return int(not ok)


def text(findings: Sequence[Finding]) -> str:
    lines: list[str] = []
    topic = ""
    for finding in findings:
        if finding.topic != topic:
            topic = finding.topic
            lines.append(topic)
        first, *rest = textwrap.wrap(finding.value, _WIDTH) or [""]
        lines.append(f" {_MARKS[finding.state]} {finding.name:<{_NAME_WIDTH}} {first}".rstrip())
        lines += [f"{_MARGIN}{more}" for more in [*rest, *([f"-> {finding.advice}"] if finding.advice else [])]]
    wrong = sum(finding.state == "bad" for finding in findings)
    problems = f"{wrong} problem{'s' if wrong > 1 else ''}, marked with !"
    lines.append(f"`bertserve serve` would not start: {problems}" if wrong else "`bertserve serve` would start")
    return "\n".join(lines)


def machine(settings: Settings, proc: Path = _PROC) -> Iterator[Finding]:
    topic = "Machine"
    instructions = host.instructions(proc / "cpuinfo")
    yield Finding(topic, "processor", host.processor(proc / "cpuinfo"))
    advice = "INT8 gains little without VNNI, AMX or dot products; compare it with --precision fp32"
    fast_int8 = any(name in instructions for name in _INT8)
    value = ", ".join(instructions) or "no INT8 extensions"
    yield _finding(topic, "instructions", value, "" if fast_int8 else advice)
    yield _cores(topic, settings)
    yield _memory(topic, proc)
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)  # to which `serve` raises the soft one
    if limit == resource.RLIM_INFINITY:
        yield Finding(topic, "descriptors", "no limit")
    elif limit < _FEW_DESCRIPTORS:
        yield Finding(topic, "descriptors", f"{limit} files", "note", "raise `ulimit -Hn`: each connection needs one")
    else:
        yield Finding(topic, "descriptors", f"{limit:,} files")
    yield Finding(topic, "system", f"{platform.system()} {platform.release()}, Python {platform.python_version()}")


def _cores(topic: str, settings: Settings) -> Finding:
    usable, quota = available_cpus(), cpu_quota()
    value, advice = f"{usable} usable of {os.cpu_count()}", ""
    if quota is not None:
        value += f", quota {quota:g}"
        advice = "the fractional core of the quota is not used" if quota != int(quota) else ""
    if settings.threads is not None and settings.threads > usable:
        advice = f"--threads {settings.threads} exceeds the usable cores"
    return _finding(topic, "cores", value, advice)


def _memory(topic: str, proc: Path) -> Finding:
    lines = re.findall(r"^(\w+):\s+(\d+) kB$", _text(proc / "meminfo"), re.MULTILINE)
    mib = {name: int(kib) >> 10 for name, kib in lines}
    limit = memory_limit()
    value = f"{mib.get('MemAvailable', 0):,} MiB free of {mib.get('MemTotal', 0):,}"
    return Finding(topic, "memory", value + (f", container limit {limit // _MIB:,} MiB" if limit else ""))


def gpus(proc: Path = _PROC, libraries: Sequence[Path] = _LIBRARIES) -> Iterator[Finding]:
    topic = "GPU"
    gpus = [_after("Model", file) for file in sorted((proc / "driver/nvidia/gpus").glob("*/information"))]
    driver = re.search(r"Module(?: for \S+)?\s+([0-9.]+)", _text(proc / "driver/nvidia/version"))
    if not gpus:
        why = "NVIDIA driver without a GPU" if driver else "no NVIDIA driver"
        yield Finding(topic, "GPUs", f"none ({why})")
        return
    yield Finding(topic, "GPUs", ", ".join(gpu or "unnamed" for gpu in gpus))
    yield Finding(topic, "driver", driver[1] if driver else "unknown")
    files = sorted({file.name for folder in libraries for name in _GPU_LIBRARIES for file in folder.rglob(name)})
    value = ", ".join([*_versions(_GPU_PACKAGES), *files])
    advice = "" if value else f"{installing('gpu')} in place of [cpu]"
    yield _finding(topic, "libraries", value or "none", advice)


def engines(settings: Settings) -> Iterator[Finding]:
    topic = "Software"
    running = _engine(settings)
    asked = running.parts or (running.name,)
    for kind in reversed(ENGINES.values()):
        if kind.packages and not kind.on_gpu:
            needed = kind.name in asked
            use = f", which --engine {settings.engine} uses" if needed else ""
            yield _library(topic, f"engine {kind.name}", kind.packages, kind.extra, use, needed=needed)
    traced = bool(settings.otlp_endpoint)
    yield _library(topic, "traces", ("opentelemetry-sdk",), "tracing", needed=traced)
    yield _library(topic, "bertserve batch", ("ray",), "batch", needed=False)
    yield _library(topic, "bertserve load", ("hdrhistogram",), "loadtest", needed=False)
    yield Finding(topic, "libraries", ", ".join(_versions(_PACKAGES)))


def _library(topic: str, name: str, packages: Sequence[str], extra: str, use: str = "", *, needed: bool) -> Finding:
    if versions := _versions(packages):
        return Finding(topic, name, versions[0] + use)
    return _finding(topic, name, "not installed", installing(extra), bad=needed)


def _engine(settings: Settings) -> EngineKind:
    """`--engine`, or the last choice of `auto` without a GPU, for models that have a form for it."""
    if settings.engine != "auto":
        return ENGINES[settings.engine]
    *better, last = (kind for kind in AUTO if not kind.on_gpu)
    targets = [target for kind in ENGINES.values() for target in kind.made_for]
    return next((kind for kind in better if not kind.obstacle(targets, asked=False)), last)


def serving_with(settings: Settings) -> Iterator[Finding]:
    """What the start would open or read, in the order of `OPENED`."""
    for look in dict.fromkeys(OPENED.values()):
        yield from look("Serving", settings)


def _ports(topic: str, settings: Settings) -> Iterator[Finding]:
    neighbour = ""
    with contextlib.ExitStack() as all_at_once:  # two settings may name one port
        for name, purpose in PURPOSES.items():
            port = getattr(settings, name)
            try:
                all_at_once.enter_context(open_port(settings, name))
            except StartupError as error:
                neighbour = neighbour or _neighbour(settings)
                advice = f"use another port with {flag_of(name)}, or 0 for a free one"
                yield Finding(topic, f"port {port}", f"{error}{neighbour}", "bad", advice)
            else:
                yield Finding(topic, f"port {port}", f"free for {purpose} on {settings.host}")


def _neighbour(settings: Settings) -> str:
    """Whether a bertserve answers at one of the ports, as the end of a sentence."""
    host = "localhost" if settings.host in _EVERY_ADDRESS else settings.host
    for port in (settings.metrics_port, settings.http_port):
        connection = http.client.HTTPConnection(host, port, timeout=_NEIGHBOUR_S)
        with (
            contextlib.closing(connection),
            contextlib.suppress(OSError, http.client.HTTPException, ValueError, TypeError),
        ):
            connection.request("GET", "/livez")
            reply = connection.getresponse()
            if reply.headers["x-request-id"] and "state" in json.loads(reply.read(_MAX_BYTES)):
                return f"; another bertserve is running at http://{host}:{port}"
    return ""


def _credentials(topic: str, settings: Settings) -> Iterator[Finding]:
    """Finding about files that were checked with the settings."""
    if settings.api_keys_file is not None:
        yield Finding(topic, "API keys", f"{settings.api_keys_file} is valid")
    if settings.tls_cert_file is not None:
        value = f"{settings.tls_cert_file}, key {settings.tls_key_file}"
        clients = settings.tls_client_ca_file
        yield Finding(topic, "TLS", value if clients is None else f"{value}, client CA {clients}")


def _token_ids(topic: str, settings: Settings) -> Iterator[Finding]:
    try:
        if OpenAiIds.open(settings.accept_token_ids):
            yield Finding(topic, "token IDs", settings.accept_token_ids)
    except StartupError as error:
        yield Finding(topic, "token IDs", str(error), "bad", f"see --accept-token-ids in `{command('serve --help')}`")


def _at_home(settings: Settings) -> Settings:
    """The settings with the paths of the export of `model_id`, if there is one."""
    return settings.model_copy(update=home_of(settings)._asdict()) if settings.model_id else settings


def _export(topic: str, settings: Settings) -> Iterator[Finding]:
    if not settings.model_id:
        return
    missing = [name for name in _EXPORT_PACKAGES if not _versions([name])]
    value = f"{settings.model_id}: `serve` exports it unless {home_of(settings).models} has it"
    if missing:
        yield Finding(topic, "export", f"{missing[0]} is missing", "bad", installing("cpu,export"))
    else:
        yield Finding(topic, "export", value)


def _repository(topic: str, settings: Settings) -> Iterator[Finding]:
    settings = _at_home(settings)
    if settings.model_id and not settings.models.is_dir():
        return
    try:
        models = Repository.open(
            settings.models,
            settings.precision,
            engine=_engine(settings).name,
            allow_unproven=settings.allow_unproven,
            cache=settings.cache_dir,
            defaults=settings.defaults(),
        ).models
    except StartupError as error:
        yield Finding(topic, "models", " ".join(str(error).split()), "bad", f"see `{command('export --help')}`")
    else:
        yield from _models(topic, models, settings)


def _models(topic: str, models: Sequence[ServedModel], settings: Settings) -> Iterator[Finding]:
    for model in models:
        artifact, total_bytes = model.artifact, sum(each.total_bytes for each in model.artifacts)
        size, proven = f"{total_bytes / _MIB:.0f} MiB", "proven" if model.proven else "not proven"
        value = f"{model.name} version {model.version}: {model.manifest.task}, {artifact.precision}, {size}, {proven}"
        advice = f"prove it on this node with `{command(f'verify {model.bundle.path} --cache-dir DIR')}`"
        yield _finding(topic, "model", value, "" if model.proven else advice)
    _, _, problem = within_limit([model.spec() for model in models], settings.threads or available_cpus())
    if problem and not _engine(settings).on_gpu:
        value, _, advice = problem.partition("; ")
        yield Finding(topic, "memory", value, "note", advice)


def _cache(topic: str, settings: Settings) -> Iterator[Finding]:
    root = _at_home(settings).cache_dir
    if root is None:
        advice = "set --cache-dir DIR to keep measured costs and proofs, for faster starts"
        yield Finding(topic, "cache", "none", "note", advice)
        return
    there = next(folder for folder in (root, *root.absolute().parents) if folder.is_dir())  # the server makes the rest
    try:
        with tempfile.TemporaryFile(dir=there):
            yield Finding(topic, "cache", f"{root} is writable")
    except OSError as error:
        advice = "the export needs it" if settings.model_id else "nothing will be cached"
        yield _finding(topic, "cache", f"{root}: {error.strerror}", advice, bad=bool(settings.model_id))


OPENED: Mapping[str, Callable[[str, Settings], Iterator[Finding]]] = {
    "model_id": _export,
    "models": _repository,
    "cache_dir": _cache,
    "accept_token_ids": _token_ids,
    **dict.fromkeys(("api_keys_file", "tls_cert_file", "tls_key_file", "tls_client_ca_file"), _credentials),
    **dict.fromkeys(PURPOSES, _ports),
}
"""Settings that name what `serve` opens or reads, with their checks."""


def _versions(packages: Sequence[str]) -> list[str]:
    installed = []
    for name in packages:
        try:
            installed.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _after(name: str, file: Path) -> str:
    match = re.search(rf"^{name}:\s*(.+)$", _text(file), re.MULTILINE)
    return match[1].strip() if match else ""
