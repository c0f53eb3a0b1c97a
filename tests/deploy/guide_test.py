"""docs/guides/deploy.md: its commands are understood, its files exist, its examples render, its numbers are today's."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import pytest
import yaml
from cryptography import x509

from bertserve.export.cli import export as export_cli
from bertserve.export.cli import inspect
from bertserve.loadtest.capacity import simulate_cli
from bertserve.serving.security.tls import check_pair
from bertserve.serving.settings import Settings
from tests.support import kubernetes
from tests.support.containerfile import lineage, stages
from tests.support.kubernetes import (
    COMPONENTS,
    NEWEST,
    OLDEST,
    OVERLAYS,
    combined,
    containers,
    longest_end_s,
    manifests,
    of_kind,
    pods,
    render,
)
from tests.support.models import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.kubernetes import Manifest

GUIDE = (ROOT / "docs/guides/deploy.md").read_text(encoding="utf-8")
EXAMPLES = [yaml.safe_load(example) for example in re.findall(r"^```yaml\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)]
COMMANDS = [shlex.split(line) for line in re.findall(r"^    (\S.*)$", GUIDE, re.MULTILINE)]


def commands(*head: str) -> list[list[str]]:
    """What follows these words in the commands that begin with them."""
    found = [words[len(head) :] for words in COMMANDS if words[: len(head)] == list(head)]
    assert found, f"no command `{shlex.join(head)}`"
    return found


def examples(key: str, value: object = None) -> list[Any]:
    """The examples with this member, of this value unless it is None."""
    found = [example for example in EXAMPLES if key in example and (value is None or example[key] == value)]
    assert found
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
    for words in (*commands("bertserve", "serve"), *commands("bertserve", "doctor")):
        Settings.load(words, {})


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
    # Docker kills after 10 s unless it is told otherwise.
    settings = Settings.load([], {})
    assert int(run[run.index("--stop-timeout") + 1]) > longest_end_s(settings.lame_duck_s, settings.drain_s)
    assert call[0] == "curl"
    assert f"http://{address}/embed" in call


def test_every_overlay_and_component_is_told_of() -> None:
    """In the lists; and what is applied exists."""
    items = re.findall(r"^- ((?:`[a-z0-9-]+`(?:, )?)+): ", GUIDE, re.MULTILINE)
    listed = {name for item in items for name in re.findall(r"[a-z0-9-]+", item)}
    assert listed == {*OVERLAYS, *COMPONENTS}
    for path, *_ in commands("kubectl", "apply", "-k"):
        assert path == "my-cluster" or (ROOT / path / "kustomization.yaml").is_file()
    for rule, path, *_ in commands("sed"):
        _, image, own, _ = rule.split(",")
        assert f"image: {image}/bertserve" in (ROOT / path).read_text()
        assert own in GUIDE


def test_links_lead_somewhere() -> None:
    """Within the project's pages; files that are named in passing exist."""
    for target in re.findall(r"\]\(([^)#:]+)", GUIDE):
        assert (ROOT / "docs/guides" / target).is_file(), target
    for path in re.findall(r"`(deploy/[^` ]+)`", GUIDE):
        assert (ROOT / path).exists(), path


@pytest.mark.external(kubernetes.obstacle())
def test_the_example_renders(tmp_path: Path) -> None:
    """With every component in it, and its own image and setting."""
    example, _ = examples("kind", "Kustomization")
    assert example is EXAMPLES[0]
    found = rendered(example, tmp_path)
    kinds = {manifest["kind"] for manifest in found}
    assert {"Deployment", "ScaledObject", "ServiceMonitor", "PrometheusRule"} <= kinds
    (pod,) = pods(found)
    wanted = example["images"][0]
    for container in pod["containers"]:
        assert container["image"] == f"{wanted['newName']}:{wanted['newTag']}"
    settings = settings_of(found)
    assert settings["BERTSERVE_DEFAULT_TIMEOUT_MS"] == "500"
    assert {"BERTSERVE_HOST", "BERTSERVE_TLS_CERT_FILE"} <= settings.keys()


