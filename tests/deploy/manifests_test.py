"""The manifests: rendered by what users have, valid for the Kubernetes that users run, and as restricted as it goes."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import yaml

from bertserve.export.checkpoint.source import safe_name
from bertserve.export.cli import export as export_cli
from bertserve.loadtest import cli as load_cli
from bertserve.serving.settings import Settings
from tests.support import kubernetes
from tests.support.containerfile import lineage, stages
from tests.support.kubernetes import (
    COMPONENTS,
    KUBERNETES,
    NEWEST,
    OLDEST,
    OVERLAYS,
    combined,
    containers,
    manifests,
    named,
    of_kind,
    pods,
    render,
)
from tests.support.models import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.kubernetes import Manifest

pytestmark = pytest.mark.external(kubernetes.obstacle())


USED: dict[str, tuple[str, str, str]] = {
    # Of resources whose schemas no package brings: version, the fields that must be there, and those that may.
    "ServiceMonitor": (
        "monitoring.coreos.com/v1",
        "selector.matchLabels.* endpoints[].port endpoints[].path",
        "endpoints[].interval endpoints[].scrapeTimeout",
    ),
    "PrometheusRule": (
        "monitoring.coreos.com/v1",
        "groups[].name groups[].rules[].expr",
        (
            "groups[].interval groups[].rules[].record groups[].rules[].alert groups[].rules[].for "
            "groups[].rules[].labels.* groups[].rules[].annotations.*"
        ),
    ),
    "ScaledObject": (
        "keda.sh/v1alpha1",
        (
            "scaleTargetRef.name triggers[].type triggers[].metadata.serverAddress triggers[].metadata.query "
            "triggers[].metadata.threshold"
        ),
        (
            "triggers[].metadata.ignoreNullValues triggers[].metricType minReplicaCount maxReplicaCount "
            "pollingInterval fallback.failureThreshold fallback.replicas "
            "advanced.horizontalPodAutoscalerConfig.behavior.scaleUp.* "
            "advanced.horizontalPodAutoscalerConfig.behavior.scaleDown.*"
        ),
    ),
    "ServingRuntime": (
        "serving.kserve.io/v1alpha1",
        "supportedModelFormats[].name protocolVersions[] containers[].*",
        "supportedModelFormats[].version supportedModelFormats[].autoSelect annotations.*",
    ),
    "InferenceService": (
        "serving.kserve.io/v1beta1",
        "predictor.model.modelFormat.name predictor.model.runtime predictor.model.storageUri",
        (
            "predictor.model.modelFormat.version predictor.model.protocolVersion predictor.minReplicas "
            "predictor.maxReplicas predictor.terminationGracePeriodSeconds predictor.automountServiceAccountToken "
            "predictor.enableServiceLinks predictor.securityContext.*"
        ),
    ),
}
VALUES: dict[str, str] = {
    # What some of these fields may hold.
    "path": "/.*",
    "serverAddress": "https?://.+",
    "type": "prometheus",
    "metricType": "AverageValue|Value",
    "protocolVersions[]": "v1|v2|grpc-v2",
    "protocolVersion": "v1|v2|grpc-v2",
    "storageUri": "[a-z0-9]+://.*",
    **dict.fromkeys(("port",), r"[a-z\d-]+"),
    **dict.fromkeys(("minReplicaCount", "maxReplicaCount", "pollingInterval", "minReplicas", "maxReplicas"), r"\d+"),
    **dict.fromkeys(("failureThreshold", "replicas", "terminationGracePeriodSeconds"), r"\d+"),
    **dict.fromkeys(("autoSelect", "automountServiceAccountToken", "enableServiceLinks"), "True|False"),
}


def leaves(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    """The fields of a manifest, as `rules[].name`, each with its value as text."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        assert value, f"{path} is empty"
        for inner in value:
            yield from leaves(inner, f"{path}[]")
    else:
        yield path, str(value)


