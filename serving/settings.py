"""The frozen settings object. Later sources override earlier ones: defaults, TOML file, `BERTSERVE_*`, command line.

Only this module reads the environment. All problems are reported at once, before any port opens.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args, get_origin

import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from bertserve.serving.engine.kinds import AUTO, ENGINES, SETTINGS
from bertserve.serving.errors import Limit, StartupError
from bertserve.serving.options import left, unknown
from bertserve.serving.security.keys import read_keys
from bertserve.serving.security.origins import Origins, check_origins
from bertserve.serving.security.tls import check_certificate, check_pair
from bertserve.serving.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pydantic.fields import FieldInfo

    from bertserve.serving.engine.kinds.kind import EngineSetting

    EngineName = str  # type checkers cannot follow the discovery of engines
    TaskName = str
else:
    EngineName = Literal["auto", *ENGINES]
    TaskName = Literal[(*TASKS, "regression")]

ENVIRONMENT_PREFIX = "BERTSERVE_"

_BUFFER_BYTES = 64 << 20
"""Sixteen bodies of the largest default size at once. An attack can make about twice that resident."""
_BODIES_IN_BUFFERS = 4
"""Minimum buffer budget, in bodies of the largest size. One connection gets half of it, and a request may hold its body
twice: compressed and decompressed."""

_CL100K = "cl100k_base"
_CL100K_CACHED = "9b5ad71b2ce5302211f9c61530b329a4922fc6a4"
"""tiktoken's name of its cached file: the SHA-1 of the file's URL."""

_COMMON = (
    *("models", "model_id", "host", "http_port", "grpc_port", "metrics_port", "engine", "precision", "threads"),
    *("cache_dir", "default_timeout_ms", "api_keys_file", "log_format"),
)
"""The settings that `--help` shows."""

_METAVARS = {bool: "true|false", int: "N", float: "NUMBER", Path: "PATH"}

_HOST = r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])"
_DEFAULT = "[a-z_]+=[^=,]+"

# Kubernetes adds BERTSERVE_PORT=tcp://..., BERTSERVE_SERVICE_HOST=... and similar variables for a Service named
# `bertserve` to every container of its namespace. These are addresses, not settings.
_SERVICE_LINK = re.compile(r"(.*_)?(SERVICE_(HOST|PORT)(_.*)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_.*)?)?)")


def _like(pattern: str, message: str) -> AfterValidator:
    """Rejects a non-empty value that does not match the pattern."""

    def check(value: str) -> str:
        if value and not re.fullmatch(pattern, value):
            raise ValueError(message)
        return value

    return AfterValidator(check)


def _number_of(value: object) -> object:
    """The number 0 for `auto`."""
    return 0 if value == "auto" else value


def _read_by(read: Callable[[Path], object]) -> AfterValidator:
    """Rejects a file that `read` cannot read."""

    def check(path: Path | None) -> Path | None:
        if path is not None:
            read(path)
        return path

    return AfterValidator(check)


class _Group(BaseModel):
    """A group of settings. The string below each one is its help."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), defer_build=True, use_attribute_docstrings=True
    )


class Model(_Group):
    """Models to serve, and their versions and artifacts."""

    models: Path = Path("models")
    """Model repository: a directory with `<model>/<version>/` below it."""
    model_id: str = ""
    """Checkpoint folder or Hugging Face model ID to serve in place of `--models`. The first start exports it into
    `--cache-dir`. Needs `bertserve[export]`."""
    revision: str = ""
    """Branch, tag or commit of `--model-id` on the Hugging Face hub. Empty: the main branch."""
    token: str = Field("", repr=False)
    """Hugging Face access token, for private and gated models. Prefer the environment variable `HF_TOKEN`. Empty:
    `HF_TOKEN`, or the token of `hf auth login`."""
    task: TaskName | None = None
    """Task to export `--model-id` for. Unset: what the checkpoint's files say."""
    precision: Literal["auto", "fp32", "fp16", "int8"] = "auto"
    """Precision of the artifact to serve. `auto` prefers INT8 on a CPU and FP16 on a GPU. It serves FP32 if the INT8
    artifact of a question-answering model gives too few of PyTorch's answers."""
    allow_unproven: bool = False
    """Serve an artifact that was never compared with PyTorch, if the model has no other. The server's state is then
    `degraded`."""
    default: Annotated[str, _like(f"{_DEFAULT}(,{_DEFAULT})*", "must look like embed=minilm,tag=ner")] = ""
    """Default models of tasks that several models serve, as `TASK=NAME,...`. They answer requests that name no
    model."""
    model_control: bool = False
    """Allow requests on `/v2` and gRPC to load and unload the repository's models and versions."""


