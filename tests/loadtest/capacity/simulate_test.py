from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from bertserve.loadtest.capacity.figures import Figures, capacity, percentile
from bertserve.loadtest.capacity.lengths import parse_mix
from bertserve.loadtest.capacity.simulate_cli import main, parser
from bertserve.loadtest.capacity.tables import PUBLISHED, find_table
from bertserve.loadtest.capacity.traffic import poisson, replayed
from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.generator.arrivals import choices, schedule
from bertserve.loadtest.generator.scenario import Phase, Scenario
from bertserve.serving.settings import Settings
from tests.support.browser import fits_a_phone

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.browser import Page

_T4 = """
                          32x1    32x8   128x1   128x2   128x4   128x8  128x32 128x128   384x1   384x8  384x32
t4-bert-base-fp16         1.58    2.62    1.76     2.5    4.17    8.36   33.83  131.64    3.63   27.48   101.2
t4-bert-base-int8         2.06    2.61    1.66    1.89    2.64    4.81   19.88   80.95    2.67   15.77   63.19
t4-bert-base-fp16-trt8       -       -    1.93    2.49    4.16    7.88   32.65  129.19    3.69   24.94   101.3
t4-bert-base-int8-trt8       -       -    1.33    1.75    2.74    4.42   17.59   67.05    2.43   13.73   54.06
t4-bert-large-fp16           -       -    4.91       -       -       -       -       -   11.51    85.4       -
t4-bert-large-int8           -       -     4.1       -       -       -       -       -    7.73    49.4       -
"""
"""Averages in milliseconds by tokens and texts, as the pages have them that the files name."""


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(words)
    told = capsys.readouterr()
    return code, told.out, told.err


def test_the_published_tables_hold_what_was_published() -> None:
    """Every point, no other point, and each with the page it stands on."""
    shapes, *rows = map(str.split, _T4.strip().splitlines())
    assert {name for name in PUBLISHED if name.startswith("t4-")} == {row[0] for row in rows}
    for name, *times in rows:
        published = {
            tuple(map(int, shape.split("x"))): float(ms) for shape, ms in zip(shapes, times, strict=True) if ms != "-"
        }
        table = find_table(name)
        assert {(point.tokens, point.batch): point.us / 1e3 for point in table.points} == pytest.approx(published)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_table_names_its_sources(name: str) -> None:
    """And is of a card that computes texts together, beside the server."""
    table = find_table(name)
    assert table.basis == "published"
    assert table.facts
    assert all(re.match(r"https://github\.com/NVIDIA/\S+ \(", source) for source in table.facts)
    assert table.batched
    assert (table.narrow_lanes, table.threads) == (0, 0)


def test_what_is_not_published_says_that_it_is_interpolated() -> None:
    """Lengths between and beyond are named; those of the table are not."""
    table = find_table("t4-bert-base-fp16")
    assert "over lengths" not in "\n".join(table.provenance([32, 128, 384]))
    told = "\n".join(table.provenance([16, 64, 128, 500]))
    assert "INTERPOLATED over lengths: 16, 64, 500 tokens" in told
    assert "below 32: as 32, linear between neighbors, above 384: proportional" in told


def test_a_table_is_read_from_status(tmp_path: Path) -> None:
    """Lanes and cores of the engine, what warm-up measured, and that as enough batches have corrected it."""
    rows = [
        {"kind": kind, "tokens": 8, "texts": texts, "measured_us": us, "spread_us": 9.0, "predicted_us": 1.0}
        for kind, texts, us in (("wide", 1, 600.0), ("wide", 2, 900.0), ("narrow", 1, 1000.0))
    ]
    learned = {"mean": 1.2, "shapes": [1.25, *[1.0] * 6], "spread": 0.1, "lasting": 0.5, "batches": 100}
    corrections = {"wide": learned, "narrow": {**learned, "batches": 5}}
    model = {"name": "minilm", "precision": "int8", "costs": {"corrections": corrections, "table": rows}}
    engine = {"threads": 2, "lanes": ["wide", "narrow", "narrow"]}
    path = tmp_path / "status.json"
    path.write_text(json.dumps({"engine": engine, "models": [model]}))
    table = find_table(str(path))
    assert (table.title, table.narrow_lanes, table.threads, table.batched) == ("minilm int8", 2, 2, True)
    assert [(p.kind, p.tokens, p.batch, p.us, p.spread_us) for p in table.points] == [
        ("wide", 8, 1, 900.0, 13.5),
        ("wide", 8, 2, 1350.0, 13.5),
        ("narrow", 8, 1, 1000.0, 9.0),
    ]
    assert [p.us for p in table.warm_up] == [600.0, 900.0, 1000.0]
    assert table.variations == {"wide": (0.1, 0.5)}
    path.write_text(json.dumps({"engine": engine, "models": [model, {**model, "name": "other"}]}))
    with pytest.raises(BenchError, match=r"--model: minilm, other"):
        find_table(str(path))
    assert find_table(str(path), "other").title == "other int8"


