"""A real Prometheus in a process of its own, and promtool, from Debian's package, which `make prometheus` unpacks."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlencode

from tests.support.clients import get
from tests.support.models import ROOT
from tests.support.server import free_port
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_PROGRAMS = ROOT / "build" / "prometheus" / "usr" / "bin"
START_LIMIT_S = 60.0
_STOP_LIMIT_S = 30.0

JOB = "bertserve"


def obstacle() -> str | None:
    """Why no Prometheus can be started here; None where one can."""
    return None if (_PROGRAMS / "promtool").exists() else "no Prometheus here (see make prometheus)"


def promtool(*words: str, given: str = "", where: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs promtool; `given` is its standard input."""
    command = [str(_PROGRAMS / "promtool"), *words]
    return subprocess.run(command, input=given, cwd=where, capture_output=True, text=True, timeout=60, check=False)


class Prometheus:
    """A Prometheus that scrapes once a second; use it in a `with` block.

    Attributes:
        address: Its `host:port`.
    """

    def __init__(self, work: Path, targets: Sequence[str], rules: Path | None = None) -> None:
        """Prepares; nothing runs before the `with` block.

        Args:
            work: A directory to write to.
            targets: Each `host:port` to scrape.
            rules: A file of rules.
        """
        self._work = work
        self._config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rules)] if rules else [],
            "scrape_configs": [{"job_name": JOB, "static_configs": [{"targets": list(targets)}]}],
        }
        self.address = f"127.0.0.1:{free_port()}"

    def __enter__(self) -> Self:
        """Starts it and waits until it has scraped each target."""
        config = self._work / "prometheus.json"
        config.write_text(json.dumps(self._config))  # JSON is YAML
        command = [
            str(_PROGRAMS / "prometheus"),
            f"--config.file={config}",
            f"--storage.tsdb.path={self._work / 'data'}",
            f"--web.listen-address={self.address}",
        ]
        with (self._work / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        wait_for(self._scraped, "a scrape of every target", START_LIMIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, path: str, **parameters: str) -> Any:
        reply = get(self.address, f"/api/v1/{path}?{urlencode(parameters)}").json()
        assert reply["status"] == "success", reply
        return reply["data"]

    def query(self, expression: str) -> dict[tuple[str, ...], float]:
        """An instant query: each sample's value by the values of its labels, ordered by their names."""
        return {
            tuple(value for _, value in sorted(sample["metric"].items())): float(sample["value"][1])
            for sample in self.ask("query", query=expression)["result"]
        }

    def targets(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("targets")["activeTargets"]
        return found

    def _scraped(self) -> bool:
        try:
            return {target["health"] for target in self.targets()} == {"up"}
        except (OSError, ValueError):
            assert self._process.poll() is None, (self._work / "prometheus.log").read_text()
            return False
