"""Row 67 of the failure modes: where settings come from, what is refused, and what the operator reads then."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, get_args

import pytest

from bertserve.export.cli import export as export_cli
from bertserve.serving.errors import StartupError
from bertserve.serving.models.artifact_selection import verify_bundles
from bertserve.serving.operations.generated_pages import settings_page
from bertserve.serving.settings import Settings, flag_of
from tests.support.refused_settings import problems
from tests.support.server import FAKE, free_port, listening, refused_start

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.server import Server

CL100K = "cl100k_base=/cache/9b5ad71b2ce5302211f9c61530b329a4922fc6a4"
DEMO = {"BERTSERVE_MODEL_ID": "demo", "HOME": "/home/me"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where to put a file of settings."""
    return tmp_path / "settings.toml"


def test_order_of_sources(file: Path) -> None:
    """Default, file, environment, command line: the last one that speaks wins."""
    file.write_text("http_port = 1\ngrpc_port = 1\nmetrics_port = 1\n", encoding="utf-8")
    environment = {"BERTSERVE_GRPC_PORT": "2", "BERTSERVE_METRICS_PORT": "2"}
    settings = Settings.load(["--config", str(file), "--metrics-port", "3"], environment)
    assert (settings.http_port, settings.grpc_port, settings.metrics_port) == (1, 2, 3)


@pytest.mark.parametrize("turned", [False, True], ids=["the file last", "the file first"])
def test_flags_win_over_the_file_wherever_they_stand(file: Path, *, turned: bool) -> None:
    """The order of words on the command line does not matter."""
    file.write_text("http_port = 2\n", encoding="utf-8")
    words = ["--http-port=1", f"--config={file}"]
    assert Settings.load(words[::-1] if turned else words, {}).http_port == 1


def test_a_file_sets_every_kind_of_value(file: Path) -> None:
    """Numbers, words and switches as TOML writes them; `BERTSERVE_CONFIG` names it too, as `--help` promises."""
    file.write_text('host = "::1"\nauto_truncate = false\nthreads = 3\ndrain_s = 0.5\n', encoding="utf-8")
    settings = Settings.load(["--config", str(file)], {})
    assert (settings.host, settings.auto_truncate, settings.threads, settings.drain_s) == ("::1", False, 3, 0.5)
    assert Settings.load([], {"BERTSERVE_CONFIG": str(file)}) == settings


def test_an_option_names_the_file_before_the_environment(file: Path, tmp_path: Path) -> None:
    """`--config` wins over `BERTSERVE_CONFIG`."""
    other = tmp_path / "other.toml"
    file.write_text("http_port = 1\n", encoding="utf-8")
    other.write_text("http_port = 2\n", encoding="utf-8")
    assert Settings.load(["--config", str(other)], {"BERTSERVE_CONFIG": str(file)}).http_port == 2


@pytest.mark.parametrize(
    ("argv", "environment", "name", "value"),
    [
        (["--auto-truncate", "false"], {}, "auto_truncate", False),
        (["--auto-truncate=0"], {}, "auto_truncate", False),
        (["--auto-truncate", "off"], {}, "auto_truncate", False),
        # A switch needs no word: what follows it is the next option's.
        (["--access-log", "--http-port", "1"], {}, "access_log", True),
        (["--model-control", "--http-port", "1"], {}, "http_port", 1),
        # Variables of other programs, and our own without a value, mean nothing.
        ([], {"PATH": "/bin", "BERTSERVER_HTTP_PORT": "1", "BERTSERVE_HTTP_PORT": ""}, "http_port", 8000),
        # The file of another tokenizer is named by its path, or found where tiktoken keeps it.
        (["--accept-token-ids", CL100K], {}, "accept_token_ids", CL100K),
        (["--accept-token-ids", "cl100k_base"], {"TIKTOKEN_CACHE_DIR": "/cache"}, "accept_token_ids", CL100K),
        # The cache of a model to export is in the home directory unless told otherwise; without such a model, none.
        ([], {"HOME": "/home/me"}, "cache_dir", None),
        ([], DEMO, "cache_dir", "/home/me/.cache/bertserve"),
        ([], DEMO | {"XDG_CACHE_HOME": "/c"}, "cache_dir", "/c/bertserve"),
        (["--cache-dir", "/mine"], DEMO, "cache_dir", "/mine"),
    ],
)
def test_what_settings_mean(argv: list[str], environment: dict[str, str], name: str, value: object) -> None:
    found = getattr(Settings.load(argv, environment), name)
    assert (str(found) if isinstance(value, str) else found) == value