class Ports(_Group):
    """Addresses and ports."""

    host: str = "127.0.0.1"
    """Address to listen on. `::` listens on all interfaces, over IPv6 and IPv4 (IPv4 alone if the host has no IPv6).
    `0.0.0.0` listens on all interfaces over IPv4."""
    http_port: int = Field(8000, ge=0, le=65_535)
    """Port for HTTP. 0: any free port."""
    grpc_port: int = Field(8001, ge=0, le=65_535)
    """Port for gRPC. 0: any free port."""
    metrics_port: int = Field(8002, ge=0, le=65_535)
    """Port for probes and metrics. 0: any free port."""


class _Engine(_Group):
    """Engines, CPU cores and recovery from engine failures."""

    engine: EngineName = Field(
        "auto",
        description=(
            f"Engine that runs the models. `auto` takes the first of these that can run, and logs why not the others: "
            f"{', '.join(kind.title for kind in AUTO)}. If a named engine cannot run, the server does not start. "
            f"{' '.join(filter(None, (kind.help for kind in ENGINES.values())))}"
        ),
    )
    threads: int | None = Field(None, ge=1, le=256)
    """CPU cores for the engine. Unset: all that CPU affinity and the container's quota allow."""
    cache_dir: Path | None = None
    """Directory for this node's data: proofs, TensorRT engines, measured batch costs and exports of `--model-id`.
    Unset: nothing is kept, except exports in `~/.cache/bertserve`."""
    cpu_fallback: bool = False
    """Fall back to the CPU if a GPU engine crashes three times within a minute. The server's state is then `degraded`.
    Off: the server exits."""
    engine_start_s: float = Field(600.0, ge=1, le=86_400)
    """Maximum engine start-up time, in seconds. A slower engine is killed and given up. A restart may take ten times
    the previous start-up time, but at least 60 s and at most this value."""
    engine_hang_s: float = Field(2.0, ge=1, le=3600)
    """Minimum time before a batch without a result counts as hung, in seconds. The batch must also exceed ten times its
    predicted cost. A hung engine is killed and restarted."""


def _field(setting: EngineSetting) -> tuple[Any, Any]:
    kind: Any = type(setting.default)
    if setting.pattern:
        kind = Annotated[kind, _like(setting.pattern, f"must look like {setting.example}")]
    least, most = (0, setting.most) if setting.most else (None, None)
    return kind, Field(setting.default, ge=least, le=most, description=setting.help)


if TYPE_CHECKING:
    Engine = _Engine
else:
    _fields = {name: _field(setting) for name, setting in SETTINGS.items()}
    Engine = pydantic.create_model("Engine", __base__=_Engine, __doc__=_Engine.__doc__, **_fields)


class Scheduling(_Group):
    """Order of requests, batches and deadlines."""

    max_batch_tokens: int = Field(1024, ge=16, le=1 << 20)
    """Maximum padded tokens per batch. Bounds how long one batch holds the engine: lower it for latency, raise it for
    throughput."""
    default_timeout_ms: int = Field(2000, ge=1, le=3_600_000)
    """Deadline of requests that set none, in milliseconds. An expensive request gets three times its predicted cost if
    that is more; bulk work gets none."""
    max_timeout_ms: int = Field(60_000, ge=1, le=3_600_000)
    """Maximum deadline of a request, in milliseconds. Bulk work is exempt."""


