"""Rules, their tests and the dashboard: right in themselves, and about metrics that the server has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from bertserve.serving.errors import BertserveError, BulkOverloaded, InvalidRequest, reasons
from bertserve.serving.telemetry import catalogue
from tests.support.clients import Tei, get, metric, post_json
from tests.support.prometheus import JOB, Prometheus, needs_prometheus, promtool
from tests.support.promql import names, plain
from tests.support.server import Server
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "deploy" / "monitoring"
RULES = yaml.safe_load((MONITORING / "rules.yaml").read_text())
DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text())
EVERY_RULE: list[dict[str, Any]] = [rule for group in RULES["groups"] for rule in group["rules"]]
ALERTS = [rule for rule in EVERY_RULE if "alert" in rule]
RECORDED = {rule["record"] for rule in EVERY_RULE if "record" in rule}
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
SHOWN: list[str] = [target["expr"] for panel in PANELS for target in panel["targets"]]
KNOWN = {
    name
    for entry in (*catalogue.SERVER, *catalogue.PROCESS)
    for name in (
        [f"{entry.name}_{part}" for part in ("bucket", "sum", "count")] if entry.kind == "histogram" else [entry.name]
    )
}
OF_PROMETHEUS = {"up"}
MAX_PANELS, MAX_ALERTS, MAX_RECORDED, MAX_METRICS = 20, 16, 16, 55


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[Server]:
    with Server(models, "--engine", "fake", "--precision", "fp32") as running:
        yield running


@pytest.fixture(scope="module")
def scraper(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus with the rules, evaluated every second."""
    work = tmp_path_factory.mktemp("monitoring")
    quick = {"groups": [{**group, "interval": "1s"} for group in RULES["groups"]]}
    (work / "rules.yaml").write_text(yaml.safe_dump(quick))
    with Prometheus(work, [server.metrics], work / "rules.yaml") as running:
        yield running


def test_the_name_finder_finds_names() -> None:
    """And no functions, labels, strings, ranges or words of the language."""
    expression = 'sum by (a, b) (rate(x_total{c="d_total", e=~"f"}[5m])) / on (g) y:z > 1 or vector(0) and h offset 5m'
    assert names(expression) == {"x_total", "y:z", "h"}


@pytest.mark.parametrize("expression", sorted({*SHOWN, *(rule["expr"] for rule in EVERY_RULE)}))
def test_every_name_is_a_metric(expression: str) -> None:
    """Of the server, of Prometheus, or recorded by our rules."""
    found = names(plain(expression))
    assert found
    assert found <= KNOWN | RECORDED | OF_PROMETHEUS


def test_every_metric_is_read() -> None:
    """By the rules, the dashboard, an autoscaler, Ray's replica or a guide; there are few enough to know them all."""
    files = [*(ROOT / "deploy").rglob("*.*"), *(ROOT / "docs/guides").glob("*.md"), ROOT / "docs/reference/alerts.md"]
    read = "\n".join(file.read_text(encoding="utf-8") for file in files)
    metrics = [entry.name for entry in (*catalogue.SERVER, *catalogue.PROCESS)]
    assert [name for name in metrics if not re.search(rf"\b{name}(_bucket|_sum|_count)?\b", read)] == []
    assert len(metrics) <= MAX_METRICS
    assert (len(ALERTS) <= MAX_ALERTS, len(RECORDED) <= MAX_RECORDED) == (True, True)


def test_every_recorded_name_is_used() -> None:
    """By an alert, by the dashboard, or by another rule."""
    used = {name for text in [*SHOWN, *(rule["expr"] for rule in EVERY_RULE)] for name in names(plain(text))}
    assert used >= RECORDED


def test_every_recorded_name_is_explained() -> None:
    """In the table of observability.md, and no other."""
    page = (ROOT / "docs/guides/observability.md").read_text()
    told = set()
    for row in re.findall(r"^\| (`bertserve:.+?) \|", page, re.MULTILINE):
        name, *others = re.findall(r"`([^`]+)`", row)
        told |= {name, *(re.sub(r"(?<=rate)\w+$", other, name) for other in others)}
    assert told == RECORDED


def test_the_dashboard_shows_what_alerts_are_about() -> None:
    """Whoever is paged finds it there, on few enough panels to look at them all."""
    made_of = {rule["record"]: rule["expr"] for rule in EVERY_RULE if "record" in rule}

    def sources(texts: Iterable[str]) -> set[str]:
        found = {name for text in texts for name in names(plain(text))}
        deeper = [made_of[name] for name in found & RECORDED]
        return found - RECORDED | (sources(deeper) if deeper else set())

    assert sources(alert["expr"] for alert in ALERTS) - OF_PROMETHEUS <= sources(SHOWN)
    assert len(PANELS) <= MAX_PANELS