LINKS = {
    **{f"BERTSERVE_HTTP_PORT={kind}": f"{kind}://10.0.0.1:8000" for kind in ("tcp", "udp", "sctp")},
    "BERTSERVE_PORT": "tcp://10.0.0.1:8000",
    "BERTSERVE_SERVICE_HOST": "10.0.0.1",
    "BERTSERVE_SERVICE_PORT": "8000",
    "BERTSERVE_SERVICE_PORT_GRPC": "8001",
    "BERTSERVE_PORT_8000_TCP": "tcp://10.0.0.1:8000",
    "BERTSERVE_PORT_8000_TCP_PROTO": "tcp",
    "BERTSERVE_PORT_8000_TCP_PORT": "8000",
    "BERTSERVE_PORT_8000_TCP_ADDR": "10.0.0.1",
    "BERTSERVE_HTTP_SERVICE_HOST": "10.0.0.1",
    "BERTSERVE_GRPC_SERVICE_HOST": "10.0.0.2",
    "BERTSERVE_METRICS_PORT_8002_TCP_PROTO": "tcp",
}


@pytest.mark.parametrize("name", LINKS)
def test_service_links(name: str) -> None:
    """What Kubernetes makes of the name of a Service called `bertserve` is passed over; the default holds."""
    assert Settings.load([], {name.partition("=")[0]: LINKS[name]}) == Settings.load([], {})


PORT = "--http-port: must be a whole number"
ENGINES = "--engine: input should be 'auto', 'tensorrt', 'ort-cuda', 'cpu', 'openvino', 'ort-cpu' or 'fake'"
SWITCH = "must be true or false"
NO_VALUE = "argument --http-port: expected one argument"
FAULTS = "--fake-faults: must look like 2053:nan,7592:exit"
SUCH = "unknown setting BERTSERVE_NO_SUCH (did you mean"

