"""Files that are made from others are as their makers would make them now."""

from __future__ import annotations

import runpy
from pathlib import Path

from serving.operations.generated_pages import metrics_page, settings_page
from tests.contract.clients.page import page as clients_page

ROOT = Path(__file__).parents[1]


def test_the_settings_page_tells_the_settings_of_today() -> None:
    """`docs/settings.md` was made from the present `Settings`; `make docs` makes it anew."""
    assert (ROOT / "docs/settings.md").read_text(encoding="utf-8") == settings_page()


def test_the_metrics_page_tells_the_metrics_of_today() -> None:
    """`docs/metrics.md` was made from the present catalogue; `make docs` makes it anew."""
    assert (ROOT / "docs/metrics.md").read_text(encoding="utf-8") == metrics_page()


def test_the_page_of_clients_tells_the_cases_of_today() -> None:
    """`docs/clients.md` was made from the present cases and pins; `make docs` makes it anew."""
    assert (ROOT / "docs/clients.md").read_text(encoding="utf-8") == clients_page()


def test_the_operators_rules_are_the_rules_of_today() -> None:
    """`prometheusrule.yaml` was made from the present `rules.yaml`; `make docs` makes it anew."""
    monitoring = ROOT / "deploy" / "monitoring"
    namespace = runpy.run_path(str(monitoring / "prometheusrule.py"))
    assert (monitoring / "prometheusrule.yaml").read_text(encoding="utf-8") == namespace["rendered"]()