@pytest.mark.external(kubernetes.obstacle())
def test_the_example_for_t4_nodes_renders(tmp_path: Path) -> None:
    """With keys, TLS, autoscaling and monitoring; its patches name the proven model, and its comments are right."""
    _, example = examples("kind", "Kustomization")
    found = rendered(example, tmp_path)
    assert {"ServiceMonitor", "PrometheusRule"} <= {manifest["kind"] for manifest in found}
    (deployment,), (scaled,) = of_kind(found, "Deployment"), of_kind(found, "ScaledObject")
    assert "replicas" not in deployment["spec"]
    assert scaled["spec"]["maxReplicaCount"] == 6
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    settings = settings_of(found)
    assert settings["BERTSERVE_ENGINE"] == "tensorrt"
    assert {"BERTSERVE_API_KEYS_FILE", "BERTSERVE_TLS_CERT_FILE"} <= settings.keys()
    (pod,) = pods(found)
    (init,) = pod["initContainers"]
    assert init["args"][:2] == ["verify", "/models/sentiment"]
    image = example["images"][0]
    assert {container["image"] for container in containers(pod)} == {f"{image['newName']}:{image['newTag']}"}
    patch, _ = example["patches"]
    replicas = yaml.safe_load(re.findall(r"^# (replicas: .*)$", GUIDE, re.MULTILINE)[0])
    later = {**patch, "patch": patch["patch"].replace("initContainers/0", "initContainers/1")}
    for component in ("fetched-models", "exported-model"):
        assert component in re.findall(r"# With (.*): initContainers/1", GUIDE)[0]
        own = {"patches": [later], **replicas}
        more = combined(tmp_path / component, "t4", component, resources=("models-claim",), more=own)
        assert of_kind(more, "Deployment")[0]["spec"]["replicas"] == replicas["replicas"][0]["count"]
        (pod,) = pods(more)
        _, verify = pod["initContainers"]
        assert (verify["name"], verify["args"][:2]) == ("verify", ["verify", "/models/sentiment"])


def settings_of(found: list[Manifest]) -> dict[str, str]:
    """The server's settings."""
    (settings,) = [each for each in of_kind(found, "ConfigMap") if each["metadata"]["name"].startswith("bertserve-set")]
    data: dict[str, str] = settings["data"]
    return data


def rendered(example: Any, folder: Path) -> list[Manifest]:
    """The manifests of an overlay of the guide's, beside a copy of `deploy/`."""
    shutil.copytree(ROOT / "deploy", folder / "deploy")
    (folder / "my-cluster").mkdir()
    (folder / "my-cluster" / "kustomization.yaml").write_text(yaml.safe_dump(example))
    found: list[Manifest] = yaml.safe_load(render(folder / "my-cluster", within=folder))
    return found


@pytest.mark.external(kubernetes.obstacle())
@pytest.mark.parametrize("overlay", ["cpu", "t4"])
def test_mounted_models_render(tmp_path: Path, overlay: str) -> None:
    """With a claim of the project's: every container finds the repository where it looks, read-only."""
    found = combined(tmp_path, overlay, "mounted-models", resources=("models-claim",))
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


@pytest.mark.external(kubernetes.obstacle())
def test_the_example_of_an_object_store_renders(tmp_path: Path) -> None:
    """In place of the component's own settings, under a name that makes a rollout.

    By patches: kustomize 5.1 and newer run generators before components, and have nothing to merge with.
    """
    s3, gcs = [example for example in patches() if "bertserve-fetch" in str(example)]
    found = {
        name: dict(bertserve_fetch(combined(tmp_path / name, "cpu", "fetched-models", more=more)))
        for name, more in (("s3", s3), ("gcs", gcs))
    }
    (whole,) = yaml.safe_load(gcs["patches"][0]["patch"])
    assert whole["path"] == "/data"
    assert found["gcs"] == whole["value"]
    own = dict(bertserve_fetch(combined(tmp_path / "own", "cpu", "fetched-models")))
    parts = {each["path"].removeprefix("/data/"): each["value"] for each in yaml.safe_load(s3["patches"][0]["patch"])}
    assert parts.keys() <= own.keys()
    assert found["s3"] == own | parts
    assert found["s3"]["RCLONE_CONFIG_MODELS_TYPE"] == "s3"