REFUSED: dict[str, tuple[str, str, list[str]]] = {
    # Words of the command line, variables of the environment, and the beginning of each sentence.
    "unknown": ("--http-prot 1", "", ["unknown setting --http-prot (did you mean --http-port?)"]),
    "unknown, a letter less": ("--thread 1", "", ["unknown setting --thread (did you mean --threads?)"]),
    "unknown, with its value": ("--nonsense=5", "", ["unknown setting --nonsense"]),
    "like nothing": ("--zzzz", "", ["unknown setting --zzzz"]),
    "abbreviated": ("--http 1", "", ["unknown setting --http (did you mean --http-port?)"]),
    "abbreviated, and clear": ("--http-po 1", "", ["unknown setting --http-po (did you mean --http-port?)"]),
    "a word of no option": ("models", "", ["unknown setting models (did you mean --models?)"]),
    "a word like nothing": ("serve", "", ["unknown setting serve"]),
    "no value": ("--http-port", "", [NO_VALUE]),
    "unknown variable": (
        "",
        "HTTP_PROT=1",
        ["unknown setting BERTSERVE_HTTP_PROT (did you mean BERTSERVE_HTTP_PORT?)"],
    ),
    **{
        # Passing it over would hide a mistake.
        f"nearly a service link, {name}": ("", f"{name}=1", [f"unknown setting BERTSERVE_{name}"])
        for name in ("PORTS", "SERVICE", "PORT_8000_ICMP", "XPORT")
    },
    "no number": ("--http-port eighty", "", [PORT]),
    "half a number": ("--threads 1.5", "", ["--threads: must be a whole number"]),
    "too large": ("--http-port 65536", "", ["--http-port: input should be less than or equal to 65535"]),
    "negative port": ("--http-port=-1", "", ["--http-port: input should be greater than or equal to 0"]),
    "negative": ("--lame-duck-s -1", "", ["--lame-duck-s: input should be greater than or equal to 0"]),
    "zero": ("--keep-alive-s 0", "", ["--keep-alive-s: input should be greater than 0"]),
    "not finite": ("--drain-s nan", "", ["--drain-s: input should be less than or equal to 600"]),
    "infinite": ("--keep-alive-s inf", "", ["--keep-alive-s: input should be less than or equal to 3600"]),
    "not a choice": ("--engine abacus", "", [ENGINES]),
    "not a switch": ("--auto-truncate perhaps", "", [f"--auto-truncate: {SWITCH}"]),
    "a word behind a switch": ("--access-log models", "", [f"--access-log: {SWITCH}"]),
    "empty": ("--http-port=", "", [PORT]),
    "bad variable": ("", "MAX_QUEUE_TOKENS=many", ["--max-queue-tokens: must be a whole number"]),
    "no keys": ("--api-keys-file /dev/null", "", ["--api-keys-file: /dev/null: contains no key"]),
    "no certificate": (
        "--tls-cert-file /dev/null --tls-client-ca-file /no/such/file",
        "TLS_KEY_FILE=/dev/null",
        ["--tls-cert-file: /dev/null: contains no PEM cert", "--tls-client-ca-file: /no/such/file: No such file"],
    ),
    **{
        f"bad origin {origin}": (
            f"--cors-origins null,{origin}",
            "",
            [f"--cors-origins: `{origin}` is not an origin: must"],
        )
        for origin in (
            *("https://app.example/", "*", "app.example", "HTTPS://app.example", "https://", "https://app.example:x"),
            *("https://*", "http://*:80", "https://a.*.example", "https://*.*.example", "https*://a", "app://*.md"),
            *("app://a/b", "data:", "Null", "//a", ""),
        )
    },
    "bad host": ("--allowed-hosts a.example:80,*", "", ["--allowed-hosts: must be `*` or names without ports"]),
    "ids of no known file": ("--accept-token-ids cl100k_base", "", ["--accept-token-ids cl100k_base: set TIKTOKEN_"]),
    "ids of another name": ("--accept-token-ids o200k_base=x", "", ["--accept-token-ids: must look like"]),
    **{
        f"faults {value}": (f"--fake-faults={value}", "", [FAULTS])
        for value in ("7", "7:", ":nan", "7:nan,", "x:nan", "7:NAN", "-1:nan", "7:explode")
    },
    "several": (
        "--http-port x --engine abacus --nonsense 1",
        "NO_SUCH=1 THREADS=0",
        ["unknown setting --nonsense", SUCH, PORT, ENGINES, "--threads: input should be greater than or equal to 1"],
    ),
    "several, and no value": ("--engine abacus --http-port", "NO_SUCH=1", [NO_VALUE, SUCH]),
}


def words_of(case: str) -> tuple[list[str], dict[str, str], list[str]]:
    options, variables, told = REFUSED[case]
    named = dict(word.split("=") for word in variables.split())
    return options.split(), {f"BERTSERVE_{name}": value for name, value in named.items()}, told


