"""The manifests of `deploy/` as a cluster would get them: rendered by real renderers."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import yaml

from bertserve.serving.lifecycle import REPLY_GRACE_S, TRACES_GRACE_S
from tests.support.models import ROOT, kept

if TYPE_CHECKING:
    from collections.abc import Iterator

KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = sorted(path.parent.name for path in KUBERNETES.glob("overlays/*/kustomization.yaml"))
COMPONENTS = sorted(path.parent.name for path in KUBERNETES.glob("components/*/kustomization.yaml"))
OLDEST, NEWEST = "1.27", ".".join(kubernetes_validate.latest_version().split(".")[:2])
"""Of Kubernetes; docs/guides/deploy.md says so, too."""
_KUSTOMIZE = ROOT / "build" / "kustomize" / "kustomize"
_LEAST = 4
"""Of kustomize; before that there were no components worth the name (kubectl 1.20 has 2.0)."""

_RENDERED = "manifests.json"
_VERSION = re.compile(r"Kustomize Version: v(\d+)")

Manifest = dict[str, Any]


def longest_end_s(lame_duck_s: float, drain_s: float) -> float:
    """Seconds from SIGTERM to the exit at most: an engine process ends within the last one."""
    return lame_duck_s + drain_s + REPLY_GRACE_S + TRACES_GRACE_S + 1.0


@functools.cache
def renderers() -> dict[str, tuple[str, ...]]:
    """Commands that render a directory, by name: kustomize from `make programs`, and a kubectl that is new enough."""
    found: dict[str, tuple[str, ...]] = {}
    if _KUSTOMIZE.exists():
        found["kustomize"] = (str(_KUSTOMIZE), "build")
    kubectl = shutil.which("kubectl")
    if kubectl is not None:
        done = subprocess.run([kubectl, "version", "--client"], capture_output=True, text=True, timeout=60, check=False)
        version = _VERSION.search(done.stdout)
        if version is not None and int(version[1]) >= _LEAST:
            found["kubectl"] = (kubectl, "kustomize")
    return found


def obstacle() -> str | None:
    """Why nothing can be rendered here; None where something can."""
    return None if renderers() else "neither kustomize nor a current kubectl here (see make programs)"


def render(path: Path, renderer: str = "", *, within: Path = ROOT / "deploy") -> str:
    """What a renderer makes of a directory, as canonical JSON; without a name, of the first renderer there is.

    It is asked once for each state of itself and of all files in `within`, and its answer is kept, as it takes a second
    of CPU. It must not warn of anything.
    """
    command = renderers()[renderer or next(iter(renderers()))]
    program = Path(command[0]).stat()
    key = hashlib.sha256(repr((command[1:], program.st_size, program.st_mtime_ns, path.relative_to(within))).encode())
    for file in sorted(file for file in within.rglob("*") if file.is_file()):
        key.update(repr((str(file.relative_to(within)), file.read_bytes())).encode())
    folder = kept(f"rendered-{key.hexdigest()[:16]}", partial(_render, command, path))
    return (folder / _RENDERED).read_text(encoding="utf-8")


def _render(command: tuple[str, ...], path: Path, folder: Path) -> None:
    # Relative, so that `kustomize` cannot tell where the checkout lies.
    words = [*command, os.path.relpath(path, ROOT)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = json.dumps([found for found in yaml.safe_load_all(done.stdout) if found], sort_keys=True)
    (folder / _RENDERED).write_text(found, encoding="utf-8")


def manifests(overlay: str) -> list[Manifest]:
    found: list[Manifest] = json.loads(_rendered(overlay))
    return found


@functools.cache
def _rendered(overlay: str) -> str:
    return render(KUBERNETES / "overlays" / overlay)


def combined(
    folder: Path, overlay: str, *components: str, resources: tuple[str, ...] = (), more: Manifest | None = None
) -> list[Manifest]:
    """What applying an overlay with components and other resources of `deploy/` would send."""
    shutil.copytree(ROOT / "deploy", folder / "deploy")
    (folder / "mine").mkdir()
    mine = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "bertserve",
        "resources": [f"../deploy/kubernetes/{path}" for path in (f"overlays/{overlay}", *resources)],
        "components": [f"../deploy/kubernetes/components/{path}" for path in components],
        **(more or {}),
    }
    (folder / "mine" / "kustomization.yaml").write_text(yaml.safe_dump(mine), encoding="utf-8")
    found: list[Manifest] = json.loads(render(folder / "mine", within=folder))
    return found


def of_kind(found: list[Manifest], kind: str) -> list[Manifest]:
    return [manifest for manifest in found if manifest["kind"] == kind]


def named(found: list[Manifest], kind: str, name: str) -> Manifest:
    (manifest,) = [manifest for manifest in of_kind(found, kind) if manifest["metadata"]["name"] == name]
    return manifest


def pods(found: list[Manifest]) -> Iterator[Manifest]:
    """The specs of the pods that these manifests make, those that KServe puts together included."""
    for deployment in of_kind(found, "Deployment"):
        yield deployment["spec"]["template"]["spec"]
    for service in of_kind(found, "InferenceService"):
        predictor = service["spec"]["predictor"]
        runtime = named(found, "ServingRuntime", predictor["model"]["runtime"])
        yield {**predictor, "containers": runtime["spec"]["containers"]}


def containers(pod: Manifest) -> list[Manifest]:
    """Those that prepare and those that serve."""
    return [*pod.get("initContainers", []), *pod["containers"]]
