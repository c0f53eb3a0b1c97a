"""The container files: what they name exists, and what they run is understood."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bertserve.serving.settings import Settings
from tests.support import kubernetes
from tests.support.certificates import Certificates
from tests.support.clients import get
from tests.support.containerfile import Stage, lineage, stages, words
from tests.support.credentials import FIRST, write_keys
from tests.support.kubernetes import manifests, pods
from tests.support.models import ROOT
from tests.support.server import FAKE, Server, environment, free_port
from tests.support.skips import excused
from tests.support.waiting import wait_for
from tests.support.wheel import SOURCES, requirements

FILES = sorted((ROOT / "deploy" / "containers").glob("*.Containerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SERVED = ("baked", "mounted")
FORBIDDEN = {"torch", "transformers", "sentence-transformers", "onnx"}
"""What only `bertserve export` needs."""

every = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def copied(all_stages: list[Stage]) -> dict[str, str]:
    """What is copied from the project: places in the image by places here."""
    found = {}
    for stage in all_stages:
        for rest in stage.of("COPY"):
            *sources, target = rest.split()
            if not sources[0].startswith("--from="):
                found |= dict.fromkeys(sources, target)
    return found


def installed(all_stages: list[Stage]) -> set[str]:
    """The extras that are installed."""
    (build,) = [stage for stage in all_stages if stage.name == "build"]
    (extras,) = re.findall(r'install [^&]*"\.\[([a-z,]+)\]"', " ".join(build.of("RUN")))
    return set(extras.split(","))


@every
def test_the_linter_is_content(path: Path) -> None:
    """Hadolint parses them as builders do, and knows what is often done wrong."""
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([str(hadolint), str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@every
def test_what_is_copied_is_there(path: Path) -> None:
    """In the project, and not kept from the builder by `.dockerignore`; models are the user's own."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    allowed = {line[1:] for line in lines if line.startswith("!")}
    sources = set(copied(stages(path)))
    assert sources <= allowed
    for source in sources - {"models"}:
        assert (ROOT / source).exists(), source


@every
def test_the_wheel_is_built_of_what_is_copied(path: Path) -> None:
    """The sources of the wheel that `wheel_test.py` installs, in the same places."""
    found = {source: target for source, target in copied(stages(path)).items() if source != "models"}
    assert found.keys() - {"constraints.txt"} == set(SOURCES)
    for source, target in found.items():
        assert target in {"./", f"./{source}"}, source


@every
def test_extras_exist_and_bring_no_pytorch(path: Path) -> None:
    """Of all that the extras need, directly or not, as far as it is installed here."""
    extras = installed(stages(path))
    assert extras <= PROJECT["optional-dependencies"].keys()
    assert {path.stem, "verify"} <= extras
    names = requirements(_own(extras), frozenset())
    assert len(names) > 10
    assert not names & FORBIDDEN


def _own(extras: set[str]) -> list[str]:
    more = [need for extra in extras for need in PROJECT["optional-dependencies"][extra]]
    return [*PROJECT["dependencies"], *more]


def test_the_exporters_stage_has_what_an_export_needs() -> None:
    """Its extras, each pinned; a user who is not root, and a home that can be written where the root cannot."""
    made = lineage(stages(ROOT / "deploy/containers/cpu.Containerfile"), "export")
    extras = re.findall(r'--constraint constraints\.txt "\.\[([a-z,]+)\]"', " ".join(text for _, text in made))
    assert {"cpu", "openvino", "export"} <= set(",".join(extras).split(","))
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert {"torch", "transformers", "onnx"} <= pinned
    rest = dict(made)
    assert "HOME=/tmp" in rest["ENV"]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", rest["USER"])