class Requests(_Group):
    """Inputs and replies."""

    auto_truncate: bool = True
    """Truncate inputs that are too long, and say so in the reply. Off: reject them."""
    accept_token_ids: Annotated[str, _like(f"{_CL100K}=.+", f"must look like {_CL100K}=PATH or {_CL100K}")] = ""
    """Accept token IDs of OpenAI's tokenizer on `/v1/embeddings`, and decode them to text. `cl100k_base=PATH`: the
    encoding file as tiktoken stores it. `cl100k_base`: the copy in `TIKTOKEN_CACHE_DIR`. Nothing is downloaded."""
    response_cache_mb: int = Field(0, ge=0, le=1_048_576)
    """Size of the response cache, in MiB. Its keys are token IDs and model version. Requests for the same text share
    one computation. A swap of version or engine clears it. 0: no cache."""


class Limits(_Group):
    """Limits on what the server accepts."""

    max_queue_tokens: int = Field(524_288, ge=16, le=1 << 30)
    """Maximum tokens in flight. Further requests are rejected with 429, as are requests that would miss their
    deadline."""
    max_client_batch_size: int = Field(2048, ge=1, le=65_536, validate_default=True)
    """Maximum inputs per request."""
    body_limit_bytes: int = Field(4 << 20, ge=1024, le=1 << 30, validate_default=True)
    """Maximum size of a request body or gRPC message, in bytes."""
    buffer_limit_mb: int | None = Field(None, ge=1, le=1 << 20)
    """Maximum memory for request bodies and unread replies of all connections, in MiB. One connection may use half of
    it. Further requests are rejected with 503. Unset: 64, or four times `--body-limit-bytes` if that is more."""

    @field_validator("max_client_batch_size", "body_limit_bytes")
    @classmethod
    def _names_itself(cls, value: int, info: ValidationInfo) -> int:
        return Limit(value, flag_of(info.field_name or ""))

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


class Connections(_Group):
    """Timeouts and limits of HTTP and gRPC connections."""

    keep_alive_s: float = Field(75.0, gt=0, le=3600)
    """Idle timeout of HTTP connections, in seconds."""
    max_connections: int | None = Field(None, ge=1, le=60_000)
    """Maximum open connections, HTTP and gRPC together. At the limit, a new connection replaces the one that has been
    idle longest; if none is idle, it is rejected. Unset: what the limit of open files allows, up to 10,000."""
    max_connection_age_s: float = Field(300.0, ge=0, le=86_400)
    """Maximum age of a connection, in seconds, with 10% jitter. The client is then asked to reconnect (GOAWAY or
    `Connection: close`), so that new replicas get their share. 0: no limit."""


class Processes(_Group):
    """Processes of the server."""

    front_processes: Annotated[int, BeforeValidator(_number_of)] = Field(1, ge=0, le=64)
    """Number of front processes. They own connections, tokenize texts and write answers for the process that schedules.
    1: one process does all. `auto` (or 0): as many as the CPUs allow and the engine can use."""