def test_labels_have_the_values_that_rules_ask_for() -> None:
    """Against the objective counts no client's fault, and no bulk work that comes again."""
    text = (MONITORING / "rules.yaml").read_text()
    asked = {tuple(found.split("|")) for found in re.findall(r'bertserve_requests_total\{reason=~"([^"]+)"', text)}
    blamed = _below(InvalidRequest)
    apart = {InvalidRequest.reason, BulkOverloaded.reason}
    ours = {kind.reason for kind in _below(BertserveError) - blamed} - apart
    assert {frozenset(found) for found in asked} == {frozenset(ours), frozenset(ours | {"ok"})}
    assert ours < set(reasons())


def _below(kind: type[BertserveError]) -> set[type[BertserveError]]:
    return {kind}.union(*map(_below, kind.__subclasses__()))


def test_the_objective_is_a_bound_of_the_histogram(server: Server) -> None:
    """Both in the rules and where the dashboard says it."""
    text = (MONITORING / "rules.yaml").read_text()
    (bound,) = set(re.findall(r'le="([^"]+)"', text))
    assert f'bertserve_request_seconds_bucket{{le="{bound}",' in get(server.metrics, "/metrics").body.decode()
    assert f"{float(bound) * 1e3:g} ms" in text


@pytest.mark.parametrize("alert", ALERTS, ids=lambda rule: str(rule["alert"]))
def test_every_alert_says_what_to_do(alert: dict[str, Any]) -> None:
    """How urgent it is, what has happened, and where a runbook is, which is there."""
    assert alert["labels"]["severity"] in {"page", "ticket"}
    notes = alert["annotations"]
    assert set(notes) == {"summary", "description", "runbook_url"}
    page, _, section = notes["runbook_url"].removeprefix("https://bertserve.example/").partition("#")
    headings = re.findall(r"^## (.+)$", (ROOT / page).read_text(), re.MULTILINE)
    assert section in {heading.lower() for heading in headings}
    assert alert["alert"].lower() == section


def test_every_section_is_an_alerts() -> None:
    """The page explains no alert that there is none of."""
    headings = re.findall(r"^## (Bertserve.+)$", (ROOT / "docs/reference/alerts.md").read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(alert["alert"] for alert in ALERTS)


def test_every_alert_is_tested_firing_and_not() -> None:
    """In the file that promtool runs."""
    cases = yaml.safe_load((MONITORING / "rules_test.yaml").read_text())["tests"]
    tried = {(case["alertname"], bool(case["exp_alerts"])) for test in cases for case in test["alert_rule_test"]}
    assert tried == {(alert["alert"], fires) for alert in ALERTS for fires in (False, True)}


@needs_prometheus
@pytest.mark.parametrize("words", [("check", "rules", "rules.yaml"), ("test", "rules", "rules_test.yaml")])
def test_promtool_accepts_the_rules(words: tuple[str, ...]) -> None:
    """And each alert fires where its test says so, and only there."""
    done = promtool(*words, where=MONITORING)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout


@needs_prometheus
def test_promtool_parses_the_dashboard(tmp_path: Path) -> None:
    """Every expression."""
    rules = [{"record": f"panel:{index}", "expr": plain(text)} for index, text in enumerate(SHOWN)]
    (tmp_path / "panels.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = promtool("check", "rules", "panels.yaml", where=tmp_path)
    assert f"{len(SHOWN)} rules found" in done.stdout, done.stdout + done.stderr


def test_the_dashboard_is_whole() -> None:
    """Panels have numbers of their own, places that do not overlap, and the dashboard's variables."""
    everything = DASHBOARD["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    cells = [
        (x, y)
        for panel in everything
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z_]+)", json.dumps(PANELS))) - {"__rate_interval", "__range"}
    assert used == variables
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in PANELS)


@needs_prometheus
def test_a_running_server_fills_the_dashboard(server: Server, scraper: Prometheus) -> None:
    """Every panel, and every recording rule over some minutes, has something to show."""
    hungry = [plain(text) for text in SHOWN]

    def fed() -> bool:
        with Tei(server) as client:
            client.embed(["a text", "another"])
        post_json(server.http, "/embed", b'{"inputs": 5}')
        hungry[:] = [text for text in hungry if not scraper.query(text)]
        return not hungry

    try:
        wait_for(fed, "something to show", 30)
    except TimeoutError:
        pytest.fail(f"nothing to show: {hungry}")


@needs_prometheus
def test_prometheus_evaluates_the_rules(server: Server, scraper: Prometheus) -> None:
    """None of them fails, and of a server that is well none fires."""
    assert metric(server, "bertserve_state", state="ready") == 1
    found: list[dict[str, Any]] = []

    def evaluated() -> bool:
        found[:] = [rule for group in scraper.ask("rules")["groups"] for rule in group["rules"]]
        return all(rule["health"] == "ok" for rule in found)

    wait_for(evaluated, "every rule to be evaluated", 20)
    assert len(found) == len(EVERY_RULE)
    assert not [rule["name"] for rule in found if rule.get("state") == "firing"]
    assert scraper.query("up") == {("up", f"{server.metrics}", JOB): 1.0}