def test_a_table_is_read_from_a_nodes_cache(tmp_path: Path) -> None:
    """The file that a server keeps beside its other caches."""
    points = [{"kind": "wide", "tokens": 8, "batch": 1, "us": 600.0, "spread_us": 9.0}]
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"fingerprint": {"threads": 4}, "points": points}))
    table = find_table(str(path))
    assert (table.threads, table.narrow_lanes, table.batched) == (4, 0, False)


@pytest.mark.parametrize(
    ("given", "mix"), [("128", {128: 1}), ("8:70,32:30", {8: 70, 32: 30}), ("10-12:6,11", {10: 2, 11: 3, 12: 2})]
)
def test_a_mix_is_read(given: str, mix: dict[int, float]) -> None:
    """Single lengths, weights, and ranges that share their weight."""
    assert parse_mix(given, "--tokens") == pytest.approx(mix)


def test_the_policy_is_the_servers() -> None:
    """What nobody names has the value that the server gives it."""
    given = parser().parse_args(["--cost", "x"])
    names = {"timeout_ms": "default_timeout_ms"}
    for name in ("timeout_ms", "max_batch_tokens"):
        assert getattr(given, name) == Settings.model_fields[names.get(name, name)].default


def test_requests_are_those_of_the_load_generator() -> None:
    """Equal rate, length, mix and seed: the same times and lengths as `bertserve load` draws."""
    mix = {8: 70.0, 32: 30.0}
    made = poisson(50, mix, 10, 2.0, seed=3)
    times = schedule(Scenario("x", "", (Phase(10, 1, 1),), mix), 50, 3)
    drawn = choices([70.0, 30.0], len(times), 3)
    assert [arrival.at for arrival in made] == times.tolist()
    assert [arrival.lengths for arrival in made] == [((8, 32)[place],) for place in drawn]


def test_a_schedule_is_replayed(tmp_path: Path) -> None:
    """Times and lengths from a file, of one text or of several."""
    path = tmp_path / "kept.json"
    path.write_text("[[0.5, 8], [0.25, [16, 32]]]")
    assert [(arrival.at, arrival.lengths) for arrival in replayed(path, 1.0)] == [(0.25, (16, 32)), (0.5, (8,))]


def test_a_percentile_is_a_value_that_occurred() -> None:
    """The least that so many percent do not exceed."""
    assert [percentile([4, 1, 3, 2], percent) for percent in (25, 50, 99)] == [1, 2, 4]
    assert percentile([], 50) != percentile([], 50)


def test_capacity_is_the_edge() -> None:
    """A run whose p99 is its rate holds up to the objective, to one percent, from wherever the search begins."""

    def run(rate: float) -> Figures:
        return Figures(rate, rate, rate, rate, rate, rate, {})

    for begin in (1, 70, 5000):
        found, runs = capacity(run, 100, begin)
        assert 99 <= found <= 100
        assert all((figures.slo_ms <= 100) == (figures.offered_per_s <= 100) for figures in runs)
    assert capacity(run, 0.001, 70)[0] is None


def test_the_command_tells_what_it_rests_on(capsys: pytest.CaptureFixture[str]) -> None:
    """Latencies, throughput, refusals, sources, what is interpolated; and that none of it was measured."""
    words = ("--cost", "t4-bert-base-fp16", "--tokens", "64", "--rate", "100", "--duration", "20")
    code, out, _ = run(capsys, *words)
    assert code == 0
    assert "SIMULATED, not measured" in out
    assert "INTERPOLATED over lengths: 64 tokens" in out
    assert "https://github.com/NVIDIA/FasterTransformer" in out
    found = re.search(r"p50 ([0-9.]+), p99 ([0-9.]+)", out)
    assert found
    assert 1.6 < float(found[1]) < 3 < float(found[2]) < 10
    assert run(capsys, *words) == (code, out, "")


def test_an_objective_decides_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    """0 where it is kept, 1 where it is broken."""
    words = ("--cost", "t4-bert-base-fp16", "--tokens", "128", "--rate", "100", "--duration", "20")
    assert run(capsys, *words, "--slo-p99-ms", "20")[0] == 0
    code, out, _ = run(capsys, *words, "--slo-p99-ms", "2")
    assert code == 1
    assert "BROKEN: p99 <= 2 ms" in out


def test_a_bulk_job_has_what_the_load_leaves(capsys: pytest.CaptureFixture[str]) -> None:
    """Its share where that is all, and a mix that is none is refused by the option's name."""
    words = ("--cost", "t4-bert-base-fp16", "--tokens", "128", "--duration", "5", "--bulk", "32:3,128:1")
    code, out, _ = run(capsys, *words, "--rate", "100")
    assert code == 0
    found = re.search(r"bulk work: ([0-9.]+) texts/s in ([0-9.]+)% of the device's time", out)
    assert found
    assert float(found[2]) > 50
    words = ("--cost", "t4-bert-large-fp16", *words[2:])
    overloaded = json.loads(run(capsys, *words, "--rate", "500", "--json")[1])
    assert overloaded["bulk_device_share"] == pytest.approx(0.05, abs=0.02)
    assert overloaded["bulk_per_s"] > 0
    assert run(capsys, *words[:-1], "many", "--rate", "100")[2].startswith("bertserve simulate: --bulk many: must look")