@pytest.mark.parametrize("case", REFUSED)
def test_row_67_wrong_settings(case: str) -> None:
    """Each is told in a sentence of its own, in one line and before anything starts; a wild guess is not offered."""
    options, variables, told = words_of(case)
    found = problems(options, variables).split("; ")
    assert len(found) == len(told), found
    assert [one for one, start in zip(found, told, strict=True) if not one.startswith(start)] == []
    assert case not in {"like nothing", "a word like nothing"} or found == told


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, ["--config {}: No such file or directory"]),
        (b"engine = = 5", ["--config {}: Invalid value (at line 1"]),
        (b"http_port = ", ["--config {}: Invalid value (at end"]),
        (b"\xff\xfe", ["--config {}: "]),
        (b"= 1", ["--config {}: "]),
        (b"engin = 'fake'", ["{}: unknown setting engin (did you mean engine?)"]),
        (b"http_port = 'x'\ngrpc_port = 70000", [PORT, "--grpc-port: input should be less than or equal to 65535"]),
        (b"[section]\nengine = 'fake'", ["{}: unknown setting section"]),
    ],
    ids=["missing", "no TOML", "half", "no UTF-8", "no name", "unknown", "bad values", "section"],
)
def test_row_67_wrong_file(file: Path, content: bytes | None, told: list[str]) -> None:
    """A configuration file is held to the same: everything that is wrong with it, with its path."""
    if content is not None:
        file.write_bytes(content)
    found = problems(["--config", str(file)]).split("; ")
    assert [one.startswith(start.format(file)) for one, start in zip(found, told, strict=True)] == [True] * len(told)
    assert problems(["--config", str(file.parent)]) == f"--config {file.parent}: Is a directory"


def test_everything_wrong_in_every_source_is_told_at_once(file: Path) -> None:
    """One sentence each: nobody has to start four times."""
    file.write_text("htp_port = 1\nthreads = 0\n", encoding="utf-8")
    words = ["--config", str(file), "--engin", "x", "--drain-s", "soon"]
    found = problems(words, {"BERTSERVE_HOTS": "h", "BERTSERVE_HTTP_PORT": "x"}).split("; ")
    assert sorted(problem.removeprefix(f"{file}: ") for problem in found) == [
        "--drain-s: must be a number",
        PORT,
        "--threads: input should be greater than or equal to 1",
        "unknown setting --engin (did you mean --engine?)",
        "unknown setting BERTSERVE_HOTS (did you mean BERTSERVE_HOST?)",
        "unknown setting htp_port (did you mean http_port?)",
    ]


def test_row_67_the_operator_reads_one_line(models: Path) -> None:
    """A start with wrong settings ends with exit code 2, all of them on one line of standard error, no port opened."""
    options, variables, told = words_of("several")
    port = free_port()
    done = refused_start("--models", str(models), "--grpc-port", str(port), *options, env=variables)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("bertserve serve: ")
    assert [word for word in told if word not in line] == []
    assert not listening(f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("options", "why", "code"), [("--models nowhere", "nowhere", 1), ("--threads none", "--threads", 2)]
)
def test_a_collector_of_json_reads_why_the_server_ends(options: str, why: str, code: int) -> None:
    """In JSON the last line is JSON too, also where the settings themselves are wrong."""
    done = refused_start("--log-format", "json", *options.split())
    (line,) = done.stderr.splitlines()
    said = json.loads(line)
    assert (done.returncode, said["level"], said["logger"]) == (code, "error", "bertserve")
    assert why in said["message"]


def test_row_67_service_links_are_ignored(serve: Callable[..., Server]) -> None:
    """The variables that Kubernetes makes of a Service called `bertserve` are no settings of a running server."""
    links = {name: value for name, value in LINKS.items() if "=" not in name}
    assert listening(serve(*FAKE, env={**links, "BERTSERVE_HTTP_PORT": "tcp://10.0.0.1:8000"}).http)


@pytest.mark.parametrize(
    ("below", "said"),
    [
        ("minilm", "is one model, not a repository; use --models {models}"),
        ("minilm/1", "is one version of a model, not a repository; use --models {models}"),
        ("missing", "no such directory; make one with `bertserve export`"),
        ("file", "a file, not a directory; make one with `bertserve export`"),
        ("empty", "contains no model; make one with `bertserve export`"),
        ("other-names", "contains no model; make one with `bertserve export`"),
    ],
)
def test_what_is_no_repository(models: Path, tmp_path: Path, below: str, said: str) -> None:
    """The refusal says what the folder is, and what to type in its place; the start ends with exit code 1."""
    (tmp_path / "file").write_text("not a directory", encoding="utf-8")
    for name in ("empty", *(f"other-names/{name}" for name in (".hidden/1", "model/latest", "model/01", "empty"))):
        (tmp_path / name).mkdir(parents=True)
    root = models / below if below.startswith("minilm") else tmp_path / below
    with pytest.raises(StartupError) as refused:
        verify_bundles(root)
    assert refused.value.exit_code == 1
    assert f"model repository {root}: {said.format(models=models)}" in str(refused.value)


