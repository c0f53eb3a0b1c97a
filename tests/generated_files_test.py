"""Files that are made from others are as their makers would make them now."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bertserve.serving.operations.generated_pages import metrics_page, settings_page
from tests.contract.clients.page import page as clients_page

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[1]


def rules() -> str:
    return str(runpy.run_path(str(ROOT / "deploy/monitoring/prometheusrule.py"))["rendered"]())


@pytest.mark.parametrize(
    ("file", "made"),
    [
        ("docs/reference/settings.md", settings_page),
        ("docs/reference/metrics.md", metrics_page),
        ("docs/reference/clients.md", clients_page),
        ("deploy/monitoring/prometheusrule.yaml", rules),
    ],
)
def test_a_file_tells_what_it_was_made_from(file: str, made: Callable[[], str]) -> None:
    """The settings, the catalogue of metrics, the cases of clients, the rules of today; `make docs` makes it anew."""
    assert (ROOT / file).read_text(encoding="utf-8") == made()
