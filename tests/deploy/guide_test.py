"""docs/deploy.md: its commands are understood, its files exist, its example renders, its numbers are the settings'."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from typing import TYPE_CHECKING

import kubernetes_validate
import pytest
import yaml

from export.cli import export as export_cli
from export.cli import inspect
from loadtest.benchmarks import runner
from loadtest.benchmarks.__main__ import BENCHMARKS
from loadtest.capacity import simulate_cli, size_cli
from serving.lifecycle import longest_end_s
from serving.settings import Settings
from tests.support import kubernetes
from tests.support.containerfile import lineage, stages
from tests.support.kubernetes import (
    COMPONENTS,
    NEWEST,
    OLDEST,
    OVERLAYS,
    combined,
    containers,
    manifests,
    of_kind,
    pods,
    render,
)
from tests.support.models import ROOT

if TYPE_CHECKING:
    from pathlib import Path

GUIDE = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
COMMANDS = [shlex.split(line) for line in re.findall(r"^    (\S.*)$", GUIDE, re.MULTILINE)]


def commands(*head: str) -> list[list[str]]:
    """What follows these words in the commands that begin with them."""
    found = [words[len(head) :] for words in COMMANDS if words[: len(head)] == list(head)]
    assert found, f"no command `{shlex.join(head)}`"
    return found


def test_commands_are_understood() -> None:
    """By the parsers of the verbs."""
    for words in commands("bertserve", "export"):
        arguments = export_cli.parser()
        export_cli.recipe_of(arguments.parse_args(words), arguments)
    for words in commands("bertserve", "inspect"):
        inspect.parser().parse_args(words)
    for words in commands("bertserve", "simulate"):
        simulate_cli.parser().parse_args(words)
    for words in commands("bertserve", "size"):
        size_cli.parser().parse_args(words)
    for words in (*commands("bertserve", "serve"), *commands("bertserve", "doctor")):
        Settings.load(words, {})
    for words in commands("python", "-m", "loadtest.benchmarks"):
        runner.parser(BENCHMARKS).parse_args(words)
    targets = {line.split(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if "## " in line}
    assert {word for (word,) in commands("make")} <= targets


def test_images_are_built_of_files_that_exist() -> None:
    """And of stages that they have."""
    for words in commands("docker", "build"):
        made = stages(ROOT / words[words.index("-f") + 1])
        assert words[words.index("--target") + 1] in {stage.name for stage in made}


def test_a_server_in_docker_in_three_lines() -> None:
    """Of an image that the line before builds; where the image looks for models, on a port that it opens."""
    at = next(at for at, words in enumerate(COMMANDS) if words[:2] == ["docker", "run"])
    build, run, call = COMMANDS[at - 1 : at + 2]
    assert build[build.index("-t") + 1] == run[-1]
    made = dict(lineage(stages(ROOT / build[build.index("-f") + 1]), build[build.index("--target") + 1]))
    verb, *options = json.loads(made["CMD"])
    assert verb == "serve"
    assert run[run.index("--volume") + 1] == f"$PWD/models:{Settings.load(options, {}).models}:ro"
    address, _, port = run[run.index("--publish") + 1].rpartition(":")
    assert port in made["EXPOSE"].split()
    assert call[0] == "curl"
    assert f"http://{address}/embed" in call


def test_every_overlay_and_component_is_told_of() -> None:
    """In the tables, but for what only other components use; and what is applied exists."""
    tables = set(re.findall(r"^\| `([a-z0-9-]+)` \|", GUIDE, re.MULTILINE))
    assert tables == {*OVERLAYS, *COMPONENTS} - {"https-egress"}
    for path, *_ in commands("kubectl", "apply", "-k"):
        assert (ROOT / path / "kustomization.yaml").is_file()
    for (path,) in commands("kubectl", "apply", "-f"):
        assert (ROOT / path).is_file()


def test_links_lead_somewhere() -> None:
    """Within the project's pages; files that are named in passing exist."""
    for target in re.findall(r"\]\(([^)#:]+)", GUIDE):
        assert (ROOT / "docs" / target).is_file(), target
    for path in re.findall(r"`(deploy/[^` ]+)`", GUIDE):
        assert (ROOT / path).exists(), path


