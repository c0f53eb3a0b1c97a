"""A real Prometheus in a process of its own, and promtool, from Debian's package, which `make programs` unpacks."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlencode

import pytest

from tests.support.clients import get
from tests.support.external_servers import program
from tests.support.models import ROOT
from tests.support.server import free_port

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_PROGRAMS = ROOT / "build" / "prometheus" / "usr" / "bin"
JOB = "bertserve"


needs_prometheus = pytest.mark.external(
    None if (_PROGRAMS / "promtool").exists() else "no Prometheus here (see make programs)"
)


def promtool(*words: str, given: str = "", where: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [str(_PROGRAMS / "promtool"), *words]
    return subprocess.run(command, input=given, cwd=where, capture_output=True, text=True, timeout=60, check=False)


class Prometheus:
    """A Prometheus that scrapes once a second; use it in a `with` block."""

    def __init__(self, work: Path, targets: Sequence[str], rules: Path | None = None) -> None:
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rules)] if rules else [],
            "scrape_configs": [{"job_name": JOB, "static_configs": [{"targets": list(targets)}]}],
        }
        (work / "prometheus.json").write_text(json.dumps(config))  # JSON is YAML
        self.address = f"127.0.0.1:{free_port()}"
        command = [
            str(_PROGRAMS / "prometheus"),
            f"--config.file={work / 'prometheus.json'}",
            f"--storage.tsdb.path={work / 'data'}",
            f"--web.listen-address={self.address}",
        ]
        self._program = program(command, work / "prometheus.log", self._has_scraped)

    def __enter__(self) -> Self:
        self._program.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._program.__exit__(*error)

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

    def _has_scraped(self) -> bool:
        return {target["health"] for target in self.targets()} == {"up"}
