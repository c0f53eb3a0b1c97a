"""An upgrade from commit 54307b58: each break is one sentence that says what to do instead, or does not happen.

`54307b58/` is what that commit left on a disk: the lists of what its users see, as its `tests/contract/surface` had
them (of routes and methods the paths; of metrics those that its dashboard, rules, autoscalers and Ray Serve read), a
file of settings, and in `data.tar.xz` bundles of schema 3 and 2 (its own exporter's, and that of 5780bbd0^), a
manifest of its `export --split`, the checkpoint of them all, its cache directory, and what its server answered. For
`tasks.tar.xz` see `bundles_test`.
"""

from __future__ import annotations

import json
import re
import tarfile
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
import yaml
from sentence_transformers import SentenceTransformer

import bertserve
from bertserve.serving import errors, options
from bertserve.serving.errors import StartupError
from bertserve.serving.http.app import PROTOCOLS
from bertserve.serving.http.openapi import docs_router
from bertserve.serving.rollout.model_export import home_of
from bertserve.serving.settings import Settings, flag_of, variable_of
from bertserve.serving.telemetry import catalogue
from tests.support import descriptions
from tests.support.certificates import Certificates
from tests.support.clients import HttpConnection, ask
from tests.support.credentials import FIRST, write_keys
from tests.support.models import ROOT
from tests.support.server import FAKE, Server, refused_start

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

pytestmark = pytest.mark.slow