@every
def test_constraints_are_those_of_the_tests(path: Path) -> None:
    """Every package at the version that the tests ran with, on a Python that is supported."""
    base, build, *_ = stages(path)
    assert "--constraint constraints.txt" in " ".join(build.of("RUN"))
    lines = [line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pinned = {canonicalize_name(Requirement(line).name) for line in lines if line}
    assert {canonicalize_name(Requirement(need).name) for need in _own(installed(stages(path)))} <= pinned
    version = re.fullmatch(r"python:(\d+\.\d+)-slim-\w+", base.base)
    assert version is not None
    assert tuple(map(int, version[1].split("."))) >= (3, 11)


@every
def test_what_runs_needs_no_shell_and_no_root(path: Path) -> None:
    """The served stages stand on the base the environment was made on, run nothing, and are a numbered user's."""
    all_stages = stages(path)
    base, build = all_stages[:2]
    assert all_stages[-1].name == "mounted"  # the one that is built where none is named
    for name in SERVED:
        made = lineage(all_stages, name)
        rest = dict(made)
        assert "RUN" not in rest
        assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", rest["USER"])
        assert rest["STOPSIGNAL"] == "SIGTERM"
        (program,) = words(rest["ENTRYPOINT"])
        folder, _, script = program.rpartition("/bin/")
        assert script in PROJECT["scripts"]
        assert f"--from=build {folder} {folder}" in [text for word, text in made if word == "COPY"]
        assert f"python -m venv {folder}" in " ".join(build.of("RUN"))
        assert made[len(base.instructions)] == ("COPY", f"--from=build {folder} {folder}")
    assert next(stage for stage in all_stages if stage.name == "runtime").base == build.base == base.name


@every
def test_the_command_is_understood(path: Path) -> None:
    """By the server's own reader; models lie where it looks, ports are those that it opens."""
    rest = dict(lineage(stages(path), "baked"))
    verb, *options = words(rest["CMD"])
    assert verb == "serve"
    settings = Settings.load(options, {})
    assert copied(stages(path))["models"] == str(settings.models)
    assert settings.host == "::"
    exposed = {int(port) for port in rest["EXPOSE"].split()}
    assert exposed == {settings.http_port, settings.grpc_port, settings.metrics_port}


@every
def test_labels_are_the_project_s(path: Path) -> None:
    """On every stage that becomes an image, and none of another version, licence or base."""
    base, *others = stages(path)
    labels = {
        name: value for rest in base.of("LABEL") for name, value in (word.split("=", 1) for word in shlex.split(rest))
    }
    assert all(name.startswith("org.opencontainers.image.") for name in labels)
    told = {name.removeprefix("org.opencontainers.image."): value for name, value in labels.items()}
    assert (told["version"], told["licenses"]) == (PROJECT["version"], PROJECT["license"])
    assert told["base.name"] == f"docker.io/library/{base.base}"
    assert told["title"] == PROJECT["name"]
    for stage in others:
        assert ("LABEL", base.of("LABEL")[0]) in lineage(stages(path), stage.name)


def test_the_cpu_image_has_the_engines_of_make_run() -> None:
    """The extras of `make run`, but for those that make models."""
    (extras,) = re.findall(r"--editable '\.\[([a-z,]+)\]'", (ROOT / "Makefile").read_text().split("STAMP,dev")[0])
    assert installed(stages(ROOT / "deploy/containers/cpu.Containerfile")) >= {*extras.split(",")} - {"export", "demo"}


def healthcheck(path: Path) -> tuple[list[str], list[str]]:
    """Options and command of the probe that both served stages have."""
    (rest,) = {dict(lineage(stages(path), name))["HEALTHCHECK"] for name in SERVED}
    options, _, command = rest.partition(" CMD ")
    return options.split(), words(command)


def probe(path: Path, port: str | None, *before: str) -> subprocess.CompletedProcess[str]:
    """Runs that command with the Python of the tests, as Docker would in the server's container."""
    _, (python, *rest) = healthcheck(path)
    assert python == "/opt/bertserve/bin/python"
    # A proxy that Docker hands to all containers is not asked for the container's own port.
    env = environment({"http_proxy": "http://127.0.0.1:1"} | ({"BERTSERVE_METRICS_PORT": port} if port else {}))
    command = [*before, sys.executable, *rest]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def port_of(server: Server) -> str:
    return server.metrics.rpartition(":")[2]


@every
def test_the_health_check_follows_readiness(path: Path, models: Path, tmp_path: Path) -> None:
    """Over the port of metrics, with TLS and keys too; not while the server ends, nor where there is none."""
    keys = write_keys(tmp_path / "keys", FIRST)
    certificates = Certificates(tmp_path / "certificates")
    secured = ("--api-keys-file", str(keys), "--lame-duck-s", "60")
    with Server(models, *FAKE, *secured, tls=certificates) as server:
        done = probe(path, port_of(server))
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        server.signal(signal.SIGTERM)
        wait_for(lambda: get(server.metrics, "/readyz").status == 503, "readiness to fall")
        assert probe(path, port_of(server)).returncode == 1
        server.signal(signal.SIGTERM)
        server.wait()
        assert probe(path, port_of(server)).returncode == 1


@every
def test_the_health_check_asks_the_usual_port(path: Path) -> None:
    """Where the environment names none, and often enough that an engine's restart is no failure."""
    options, command = healthcheck(path)
    told = dict(option.removeprefix("--").split("=") for option in options)
    assert f"'BERTSERVE_METRICS_PORT', '{Settings().metrics_port}'" in command[-1]
    assert int(told["retries"]) * int(told["interval"].removesuffix("s")) >= 60
    timeout = re.findall(r"timeout=(\d+)", command[-1])
    assert int(timeout[0]) < int(told["timeout"].removesuffix("s"))


@every
def test_the_health_check_speaks_ipv6(path: Path, models: Path, tmp_path: Path) -> None:
    """Where the server listens on nothing else; containers have `localhost` for both families."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip(excused("only root can give a process hosts of its own"))
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n::1 localhost\n")
    script = f"mount --bind '{hosts}' /etc/hosts && exec \"$@\""
    confined = ("unshare", "--mount", "sh", "-c", script, "sh")
    if subprocess.run([*confined, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip(excused("no namespaces here"))
    with Server(models, *FAKE, "--host", "::1") as server:
        assert probe(path, port_of(server), *confined).returncode == 0
        assert probe(path, str(free_port()), *confined).returncode == 1


@every
def test_the_commands_in_the_comments_build_it(path: Path) -> None:
    """Each names this file and a stage that it has."""
    lines = [line.removeprefix("#") for line in path.read_text().splitlines() if line.startswith("#   docker build")]
    assert len(lines) == len(SERVED)
    for line in lines:
        given = shlex.split(line)
        assert (ROOT / given[given.index("-f") + 1]) == path
        target = given[given.index("--target") + 1] if "--target" in given else "mounted"
        assert target in {stage.name for stage in stages(path)}


@pytest.mark.external(kubernetes.obstacle())
@pytest.mark.parametrize(("overlay", "kind"), [("cpu", "cpu"), ("t4", "gpu"), ("kserve", "cpu")])
def test_manifests_and_images_agree(overlay: str, kind: str) -> None:
    """The same user, and an image of the right kind and of this version."""
    rest = dict(lineage(stages(ROOT / f"deploy/containers/{kind}.Containerfile"), "baked"))
    user, group = rest["USER"].split(":")
    for pod in pods(manifests(overlay)):
        security = pod["securityContext"]
        assert (security["runAsUser"], security["runAsGroup"]) == (int(user), int(group))
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            assert container["image"].endswith(f"/bertserve:{PROJECT['version']}-{kind}")