def assert_of_others(manifest: Manifest) -> None:
    """It has the fields that are used of its kind, and no more."""
    version, required, optional = USED[manifest["kind"]]
    assert manifest.keys() == {"apiVersion", "kind", "metadata", "spec"}
    assert manifest["apiVersion"] == version
    assert {"name", "namespace"} <= manifest["metadata"].keys() <= {"name", "namespace", "labels"}
    patterns = [re.escape(name).replace(r"\*", ".+") for name in f"{required} {optional}".split()]
    found = dict(leaves(manifest["spec"]))
    assert [path for path in found if not any(re.fullmatch(one, path) for one in patterns)] == []
    for one in patterns[: len(required.split())]:
        assert any(re.fullmatch(one, path) for path in found), one
    for path, value in leaves(manifest["spec"]):
        allowed = VALUES.get(path.rpartition(".")[2]) if not any(part in path for part in FREE) else None
        assert re.fullmatch(allowed or ".+", value, re.DOTALL), (path, value)
    for rule in [rule for group in manifest["spec"].get("groups", ()) for rule in group["rules"]]:
        assert ("alert" in rule) != ("record" in rule)


FREE = ("containers[]", "behavior.", "labels.", "annotations.", "securityContext.", "matchLabels.")
"""Parts of resources that hold what their users like."""


"""What is used of the resources of others, whose schemas no package brings: their fields and no more."""


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("renderer", kubernetes.renderers())
def test_every_overlay_is_rendered(overlay: str, renderer: str) -> None:
    """Without a warning, and to the same by each renderer there is."""
    assert render(KUBERNETES / "overlays" / overlay, renderer) == json.dumps(manifests(overlay), sort_keys=True)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_core_kinds_are_valid(overlay: str, version: str) -> None:
    """Strictly: a field that Kubernetes does not know is an error. What others define is held to what is used of it."""
    assert_valid(manifests(overlay), version)


def assert_valid(found: list[Manifest], version: str) -> None:
    """Every manifest is, for a version of Kubernetes."""
    for manifest in found:
        if manifest["kind"] in USED:
            assert_of_others(manifest)
        else:
            assert kubernetes_validate.validate(manifest, version, strict=True) == version


