"""Row 67 of the failure modes: a command line or an environment that is wrong."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from serving.errors import StartupError
from serving.models.forms import verified
from serving.settings import Settings
from tests.support.refused_settings import problems
from tests.support.server import free_port, listening, refused_start

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.server import Server

REFUSED: dict[str, tuple[list[str], dict[str, str], list[str]]] = {
    "unknown-flag": (["--http-prot", "1"], {}, ["--http-prot", "did you mean --http-port"]),
    "unknown-flag-with-value": (["--nonsense=5"], {}, ["--nonsense"]),
    "abbreviated-flag": (["--http", "1"], {}, ["--http"]),
    "stray-word": (["models"], {}, ["models"]),
    "no-value": (["--http-port"], {}, ["--http-port"]),
    "unknown-variable": ([], {"BERTSERVE_HTTP_PROT": "1"}, ["BERTSERVE_HTTP_PROT", "did you mean"]),
    "no-number": (["--http-port", "eighty"], {}, ["--http-port"]),
    "too-large": (["--http-port", "70000"], {}, ["--http-port", "65535"]),
    "negative": (["--lame-duck-s", "-1"], {}, ["--lame-duck-s"]),
    "not-finite": (["--drain-s", "nan"], {}, ["--drain-s"]),
    "infinite": (["--keep-alive-s", "inf"], {}, ["--keep-alive-s"]),
    "not-a-choice": (["--engine", "abacus"], {}, ["--engine"]),
    "not-a-switch": (["--auto-truncate", "perhaps"], {}, ["--auto-truncate"]),
    "empty-value": (["--http-port", ""], {}, ["--http-port"]),
    "bad-variable": ([], {"BERTSERVE_MAX_QUEUE_TOKENS": "many"}, ["max-queue-tokens"]),
    "no-keys": (["--api-keys-file", "/dev/null"], {}, ["--api-keys-file: /dev/null: no key in it"]),
    "no-certificate": (
        ["--tls-cert-file", "/dev/null", "--tls-client-ca-file", "/no/such/file"],
        {"BERTSERVE_TLS_KEY_FILE": "/dev/null"},
        ["--tls-cert-file: /dev/null: no cert", "--tls-client-ca-file: /no/such/file: No such file"],
    ),
    "bad-origin": (["--cors-origins", "https://app.example/,*"], {}, ["--cors-origins: must be `*` or"]),
    "bad-host": (["--allowed-hosts", "a.example:80,*"], {}, ["--allowed-hosts: must be `*` or names without ports"]),
    "bad-fault": (["--fake-faults", "7:explode"], {}, ["--fake-faults"]),
    "several": (
        ["--http-port", "x", "--engine", "abacus", "--nonsense", "1"],
        {"BERTSERVE_NO_SUCH": "1", "BERTSERVE_THREADS": "0"},
        ["--http-port", "--engine", "--nonsense", "BERTSERVE_NO_SUCH", "--threads"],
    ),
    "several-with-a-flag-without-value": (
        ["--engine", "abacus", "--http-port"],
        {"BERTSERVE_NO_SUCH": "1"},
        ["--http-port", "BERTSERVE_NO_SUCH"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_row_67_wrong_settings(models: Path, case: str) -> None:
    options, variables, words = REFUSED[case]
    told = problems(["--models", str(models), *options], variables)
    assert [word for word in words if word not in told] == []


def test_row_67_the_operator_reads_one_line(models: Path) -> None:
    """A start with wrong settings ends with exit code 2 and all of them on one line of standard error."""
    options, variables, words = REFUSED["several"]
    done = refused_start("--models", str(models), *options, env=variables)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("bertserve serve: ")
    assert [word for word in words if word not in line] == []


@pytest.mark.parametrize(
    ("options", "why", "code"),
    [
        (("--log-format", "json", "--models", "nowhere"), "nowhere", 1),
        (("--log-format", "json", "--threads", "none"), "--threads", 2),
    ],
)
def test_a_collector_of_json_reads_why_the_server_ends(options: tuple[str, ...], why: str, code: int) -> None:
    """In JSON the last line is JSON too, also where the settings themselves are wrong."""
    done = refused_start(*options)
    (line,) = done.stderr.splitlines()
    said = json.loads(line)
    assert (done.returncode, said["level"], said["logger"]) == (code, "error", "bertserve")
    assert why in said["message"]


def test_row_67_no_port_is_opened(models: Path) -> None:
    """A good port beside a bad setting stays closed, though nothing else is wrong."""
    port = free_port()
    assert refused_start("--models", str(models), "--http-port", str(port), "--engine", "abacus").returncode == 2
    assert not listening(f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["No such file"]),
        ("engine = = 5", ["line 1"]),
        ("engin = 'fake'", ["engin", "did you mean engine"]),
        ("http_port = 'x'\ngrpc_port = 70000", ["--http-port", "--grpc-port"]),
        ("[section]\nengine = 'fake'", ["section"]),
    ],
    ids=["missing", "no-toml", "unknown", "bad-values", "section"],
)
def test_row_67_wrong_file(tmp_path: Path, content: str | None, words: list[str]) -> None:
    """A configuration file is held to the same: exit code 2 and everything that is wrong with it."""
    file = tmp_path / "bertserve.toml"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    told = problems(["--config", str(file)])
    assert [word for word in words if word not in told] == []


def test_row_67_service_links_are_ignored(serve: Callable[..., Server]) -> None:
    """The variables that Kubernetes makes of a Service called `bertserve` are no settings."""
    address = "tcp://10.0.0.1:8000"
    server = serve(
        *("--engine", "fake", "--precision", "fp32"),
        env={
            "BERTSERVE_PORT": address,
            "BERTSERVE_SERVICE_HOST": "10.0.0.1",
            "BERTSERVE_SERVICE_PORT": "8000",
            "BERTSERVE_SERVICE_PORT_HTTP": "8000",
            "BERTSERVE_PORT_8000_TCP": address,
            "BERTSERVE_PORT_8000_TCP_ADDR": "10.0.0.1",
            "BERTSERVE_HTTP_PORT": address,
            "BERTSERVE_GRPC_SERVICE_HOST": "10.0.0.2",
            "BERTSERVE_METRICS_PORT_8002_TCP_PROTO": "tcp",
        },
    )
    assert listening(server.http)


def refused_repository(root: Path) -> str:
    """Why the models in a folder are not served; the start ends with exit code 1."""
    with pytest.raises(StartupError) as refused:
        verified(root)
    assert refused.value.exit_code == 1
    return str(refused.value)


def test_a_checkpoint_is_no_repository(tmp_path: Path) -> None:
    """One line says so, and the command that serves it."""
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    done = refused_start("--models", str(tmp_path))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.endswith(
        f"is a checkpoint, which has to be exported; `bertserve serve --model-id {tmp_path}` does both"
    )


@pytest.mark.parametrize(("below", "what"), [("minilm", "one model"), ("minilm/1", "one version of a model")])
def test_a_part_of_a_repository_is_none(models: Path, below: str, what: str) -> None:
    """The refusal says which part it is, and what to type in its place."""
    told = refused_repository(models / below)
    assert told.endswith(f"{models / below}: is {what}, not a repository; give --models {models}")


@pytest.mark.parametrize("kind", ["missing", "file", "empty", "only-other-names"])
def test_models_directory_without_models(tmp_path: Path, kind: str) -> None:
    """A model repository that is missing, or holds no model, is refused."""
    root = tmp_path / "models"
    if kind == "file":
        root.write_text("not a directory", encoding="utf-8")
    elif kind != "missing":
        root.mkdir()
    if kind == "only-other-names":
        for name in (".hidden/1", "model/latest", "model/01", "empty"):
            (root / name).mkdir(parents=True)
    said = {"missing": "no such directory", "file": "a file, not a directory"}.get(kind, "holds no model")
    assert f"model repository {root}: {said}; make one with `bertserve export`" in refused_repository(root)


def test_precision_that_the_bundle_lacks(tmp_path: Path, models: Path) -> None:
    """A precision for which the bundle has no artifact is refused in one line that says which it has."""
    from tests.support.poison import tiny_bundle  # noqa: PLC0415  needs onnx, the rest does not

    tiny_bundle(models, tmp_path)
    done = refused_start("--models", str(tmp_path), "--precision", "int8")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "int8" in line
    assert "fp32" in line


def test_help_in_short(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        Settings.load(["-h"], {})
    assert ended.value.code == 0
    assert "--help-all" in capsys.readouterr().out