def test_capacity_is_found_and_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The rate keeps its objective in a run of its own, and the curve stands in a file of each kind."""
    words = ("--cost", "t4-bert-base-int8", "--tokens", "128", "--slo-p99-ms", "10", "--duration", "1")
    out = tmp_path / "curve.html"
    code, told, _ = run(capsys, *words, "--find-capacity", "--json", "--out", str(out))
    found = json.loads(told)["capacity_per_s"]
    assert code == 0
    assert json.loads(told)["devices"] is None
    assert "devices: 3 for" in run(capsys, *words, "--find-capacity", "--rate", f"{2.5 * found}")[1]
    assert run(capsys, *words, "--rate", str(found))[0] == 0
    assert run(capsys, *words, "--rate", str(found * 1.3))[0] == 1
    assert "https://github.com/NVIDIA/TensorRT" in out.read_text()
    assert "This is a simulation, not a measurement" in out.read_text()
    for kind in ("svg", "json"):
        run(capsys, *words, "--rate", "100", "--out", str(tmp_path / f"curve.{kind}"))
    assert (tmp_path / "curve.svg").read_text().startswith("<svg")
    assert len(json.loads((tmp_path / "curve.json").read_text())["runs"]) == 14


def test_the_page_fits_a_phone(page: Page, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Its table and its curve are wider, and are scrolled by themselves."""
    out = tmp_path / "curve.html"
    run(capsys, "--cost", "t4-bert-base-int8", "--tokens", "128", "--rate", "100", "--duration", "1", "--out", str(out))
    page.open(out.as_uri())
    assert page.run("document.querySelectorAll('td').length") == 14 * 5
    fits_a_phone(page)


def test_overload_is_refused_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """At five times what the device can do most are refused, and the answered keep their deadline."""
    words = ("--cost", "t4-bert-large-fp16", "--tokens", "128", "--rate", "1000", "--duration", "10", "--timeout-ms")
    code, out, _ = run(capsys, *words, "500", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["fates"]["refused: overloaded"] > 6000
    assert found["p99_ms"] <= 510
    assert found["slo_ms"] is None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--cost", "t4", "--tokens", "8", "--rate", "1"), "built-in tables: a100-bert-base-fp16"),
        (("--cost", "t4-bert-base-fp16", "--rate", "1"), "--tokens is missing"),
        (("--cost", "t4-bert-base-fp16", "--tokens", "8"), "--rate is missing"),
        (("--cost", "t4-bert-base-fp16", "--tokens", "0", "--rate", "1"), "must look like 128, 8:70,32:30 or 10-250"),
        (("--cost", "t4-bert-base-fp16", "--tokens", "8:0", "--rate", "1"), "at least one weight must be above 0"),
        (("--cost", "t4-bert-base-fp16", "--tokens", "8", "--rate", "-1"), "--rate must be above 0"),
        (("--cost", "t4-bert-base-fp16", "--tokens", "8", "--find-capacity"), "--find-capacity needs --slo-p99-ms"),
        (
            ("--cost", "t4-bert-base-fp16", "--tokens", "8", "--rate", "1", "--front-processes", "0"),
            "--front-processes must be 1 or more, not 0",
        ),
        (("--cost", "README.md", "--tokens", "8", "--rate", "1"), "not a cost table"),
        (("--cost", "t4-bert-base-fp16", "--replay", "README.md"), "must be a list of [seconds, tokens]"),
        (("--cost", "t4-bert-base-fp16", "--replay", "x", "--rate", "1"), "--replay sets times and lengths"),
        (
            ("--cost", "t4-bert-base-fp16", "--tokens", "8", "--rate", "9", "--duration", "1", "--out", "x.png"),
            "--out x.png: must end in .html or .svg or .json",
        ),
    ],
)
def test_what_makes_no_sense_is_said_in_a_line(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], told: str
) -> None:
    """Exit code 2 and one line that names the option."""
    code, _, errors = run(capsys, *words)
    assert code == 2
    assert errors.startswith("bertserve simulate: ")
    assert told in errors
    assert errors.count("\n") == 1


def test_front_processes_carry_what_one_does_not_until_the_core_is_full(capsys: pytest.CaptureFixture[str]) -> None:
    """At 800 requests/s, of which one front carries 500 and a slow core as many; the device is nearly idle."""

    def p50_ms(*options: str) -> float:
        words = ["--cost", "t4-bert-base-int8", "--tokens", "32", "--rate", "800", "--duration", "4", "--json"]
        assert main([*words, "--receive-us", "2000", *options]) == 0
        return float(json.loads(capsys.readouterr().out)["p50_ms"])

    assert p50_ms() > 100
    assert p50_ms("--front-processes", "3") < 20
    assert p50_ms("--front-processes", "3", "--core-us", "2000") > 100
