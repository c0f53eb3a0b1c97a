"""One frozen settings object: defaults, then a TOML file, then `BERTSERVE_*`, then the command line.

Nothing else reads the environment. All problems are listed at once, before any port opens.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from serving.engine.kinds import AUTO, ENGINES, SETTINGS
from serving.errors import Limit, StartupError
from serving.options import nearest
from serving.security.keys import read_keys
from serving.security.tls import check_certificate, check_pair
from serving.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from serving.engine.kinds.kind import EngineSetting

    TaskName = str
else:
    TaskName = Literal[(*TASKS, "regression")]

_BUFFER_BYTES = 64 << 20
"""Sixteen bodies of the largest size at once; what an attack makes resident is about twice that."""
_BODIES_IN_BUFFERS = 4
"""Half of the buffers is one connection's, and one request may hold a body twice: compressed and inflated."""

ENVIRONMENT_PREFIX = "BERTSERVE_"

_ORIGIN = r"https?://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?"
_HOST = r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])"
_DEFAULT = "[a-z_]+=[^=,]+"
_SYNTAX = {
    "cors_origins": (
        rf"\*|{_ORIGIN}(,{_ORIGIN})*",
        "must be `*` or look like https://app.example,http://localhost:3000",
    ),
    "allowed_hosts": (
        rf"\*|{_HOST}(,{_HOST})*",
        "must be `*` or names without ports, such as search.example,10.0.0.7,[fd00::7]",
    ),
    **{name: (each.pattern, f"must look like {each.example}") for name, each in SETTINGS.items() if each.pattern},
    "default": (f"{_DEFAULT}(,{_DEFAULT})*", "must look like embed=minilm,tag=ner"),
    "accept_token_ids": (r"cl100k_base=.+", "must look like cl100k_base=PATH or cl100k_base"),
    "otlp_endpoint": (
        r"https?://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\])(:[0-9]{1,5})?(/[!-~]*)?",
        "must look like http://host:4318",
    ),
}
"""Of settings with a syntax of their own: the pattern, and the message where a value does not match."""

_CL100K = "cl100k_base"
_CL100K_CACHED = "9b5ad71b2ce5302211f9c61530b329a4922fc6a4"
"""What tiktoken calls its copy of the file: the SHA-1 of the address that it comes from."""

_METAVARS = {"boolean": "true|false", "integer": "N", "number": "NUMBER", "path": "PATH"}
"""What stands for a value in `--help`, by its format or type in JSON Schema."""

_FOR_TESTS = "fake_"
"""How the names of settings begin that are accepted, and that neither `--help` nor the page of settings shows."""

_OF_THE_MODEL = ("revision", "token", "task")

# A Kubernetes Service named `bertserve` puts BERTSERVE_PORT=tcp://..., BERTSERVE_SERVICE_HOST=... and the
# like into every container of its namespace; they are addresses, not settings.
_SERVICE_LINK = re.compile(r"(.*_)?(SERVICE_(HOST|PORT)(_.*)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_.*)?)?)")


_HELPS = filter(None, (kind.help for kind in ENGINES.values()))
_AUTO = f"{', '.join(kind.title for kind in AUTO[:-1])} and {AUTO[-1].title}"

if TYPE_CHECKING:  # no type checker follows what is found in a folder
    EngineName = str
