"""The manifests of `deploy/` as a cluster would get them: rendered by real renderers."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import yaml

from tests.support.models import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = sorted(path.parent.name for path in KUBERNETES.glob("overlays/*/kustomization.yaml"))
OLDEST, NEWEST = "1.27", ".".join(kubernetes_validate.latest_version().split(".")[:2])
"""Of Kubernetes; docs/deploy.md says so, too."""
_KUSTOMIZE = ROOT / "build" / "kustomize" / "kustomize"
_LEAST = 4
"""Of kustomize; before that there were no components worth the name (kubectl 1.20 has 2.0)."""

_VERSION = re.compile(r"Kustomize Version: v(\d+)")

Manifest = dict[str, Any]


@functools.cache
def renderers() -> dict[str, tuple[str, ...]]:
    """Commands that render a directory, by name: kustomize from `make kustomize`, and a kubectl that is new enough."""
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
    return None if renderers() else "neither kustomize nor a current kubectl here (see make kustomize)"


@functools.cache
def render(path: Path, renderer: str = "") -> str:
    """What a renderer makes of a directory, as canonical JSON; without a name, of the first renderer there is.

    Raises:
        AssertionError: It refuses, or warns of something.
    """
    command = renderers()[renderer or next(iter(renderers()))]
    # Relative, so that `kustomize` cannot tell where the checkout lies.
    words = [*command, os.path.relpath(path, ROOT)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.dumps([found for found in yaml.safe_load_all(done.stdout) if found], sort_keys=True)


def manifests(overlay: str) -> list[Manifest]:
    """What applying an overlay would send."""
    found: list[Manifest] = json.loads(render(KUBERNETES / "overlays" / overlay))
    return found


def of_kind(found: list[Manifest], kind: str) -> list[Manifest]:
    """Those of a kind."""
    return [manifest for manifest in found if manifest["kind"] == kind]


def named(found: list[Manifest], kind: str, name: str) -> Manifest:
    """The only one of that kind and name."""
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