def test_the_validation_finds_something(tmp_path: Path) -> None:
    """A misspelt field, and one that an older Kubernetes does not know."""
    deployment = named(manifests("cpu"), "Deployment", "bertserve")
    deployment["spec"]["replica"] = 3
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(deployment, NEWEST, strict=True)
    trigger = named(combined(tmp_path, "cpu", "keda"), "ScaledObject", "bertserve")
    trigger["spec"]["triggers"][0]["metadata"]["metricName"] = "gone since 2.12"
    with pytest.raises(AssertionError, match="metricName"):
        assert_of_others(trigger)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_everything_stands_in_one_namespace(overlay: str) -> None:
    """Which exists, and which lets only restricted pods in."""
    found = manifests(overlay)
    (namespace,) = of_kind(found, "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    others = {manifest["metadata"].get("namespace") for manifest in found if manifest is not namespace}
    assert others == {namespace["metadata"]["name"]}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_are_restricted(overlay: str) -> None:
    """The standard `restricted` of Kubernetes, rule by rule, and then a read-only root and no token."""
    found = list(pods(manifests(overlay)))
    assert found
    for pod in found:
        assert_restricted(pod)


def assert_restricted(pod: Manifest) -> None:
    """A pod keeps to all of it."""
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    allowed = {"configMap", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
    assert all(set(volume) - {"name"} <= allowed for volume in pod.get("volumes", []))
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in containers(pod):
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["readOnlyRootFilesystem"] is True
        assert not security.get("privileged")
        assert security.get("runAsNonRoot", True)
        assert all("hostPort" not in port for port in container.get("ports", []))
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False


def test_the_load_test_is_let_in() -> None:
    """Into the server's namespace, to its port, and by no Service's selector; its command is understood."""
    container, options = job_of("loadtest", "load")
    given = load_cli.parser().parse_args(options)
    assert any(given.out.is_relative_to(mount["mountPath"]) for mount in container["volumeMounts"])
    target = urlsplit(given.target)
    service = named(manifests("cpu"), "Service", str(target.hostname))
    assert target.port in {port["port"] for port in service["spec"]["ports"]}


def test_the_export_is_let_in(tmp_path: Path) -> None:
    """The same of the Job that exports, which writes to the claim that servers mount and is let out to the hub."""
    container, options = job_of("export", "export")
    parser = export_cli.parser()
    recipe = export_cli.recipe_of(parser.parse_args(options), parser)
    assert recipe.if_changed
    (claim,) = [volume["persistentVolumeClaim"] for volume in container["volumes"] if volume["name"] == "models"]
    found = combined(tmp_path, "cpu", "exported-model", resources=("models-claim",))
    (pod,) = pods(found)
    (init,), (serving,) = pod["initContainers"], pod["containers"]
    assert claim in [volume.get("persistentVolumeClaim") for volume in pod["volumes"]]
    for each in (container, init):
        mounts = {mount["name"]: mount for mount in each["volumeMounts"]}
        assert mounts == {
            "models": {"name": "models", "mountPath": str(recipe.out)},
            "tmp": {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  the image's home
        }
        assert each["image"] == container["image"]
    assert {"name": "models", "mountPath": str(recipe.out), "readOnly": True} in serving["volumeMounts"]
    (policy,) = of_kind(found, "NetworkPolicy")
    assert {port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]} == {53, 443}


def test_the_export_on_t4_nodes_makes_what_is_verified_there(tmp_path: Path) -> None:
    """An engine for the T4, of the model that the next container verifies."""
    found = combined(tmp_path, "t4", "exported-model", resources=("models-claim",))
    (pod,) = pods(found)
    made, verified = pod["initContainers"]
    (config,) = [
        each for each in of_kind(found, "ConfigMap") if each["metadata"]["name"].startswith("bertserve-model-")
    ]
    asked = config["data"]["MODEL_ID"]
    parser = export_cli.parser()
    recipe = export_cli.recipe_of(
        parser.parse_args([word.replace("$(MODEL_ID)", asked) for word in made["args"][1:]]), parser
    )
    assert (str(recipe.out), list(recipe.tensorrt)) == ("/models", ["t4"])
    assert verified["args"][:2] == ["verify", f"/models/{safe_name(asked.rpartition('/')[2])}"]


def job_of(folder: str, verb: str) -> tuple[Manifest, list[str]]:
    """A Job's container with its pod's volumes, and the options of its command.

    It is valid and restricted, in the server's namespace, of no Service and no network policy of the server's, and its
    image's user is its own.
    """
    (job,) = yaml.safe_load_all((KUBERNETES / folder / "job.yaml").read_text())
    for version in (OLDEST, NEWEST):
        assert kubernetes_validate.validate(job, version, strict=True) == version
    template, found = job["spec"]["template"], manifests("cpu")
    assert_restricted(template["spec"])
    assert [job["metadata"]["namespace"]] == [space["metadata"]["name"] for space in of_kind(found, "Namespace")]
    labels = template["metadata"]["labels"]
    assert not any(labels_match(each["spec"]["selector"], labels) for each in of_kind(found, "Service"))
    policies = [policy["spec"]["podSelector"]["matchLabels"] for policy in of_kind(found, "NetworkPolicy")]
    assert not any(labels_match(selector, labels) for selector in policies)
    user, group = dict(lineage(stages(ROOT / "deploy/containers/cpu.Containerfile"), folder))["USER"].split(":")
    security = template["spec"]["securityContext"]
    assert (security["runAsUser"], security["runAsGroup"]) == (int(user), int(group))
    (container,) = template["spec"]["containers"]
    assert f"-{folder}" in container["image"]
    named_verb, *options = container["args"]
    assert named_verb == verb
    return {**container, "volumes": template["spec"]["volumes"]}, options


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_get_whole_cores_of_their_own(overlay: str) -> None:
    """Requests are limits, so neither neighbours nor throttling disturb an engine's threads."""
    assert_whole_cores(manifests(overlay))


def assert_whole_cores(found: list[Manifest]) -> None:
    """All containers of all pods have them."""
    for pod in pods(found):
        for container in containers(pod):
            assert container["resources"]["requests"] == container["resources"]["limits"]
            assert container["resources"]["limits"]["cpu"].isdigit()


def labels_match(selector: dict[str, str], labels: dict[str, str]) -> bool:
    """Whether a selector chooses what has these labels."""
    return bool(selector) and selector.items() <= labels.items()


@pytest.mark.parametrize("overlay", [name for name in OVERLAYS if name != "kserve"])
def test_everything_points_at_what_is_there(overlay: str) -> None:
    """Selectors choose the pods; ports, settings and claims have names that exist; mounts have volumes."""
    assert_pointing(manifests(overlay))


def assert_pointing(found: list[Manifest]) -> None:
    """So does whatever goes with a Deployment; ingresses lead to Services."""
    deployment = named(found, "Deployment", "bertserve")
    template = deployment["spec"]["template"]
    labels, pod = template["metadata"]["labels"], template["spec"]
    assert labels_match(deployment["spec"]["selector"]["matchLabels"], labels)
    ports = {port["name"]: port["containerPort"] for port in pod["containers"][0]["ports"]}
    for service in of_kind(found, "Service"):
        assert labels_match(service["spec"]["selector"], labels)
        for port in service["spec"]["ports"]:
            assert port["port"] == ports[port["targetPort"]]
    for policy in of_kind(found, "NetworkPolicy"):
        assert labels_match(policy["spec"]["podSelector"]["matchLabels"], labels)
        assert {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]} == set(ports)
    (budget,) = of_kind(found, "PodDisruptionBudget")
    assert labels_match(budget["spec"]["selector"]["matchLabels"], labels)
    (spread,) = pod["topologySpreadConstraints"]
    assert labels_match(spread["labelSelector"]["matchLabels"], labels)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounted = {mount["name"] for container in containers(pod) for mount in container["volumeMounts"]}
    assert mounted == set(volumes)
    named(found, "ServiceAccount", pod["serviceAccountName"])
    assert_named(found, pod)
    assert_routed(found)
    targets = [scaler["spec"]["scaleTargetRef"]["name"] for scaler in scalers(found)]
    assert targets in ([], ["bertserve"])
    assert ("replicas" in deployment["spec"]) is (not targets)


def assert_named(found: list[Manifest], pod: Manifest) -> None:
    """What a pod names is there: claims and ConfigMaps. Secrets are made elsewhere."""
    for claim in filter(None, (volume.get("persistentVolumeClaim") for volume in pod["volumes"])):
        named(found, "PersistentVolumeClaim", claim["claimName"])
    for container in containers(pod):
        for source in container.get("envFrom", []):
            if "configMapRef" in source:
                named(found, "ConfigMap", source["configMapRef"]["name"])
            else:
                assert source["secretRef"]["optional"]


def assert_routed(found: list[Manifest]) -> None:
    """Ingresses lead to ports of Services."""
    for ingress in of_kind(found, "Ingress"):
        for path in (path for rule in ingress["spec"]["rules"] for path in rule["http"]["paths"]):
            assert path["backend"]["service"]["port"]["name"] in ports_of(found, path["backend"]["service"]["name"])


def ports_of(found: list[Manifest], service: str) -> dict[str, int]:
    """The ports of a Service, by their names."""
    return {port["name"]: port["port"] for port in named(found, "Service", service)["spec"]["ports"]}


SOURCES: tuple[tuple[str, ...], ...] = ((), ("mounted-models",), ("exported-model",), ("fetched-models",))
"""Where models come from: the image, a claim, the hub, an object store."""
SCALING: tuple[tuple[str, ...], ...] = ((), ("hpa",), ("keda",))
COMBINATIONS = [
    (overlay, (*source, *scaling, "ingress", *(("secured",) if (at + number) % 2 == 0 else ()), "../../monitoring"))
    for overlay in ("cpu", "t4")
    for at, source in enumerate(SOURCES)
    for number, scaling in enumerate(SCALING)
]
"""Every source of models with every way of scaling, on both kinds of nodes. The other components touch other fields or
add resources: they are in all, or take turns."""


def test_combinations_have_every_component() -> None:
    """Each is in some."""
    assert {part for _, parts in COMBINATIONS for part in parts} == {*COMPONENTS, "../../monitoring"}


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("overlay", "parts"), COMBINATIONS, ids=lambda word: "-".join(word) if word else "baked")
def test_components_combine(tmp_path: Path, overlay: str, parts: tuple[str, ...]) -> None:
    """What holds of overlays holds of what users make of them."""
    found = combined(tmp_path, overlay, *parts, resources=("models-claim",))
    for version in (OLDEST, NEWEST):
        assert_valid(found, version)
    (pod,) = pods(found)
    assert_restricted(pod)
    assert_whole_cores(found)
    assert_pointing(found)
    assert {each["metadata"].get("namespace") for each in found if each["kind"] != "Namespace"} == {"bertserve"}
    names = [container["name"] for container in pod.get("initContainers", [])]
    assert names == [
        *(["fetch"] if "fetched-models" in parts else []),
        *(["export"] if "exported-model" in parts else []),
    ] + (["verify"] if overlay == "t4" else [])
    assert all("/" in container["image"] for container in containers(pod))
    mounts = {container["name"]: container["volumeMounts"] for container in containers(pod)}
    for name in {"bertserve", "verify"} & mounts.keys() if {*parts} & {*sum(SOURCES, ())} else ():
        assert {"name": "models", "mountPath": "/models", "readOnly": True} in mounts[name]
    if "exported-model" in parts:
        assert {"name": "models", "mountPath": "/models"} in mounts["export"]
        assert {"name": "models", "persistentVolumeClaim": {"claimName": "bertserve-models"}} in pod["volumes"]
    (policy,) = of_kind(found, "NetworkPolicy")
    opened = {port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]}
    assert opened == ({53, 443} if {"fetched-models", "exported-model"} & {*parts} else set())