def test_a_checkpoint_is_no_repository(tmp_path: Path) -> None:
    """One line says so, and the command that serves it."""
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    done = refused_start("--models", str(tmp_path))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.endswith(
        f"is a checkpoint, not a repository; export and serve it with `bertserve serve --model-id {tmp_path}`"
    )


def test_precision_that_the_bundle_lacks(tmp_path: Path, models: Path) -> None:
    """A precision for which the bundle has no artifact is refused in one line that says which it has."""
    from tests.support.poison import tiny_bundle  # noqa: PLC0415  needs onnx, the rest does not

    tiny_bundle(models, tmp_path)
    done = refused_start("--models", str(tmp_path), "--precision", "int8")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "int8" in line
    assert "fp32" in line


def help_text(option: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What an option prints of the settings; it ends with success, whatever else is wrong."""
    with pytest.raises(SystemExit) as ended:
        Settings.load([option, "--nonsense"], {})
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_the_whole_help(capsys: pytest.CaptureFixture[str]) -> None:
    """It lists every option that is not for tests alone in its group, with its bounds and default."""
    shown = help_text("--help-all", capsys)
    for name in Settings.model_fields:
        assert shown.count(f"\n  --{name.replace('_', '-')} ") == (not name.startswith("fake_")), name
    words = " ".join(shown.split())
    ports, engine = words.index("Ports: Addresses and ports. "), words.index("Engine: Engines, CPU cores")
    assert ports < words.index("--http-port N") < engine < words.index("--threads N")
    assert "--log-level {debug,info,warning,error}" in words
    assert "--engine-hang-s NUMBER " in words
    assert "(1 to 3,600; default: 2)" in words
    assert "--access-log [true|false]" in words
    assert "(above 0 to 3,600; default: 75)" in words
    assert "None" not in words


def test_the_help_in_short(capsys: pytest.CaptureFixture[str]) -> None:
    """A dozen common options, and how to see the others."""
    shown = help_text("--help", capsys)
    assert shown == help_text("-h", capsys)
    listed = re.findall(r"^  (--[a-z-]+)", shown, re.MULTILINE)
    assert {"--help-all", "--config", "--models", "--http-port", "--engine"} <= set(listed)
    assert len(listed) <= 16
    assert "Common options:" in shown
    assert "`bertserve serve --help-all` lists all options" in " ".join(shown.split())


@pytest.mark.parametrize("name", Settings.model_fields)
def test_the_page_has_every_setting(name: str) -> None:
    """That is not for tests alone."""
    assert (f"`{flag_of(name)}`" in settings_page()) == (not name.startswith("fake_"))


def test_an_engine_is_given_its_own_settings() -> None:
    """And no other engine is."""
    settings = Settings.load(["--fake-faults", "7:nan,9:exit"], {})
    others = {"fake_ms": 0.0, "fake_batch_ms": "", "fake_token_us": 0.0}
    assert settings.of_engine("fake") == {**others, "fake_faults": "7:nan,9:exit"}
    assert settings.of_engine("ort-cpu") == {}


def test_tasks_are_those_of_the_export() -> None:
    """The settings know nothing of bundles, so they name them themselves."""
    (choices,) = [action.choices for action in export_cli.parser()._actions if action.dest == "task"]
    (literal, _) = get_args(Settings.model_fields["task"].annotation)
    assert get_args(literal) == choices


def test_settings_do_not_change() -> None:
    """The object is frozen."""
    settings = Settings.load([], {})
    with pytest.raises(ValueError, match="frozen"):
        settings.http_port = 1  # type: ignore[misc]