@pytest.mark.skipif(kubernetes.obstacle() is not None, reason=str(kubernetes.obstacle()))
def test_the_example_renders(tmp_path: Path) -> None:
    """With every component in it, and its own image and setting."""
    (example,) = re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    (tmp_path / "my-cluster").mkdir()
    (tmp_path / "my-cluster" / "kustomization.yaml").write_text(example)
    found = yaml.safe_load(render(tmp_path / "my-cluster", within=tmp_path))
    kinds = {manifest["kind"] for manifest in found}
    assert {"Deployment", "ScaledObject", "ServiceMonitor", "PrometheusRule"} <= kinds
    (pod,) = pods(found)
    wanted = yaml.safe_load(example)["images"][0]
    for container in [*pod["initContainers"], *pod["containers"]]:
        assert container["image"] == f"{wanted['newName']}:{wanted['newTag']}"
    (settings,) = [manifest["data"] for manifest in found if manifest["metadata"]["name"].startswith("bertserve-sett")]
    assert settings["BERTSERVE_MAX_BATCH_TOKENS"] == "4096"
    assert {"BERTSERVE_HOST", "BERTSERVE_TLS_CERT_FILE"} <= settings.keys()


@pytest.mark.skipif(kubernetes.obstacle() is not None, reason=str(kubernetes.obstacle()))
@pytest.mark.parametrize(("overlay", "component"), [("cpu", "mounted-models"), ("t4", "mounted-models-t4")])
def test_mounted_models_render(tmp_path: Path, overlay: str, component: str) -> None:
    """With a claim of the project's: every container finds the repository where it looks, read-only."""
    found = combined(tmp_path, overlay, component, resources=("models-claim",))
    (claim,) = of_kind(found, "PersistentVolumeClaim")
    assert claim["metadata"]["name"] == "bertserve-models"
    for version in (OLDEST, NEWEST):
        for manifest in found:
            assert kubernetes_validate.validate(manifest, version, strict=True) == version
    (pod,), (plain,) = pods(found), pods(manifests(overlay))
    assert [container["name"] for container in containers(pod)] == [
        container["name"] for container in containers(plain)
    ]
    for container in containers(pod):
        (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "models"]
        assert mount == {"name": "models", "mountPath": "/models", "readOnly": True}
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "models"]
    assert volume["persistentVolumeClaim"] == {"claimName": "bertserve-models", "readOnly": True}


@pytest.mark.skipif(kubernetes.obstacle() is not None, reason=str(kubernetes.obstacle()))
def test_the_example_of_an_object_store_renders(tmp_path: Path) -> None:
    """In place of the component's own settings, under a name that makes a rollout."""
    (example,) = re.findall(r"^    (configMapGenerator:\n(?:    .*\n)+)", GUIDE, re.MULTILINE)
    more = yaml.safe_load(example.replace("\n    ", "\n"))
    found = combined(tmp_path, "cpu", "fetched-models", more=more)
    (config,) = [
        each for each in of_kind(found, "ConfigMap") if each["metadata"]["name"].startswith("bertserve-fetch-")
    ]
    assert config["data"] == dict(line.split("=") for line in more["configMapGenerator"][0]["literals"])


def test_numbers_are_the_settings() -> None:
    """Lame duck, drain, the longest end, the age of connections, and the versions that are validated."""
    usual = Settings()
    assert f"to {usual.lame_duck_s:g} s (`--lame-duck-s`)" in GUIDE
    assert f"to {usual.lame_duck_s + usual.drain_s:g} s (`--drain-s`)" in GUIDE
    assert f"to {longest_end_s(usual.lame_duck_s, usual.drain_s):g} s at most" in GUIDE
    assert usual.max_connection_age_s == 300
    assert f"Kubernetes {OLDEST} to {NEWEST}" in GUIDE