def test_ingresses_leave_deadlines_and_retries_to_the_server(tmp_path: Path) -> None:
    """No timeout is shorter than the longest deadline, nothing is sent again that a replica may have read."""
    longest_s = Settings().max_timeout_ms / 1000
    for ingress in of_kind(combined(tmp_path, "cpu", "ingress"), "Ingress"):
        assert float(ingress["metadata"]["annotations"]["haproxy.org/timeout-server"].removesuffix("s")) > longest_s
        assert not any("retry" in name for name in ingress["metadata"]["annotations"])


def scalers(found: list[Manifest]) -> list[Manifest]:
    """What sets the number of replicas."""
    return [*of_kind(found, "HorizontalPodAutoscaler"), *of_kind(found, "ScaledObject")]


def test_requests_come_in_and_nothing_goes_out() -> None:
    """The server asks nobody; the port without keys is open to the monitoring alone."""
    (policy,) = of_kind(manifests("cpu"), "NetworkPolicy")
    assert sorted(policy["spec"]["policyTypes"]) == ["Egress", "Ingress"]
    assert policy["spec"]["egress"] == []
    (rule,) = [rule for rule in policy["spec"]["ingress"] if {"port": "metrics"} in rule["ports"]]
    assert rule["ports"] == [{"port": "metrics"}]
    (peer,) = rule["from"]
    assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "monitoring"}