class Security(_Group):
    """Authentication, TLS and access by browsers."""

    api_keys_file: Annotated[Path | None, _read_by(read_keys)] = None
    """File of API keys, one per line. Every route and call then needs a key, except the start page and the probes. The
    server reloads the file when it changes."""
    tls_cert_file: Annotated[Path | None, _read_by(check_certificate)] = None
    """PEM file of the server's certificate chain. HTTP and gRPC then accept TLS alone. The server reloads the TLS files
    when they change."""
    tls_key_file: Path | None = Field(None, validate_default=True)
    """PEM file of the certificate's private key, unencrypted."""
    tls_client_ca_file: Annotated[Path | None, _read_by(check_certificate)] = None
    """PEM file of certificate authorities for mutual TLS. Clients must present a certificate of one of them."""
    cors_origins: Annotated[str, AfterValidator(check_origins)] = ""
    """Origins that may call the HTTP port from a browser (CORS), such as `https://app.example,app://obsidian.md`.
    Wildcards: `https://*.app.example` (one label), `http://localhost:*` (any port), `vscode-webview://*` (not for http
    and https). `null`: local files and sandboxed frames of any site. `*`: all. Empty: none."""
    allowed_hosts: Annotated[
        str,
        _like(
            rf"\*|{_HOST}(,{_HOST})*", "must be `*` or names without ports, such as search.example,10.0.0.7,[fd00::7]"
        ),
    ] = ""
    """Names and addresses allowed in the `Host` header of HTTP requests, such as `search.example,10.0.0.7`. `localhost`
    and loopback addresses are always allowed. Other hosts are rejected with 421, except for probes. `*`: all. Empty:
    all, unless the server listens on a loopback address without API keys. It then allows only names without a dot,
    against DNS rebinding (see security.md)."""

    @field_validator("tls_key_file")
    @classmethod
    def _key_of_the_certificate(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if "tls_cert_file" not in info.data:
            return value  # an invalid certificate has been reported already
        certificate = info.data["tls_cert_file"]
        if (value is None) != (certificate is None):
            raise ValueError("--tls-cert-file and --tls-key-file: set both or neither")
        if value is not None:
            check_pair(certificate, value)
        return value

    @field_validator("tls_client_ca_file")
    @classmethod
    def _beside_a_certificate(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is not None and info.data.get("tls_cert_file", value) is None:
            raise ValueError("needs --tls-cert-file and --tls-key-file")
        return value

    @property
    def allowed_origins(self) -> Origins:
        """The origins of `cors_origins`."""
        return Origins(self.cors_origins)

    @property
    def host_names(self) -> frozenset[str]:
        """The names of `allowed_hosts`, in lower case; `*` stands for all."""
        return frozenset(self.allowed_hosts.lower().split(",") if self.allowed_hosts else ())


class Shutdown(_Group):
    """Graceful shutdown after SIGTERM."""

    lame_duck_s: float = Field(5.0, ge=0, le=600)
    """Lame-duck time after SIGTERM, in seconds. The server is not ready but still serves, until load balancers have
    noticed."""
    drain_s: float = Field(10.0, ge=0, le=600)
    """Maximum drain time after that, in seconds. Requests in flight may finish, and gRPC clients learn of the end."""


class Logs(_Group):
    """Logs and traces."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum level of log lines."""
    log_format: Literal["text", "json"] = "text"
    """Format of log lines. `json`: one object per line, and no announcement on standard output."""
    access_log: bool = False
    """Log one line per request, including rejected ones."""
    otlp_endpoint: Annotated[
        str,
        _like(
            r"https?://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\])(:[0-9]{1,5})?(/[!-~]*)?", "must look like http://host:4318"
        ),
    ] = ""
    """OpenTelemetry collector to send traces to, such as `http://host:4318` (OTLP over HTTP, `/v1/traces`). Empty: no
    traces."""
    trace_sample: float = Field(0.01, ge=0, le=1)
    """Share of requests to trace, as a fraction. A request's `traceparent` takes precedence."""


# pydantic puts the fields of the last base first.
class Settings(Logs, Shutdown, Security, Connections, Processes, Limits, Requests, Scheduling, Engine, Ports, Model):
    """The options of `bertserve serve`."""

    def defaults(self) -> dict[str, str]:
        """The models of `default` by task."""
        return dict(word.split("=") for word in self.default.split(",") if word)

    def of_engine(self, name: str) -> dict[str, float | str]:
        """The engine-specific settings of an engine."""
        return {setting: getattr(self, setting) for setting in ENGINES[name].settings}

    @classmethod
    def restored(cls, dumped: str) -> Self:
        """The settings of another process, from `model_dump_json`; raises `StartupError` if a file has changed."""
        try:
            return cls.model_validate_json(dumped)
        except pydantic.ValidationError as invalid:
            raise StartupError("; ".join(map(_explain, invalid.errors()))) from None

    @classmethod
    def load(cls, argv: list[str], environment: Mapping[str, str] = os.environ) -> Self:
        """Reads settings from the command line, the environment and the file of `--config`.

        Raises:
            StartupError: Lists all problems; exit code 2.
        """
        problems: list[str] = []
        flags, variables = _read_flags(argv, problems), _read_environment(environment)
        named = variables.pop("config", None)
        config = flags.pop("config", None) or named
        file = {} if config is None else _read_file(Path(config), problems)
        values = _known(file, problems, where=f"{config}: ") | _known(variables, problems, variable_of) | flags
        problems += _model_problems(values, environment)
        problems += _token_id_problems(values, environment)
        try:
            settings = cls.model_validate(values)
        except pydantic.ValidationError as invalid:
            problems += map(_explain, invalid.errors())
        if problems:
            raise StartupError("; ".join(problems), exit_code=2, as_json=values.get("log_format") == "json")
        return settings


def _model_problems(values: dict[str, Any], environment: Mapping[str, str]) -> list[str]:
    """Problems with `model_id`. With `model_id`, also sets a default for `cache_dir`."""
    if not values.get("model_id"):
        of_the_model = ("revision", "token", "task")
        return [f"{flag_of(name)}: needs --model-id" for name in of_the_model if values.get(name)]
    problems = []
    if values.get("models"):
        problems.append("--models and --model-id: set only one, a repository of exported models or a model to export")
    kind = ENGINES.get(str(values.get("engine")))
    if kind and not kind.exports("auto"):
        problems.append(
            f"--engine {kind.name}: needs an artifact that --model-id does not export; "
            "use `bertserve export --tensorrt native` and --models instead"
        )
    if not values.get("cache_dir"):
        home = environment.get("HOME", "")
        caches = environment.get("XDG_CACHE_HOME") or (f"{home}/.cache" if home else "")
        if not caches:
            problems.append("--model-id: no home directory to export to; set --cache-dir DIR")
        values["cache_dir"] = f"{caches}/bertserve"
    return problems


def _token_id_problems(values: dict[str, Any], environment: Mapping[str, str]) -> list[str]:
    """Problems with `accept_token_ids`. An encoding without a path becomes tiktoken's cached file."""
    if values.get("accept_token_ids") != _CL100K:
        return []
    folder = environment.get("TIKTOKEN_CACHE_DIR")
    values["accept_token_ids"] = f"{_CL100K}={folder}/{_CL100K_CACHED}"
    if not folder:
        return [f"--accept-token-ids {_CL100K}: set TIKTOKEN_CACHE_DIR, or use {_CL100K}=PATH"]
    return []


GROUPS: Sequence[type[_Group]] = [base for base in reversed(Settings.__bases__) if issubclass(base, _Group)]
"""The groups of settings, in the order of `--help-all` and of the documentation."""


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    return ENVIRONMENT_PREFIX + name.upper()


def is_for_tests(name: str) -> bool:
    """Whether a setting or engine is accepted but hidden from `--help-all` and from the settings page."""
    return name.startswith("fake")


def words_of(field: FieldInfo) -> list[str]:
    """The words that are shown as allowed; empty if a setting takes other values."""
    return [word for word in get_args(kind_of(field)) if not is_for_tests(word)]


def kind_of(field: FieldInfo) -> Any:  # noqa: ANN401  a type, or a Literal
    """The type of a setting's value when it is set: `int` for `int | None`."""
    parts = () if get_origin(field.annotation) is Literal else get_args(field.annotation)
    return next((part for part in parts if part is not NoneType), field.annotation)


def bounds_of(field: FieldInfo) -> str:
    """The allowed range of a number; empty for other types."""
    bounds = {
        name: getattr(each, name) for each in field.metadata for name in ("ge", "gt", "le") if hasattr(each, name)
    }
    if not bounds:
        return ""
    least = f"{bounds['ge']:,}" if "ge" in bounds else f"above {bounds['gt']:,}"
    return f"{least} to {bounds['le']:,}"


def default_of(field: FieldInfo) -> str:
    """The default as users write it; empty if there is none."""
    default = field.default
    if isinstance(default, float):
        return f"{default:g}"
    return "" if default is None else str(default).lower() if isinstance(default, bool) else str(default)


@functools.cache
def _parser(*, common: bool = False) -> argparse.ArgumentParser:
    """A parser of all options in groups, or of the common options."""
    parser = argparse.ArgumentParser(
        prog="bertserve serve",
        usage="bertserve serve [options]",
        description="Serve a model repository, or export a checkpoint and serve it, over HTTP and gRPC.",
        epilog=f"Each option is also an environment variable {ENVIRONMENT_PREFIX}<NAME> and a key of the --config file."
        + " `bertserve serve --help-all` lists all options." * common,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
        exit_on_error=False,
    )
    first = parser.add_argument_group("Common options" if common else "General")
    first.add_argument("-h", "--help", action=_Help, nargs=0, help="Show the common options and exit.")
    first.add_argument("--help-all", action=_Help, nargs=0, help="Show all options in groups and exit.")
    first.add_argument("--config", metavar="FILE", help="TOML file with settings. Variables and options override it.")
    if common:
        for name in _COMMON:
            _add(first, name)
        return parser
    for group in GROUPS:
        titled = parser.add_argument_group(group.__name__, group.__doc__)
        for name in group.model_fields:
            _add(titled, name)
    return parser


def _add(group: argparse._ArgumentGroup, name: str) -> None:
    """Adds a setting's option. A boolean option needs no value."""
    field = Settings.model_fields[name]
    kind, default = kind_of(field), default_of(field)
    shown: dict[str, Any] = {"nargs": "?", "const": "true"} if kind is bool else {}
    if is_for_tests(name):
        shown["help"] = argparse.SUPPRESS
    else:
        notes = "; ".join(filter(None, [bounds_of(field), default and f"default: {default}"]))
        shown["help"] = f"{field.description}{notes and f' ({notes})'}".replace("%", "%%")
        words = words_of(field)
        shown["metavar"] = f"{{{','.join(words)}}}" if words else _METAVARS.get(kind, "VALUE")
    group.add_argument(flag_of(name), dest=name, **shown)


class _Help(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        _parser(common=self.dest == "help").print_help()
        parser.exit()


def _read_flags(argv: list[str], problems: list[str]) -> dict[str, Any]:
    try:
        arguments, rest = _parser().parse_known_args(argv)
    except argparse.ArgumentError as error:
        problems.append(str(error))
        return {}
    names = [flag_of(name) for name in ["config", *Settings.model_fields]]
    flags = [word.split("=")[0] for word in rest if word.startswith("-")]
    problems += [unknown("setting", word, names) for word in flags or rest]
    return vars(arguments)


def _read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    return {
        key.removeprefix(ENVIRONMENT_PREFIX).lower(): value
        for key, value in environment.items()
        if key.startswith(ENVIRONMENT_PREFIX) and value and not _is_service_link(key, value)
    }


def _is_service_link(key: str, value: str) -> bool:
    name = key.removeprefix(ENVIRONMENT_PREFIX)
    if name.lower() in Settings.model_fields or left(name):
        return value.startswith(("tcp://", "udp://", "sctp://"))
    return _SERVICE_LINK.fullmatch(name) is not None


def _read_file(path: Path, problems: list[str]) -> dict[str, Any]:
    import tomllib  # noqa: PLC0415  most starts have no file

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        problems.append(f"--config {path}: {error.strerror}")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problems.append(f"--config {path}: {error}")
    return {}


def _known(
    values: dict[str, Any], problems: list[str], spelled: Callable[[str], str] = str, where: str = ""
) -> dict[str, Any]:
    """The known settings of a source. Adds a problem for each unknown one, with its name as spelled in that source."""
    names = [spelled(name) for name in Settings.model_fields]
    others = values.keys() - Settings.model_fields.keys()
    problems += [where + unknown("setting", spelled(name), names) for name in sorted(others)]
    return {name: value for name, value in values.items() if name not in others}


_MUST_BE = {"bool_parsing": "true or false", "int_parsing": "a whole number", "float_parsing": "a number"}


def _explain(error: Any) -> str:  # noqa: ANN401  pydantic's ErrorDetails
    name = str(error["loc"][0]) if error["loc"] else "settings"
    if error["type"] in _MUST_BE:
        return f"{flag_of(name)}: must be {_MUST_BE[error['type']]}"
    message = error["msg"].removeprefix("Value error, ")
    return f"{flag_of(name)}: {message if message != error['msg'] else message[0].lower() + message[1:]}"
