"""The component `fetched-models`: its command, run by a real rclone against stores that speak S3 and GCS."""

from __future__ import annotations

import contextlib
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.support import kubernetes
from tests.support.clients import Tei
from tests.support.kubernetes import combined, containers, named, pods
from tests.support.models import NAME, ROOT, light_repository
from tests.support.server import FAKE, Server, environment, free_port, listening
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROGRAM, INSTALLED = ROOT / "build" / "rclone" / "usr" / "bin" / "rclone", ROOT / "build" / "stores"
BIN = INSTALLED / "bin"
STORES = {
    "S3": (
        ("moto_server", "-H", "127.0.0.1", "-p"),
        # A provider whose buckets are no names of hosts.
        {"ENDPOINT": "http://127.0.0.1:{port}", "PROVIDER": "Other"},
        {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"},
    ),
    "GCS": (
        (
            "gcp-storage-emulator",
            "start",
            "--host",
            "127.0.0.1",
            "--in-memory",
            "--default-bucket",
            "my-bucket",
            "--port",
        ),
        {"ENDPOINT": "http://127.0.0.1:{port}/storage/v1/", "TYPE": "gcs", "ANONYMOUS": "true", "ENV_AUTH": "false"},
        {},
    ),
}
"""Programs that stand in for the stores, and what a user sets for them: options of the remote, and a Secret."""

pytestmark = [
    pytest.mark.external(kubernetes.obstacle()),
    pytest.mark.external(
        None if PROGRAM.exists() and (INSTALLED / ".installed").exists() else "no rclone here (see make programs)"
    ),
]


class Fetch:
    """The init container, without a container.

    Attributes:
        source: Where it fetches from, as rclone names it.
    """

    def __init__(self, folder: Path, options: dict[str, str], secret: dict[str, str]) -> None:
        """Renders the component.

        Args:
            folder: An empty directory.
            options: Of the remote, in place of the component's or beside them.
            secret: What the Secret would hold.
        """
        found = combined(folder, "cpu", "fetched-models")
        (pod,) = pods(found)
        (self._container,) = [container for container in containers(pod) if container["name"] == "fetch"]
        (config, _) = self._container["envFrom"]
        told = named(found, "ConfigMap", config["configMapRef"]["name"])["data"]
        remote = {f"RCLONE_CONFIG_MODELS_{name}": value for name, value in options.items()}
        self._env = environment({**told, **remote, **secret, "HOME": str(folder), "AWS_CA_BUNDLE": ""})
        self.source = f"models:{told['SOURCE']}"

    def rclone(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [str(PROGRAM), *words, "--retries", "1"]
        return subprocess.run(command, env=self._env, capture_output=True, text=True, timeout=60, check=False)

    def run(self, models: Path, source: str | None = None) -> subprocess.CompletedProcess[str]:
        """Its arguments, with a directory for its volume."""
        (mount,) = self._container["volumeMounts"]
        places = {"models:$(SOURCE)": source or self.source, mount["mountPath"]: str(models)}
        assert places.keys() <= {*self._container["args"]}
        return self.rclone(*(places.get(word, word) for word in self._container["args"]))


@pytest.fixture(params=STORES)
def fetch(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fetch]:
    """The init container beside a store that has the bundle."""
    (program, *words), options, secret = STORES[request.param]
    port = free_port()
    with (tmp_path / "log").open("wb") as log:
        store = subprocess.Popen([str(BIN / program), *words, str(port)], stdout=log, stderr=log, env=environment({}))
    try:
        wait_for(lambda: listening(f"127.0.0.1:{port}"), program, 60)
        fetch = Fetch(tmp_path / "rendered", {name: value.format(port=port) for name, value in options.items()}, secret)
        done = fetch.rclone("copy", "--copy-links", str(light_repository()), fetch.source)
        assert done.returncode == 0, done.stderr
        yield fetch
    finally:
        with contextlib.suppress(ProcessLookupError):
            store.terminate()
        store.wait(30)


def test_what_is_fetched_is_served(fetch: Fetch, tmp_path: Path) -> None:
    """Whole, as its digests say, and again after the init container was ended in the middle."""
    models = tmp_path / "models"
    for _ in range(2):
        done = fetch.run(models)
        assert done.returncode == 0, done.stderr
        (models / NAME / "1" / "manifest.json").unlink()
    assert fetch.run(models).returncode == 0
    with Server(models, *FAKE) as server, Tei(server) as client:
        assert client.embed(["What is a T4?"]).vectors.shape == (1, 384)


def test_a_bucket_that_is_not_there_ends_the_start(fetch: Fetch, tmp_path: Path) -> None:
    """With an exit code, so that Kubernetes tries again and says why."""
    done = fetch.run(tmp_path / "models", "models:another-bucket/bertserve/1")
    assert done.returncode != 0
    assert "directory not found" in done.stderr
