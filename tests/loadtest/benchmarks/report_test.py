from __future__ import annotations

import json
from dataclasses import replace

import pytest

from loadtest.benchmarks.server import page
from loadtest.benchmarks.server.report import Report, Samples
from loadtest.benchmarks.server.subjects import CONNECTIONS, OPTIONS, PROTOCOLS, raw_subject, server_subject, ways
from loadtest.report.sample import Sample, Spread
from loadtest.report.tables import Table, as_markdown, as_text


def sample(p50_ms: float = 1.0, per_s: float = 100.0) -> Sample:
    """A sample of which a test names what matters."""
    return Sample(200, 250, per_s, p50_ms, 2 * p50_ms, 50.0, 100.0, 400.0, 1.0)


def samples(lengths: tuple[int, ...] = (8, 128), rounds: int = 2) -> Samples:
    """Every subject, raw engines at 1 ms and 100 texts a second, the server at 1.4 ms and 90."""
    made = Samples()
    for _ in range(rounds):
        for tokens in lengths:
            for options in OPTIONS:
                for way in ways(batch_invariant=False):
                    made.add(tokens, raw_subject(way, options), sample())
            for protocol in PROTOCOLS:
                for connections in CONNECTIONS:
                    made.add(tokens, server_subject(protocol, connections), sample(1.4, 90.0))
    return made


def report(measured: Samples, engine_mb: float = 200.0, ready_s: float = 2.0) -> Report:
    """A report around samples."""
    return Report(
        command="python -m loadtest.benchmarks.server.command",
        date="2026-01-02T03:04:05+00:00",
        machine={"CPU": "a processor", "Python": "3.11"},
        model={"model": "minilm", "version": "1", "precision": "int8"},
        settings={"rounds": 2, "seconds": 2.0, "warm_up_s": 0.5, "cores": 2},
        samples=measured,
        repeats=0,
        ready_s=ready_s,
        server_mb=100.0,
        engine_mb=engine_mb,
        idle_percent=0.1,
        steal_percent=0.2,
    )


def test_the_better_raw_engine_is_the_baseline() -> None:
    """The baseline is not handicapped: the fastest options count for latency, the busiest way for throughput."""
    made = Samples()
    made.add(8, "raw wide served", sample(1.2, 800))
    made.add(8, "raw wide default", sample(1.0, 900))
    made.add(8, "raw narrow served", sample(0.1, 1000))
    assert made.fastest_raw(8) == "raw wide default"
    assert made.busiest_raw(8) == "raw narrow served"


def test_subjects_are_compared_within_a_round() -> None:
    """A round in which the whole machine was slow changes neither difference nor share."""
    made = Samples()
    for slow in (1.0, 10.0, 1.0):
        made.add(8, "raw wide served", sample(slow, 1000 / slow))
        made.add(8, "raw wide default", sample(2 * slow, 10))
        made.add(8, "HTTP 1", sample(slow + 0.25, 800 / slow))
    assert made.over_raw_ms(8, "HTTP 1") == Spread(0.25, 0.25, 0.25, 3)
    assert made.percent_of_raw(8, "HTTP 1").median == pytest.approx(80)


def test_disturbed_measurements_count_only_where_there_is_no_quiet_one() -> None:
    """While others use the machine neither side's figures say anything, unless they are all there is."""
    made = Samples()
    for own, raw in ((0.0, 0.0), (50.0, 0.0), (0.0, 50.0)):
        made.add(8, "raw wide served", replace(sample(1.0 + raw), others_percent=raw))
        made.add(8, "raw wide default", sample(1000.0))
        made.add(8, "HTTP 1", replace(sample(1.5 + own), others_percent=own))
        made.add(8, "HTTP 8", replace(sample(2.0), others_percent=60.0))
    assert made.over_raw_ms(8, "HTTP 1") == Spread(0.5, 0.5, 0.5, 1)
    assert made.spread(8, "HTTP 1", "p50_ms") == Spread(1.5, 1.5, 1.5, 2)
    assert made.spread(8, "HTTP 8", "p50_ms") == Spread(2.0, 2.0, 2.0, 3)


def test_the_targets_are_the_specification_s() -> None:
    """A fast server meets all of them, and each says what was found."""
    targets = report(samples()).targets()
    assert [target.met for target in targets] == [True] * 6
    assert targets[0].found == "0.40 ms (0.40 to 0.40; rounds: 2)"
    assert targets[2].found == "90% (90 to 90; rounds: 2)"
    assert targets[4].found == "300 MB (100 + 200)"


def test_a_missed_target_is_seen() -> None:
    """Too slow, too large, too late: each is told by itself."""
    slow = samples()
    for subject in ("HTTP 1", "gRPC 32"):
        for tokens in (8, 128):
            slow.by_tokens[tokens][subject] = [sample(1.46, 84.0)] * 2
    missed = [target.what for target in report(slow, engine_mb=401.0, ready_s=10.1).targets() if not target.met]
    assert [what.split(",")[0] for what in missed] == [
        "HTTP",
        "gRPC",
        "Resident memory of server and engine after the load",
        "Start to READY",
    ]


def test_what_was_not_measured_is_not_judged() -> None:
    """A run over other lengths leaves the targets open."""
    assert [target.met for target in report(samples(lengths=(32,))).targets()] == [None] * 4 + [True] * 2


def test_a_table_lines_up() -> None:
    """On a terminal words stand to the left, figures to the right, and every line has its columns."""
    table = Table("Title", "Note.", ("name", "figure"), [("a", "1.5"), ("longer", "10.25")], words=1)
    assert as_text(table).splitlines() == [
        "Title",
        "Note.",
        "",
        "name    figure",
        "------  ------",
        "a          1.5",
        "longer   10.25",
    ]
    assert as_markdown(table).splitlines() == [
        "## Title",
        "",
        "Note.",
        "",
        "| name | figure |",
        "| :--- | ---: |",
        "| a | 1.5 |",
        "| longer | 10.25 |",
    ]


def test_the_report_has_a_row_for_each_length() -> None:
    """Both renderings show every length, the medians, the machine and the command."""
    made = report(samples())
    text, markdown = page.text(made), page.markdown(made)
    for rendering in (text, markdown):
        assert "CPU: a processor" in rendering
        assert "+0.40" in rendering
    assert "`python -m loadtest.benchmarks.server.command`" in markdown
    latency = markdown.split("## Latency")[1].split("##")[0]
    assert [line.split("|")[1].strip() for line in latency.splitlines() if line.startswith("|")][2:] == ["8", "128"]
    assert len({line.count("|") for line in latency.splitlines() if line.startswith("|")}) == 1


def test_the_figures_can_be_read_back() -> None:
    """The JSON file holds every measurement, the comparison and the verdict."""
    data = json.loads(json.dumps(report(samples()).as_json()))
    assert data["machine"]["CPU"] == "a processor"
    assert data["lengths"]["8"]["over_raw_ms"]["HTTP"]["median"] == pytest.approx(0.4)
    assert len(data["lengths"]["128"]["rounds"]["gRPC 32"]) == 2
    assert data["lengths"]["128"]["rounds"]["gRPC 32"][0]["p50_ms"] == 1.4
    assert [target["met"] for target in data["targets"]] == [True] * 6