OLD = Path(__file__).with_name("54307b58")
REMOVED = " ".join((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("### Removed")[1].split("\n#")[0].split())
HOME = "/srv/bertserve"
"""Where `settings.toml` has its directories."""
DEVIATION = 1e-5
INT8_DEVIATION = 0.05
"""Of components of unit vectors: what the export's own report found for INT8, five times over."""


def lines(name: str) -> list[str]:
    """Of a list of the old commit, without its comment."""
    return [line for line in (OLD / name).read_text().splitlines() if not line.startswith("#")]


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the old commit left, unpacked."""
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(OLD / "data.tar.xz") as packed:
        packed.extractall(folder, filter="data")
    write_keys(folder / "keys", FIRST)
    Certificates(folder / "tls", mutual=True)
    return folder


# Settings, verbs and options

KINDS = dict(re.findall(r"(\w+): (.*) = ", "\n".join(lines("settings.txt"))))
PEM = {"tls_cert_file": "{disk}/tls/cert.pem", "tls_key_file": "{disk}/tls/key.pem"}
STRINGS = {
    **PEM,
    "accept_token_ids": "cl100k_base=/srv/cl100k",
    "allowed_hosts": "search.example",
    "api_keys_file": "{disk}/keys",
    "batch_dir": "/srv/batches",
    "cache_dir": "/srv/cache",
    "cors_origins": "https://app.example",
    "default": "embed=minilm,tag=ner",
    "host": "::",
    "model_id": "demo",
    "models": "/srv/models",
    "otlp_endpoint": "http://collector:4318",
    "revision": "main",
    "tls_client_ca_file": "{disk}/tls/client-ca.pem",
    "token": "hf_x",
}
BESIDE: dict[str, dict[str, str]] = {
    **{key: {"model_id": "demo"} for key in ("revision", "task", "token")},
    **dict.fromkeys((*PEM, "tls_client_ca_file"), PEM),
    "buffer_limit_mb": {"body_limit_bytes": "1024"},
}
"""What a setting needs beside it."""


def values(key: str) -> list[str]:
    """Every choice of a setting, its bounds, or a value."""
    if key in STRINGS:
        return [STRINGS[key]]
    if KINDS[key].startswith("boolean"):
        return ["true", "false"]
    found = re.findall(r'"(\w[\w-]*)"|(?:maximum|minimum)=([\d.]+)', KINDS[key])
    return [choice or bound for choice, bound in found]


@pytest.mark.parametrize("key", KINDS)
def test_a_setting_works_or_is_rejected_with_what_to_do(key: str, disk: Path, tmp_path: Path) -> None:
    """On the command line, in the environment and in a file, with every value that it had."""
    assert values(key)
    for value in values(key):
        given = {name: text.format(disk=disk) for name, text in {**BESIDE.get(key, {}), key: value}.items()}
        given = {name: text for name, text in given.items() if name == key or name in Settings.model_fields}
        file = tmp_path / "settings.toml"
        file.write_text("".join(f"{name} = {json.dumps(text)}\n" for name, text in given.items()))
        sources: list[tuple[str, list[str], dict[str, str]]] = [
            (flag_of(key), [word for name, text in given.items() for word in (flag_of(name), text)], {}),
            (variable_of(key), [], {variable_of(name): text for name, text in given.items()}),
            (key, ["--config", str(file)], {}),
        ]
        for spelled, argv, variables in sources:
            if key in Settings.model_fields:
                Settings.load(argv, {"HOME": "/root", **variables})
                continue
            with pytest.raises(StartupError) as rejected:
                Settings.load(argv, variables)
            assert str(rejected.value).removeprefix(f"{file}: ") == f"{spelled} left: {instead(key)}"


def instead(name: str) -> str:
    """What to do in place of a setting, verb or option that left."""
    return options.LEFT[name.removeprefix("--").replace("_", "-")]


def is_told(sentence: str) -> bool:
    """Whether the changelog says it under "Removed"."""
    return sentence.replace("`", "") in REMOVED.replace("`", "")


def verbs() -> dict[str, dict[str, str]]:
    """The old verbs with their options and arguments, and what is said of each."""
    found: dict[str, dict[str, str]] = {}
    for line in lines("commands.txt"):
        if line.startswith("bertserve "):
            found[line.removeprefix("bertserve ")] = {}
        else:
            name, _, said = line.strip().partition(":")
            found[[*found][-1]][name] = said.strip()
    found["doctor"] = {name: said for name, said in found["serve"].items() if name != "--help-all"}
    return found


VERBS = verbs()


def choices(said: str) -> set[str]:
    """The values that an option takes; empty where it takes any."""
    found = re.search(r"one of ([^;]+)|takes \{(.+?)\}", said)
    return set(re.split(r",\s*", found[1] or found[2])) if found else set()


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_takes_its_options_or_says_what_to_do(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line with exit code 2. `doctor` and `serve` take the settings, which have a test of their own."""

    def told(*words: str) -> str:
        try:
            code: object = bertserve.main([verb, *words])
        except SystemExit as end:
            code = end.code
        (line,) = capsys.readouterr().err.splitlines()
        assert code == 2, line
        return line

    if verb not in bertserve.VERBS:
        assert f"{verb} left: {instead(verb)};" in told()
        return
    if verb in {"serve", "doctor"}:
        return
    now = dict(line.strip().partition(":")[::2] for line in descriptions.options(verb))
    needed = [(name, said) for name, said in VERBS[verb].items() if "; required" in said and name in now]
    words = [word for name, _ in needed for word in ([name] if name.startswith("--") else []) + ["x"]]
    for name, said in VERBS[verb].items():
        if name in now:
            assert bool(now[name].strip()) == bool(said), name
            assert not choices(now[name]) or choices(said) <= choices(now[name]), f"{name}: a value left"
        else:
            line = told(*words, name, *(["x"] if re.match("takes|one of|default", said) else []))
            assert f"{name} left: {instead(name)};" in line


def test_python_programs_import_what_they_did() -> None:
    """`from bertserve import BatchPredictor`."""
    assert "BatchPredictor" in bertserve.OFFERED


def test_the_changelog_says_what_is_said() -> None:
    """Under "Removed", so that who reads it before the upgrade needs no rejected start."""
    assert [said for said in options.LEFT.values() if not is_told(said)] == []


# Routes, methods and metrics


@pytest.fixture(scope="module")
def fake(disk: Path) -> Iterator[Server]:
    with Server(disk / "models", *FAKE) as running:
        yield running


def left(path: str) -> str:
    """What is said of a route or method that left; the changelog says it too."""
    (start,) = [start for start in errors.LEFT if path.startswith(start)]
    assert is_told(errors.LEFT[start])
    return f"{start} left: {errors.LEFT[start]}"


def test_a_route_answers_or_says_what_to_do(fake: Server) -> None:
    """With 404, and one sentence."""
    routes = [route for router in (*PROTOCOLS, docs_router(None)) for route in router.routes]
    offered = {(method, route.path) for route in routes for method in route.methods}
    with HttpConnection(fake.http) as http:
        for line in (line for line in lines("routes.txt") if not line.startswith("/")):
            methods, _, path = line.rpartition(" ")
            method = methods.partition(",")[0]
            if (method, path) not in offered:
                reply = http.call(method, re.sub(r"\{\w+\}", "x", path))
                assert (reply.status, left(path) in reply.body.decode()) == (404, True), line


def test_a_method_of_grpc_answers_or_says_what_to_do(fake: Server) -> None:
    """With UNIMPLEMENTED, and one sentence."""
    told: dict[str, str | None] = {}
    with grpc.insecure_channel(fake.grpc) as channel:
        for route in (line for line in lines("routes.txt") if line.startswith("/")):
            call = channel.stream_stream(route)(iter([b""]), timeout=10)
            try:
                next(call, None)
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                    told[route] = error.details()
            call.cancel()
    assert told == {route: left(route) for route in told}


def test_dashboard_alerts_and_autoscalers_find_their_metrics() -> None:
    """Each with its labels, or named by the changelog."""
    rules = yaml.safe_load((ROOT / "deploy" / "monitoring" / "rules.yaml").read_text())
    recorded = {rule.get("record") for group in rules["groups"] for rule in group["rules"]}
    metrics = (*catalogue.SERVER, *catalogue.PROCESS)
    labels: dict[str, set[str]] = {
        **{name: set() for name in recorded},
        **{each.name: set(each.labels) for each in metrics},
    }
    named = re.findall(r"`((?:bertserve|nv|process)[_:][\w:*]+)`", REMOVED)
    for line in lines("metrics.txt"):
        name, *asked = line.split()
        if not any(fnmatchcase(name, pattern) for pattern in named):
            assert name in labels, f"{name} left: the changelog names it"
            assert set(asked) <= labels[name], name


def test_manifests_are_where_they_were() -> None:
    """Or the changelog names them, for those whose own overlays are on top of them."""
    gone = [Path(line) for line in lines("deploy.txt") if not (ROOT / "deploy" / line).exists()]
    assert [path for path in gone if not re.search(rf"[`/]{re.escape(path.name)}/?`", REMOVED)] == []


# The whole


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture(scope="module")
def answers(disk: Path) -> dict[str, Any]:
    """What the old server answered, beside what Sentence Transformers says of the same texts."""
    recorded: dict[str, Any] = json.loads((disk / "answers.json").read_text())
    model = SentenceTransformer(str(disk / "ckpt"), device="cpu", local_files_only=True)
    recorded["reference"] = model.encode(recorded["texts"], normalize_embeddings=True)
    return recorded


def test_the_rehearsal(disk: Path, answers: dict[str, Any]) -> None:
    """The old settings are rejected once, with a sentence for each that left; without those, all is as it was."""
    settings = tomllib.loads((OLD / "settings.toml").read_text().replace(HOME, str(disk)))
    before, file = content(disk / "models"), disk / "settings.toml"
    in_file, in_variables = list(settings)[::2], list(settings)[1::2]

    def written(known: Container[str]) -> dict[str, str]:
        """Writes half of the settings into the file, and returns the rest as variables."""
        file.write_text("".join(f"{key} = {json.dumps(settings[key])}\n" for key in in_file if key in known))
        return {variable_of(key): str(settings[key]) for key in in_variables if key in known}

    told = [f"{file}: {key} left: {instead(key)}" for key in sorted({*in_file} - {*Settings.model_fields})]
    told += [f"{variable_of(key)} left: {instead(key)}" for key in sorted({*in_variables} - {*Settings.model_fields})]
    if told:
        rejected = refused_start("--config", str(file), env=written(settings))
        assert (rejected.returncode, rejected.stderr.count("\n")) == (2, 1), rejected.stderr
        assert rejected.stderr.endswith(f"{'; '.join(told)}\n")
    with Server(None, "--config", str(file), env=written(Settings.model_fields)) as server:
        for name in ("schema-2", "schema-3"):
            check(server, name, "fp32", answers)
    assert "WARNING bertserve: schema-2: version 1 has a manifest of schema 2" in server.log
    assert content(disk / "models") == before


def check(server: Server, name: str, precision: str, answers: dict[str, Any], deviation: float = DEVIATION) -> None:
    """The server's vectors beside the old server's and the reference's; and it started without a traceback."""
    found = ask(server, f"/models/{name}/embed", inputs=answers["texts"])
    np.testing.assert_allclose(found, answers[f"{name} {precision}"], rtol=0, atol=DEVIATION)
    np.testing.assert_allclose(found, answers["reference"], rtol=0, atol=deviation)
    assert "Traceback" not in server.log


@pytest.mark.parametrize("schema", ["schema-2", "schema-3"])
def test_int8_answers_as_before(schema: str, disk: Path, answers: dict[str, Any]) -> None:
    """With the proofs and costs that the old commit kept in its cache."""
    words = ("--engine", "ort-cpu", "--precision", "int8", "--cache-dir", str(disk / "cache"))
    with Server(disk / "models", *words) as server:
        check(server, schema, "int8", answers, INT8_DEVIATION)


def test_an_export_that_the_old_server_kept(disk: Path, answers: dict[str, Any]) -> None:
    """`--model-id` serves it, or exports again."""
    words = ("--model-id", str(disk / "ckpt"), "--cache-dir", str(disk / "cache"), "--engine", "ort-cpu")
    (disk / "cache" / "exports" / "ckpt").rename(home_of(Settings.load([*words], {})).models.parent)
    with Server(None, *words, start_limit_s=300) as server:
        check(server, "ckpt", "int8", {**answers, "ckpt int8": answers["model-id"]}, INT8_DEVIATION)


def test_a_split_bundle_is_rejected(disk: Path) -> None:
    """In one line that says to export again."""
    rejected = refused_start("--models", str(disk / "split"))
    assert (rejected.returncode != 0, rejected.stderr.count("\n")) == (True, 1), rejected.stderr
    assert "the model is cut into parts, which this version does not serve; export it again" in rejected.stderr
