"""The container files: what they name exists, and what they run is understood."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from serving.settings import Settings
from tests.support import kubernetes
from tests.support.containerfile import Stage, lineage, stages, words
from tests.support.kubernetes import manifests, pods
from tests.support.models import ROOT
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
    (extras,) = re.findall(r'--constraint constraints\.txt "\.\[([a-z,]+)\]"', made[-6][1])
    assert set(extras.split(",")) == {"cpu", "openvino", "export"}
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert {"torch", "transformers", "onnx"} <= pinned
    rest = dict(made)
    assert "HOME=/tmp" in rest["ENV"]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", rest["USER"])


@every
def test_constraints_are_those_of_the_tests(path: Path) -> None:
    """Every package at the version that the tests ran with, on a Python that is supported."""
    (build, *_) = stages(path)
    assert "--constraint constraints.txt" in " ".join(build.of("RUN"))
    lines = [line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pinned = {canonicalize_name(Requirement(line).name) for line in lines if line}
    assert {canonicalize_name(Requirement(need).name) for need in _own(installed(stages(path)))} <= pinned
    version = re.fullmatch(r"python:(\d+\.\d+)-slim-\w+", build.base)
    assert version is not None
    assert tuple(map(int, version[1].split("."))) >= (3, 11)


@every
def test_what_runs_needs_no_shell_and_no_root(path: Path) -> None:
    """The served stages stand on the base the environment was made on, run nothing, and are a numbered user's."""
    all_stages = stages(path)
    build = all_stages[0]
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
        assert [made[0]] == [("COPY", f"--from=build {folder} {folder}")]
    assert next(stage for stage in all_stages if stage.name == "runtime").base == build.base


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
def test_the_commands_in_the_comments_build_it(path: Path) -> None:
    """Each names this file and a stage that it has."""
    lines = [line.removeprefix("#") for line in path.read_text().splitlines() if line.startswith("#   docker build")]
    assert len(lines) == len(SERVED)
    for line in lines:
        given = shlex.split(line)
        assert (ROOT / given[given.index("-f") + 1]) == path
        target = given[given.index("--target") + 1] if "--target" in given else "mounted"
        assert target in {stage.name for stage in stages(path)}


@pytest.mark.skipif(kubernetes.obstacle() is not None, reason=str(kubernetes.obstacle()))
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