def patches() -> list[Any]:
    """The examples that are patches alone."""
    return [example for example in examples("patches") if "kind" not in example]


def bertserve_fetch(found: list[Manifest]) -> dict[str, str]:
    """What the init container is told, of a ConfigMap whose name makes a rollout."""
    (config,) = [
        each for each in of_kind(found, "ConfigMap") if each["metadata"]["name"].startswith("bertserve-fetch-")
    ]
    data: dict[str, str] = config["data"]
    return data


@pytest.mark.external(kubernetes.obstacle())
def test_the_patches_for_a_cluster_render(tmp_path: Path) -> None:
    """All together: each adds what it says."""
    (example,) = [example for example in patches() if "bertserve-fetch" not in str(example)]
    parts = ("fetched-models", "keda", "../../monitoring")
    found = combined(tmp_path / "with", "t4", *parts, resources=("models-claim",), more=example)
    (scaled,) = of_kind(found, "ScaledObject")
    assert scaled["spec"]["minReplicaCount"] == 2
    (claim,) = of_kind(found, "PersistentVolumeClaim")
    assert claim["spec"]["storageClassName"] == "my-class"
    for kind in ("ServiceMonitor", "PrometheusRule"):
        (manifest,) = of_kind(found, kind)
        assert manifest["metadata"]["labels"]["release"] == "kube-prometheus-stack"
    for version in (OLDEST, NEWEST):
        assert kubernetes_validate.validate(claim, version, strict=True) == version


@pytest.mark.external(kubernetes.obstacle())
def test_a_registry_of_ones_own_is_everywhere(tmp_path: Path) -> None:
    """Both entries of the example name every image of the project's, the exporter's too."""
    images = examples("kind", "Kustomization")[0]["images"]
    found = combined(tmp_path, "cpu", "exported-model", resources=("models-claim",), more={"images": images})
    (pod,) = pods(found)
    (init,), (serving,) = pod["initContainers"], pod["containers"]
    assert serving["image"] == f"{images[0]['newName']}:{images[0]['newTag']}"
    assert init["image"].startswith(f"{images[1]['newName']}:")


@pytest.mark.external
def test_the_certificate_has_the_names_that_clients_use(tmp_path: Path) -> None:
    """The one that openssl makes by the guide's line, and cert-manager's."""
    (words,) = commands("openssl", "req")
    openssl = shutil.which("openssl")
    assert openssl is not None
    subprocess.run([openssl, "req", *words], cwd=tmp_path, check=True, capture_output=True, timeout=60)
    check_pair(tmp_path / "tls.crt", tmp_path / "tls.key")
    certificate = x509.load_pem_x509_certificate((tmp_path / "tls.crt").read_bytes())
    extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    names = set(extension.value.get_values_for_type(x509.DNSName))
    (made,) = examples("kind", "Certificate")
    assert set(made["spec"]["dnsNames"]) == names
    assert {host.partition(":")[0] for host in re.findall(r"bertserve[\w-]*\.bertserve:800[01]", GUIDE)} <= names


def test_numbers_are_the_settings() -> None:
    """Lame duck, drain, the longest end, the age of connections, and the versions that are validated."""
    usual = Settings()
    assert f"to {usual.lame_duck_s:g} s (`--lame-duck-s`)" in GUIDE
    assert f"to {usual.lame_duck_s + usual.drain_s:g} s (`--drain-s`)" in GUIDE
    assert f"to {longest_end_s(usual.lame_duck_s, usual.drain_s):g} s at most" in GUIDE
    assert usual.max_connection_age_s == 300
    assert f"Kubernetes {OLDEST} to {NEWEST}" in GUIDE
