from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hdrh.histogram import HdrHistogram

from bertserve.export.pages.tables import as_text
from bertserve.loadtest.cli import HELD, IMPOSSIBLE, main, summary
from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.generator.records import RECORD
from bertserve.loadtest.report import compare
from bertserve.loadtest.report.histogram import Histogram
from bertserve.loadtest.report.page import report
from bertserve.loadtest.report.result import STAGES, Result
from bertserve.loadtest.report.sample import percentile
from bertserve.loadtest.report.slo import judge, parse_slo
from tests.support.browser import fits_a_phone, is_whole_on_a_phone

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.browser import Page

FACTS = {"scenario": "<b>odd</b>", "purpose": "", "target": "http://t", "date": "today", "command": "bertserve load"}
SECONDS = 10.0
COUNT = 2000


def run(latency_ms: float = 2.0, *, failing: int = 0, seed: int = 1, late_ms: float = 0.1, told: bool = True) -> Result:
    """A run with latencies spread around a median; the first `failing` requests get 429."""
    dice = np.random.default_rng(seed)
    records = np.zeros(COUNT, RECORD)
    records["intended"] = np.sort(dice.uniform(0, SECONDS, COUNT))
    records["due"] = records["sent"] = records["intended"] + late_ms / 1e3
    records["done"] = records["sent"] + latency_ms / 1e3 * dice.lognormal(0, 0.3, COUNT)
    records["fault"][:failing] = 1
    records["kind"] = np.arange(COUNT) % 2
    stages = {"tokenize_us": 50, "queue_us": 100, "compute_us": 600, "total_us": 900}
    for name, value in stages.items():
        records[name] = value if told else -1
    result = Result(dict(FACTS), SECONDS, good_limit_ms=4.0)
    for part in np.array_split(records, 7):
        result.take(part, ["", "429 Too Many Requests"], ["8 tokens", "32 tokens"])
    return result


def test_a_histogram_keeps_a_thousandth() -> None:
    """Percentiles are right to a thousandth, also after a trip through the standard encoded form."""
    seconds = np.random.default_rng(1).lognormal(-6, 1, 5000)
    histogram = Histogram()
    histogram.record(seconds.tolist())
    again = Histogram.decoded(histogram.encoded())
    for percent in (50, 90, 99):
        exact = percentile(sorted(seconds.tolist()), percent) * 1e3
        assert again.percentile_ms(percent) == histogram.percentile_ms(percent) == pytest.approx(exact, rel=2e-3)
    assert len(again) == 5000
    assert math.isnan(Histogram().percentile_ms(50))


def test_a_missing_library_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the extra is not installed, the message says how to install it."""
    monkeypatch.setitem(sys.modules, "hdrh", None)
    with pytest.raises(BenchError, match=r"--editable '\.\[loadtest\]'"):
        Histogram()


@pytest.mark.parametrize("options", [[], ["--find-capacity", "--slo", "p99=20ms"]])
def test_a_missing_library_is_told_before_anything_is_asked_or_measured(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The server is not even there."""
    monkeypatch.setitem(sys.modules, "hdrh", None)
    assert main(["--target", "http://127.0.0.1:9", "--out", str(tmp_path / "out"), *options]) == IMPOSSIBLE
    assert "the module hdrh" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_distribution_is_what_the_library_says() -> None:
    """Values and counts read from the library's memory are those that its own iterator gives, at every size."""
    recorded = HdrHistogram(1, 100_000_000, 3)
    for value in (1, 2, 1023, 1024, 2047, 2048, 2049, 4095, 4096, 123_456, 99_999_999, 100_000_000):
        recorded.record_value(value, value % 7 + 1)
    expected = [
        (item.value_iterated_to / 1e3, item.count_added_in_this_iter_step) for item in recorded.get_recorded_iterator()
    ]
    values, counts = Histogram(recorded).distribution()
    assert list(zip(values.tolist(), counts.tolist(), strict=True)) == expected


@pytest.mark.parametrize(
    ("count", "percent", "resolved"), [(99, 99, False), (100, 99, True), (999, 99.9, False), (1000, 99.9, True)]
)
def test_a_percentile_needs_enough_requests(count: int, percent: float, resolved: bool) -> None:  # noqa: FBT001
    """A p99 of fewer than a hundred requests would be the greatest latency under another name."""
    histogram = Histogram()
    histogram.record([0.001] * count)
    assert histogram.resolves(percent) == resolved