def test_grpc_has_a_service_without_an_address() -> None:
    """So that clients see every replica, and only those that are ready."""
    service = named(manifests("cpu"), "Service", "bertserve-grpc")
    assert service["spec"]["clusterIP"] == "None"
    assert not service["spec"].get("publishNotReadyAddresses")


def test_a_rollout_takes_no_capacity_away() -> None:
    """A replica ends once another is ready."""
    strategy = named(manifests("cpu"), "Deployment", "bertserve")["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def test_the_t4_overlay_asks_for_the_card() -> None:
    """On nodes that have one, tolerating their taint, with a cache that the verification and the server share."""
    (pod,) = pods(manifests("t4"))
    spec = named(manifests("t4"), "Deployment", "bertserve")["spec"]
    probe = pod["containers"][0]["startupProbe"]
    assert spec["progressDeadlineSeconds"] >= 2 * probe["periodSeconds"] * probe["failureThreshold"]
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "Tesla-T4"}
    assert [toleration["key"] for toleration in pod["tolerations"]] == ["nvidia.com/gpu"]
    assert [container["resources"]["limits"]["nvidia.com/gpu"] for container in containers(pod)] == [1, 1]
    (verify,), (serve,) = pod["initContainers"], pod["containers"]
    assert verify["image"] == serve["image"]
    assert verify["volumeMounts"] == serve["volumeMounts"]


def test_prometheus_finds_the_metrics() -> None:
    """The monitor selects one Service, by a port that it has."""
    found = manifests("monitoring")
    spec = named(found, "ServiceMonitor", "bertserve")["spec"]
    chosen = [
        service
        for service in of_kind(found, "Service")
        if labels_match(spec["selector"]["matchLabels"], service["metadata"]["labels"])
    ]
    (service,) = chosen
    assert "bertserve" in service["metadata"]["name"]  # becomes the job's name, which BertserveDown looks for
    assert {endpoint["port"] for endpoint in spec["endpoints"]} <= {port["name"] for port in service["spec"]["ports"]}


def test_the_operator_gets_the_rules_and_grafana_the_dashboard() -> None:
    """The very ones that promtool tests and that a running server fills."""
    found = manifests("monitoring")
    rules = yaml.safe_load((ROOT / "deploy/monitoring/rules.yaml").read_text())
    assert named(found, "PrometheusRule", "bertserve")["spec"] == rules
    dashboard = named(found, "ConfigMap", "bertserve-dashboard")
    assert dashboard["data"] == {"dashboard.json": (ROOT / "deploy/monitoring/dashboard.json").read_text()}
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