else:
    EngineName = Literal["auto", *ENGINES]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), defer_build=True)

    models: Path = Field(Path("models"), description="Model repository: `<models>/<model>/<version>/`.")
    model_id: str = Field(
        "",
        description="In place of `models`: a checkpoint folder or an id of the Hugging Face hub, which the start "
        "exports into `cache_dir` where that does not hold it yet (needs `bertserve[export]`).",
    )
    revision: str = Field("", description="The hub's branch, tag or commit of `model_id`; empty: its main branch.")
    token: str = Field(
        "",
        repr=False,
        description="Of an account of the hub, for models that it does not give to all; empty: `HF_TOKEN`, or that of"
        " the hub's own login.",
    )
    task: TaskName | None = Field(None, description="What to export `model_id` for; unset: what its files say.")
    host: str = Field(
        "127.0.0.1",
        description="Address to listen on. `::` opens the server to the network, over IPv6 and IPv4 (where there is no "
        "IPv6, over IPv4); 0.0.0.0 over IPv4 alone.",
    )
    http_port: int = Field(8000, ge=0, le=65535, description="Port of HTTP; 0 picks a free one.")
    grpc_port: int = Field(8001, ge=0, le=65535, description="Port of gRPC; 0 picks a free one.")
    metrics_port: int = Field(8002, ge=0, le=65535, description="Port of probes and metrics; 0 picks a free one.")
    agent_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="Port of HAProxy's agent checks, which learn this replica's weight from its predicted wait; unset:"
        " none.",
    )
    load_reports: Literal["asked", "always"] = Field(
        "asked",
        description="Which replies carry a load report for balancers (ORCA): those to requests with the header"
        " `endpoint-load-metrics-format`, or all.",
    )

    api_keys_file: Path | None = Field(
        None,
        description="File of API keys, one a line. Every route and call then needs a key, except the start page "
        "and the probes. Read again when it changes.",
    )
    tls_cert_file: Path | None = Field(
        None,
        description="PEM file of the server's certificate chain; HTTP and gRPC then speak TLS alone. This and "
        "the next two are read again when they change.",
    )
    tls_key_file: Path | None = Field(
        None, validate_default=True, description="PEM file of the certificate's key, not encrypted."
    )
    tls_client_ca_file: Path | None = Field(
        None, description="PEM file of authorities: clients must show a certificate of one of them (mutual TLS)."
    )

    cors_origins: str = Field(
        "",
        description="Origins whose pages may call the HTTP port from a browser, such as "
        "`https://app.example:8443,http://localhost:3000`, or `*` for all; empty: none.",
    )

    allowed_hosts: str = Field(
        "",
        description="Names and addresses that requests to the HTTP port may have in `Host`, such as"
        " `search.example,10.0.0.7`, beside `localhost` and loopback addresses; others are refused with 421, except"
        " probes. `*`: all. Empty: all, but on a loopback address without `api_keys_file` only names without a dot,"
        " against pages that rebind their name (see security.md).",
    )

    engine: EngineName = Field(
        "auto",
        description=f"What runs the models. `auto` takes the first that can of {_AUTO}, and says why not the others; a "
        f"named engine runs or the server does not start. {' '.join(_HELPS)}",
    )
    cpu_fallback: bool = Field(
        False,
        description="After `engine_crash_limit` deaths of an engine on a GPU, serve on the CPU in state "
        "`degraded` instead of ending.",
    )
    build_engine: bool = Field(
        False,
        description="If there is a GPU and a bundle exported with `--tensorrt graph` has no TensorRT engine for "
        "it: serve with what runs, build an engine at idle priority, prove it, keep it in "
        "`cache_dir` and switch to it.",
    )
    precision: Literal["auto", "fp32", "fp16", "int8"] = Field(
        "auto",
        description="Which artifact of a bundle is served; `auto` prefers int8 on a CPU and fp16 on a GPU, "
        "and fp32 where INT8 of a model for questions gives too few of PyTorch's answers.",
    )
    allow_unproven: bool = Field(
        False,
        description="Serve an artifact that was not compared with PyTorch where a bundle has no other, in state "
        "`degraded`.",
    )
    cache_dir: Path | None = Field(
        None,
        validate_default=True,
        description="Directory of what belongs to this node: proofs of `bertserve verify`, engines of `bertserve "
        "build`, measured costs, and exports of `model_id`, which without it go to `~/.cache/bertserve`.",
    )
    threads: int | None = Field(
        None, ge=1, le=256, description="Cores the engine uses; unset: what affinity and the container's quota allow."
    )
    engine_nice: int = Field(
        10,
        ge=0,
        le=19,
        description="By how much the lanes on which an engine on a CPU carries load are nicer than the rest of the "
        "server (see `nice`): they then leave time to read requests and to refuse what is too much. The lane of lone "
        "texts is not nicer, unless it is the only one.",
    )

    max_batch_tokens: int = Field(
        1024, ge=16, le=1 << 20, description="Padded tokens in a batch; bounds how long one batch holds the engine."
    )
    max_queue_tokens: int = Field(
        524_288,
        ge=16,
        le=1 << 30,
        description="Tokens in flight; beyond it requests are refused with 429, as "
        "are those whose answer would come after their deadline.",
    )
    max_bulk_tokens: int = Field(
        524_288,
        ge=16,
        le=1 << 30,
        description="Tokens of bulk work (priority 4) in flight, bounded apart; beyond them it is refused with 429.",
    )
    bulk_share: float = Field(
        0.05,
        ge=0,
        le=0.9,
        description="Share of the device's time that bulk work has at least while it waits; what other requests leave "
        "comes on top.",
    )
    bulk_slice_ms: float = Field(
        8.0,
        gt=0,
        le=60_000,
        description="How long a batch of bulk work may take while other requests come, which wait for it; a single "
        "text always runs.",
    )
    min_batch_gain: float = Field(
        0.05, ge=0, le=0.9, description="A batch is doubled as long as that makes each text cheaper by this share."
    )
    fairness: float = Field(
        6.0,
        ge=0,
        le=1000,
        description="Later texts may overtake a text for at most so many times its own cost; 0: first come, "
        "first served.",
    )
    scheduling: Literal["deadline", "fifo"] = Field(
        "deadline",
        description="`fifo`: first come, first served with `max_batch_tokens` alone and without predictions; for "
        "comparisons.",
    )
    max_queue_delay_ms: float = Field(
        0.0,
        ge=0,
        le=60_000,
        description="How long a batch that could still grow waits for more texts, where deadlines allow it; 0: "
        "it starts whenever a lane is free, which is best for latency.",
    )
    max_client_batch_size: int = Field(
        32, ge=1, le=65_536, validate_default=True, description="Inputs of one request on the text routes."
    )
    max_openai_batch_size: int = Field(
        2048,
        ge=1,
        le=65_536,
        validate_default=True,
        description="Inputs of one request on `/v1`, in Cohere's and in Jina's shape.",
    )
    accept_bare_ids: bool = Field(
        False,
        description="Let `/v1/embeddings` take token ids without the model's special tokens, which are added. They "
        "must be the model's own.",
    )
    accept_token_ids: str = Field(
        "",
        description="Take the token ids that OpenAI's clients may send to `/v1/embeddings` and read them back to text: "
        "`cl100k_base=PATH`, the file of that encoding as tiktoken keeps it, or `cl100k_base`, where "
        "`TIKTOKEN_CACHE_DIR` holds it. Nothing is downloaded.",
    )
    max_v2_batch_size: int = Field(
        128, ge=1, le=65_536, validate_default=True, description="Inputs of one request on `/v2` and gRPC."
    )
    default: str = Field(
        "",
        description="For tasks of several models, the one that answers a request without a model name: "
        "`TASK=NAME,...`.",
    )
    model_control: bool = Field(
        False,
        description="Let requests on `/v2` and gRPC load versions of the repository's models and take models out of "
        "service and back.",
    )
    watch_models_s: float = Field(
        0.0,
        ge=0,
        le=86_400,
        description="Look for newer versions of the models this often and swap to them while serving; 0: the "
        "versions of the start are served until a request loads others.",
    )
    keep_version_s: float = Field(
        300.0,
        ge=0,
        le=86_400,
        description="How long the version before stays in memory after a swap, for the way back: on request, or "
        "by itself when the engine of the new one ends. It needs memory beside the new one.",
    )
    unknown_fields: Literal["ignore", "refuse"] = Field(
        "ignore",
        description="What becomes of a request with a field that is not read and that no owner of a protocol"
        " documents: `ignore` answers it and names the field in `X-Ignored-Fields`; `refuse` rejects it"
        " (HTTP 400 or 422), and documented fields that are not read.",
    )
    auto_truncate: bool = Field(
        True, description="Cut texts that are too long and say so in the reply; off: refuse them."
    )

    response_cache_mb: int = Field(
        0,
        ge=0,
        le=1_048_576,
        description="MiB of answers to keep, by token ids and the model's version, until another version or engine"
        " takes over. Requests for what is being computed wait for it. 0: every text is computed.",
    )
    default_timeout_ms: int = Field(
        2000,
        ge=1,
        le=3_600_000,
        description="Deadline of a request that brings none, unless it costs more; bulk work then has none.",
    )
    max_timeout_ms: int = Field(
        60_000, ge=1, le=3_600_000, description="Longest deadline a request may have that is not bulk work."
    )

    batch_dir: Path | None = Field(
        None,
        description="Folder for the files and jobs of `/v1/files` and `/v1/batches`, of one server alone; unset: both "
        "are off.",
    )
    batch_file_mb: int = Field(200, ge=1, le=65_536, description="MiB of a file that is uploaded to `/v1/files`.")
    batch_max_lines: int = Field(50_000, ge=1, le=10_000_000, description="Lines of a batch's input file.")
    batch_disk_mb: int = Field(
        10_240,
        ge=1,
        le=1 << 30,
        description="MiB of all files together, results included. Beyond it uploads are refused, and batches wait "
        "until files are deleted or expire.",
    )
    batch_max_files: int = Field(1000, ge=1, le=100_000, description="Files that are kept, results included.")
    batch_max_jobs: int = Field(
        1000,
        ge=1,
        le=100_000,
        description="Batches that are kept; for a new one the key's own that ended first is forgotten, or any, and "
        "where none has ended it is refused with 429.",
    )
    batch_keep_days: float = Field(
        30.0,
        gt=0,
        le=3650,
        description="How long files are kept at most, and batches after their end.",
    )

    body_limit_bytes: int = Field(
        4 << 20, ge=1024, le=1 << 30, validate_default=True, description="Bytes of a request's body or message."
    )
    buffer_limit_mb: int | None = Field(
        None,
        ge=1,
        le=1 << 20,
        description="MiB that all connections together may hold of bodies on their way or waiting, inflated bodies and "
        "unread replies, one connection half of them; what goes beyond is refused with 503. Unset: 64, or four times "
        "`body_limit_bytes` where that is more.",
    )
    header_limit_bytes: int = Field(16_384, ge=1024, le=1 << 20, description="Bytes of a request's line and headers.")
    header_limit_count: int = Field(100, ge=8, le=10_000, description="Headers of a request.")
    header_timeout_s: float = Field(5.0, gt=0, le=3600, description="Time in which a request's headers must arrive.")
    body_timeout_s: float = Field(10.0, gt=0, le=3600, description="Time in which its body must arrive.")
    keep_alive_s: float = Field(75.0, gt=0, le=3600, description="How long an idle HTTP connection stays open.")
    max_connections: int | None = Field(
        None,
        ge=1,
        le=60_000,
        description="Open connections of HTTP and gRPC together. When all are taken, the one that has been idle the "
        "longest is closed for a new one; where none is idle, the new one is refused. Unset: what the limit of open "
        "files leaves, 10,000 at most.",
    )
    max_connections_per_peer: int = Field(
        0,
        ge=0,
        le=60_000,
        description="The same from one address (of IPv6, one /64 network); 0: no bound, because behind a proxy all "
        "clients have one address.",
    )
    max_connection_age_s: float = Field(
        300.0,
        ge=0,
        le=86_400,
        description="After so long, a tenth more or less, a client is asked to open a new connection (GOAWAY, or "
        "`Connection: close`), so that newer replicas get their share; 0: never.",
    )

    lame_duck_s: float = Field(
        5.0, ge=0, le=600, description="After SIGTERM: not ready but still serving, until load balancers have noticed."
    )
    drain_s: float = Field(
        10.0,
        ge=0,
        le=600,
        description="Then: how long requests under way may take to finish, and gRPC clients to hear of the end.",
    )
    engine_crash_limit: int = Field(
        3,
        ge=1,
        le=100_000,
        description="Deaths of the engine within `engine_crash_window_s` after which it is not started again. On a CPU"
        " with `engine` `auto`, `ort-cpu` takes the place of `cpu`, in state `degraded`; a GPU needs"
        " `cpu_fallback`. Where no engine is left, the server ends.",
    )
    engine_crash_window_s: float = Field(60.0, gt=0, le=86_400, description="See `engine_crash_limit`.")
    engine_start_s: float = Field(
        600.0,
        ge=1,
        le=86_400,
        description="In which an engine must be ready. One that is started again has ten times what the start before "
        "took, if that is less, and 60 s at least. An engine that is not ready by then is killed and given up.",
    )
    engine_hang_s: float = Field(
        2.0,
        ge=1,
        le=3600,
        description="A batch without an answer after so long, and after ten times its predicted cost, is taken for "
        "a hang: the engine is killed and started again.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="What the log shows.")
    log_format: Literal["text", "json"] = Field(
        "text",
        description="`json`: each line of the log is one object, and the announcement on standard output is left out.",
    )
    access_log: bool = Field(False, description="A line for each request that is answered, refused ones included.")
    otlp_endpoint: str = Field(
        "",
        description="Send traces to this OpenTelemetry collector, `http://host:4318` (OTLP over HTTP, `/v1/traces`); "
        "empty: no traces.",
    )
    trace_sample: float = Field(
        0.01,
        ge=0,
        le=1,
        description="Share of requests that are traced, of those whose `traceparent` does not decide it.",
    )

    @field_validator("max_client_batch_size", "max_openai_batch_size", "max_v2_batch_size", "body_limit_bytes")
    @classmethod
    def _names_itself(cls, value: int, info: ValidationInfo) -> int:
        return Limit(value, flag_of(info.field_name or ""))

    @field_validator("api_keys_file", "tls_cert_file")
    @classmethod
    def _usable(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is not None:
            check = read_keys if info.field_name == "api_keys_file" else check_certificate
            check(value)
        return value

    @field_validator("tls_key_file")
    @classmethod
    def _key_of_the_certificate(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if "tls_cert_file" not in info.data:
            return value  # the certificate is wrong: that is said already
        certificate = info.data["tls_cert_file"]
        if (value is None) != (certificate is None):
            raise ValueError("--tls-cert-file and --tls-key-file need one another")
        if value is not None:
            check_pair(certificate, value)
        return value

    @field_validator("tls_client_ca_file")
    @classmethod
    def _usable_authorities(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is not None:
            if info.data.get("tls_cert_file", value) is None:
                raise ValueError("needs --tls-cert-file and --tls-key-file")
            check_certificate(value)
        return value

    @field_validator(*_SYNTAX, check_fields=False)
    @classmethod
    def _well_formed(cls, value: str, info: ValidationInfo) -> str:
        pattern, message = _SYNTAX[info.field_name or ""]
        if value and not re.fullmatch(pattern, value):
            raise ValueError(message)
        return value

    @field_validator("accept_token_ids")
    @classmethod
    def _of_one_tokenizer(cls, value: str, info: ValidationInfo) -> str:
        if value and info.data.get("accept_bare_ids"):
            raise ValueError("ids are of one tokenizer: leave out --accept-bare-ids")
        return value

    @field_validator("cache_dir")
    @classmethod
    def _cache_for_builds(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if info.data.get("build_engine") and (value is None or info.data.get("engine") != "auto"):
            raise ValueError("--build-engine needs it, and --engine auto")
        return value

    @field_validator("buffer_limit_mb")
    @classmethod
    def _room_for_bodies(cls, value: int | None, info: ValidationInfo) -> int | None:
        least = -(-_BODIES_IN_BUFFERS * info.data.get("body_limit_bytes", 0) >> 20)
        if value is not None and value < least:
            raise ValueError(f"must be at least {least}, {_BODIES_IN_BUFFERS} times --body-limit-bytes")
        return value

    @property
    def buffer_limit_bytes(self) -> int:
        """`buffer_limit_mb` in bytes."""
        if self.buffer_limit_mb is not None:
            return self.buffer_limit_mb << 20
        return max(_BUFFER_BYTES, _BODIES_IN_BUFFERS * self.body_limit_bytes)

    def defaults(self) -> dict[str, str]:
        """`default` as task to model."""
        return dict(word.split("=") for word in self.default.split(",") if word)

    @property
    def allowed_origins(self) -> frozenset[str]:
        """`cors_origins` one by one; `*` stands for all."""
        return frozenset(self.cors_origins.split(",") if self.cors_origins else ())

    @property
    def host_names(self) -> frozenset[str]:
        """`allowed_hosts` one by one, in lower case; `*` stands for all."""
        return frozenset(self.allowed_hosts.lower().split(",") if self.allowed_hosts else ())

    def of_engine(self, name: str) -> dict[str, float | str]:
        """The settings of an engine's own."""
        return {setting: getattr(self, setting) for setting in ENGINES[name].settings}

    @classmethod
    def load(cls, argv: list[str], environment: Mapping[str, str] = os.environ) -> Settings:
        """Settings from the command line, the environment and the file that `--config` names.

        Raises:
            StartupError: With every problem, and exit code 2.
        """
        flags, problems = _parse_flags(argv)
        problems += _unknown_environment(environment)
        config = flags.pop("config", None) or _environment(environment).get("config")
        values = {} if config is None else _read_file(Path(config), problems)
        values |= {name: value for name, value in _environment(environment).items() if name in cls.model_fields}
        values |= flags
        problems += _model_problems(values, environment)
        problems += _token_id_problems(values, environment)
        try:
            settings = cls.model_validate(values)
        except pydantic.ValidationError as invalid:
            problems += [_explain(error) for error in invalid.errors()]
        if problems:
            raise StartupError("; ".join(problems), exit_code=2, as_json=values.get("log_format") == "json")
        return settings


def _field(setting: EngineSetting) -> tuple[type, Any]:
    least, most = (0, setting.most) if setting.most else (None, None)
    return type(setting.default), Field(setting.default, ge=least, le=most, description=setting.help)


if TYPE_CHECKING:
    Settings = _Settings
else:
    fields = {name: _field(setting) for name, setting in SETTINGS.items()}
    Settings = pydantic.create_model("Settings", __base__=_Settings, __doc__=_Settings.__doc__, **fields)


def _model_problems(values: dict[str, Any], environment: Mapping[str, str]) -> list[str]:
    """What goes against `model_id`; gives it a cache where it goes well."""
    if not values.get("model_id"):
        return [f"{flag_of(name)}: is of --model-id, which is not given" for name in _OF_THE_MODEL if values.get(name)]
    problems = []
    if values.get("models"):
        problems.append(
            "--models and --model-id: give one of them, a repository of exported models or a model to export"
        )
    kind = ENGINES.get(str(values.get("engine")))
    if kind and not kind.exports("auto"):
        problems.append(
            f"--engine {kind.name}: needs an engine that --model-id does not build; give --build-engine instead"
        )
    if not values.get("cache_dir"):
        home = environment.get("HOME", "")
        caches = environment.get("XDG_CACHE_HOME") or (f"{home}/.cache" if home else "")
        if not caches:
            problems.append("--model-id: there is no home directory to export to; give --cache-dir DIR")
        values["cache_dir"] = f"{caches}/bertserve"
    return problems


def _token_id_problems(values: dict[str, Any], environment: Mapping[str, str]) -> list[str]:
    """What goes against `accept_token_ids`; where it names an encoding alone, gives it tiktoken's file."""
    if values.get("accept_token_ids") != _CL100K:
        return []
    folder = environment.get("TIKTOKEN_CACHE_DIR")
    values["accept_token_ids"] = f"{_CL100K}={folder}/{_CL100K_CACHED}"
    if not folder:
        return [f"--accept-token-ids {_CL100K}: set TIKTOKEN_CACHE_DIR, or give {_CL100K}=PATH"]
    return []


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


@functools.cache  # the schema takes most of a parse
def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bertserve serve",
        description="Serve the models of a repository, or one that is exported first, over HTTP and gRPC.",
        epilog=f"Every option can also be set as {ENVIRONMENT_PREFIX}<NAME> or in a TOML file given by --config.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="TOML file with settings.")
    for name, schema in Settings.model_json_schema()["properties"].items():
        shown = {"help": argparse.SUPPRESS} if name.startswith(_FOR_TESTS) else _shown(schema)
        parser.add_argument(flag_of(name), dest=name, default=argparse.SUPPRESS, **shown)
    parser.exit_on_error = False
    return parser


def _shown(schema: dict[str, Any]) -> dict[str, Any]:
    """What `--help` shows of a setting beside its name; a switch needs no word."""
    kind, default = kind_of(schema), schema.get("default")
    if isinstance(default, bool):
        default = str(default).lower()
    notes = [
        *([bounds] if (bounds := bounds_of(kind)) else []),
        *([] if default in (None, "") else [f"default: {default}"]),
    ]
    text = f"{schema['description']} ({'; '.join(notes)})" if notes else schema["description"]
    shown = {"help": text.replace("%", "%%"), "metavar": _METAVARS.get(kind.get("format") or kind["type"], "VALUE")}
    if "enum" in kind:
        shown["metavar"] = f"{{{','.join(kind['enum'])}}}"
    return shown | ({"nargs": "?", "const": "true"} if kind["type"] == "boolean" else {})


def documented() -> dict[str, dict[str, Any]]:
    """The schema of each setting that users are told of."""
    properties = Settings.model_json_schema()["properties"]
    return {name: schema for name, schema in properties.items() if not name.startswith(_FOR_TESTS)}


def kind_of(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a setting's value where it is set."""
    (kind,) = (part for part in schema.get("anyOf", [schema]) if part.get("type") != "null")
    return dict(kind)


def bounds_of(kind: dict[str, Any]) -> str:
    """The least and the largest number that a setting takes; empty where it is no number."""
    if "maximum" not in kind:
        return ""
    least = f"{kind['minimum']:,}" if "minimum" in kind else f"above {kind['exclusiveMinimum']:,}"
    return f"{least} to {kind['maximum']:,}"


def _parse_flags(argv: list[str]) -> tuple[dict[str, Any], list[str]]:
    try:
        arguments, unknown = _parser().parse_known_args(argv)
    except argparse.ArgumentError as error:
        return {}, [str(error)]
    names = [flag_of(name) for name in ["config", *Settings.model_fields]]
    flags = [word.split("=")[0] for word in unknown if word.startswith("-")]
    return vars(arguments), [_unknown(word, names) for word in flags or unknown]


def _unknown(name: str, names: list[str]) -> str:
    return f"unknown setting {name}{nearest(name, names)}"


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        key.removeprefix(ENVIRONMENT_PREFIX).lower(): value
        for key, value in environment.items()
        if key.startswith(ENVIRONMENT_PREFIX) and value and not _is_service_link(key, value)
    }


def _is_service_link(key: str, value: str) -> bool:
    name = key.removeprefix(ENVIRONMENT_PREFIX)
    if name.lower() in Settings.model_fields:
        return value.startswith(("tcp://", "udp://", "sctp://"))
    return _SERVICE_LINK.fullmatch(name) is not None


def _unknown_environment(environment: Mapping[str, str]) -> list[str]:
    names = [ENVIRONMENT_PREFIX + name.upper() for name in Settings.model_fields]
    unknown = _environment(environment).keys() - Settings.model_fields.keys() - {"config"}
    return [_unknown(ENVIRONMENT_PREFIX + name.upper(), names) for name in sorted(unknown)]


def _read_file(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        problems.append(f"--config {path}: {error.strerror}")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problems.append(f"--config {path}: {error}")
    else:
        unknown = values.keys() - Settings.model_fields.keys()
        problems += [f"{path}: {_unknown(name, list(Settings.model_fields))}" for name in sorted(unknown)]
        return {name: value for name, value in values.items() if name not in unknown}
    return {}


_MUST_BE = {"bool_parsing": "true or false", "int_parsing": "a whole number", "float_parsing": "a number"}


def _explain(error: Any) -> str:  # noqa: ANN401  pydantic's ErrorDetails
    name = str(error["loc"][0]) if error["loc"] else "settings"
    if error["type"] in _MUST_BE:
        return f"{flag_of(name)}: must be {_MUST_BE[error['type']]}"
    message = error["msg"].removeprefix("Value error, ")
    return f"{flag_of(name)}: {message if message != error['msg'] else message[0].lower() + message[1:]}"