def test_requests_count_where_they_should_have_been_sent() -> None:
    """Offered, answered and failed add up over the slices; errors keep their reasons."""
    result = run(failing=300)
    assert (result.offered, result.failed, len(result.latency)) == (COUNT, 300, COUNT - 300)
    assert result.faults == {"429 Too Many Requests": 300}
    assert sum(len(kind) for kind in result.kinds.values()) == COUNT - 300
    assert result.slices[0].failed == result.slices[0].offered
    assert 0 < result.good_per_s < result.answered_per_s < result.offered_per_s


def test_stages_are_the_client_s_beside_the_server_s() -> None:
    """What the server does not tell of is the network's, and of its total what no stage has is other work."""
    stages = run().stages
    assert tuple(stages) == STAGES
    assert stages["waiting to be sent"].mean_ms() == pytest.approx(0.1, abs=0.002)
    assert stages["compute"].mean_ms() == pytest.approx(0.6, rel=0.01)
    assert stages["other work of the server"].mean_ms() == pytest.approx(0.15, rel=0.01)
    assert not run(told=False).stages


def test_a_generator_that_sends_late_says_so() -> None:
    """Lateness that makes a large part of the tail is a caution; beside a long tail it is nothing."""
    assert not run(late_ms=0.1).generator_was_the_limit
    assert not run(latency_ms=50, late_ms=1.5).generator_was_the_limit
    result = run(late_ms=1.5)
    assert result.generator_was_the_limit
    assert "the load generator was the limit" in "\n".join(summary(result, []))
    assert "the load generator was the limit" in report(result, [])


