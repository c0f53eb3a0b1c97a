"""The manifests and the server agree: ports, routes, options, settings, metrics, and the time that an end takes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from bertserve.export.cli import export, verify
from bertserve.serving.settings import Settings
from tests.support import kubernetes
from tests.support.certificates import Certificates
from tests.support.clients import get
from tests.support.credentials import FIRST, write_keys
from tests.support.kubernetes import OVERLAYS, combined, containers, longest_end_s, manifests, named, of_kind, pods
from tests.support.models import ROOT
from tests.support.promql import names
from tests.support.server import Server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.kubernetes import Manifest

pytestmark = pytest.mark.external(kubernetes.obstacle())

PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def environment(found: list[Manifest], pod: Manifest) -> dict[str, str]:
    """What a container of the server's gets from its ConfigMaps."""
    values: dict[str, str] = {}
    for source in pod["containers"][0].get("envFrom", []):
        values |= named(found, "ConfigMap", source["configMapRef"]["name"])["data"]
    return values


def settings(overlay: str) -> Settings:
    """The settings that a pod of an overlay runs with."""
    found = manifests(overlay)
    (pod,) = pods(found)
    verb, *options = pod["containers"][0]["args"]
    assert verb == "serve"
    return Settings.load(options, environment(found, pod))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_settings_are_understood(overlay: str) -> None:
    """By the server's own reader, which refuses names that it does not know."""
    understood = settings(overlay)
    assert understood.host == "::"
    (pod,) = pods(manifests(overlay))
    mounts = {mount["mountPath"] for mount in pod["containers"][0].get("volumeMounts", [])}
    assert understood.cache_dir is None or str(understood.cache_dir) in mounts


def test_every_address_that_is_shipped_is_of_both_families() -> None:
    """In a cluster of IPv6 alone, probes and clients would find nobody behind an address of IPv4."""
    texts = [
        file.read_text(encoding="utf-8", errors="replace") for file in (ROOT / "deploy").rglob("*") if file.is_file()
    ]
    hosts = re.findall(r'(?:BERTSERVE_HOST=|--host"?[, ]+"?)([^\s",]+)', "\n".join(texts))
    assert len(hosts) >= 4  # two images, the base, KServe's runtime
    assert set(hosts) == {"::"}
    assert [text for text in texts if "0.0.0.0" in text] == []


def test_secured_settings_are_understood(tmp_path: Path) -> None:
    """With the files where the Secrets put them."""
    found = combined(tmp_path / "rendered", "cpu", "secured")
    (pod,) = pods(found)
    values = environment(found, pod)
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    secrets = {volume["name"]: volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume}
    made = Certificates(tmp_path / "made")
    placed = {"keys": write_keys(tmp_path / "keys", FIRST), "tls.crt": made.cert, "tls.key": made.key}
    mounted = {}
    for name, value in values.items():
        folder, _, file = value.rpartition("/")
        if name.endswith("_FILE"):
            mounted[name] = secrets[mounts[folder]]
            values[name] = str(placed[file])
    assert mounted == {
        "BERTSERVE_API_KEYS_FILE": "bertserve-api-keys",
        "BERTSERVE_TLS_CERT_FILE": "bertserve-tls",
        "BERTSERVE_TLS_KEY_FILE": "bertserve-tls",
    }
    assert Settings.load([], values).api_keys_file is not None


@pytest.mark.parametrize(("overlay", "parts"), [("cpu", ("exported-model",)), ("t4", ("exported-model",)), ("t4", ())])
def test_commands_are_understood(tmp_path: Path, overlay: str, parts: tuple[str, ...]) -> None:
    """Verbs and options of init containers, by the parsers of the commands."""
    for pod in pods(combined(tmp_path, overlay, *parts)):
        assert pod["initContainers"]
        for container in pod.get("initContainers", []):
            verb, *options = container["args"]
            (serving,) = pod["containers"]
            if verb == "export":
                parser = export.parser()
                recipe = export.recipe_of(parser.parse_args(options), parser)
                assert recipe.out == settings(overlay).models
                assert recipe.if_changed
                continue
            assert verb == "verify"
            given = verify.parser().parse_args(options)
            assert str(given.cache_dir) in {mount["mountPath"] for mount in serving["volumeMounts"]}
            assert given.bundle.is_relative_to(settings(overlay).models)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_end_fits_into_the_grace_period(overlay: str) -> None:
    """Lame duck, drain, refusals of what was left, last traces, the engine: and then there is time to spare."""
    understood = settings(overlay)
    takes_s = longest_end_s(understood.lame_duck_s, understood.drain_s)
    for pod in pods(manifests(overlay)):
        assert takes_s + 5 <= pod["terminationGracePeriodSeconds"]
        assert all("lifecycle" not in container for container in containers(pod))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_lame_duck_outlasts_the_readiness_probe(overlay: str) -> None:
    """Whoever looks at readiness has seen it fall, and has had a second to act, before a port closes."""
    understood = settings(overlay)
    for pod in pods(manifests(overlay)):
        probe = pod["containers"][0]["readinessProbe"]
        assert (
            probe["periodSeconds"] * probe["failureThreshold"] + probe["timeoutSeconds"] + 1 <= understood.lame_duck_s
        )