def never_sent() -> Result:
    """A run of which the generator could not send a tenth."""
    records = np.zeros(COUNT, RECORD)
    records["intended"] = np.linspace(0, SECONDS, COUNT, endpoint=False)
    records["due"] = records["sent"] = records["intended"]
    records["done"] = records["sent"] + 0.002
    records["fault"][: COUNT // 10] = 1
    result = Result(dict(FACTS), SECONDS)
    result.take(records, ["", "never sent: 900 connections busy for 10 s"], ["8 tokens", "32 tokens"])
    return result


def test_what_was_never_sent_is_no_error_of_the_server() -> None:
    """It is told apart, and makes the run doubtful; an objective of latency counts it, as its user waited."""
    result = never_sent()
    assert (result.failed, result.unsent, result.failed_percent) == (0, COUNT // 10, 0)
    assert [v.held for v in judge(parse_slo("p50=5ms,p99=5ms,errors=0%"), result)] == [True, False, True]
    said = "\n".join(summary(result, []))
    assert "failed" not in said
    assert f"CAUTION: the load generator was the limit: {COUNT // 10} of {COUNT} requests were never sent" in said
    assert "never sent" in report(result, [])


def test_a_late_generator_that_moves_no_figure_is_no_limit() -> None:
    """One request in fifty is sent late on a shared machine; where the p99 stays the same, nothing is said."""
    dice = np.random.default_rng(1)
    records = np.zeros(COUNT, RECORD)
    records["intended"] = np.sort(dice.uniform(0, SECONDS, COUNT))
    records["due"] = records["intended"] + np.where(np.arange(COUNT) % 50, 0, 0.004)
    records["sent"] = records["due"]
    records["done"] = records["due"] + dice.lognormal(-5, 0.5, COUNT)
    result = Result(dict(FACTS), SECONDS)
    result.take(records, [""], ["8 tokens", "32 tokens"])
    assert result.generator.lateness.percentile_ms(99) > result.latency.percentile_ms(99) / 10
    assert not result.generator_was_the_limit


def test_a_comparison_is_written_where_out_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For browsers and for programs, beside the reports and not over them; every other option is refused."""
    for name, latency_ms in (("a", 2.0), ("b", 2.4)):
        (tmp_path / f"{name}.json").write_text(json.dumps(run(latency_ms).as_json()), encoding="utf-8")
    words = ["--compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    assert main([*words, "--out", str(tmp_path / "out")]) == HELD
    found = json.loads((tmp_path / "out" / "compare.json").read_text(encoding="utf-8"))
    assert {each["what"]: each["is_more_than_noise"] for each in found["differences"]}["p50 ms"]
    assert "p99.9 ms" in (tmp_path / "out" / "compare.html").read_text(encoding="utf-8")
    assert "compare.html" in capsys.readouterr().out
    assert main([*words, "--rate", "5"]) == IMPOSSIBLE
    assert "--compare runs no test; remove --rate" in capsys.readouterr().err


def test_a_run_survives_its_file(tmp_path: Path) -> None:
    """Read back from JSON a run is the same run."""
    result = run(failing=10)
    file = tmp_path / "report.json"
    file.write_text(json.dumps(result.as_json()), encoding="utf-8")
    assert Result.read(file).as_json() == result.as_json()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "other"}', '{"format": "bertserve-load-1"}'])
def test_a_file_that_is_no_report_is_a_sentence(tmp_path: Path, text: str) -> None:
    """Whatever a file holds instead, the message names it in one line."""
    file = tmp_path / "a.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(BenchError, match=r"a\.json") as caught:
        Result.read(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("slo", "held"),
    [
        ("p50=3ms,p99=10ms,errors=0.1%", [True, True, True]),
        ("p50=1000us", [False]),
        ("p99.9=0.1s,max=1us", [True, False]),
    ],
)
def test_objectives_are_judged(slo: str, held: list[bool]) -> None:
    """Each limit is held or missed by what was measured, whatever its unit."""
    assert [verdict.held for verdict in judge(parse_slo(slo), run())] == held


def test_refusing_everything_keeps_no_objective() -> None:
    """Without a word on errors a failed request is later than any limit; with one, errors are judged by it."""
    result = run(failing=100)
    assert [v.held for v in judge(parse_slo("p99=1s"), result)] == [False]
    assert [v.held for v in judge(parse_slo("p90=1s"), result)] == [True]
    assert [v.held for v in judge(parse_slo("p99=1s,errors=5%"), result)] == [True, True]
    assert [v.held for v in judge(parse_slo("p99=1s,errors=4.9%"), result)] == [True, False]
    assert [v.held for v in judge(parse_slo("p50=1s"), run(failing=COUNT))] == [False]


@pytest.mark.parametrize(
    ("slo", "sentence"),
    [
        ("", "has no objective"),
        ("p99", "'p99': the limit must be in us, ms or s"),
        ("p99=2", "'p99=2': the limit must be in us"),
        ("p99=0ms", "the limit must be in us"),
        ("p0=2ms", "unknown objective 'p0'"),
        ("p100=2ms", "unknown objective 'p100'"),
        ("q99=2ms", "unknown objective 'q99'; use a percentile"),
        ("errors=1", "the limit must be in percent"),
        ("errors=101%", "the limit must be in percent"),
        ("p99=1ms,p99=2ms", "p99 is given twice"),
    ],
)
def test_a_wrong_objective_is_a_sentence(slo: str, sentence: str) -> None:
    """What is wrong with it is said in one line."""
    with pytest.raises(BenchError, match=sentence):
        parse_slo(slo)


def test_noise_is_no_difference() -> None:
    """Two runs of one distribution do not differ by more than noise, in any of the figures."""
    found = compare.differences(run(seed=1), run(seed=2))
    assert [each.what for each in found if each.is_more_than_noise] == []


def test_a_difference_is_more_than_noise() -> None:
    """A fifth more latency shows at the median and in the tail, and so does a rise in errors."""
    found = {each.what: each for each in compare.differences(run(2.0), run(2.4, failing=200, seed=2))}
    for what in ("p50 ms", "p90 ms", "p99 ms", "failed %"):
        assert found[what].is_more_than_noise
    assert found["p50 ms"].low < 0.4 < found["p50 ms"].high
    assert "more than noise" in as_text(*compare.lines(run(2.0), run(2.4)))


def test_a_run_too_short_is_not_compared() -> None:
    """A second of load tells nothing of noise, and says so."""
    with pytest.raises(BenchError, match=r"a run of 1 s is too short .* the minimum is 2 s"):
        compare.differences(Result(dict(FACTS), 1.0), run())


def test_the_page_says_what_was_found() -> None:
    """Verdicts, errors by reason, stages and kinds stand in the page, and nothing in it is fetched or unescaped."""
    result = run(failing=50)
    html = report(result, judge(parse_slo("p99=1us,errors=50%"), result))
    for words in ("missed", "429 Too Many Requests", "2.50%", "32 tokens", "other work of the server", "&lt;b&gt;odd"):
        assert words in html
    for banned in ("<b>odd", "<script", "http://fonts", 'src="', "@import", "nan"):
        assert banned not in html


def test_the_page_of_a_dead_server_is_a_page() -> None:
    """Where nothing was answered there is still a report, with the reason."""
    html = report(run(failing=COUNT), [])
    assert "Nothing was answered" in html
    assert "429 Too Many Requests" in html


def test_a_browser_shows_the_page(page: Page, tmp_path: Path) -> None:
    """The page renders without network and without a word on its console."""
    file = tmp_path / "report.html"
    file.write_text(report(run(failing=5), []), encoding="utf-8")
    page.open(file.as_uri())
    assert page.run("document.querySelectorAll('svg.wide').length") == 4
    assert page.requests == [file.as_uri()]
    assert page.problems == []
    fits_a_phone(page)
    is_whole_on_a_phone(page)