def ports_of(container: Manifest) -> dict[str | int, int]:
    """A container's ports, by name and by number."""
    found = {port["containerPort"]: port["containerPort"] for port in container["ports"]}
    return found | {port["name"]: port["containerPort"] for port in container["ports"]}


def address(server: Server, port: int) -> str:
    """Where a running server has what a container has on a port."""
    usual = Settings()
    return {usual.http_port: server.http, usual.grpc_port: server.grpc, usual.metrics_port: server.metrics}[port]


@pytest.fixture(scope="module")
def warming_server(models: Path) -> Iterator[Server]:
    """A server whose engine warms up for longer than the test takes."""
    options = ("--engine", "fake", "--precision", "fp32", "--fake-ms", "5000")
    with Server(models, *options, wait_ready=False) as server:
        server.wait_logged("state: warming")
        yield server


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_three_probes_mean_three_things(overlay: str, fake_server: Server, warming_server: Server) -> None:
    """While it warms up it is alive, has not started and takes no requests; ready, all three are content."""
    for pod in pods(manifests(overlay)):
        (container,) = pod["containers"]
        asked = {}
        for name in PROBES:
            probe = container[name]["httpGet"]
            port = ports_of(container)[probe["port"]]
            assert get(address(fake_server, port), probe["path"]).status == 200
            asked[name] = get(address(warming_server, port), probe["path"]).status == 200
        assert asked == {"startupProbe": False, "readinessProbe": False, "livenessProbe": True}
        startup, liveness = container["startupProbe"], container["livenessProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 300
        assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 30


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_ports_are_the_servers(overlay: str) -> None:
    """Every port of a container is one that the server opens with these settings."""
    usual = Settings()
    opened = {"http": usual.http_port, "http1": usual.http_port, "grpc": usual.grpc_port, "metrics": usual.metrics_port}
    for pod in pods(manifests(overlay)):
        for port in pod["containers"][0]["ports"]:
            assert port["containerPort"] == opened[port["name"]]


def test_metrics_of_autoscaling_are_scraped(fake_server: Server, tmp_path: Path) -> None:
    """Both autoscalers follow predicted wait and tokens in flight, by names that a running server has."""
    scraped = set(re.findall(r"^([a-z_]+)(?:\{| )", get(fake_server.metrics, "/metrics").body.decode(), re.MULTILINE))
    (scaler,) = of_kind(combined(tmp_path / "hpa", "cpu", "hpa"), "HorizontalPodAutoscaler")
    followed = {metric["pods"]["metric"]["name"] for metric in scaler["spec"]["metrics"]}
    (keda,) = of_kind(combined(tmp_path / "keda", "cpu", "keda"), "ScaledObject")
    asked = {name for trigger in keda["spec"]["triggers"] for name in names(trigger["metadata"]["query"])}
    assert asked == followed == {"bertserve_predicted_wait_seconds", "bertserve_admitted_tokens"}
    assert followed <= scraped


def test_scrapes_find_their_path(fake_server: Server) -> None:
    """The monitor's, and the one that KServe's annotation names."""
    (monitor,) = of_kind(manifests("monitoring"), "ServiceMonitor")
    for endpoint in monitor["spec"]["endpoints"]:
        assert get(fake_server.metrics, endpoint["path"]).status == 200
    (runtime,) = of_kind(manifests("kserve"), "ServingRuntime")
    notes = runtime["spec"]["annotations"]
    place = address(fake_server, int(notes["prometheus.kserve.io/port"]))
    assert get(place, notes["prometheus.kserve.io/path"]).status == 200


def test_kserve_names_the_model_as_its_paths_do(fake_server: Server) -> None:
    """The InferenceService's name stands in the path that clients are told, so it is the model's."""
    (service,) = of_kind(manifests("kserve"), "InferenceService")
    assert get(fake_server.http, f"/v2/models/{service['metadata']['name']}/ready").status == 200
