"""About 9 seconds of CPU."""

from __future__ import annotations

import http.server
import json
import math
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from loadtest.capacity import plan as plans
from loadtest.capacity import sensitivity
from loadtest.capacity.candidates import read_candidates
from loadtest.capacity.costs import _fitted as fitted
from loadtest.capacity.costs import costs_of, known, transfer_error
from loadtest.capacity.encoder import KNOWN, encoder_of
from loadtest.capacity.lengths import read_lengths
from loadtest.capacity.plan import Objective, Replica, SizingLoad, SizingPlan, memory_of, plan
from loadtest.capacity.roofline import error_on
from loadtest.capacity.simulator import Overhead
from loadtest.capacity.size_cli import main
from loadtest.errors import BenchError
from loadtest.report.progress import Progress
from tests.support.browser import fits_a_phone, is_whole_on_a_phone
from tests.support.clients import post_json

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.browser import Page
    from tests.support.server import Server

SHEETS = {
    "t4": (320, 65, 130, 16, 70),
    "l4": (300, 121, 242, 24, 72),
    "a10": (600, 125, 250, 24, 150),
    "a100": (2039, 312, 624, 80, 400),
    "h100": (3350, 989, 1979, 80, 700),
}
"""NVIDIA's data sheets: GB/s, TFLOPS in fp16, TOPS in INT8, GB, W."""


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(words)
    told = capsys.readouterr()
    return code, told.out, told.err


@pytest.fixture
def rough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plays fewer requests at the end of a search: enough where exact figures are not what is tested."""
    monkeypatch.setattr(plans, "_FINAL_REQUESTS", 6_000)


def load(rate: float = 300.0, limit_ms: float = 40.0) -> SizingLoad:
    return SizingLoad(rate, read_lengths("8:70,128:30", 512), Objective(99, limit_ms))


def test_the_table_holds_what_the_data_sheets_say() -> None:
    """Bandwidth, rates, memory and power of the cards."""
    table = read_candidates(None)
    found = {
        name: (one.bandwidth_gb_s, one.tera_per_s["fp16"], one.tera_per_s["int8"], one.memory_gb, one.watts)
        for name, one in table.items()
        if one.kind == "gpu"
    }
    assert found == SHEETS


@pytest.mark.parametrize(
    ("card", "precision", "length", "batch", "ms"),
    [
        ("l4", "fp16", 128, 1, 1.01),
        ("l4", "int8", 384, 8, 5.42),
        ("a100", "fp16", 384, 1, 1.31),
        ("a100", "int8", 128, 8, 0.95),
    ],
)
def test_a_published_time_is_used_as_it_stands(card: str, precision: str, length: int, batch: int, ms: float) -> None:
    """For BERT-base, and nothing computed stands in its place."""
    costs = costs_of(card, read_candidates(None)[card], encoder_of("bert-base"), precision)
    assert [p.us for p in costs.points if (p.tokens, p.batch) == (length, batch)] == pytest.approx([1000 * ms])
    assert costs.basis == "published"
    assert any("https://github.com/NVIDIA/TensorRT" in fact for fact in costs.facts)


def test_the_roofline_comes_as_near_as_its_page_says() -> None:
    """docs/guides/sizing.md quotes these errors, of each card and of one card by another's shares."""
    errors = {(card, form): fitted((card,), form).error for card in ("t4", "l4", "a100") for form in ("fp16", "int8")}
    assert {key: round(100 * error) for key, error in errors.items()} == {
        ("t4", "fp16"): 4,
        ("l4", "fp16"): 8,
        ("a100", "fp16"): 9,
        ("t4", "int8"): 13,
        ("l4", "int8"): 11,
        ("a100", "int8"): 16,
    }
    assert round(100 * transfer_error("fp16")) == 28
    assert error_on(known("a100", "fp16"), fitted(("t4",), "fp16")) > 0.4


def test_an_encoder_without_a_table_is_computed_and_says_so() -> None:
    """With an error; a card without any table of its own has the larger one."""
    table, encoder = read_candidates(None), encoder_of("megatron-1.3b")
    own, borrowed = (costs_of(name, table[name], encoder, "fp16") for name in ("l4", "a10"))
    assert (own.basis, borrowed.basis) == ("computed", "computed")
    assert 0 < own.error < borrowed.error


@pytest.mark.usefixtures("rough")
def test_more_load_needs_more_replicas_and_one_less_would_break() -> None:
    """The number is the smallest that holds in the simulation, and a stricter objective needs no fewer."""
    table, encoder = read_candidates(None), encoder_of("bert-large")
    costs = costs_of("t4", table["t4"], encoder, "fp16")
    counts = {
        (rate, limit): plan("t4", table["t4"], "fp16", costs, encoder, load(rate, limit)).replicas
        for rate, limit in ((300, 40), (900, 40), (300, 25))
    }
    assert 1 <= counts[300, 40] < counts[900, 40]
    assert counts[300, 25] >= counts[300, 40]
    replica = Replica(costs, load(900), 1)
    assert replica.holds(900 / counts[900, 40])
    assert not replica.holds(900 / (counts[900, 40] - 1))


@pytest.mark.usefixtures("rough")
def test_front_processes_are_added_where_they_save_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As few as do. One front carries 1,000 texts/s and the core 2,500; a T4 takes more than both, or much less."""
    monkeypatch.setattr(
        plans, "usual", lambda _threads, fronts=1: Overhead(receive_us=1000, core_us=400, fronts=fronts)
    )
    t4, asked = read_candidates(None)["t4"], load(3500.0)

    def planned(name: str, asked: SizingLoad) -> SizingPlan:
        encoder = encoder_of(name)
        return plan("t4", t4, "int8", costs_of("t4", t4, encoder, "int8"), encoder, asked)

    found = planned("bert-base", asked)
    assert (found.replicas, found.fronts, found.replicas_of_one_process, found.bound) == (2, 2, 5, "front")
    few, enough = (Replica(found.costs, asked, 1, fronts) for fronts in (1, 2))
    assert not few.holds(3500 / 2)
    assert enough.holds(3500 / 2)
    full = planned("bert-base", load(2200.0))
    assert (full.replicas, full.fronts, full.bound) == (1, 3, "core")
    one_is_enough = planned("bert-base", load(700.0))
    assert (one_is_enough.replicas, one_is_enough.fronts, one_is_enough.bound) == (1, 1, "front")
    slow = planned("bert-large", asked)
    assert (slow.fronts, slow.replicas_of_one_process, slow.bound) == (1, slow.replicas, "engine")


@pytest.mark.usefixtures("rough")
def test_weights_that_do_not_fit_are_split() -> None:
    """Over as many devices as hold them; where one fits, over none."""
    table = read_candidates(None)
    assert memory_of(table["t4"], encoder_of("megatron-3.9b"), "fp16", 1024).devices == 1
    huge = encoder_of("encoder-481b")
    on_h100 = memory_of(table["h100"], huge, "fp16", 1024)
    assert on_h100.weights_bytes == pytest.approx(961e9, rel=0.01)
    assert 961 / 80 < on_h100.devices < 20
    found = plan("h100", table["h100"], "fp16", costs_of("h100", table["h100"], huge, "fp16"), huge, load(10, 5000))
    assert found.devices == found.replicas * on_h100.devices > 0


def test_a_pipeline_answers_every_text_although_one_takes_nearly_the_objective() -> None:
    """Admission leaves a request the time that a server gives it, not the objective's alone."""
    table, huge = read_candidates(None), encoder_of("encoder-481b")
    costs = costs_of("t4", table["t4"], huge, "fp16")
    replica = Replica(costs, SizingLoad(5.0, read_lengths("10-250", 512), Objective(99, 10_000), timeout_ms=10_000), 84)
    run = replica.run(5.0, 1000)
    assert run.fates.keys() == {"answered"}
    assert 9000 < run.p99_ms < 10_000


@pytest.mark.usefixtures("rough")
def test_the_command_answers_for_programs_and_twice_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """Every figure of a row, the cheapest row, and what is not known."""
    words = ("bert-base", "--lengths", "8:70,128:30", "--rate", "500", "--slo", "p99=30ms", "--on", "t4", "--json")
    code, out, _ = run(capsys, *words, "--price", "t4=0.36", "--precision", "fp16")
    assert (code, out) == (0, run(capsys, *words, "--price", "t4=0.36", "--precision", "fp16")[1])
    found = json.loads(out)
    [row] = found["candidates"]
    assert (row["name"], row["precision"], row["basis"], row["holds"]) == ("t4", "fp16", "published", True)
    assert row["objective_ms"] <= 30
    assert 0 < row["utilisation"] < 1
    assert row["watts"] == 70 * row["devices"]
    assert (row["bound"], row["front_processes"], row["advice"]) == ("engine", 1, None)
    assert row["per_million_texts"] == pytest.approx(0.36 * row["devices"] / 3600 / 500 * 1e6)
    assert row["per_million_tokens"] == pytest.approx(row["per_million_texts"] / found["load"]["mean_tokens"])
    assert found["cheapest"] == {"name": "t4", "precision": "fp16"}
    assert found["unknown"]


@pytest.mark.usefixtures("rough")
def test_the_command_says_when_the_front_bounds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To people and to programs, with the option that helps."""
    monkeypatch.setattr(
        plans, "usual", lambda _threads, fronts=1: Overhead(receive_us=1000, core_us=100, fronts=fronts)
    )
    words = ("bert-base", "--lengths", "32", "--rate", "1500", "--slo", "p99=30ms", "--on", "t4", "--precision", "int8")
    advice = "bounded by the front process: add --front-processes 2 (devices: 2 to 1)"
    _, out, _ = run(capsys, *words)
    assert f"t4 int8: {advice}" in out
    assert "1 x NVIDIA T4 in int8 with --front-processes 2" in out
    [row] = json.loads(run(capsys, *words, "--json")[1])["candidates"]
    assert (row["devices"], row["front_processes"], row["bound"], row["advice"]) == (1, 2, "front", advice)


@pytest.mark.usefixtures("rough")
def test_a_page_shows_how_the_answer_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the rate, the objective and the lengths, for each candidate that holds; the picture is a file of its own."""
    monkeypatch.setattr(sensitivity, "_REQUESTS", 40)
    words = ("bert-base", "--lengths", "8:70,128:30", "--rate", "200", "--slo", "p99=30ms", "--on", "t4,l4")
    html, svg = tmp_path / "page.html", tmp_path / "picture.svg"
    assert run(capsys, *words, "--precision", "int8", "--out", str(html))[0] == 0
    page = html.read_text()
    for title in ("Cost by rate", "Cost by objective", "Cost by text length", "Latency of one replica"):
        assert f"<h2>{title}</h2>" in page
    assert page.count("t4 int8") >= 4
    assert "://" not in page.replace("https://github.com/NVIDIA/", "")
    assert run(capsys, *words, "--precision", "fp16", "--out", str(svg))[0] == 0
    assert svg.read_text().startswith("<svg")
    assert svg.read_text().count('class="series"') == 2
    code, _, error = run(capsys, *words, "--out", str(tmp_path / "page.pdf"))
    assert (code, "must end in .html or .svg" in error) == (2, True)


@pytest.mark.usefixtures("rough")
def test_the_page_fits_a_phone(
    page: Page, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are cards there, its curves drawn narrower, and no label lies on a line."""
    monkeypatch.setattr(sensitivity, "_REQUESTS", 40)
    html = tmp_path / "page.html"
    words = ("bert-base", "--lengths", "128", "--rate", "200", "--slo", "p99=30ms", "--on", "t4", "--precision", "int8")
    assert run(capsys, *words, "--out", str(html))[0] == 0
    page.open(html.as_uri())
    assert page.run("document.querySelectorAll('svg.wide').length") == 4
    fits_a_phone(page)
    is_whole_on_a_phone(page)
    assert "USD/h" in page.text("table")


@pytest.mark.usefixtures("rough")
def test_what_the_curves_say_of_other_rates_is_what_a_sizing_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """More load, shorter limits and longer texts never need fewer devices, and nothing holds below a lone text."""
    monkeypatch.setattr(sensitivity, "_REQUESTS", 600)
    table, encoder = read_candidates(None), encoder_of("bert-base")
    asked = load(400.0, 30.0)
    found = plan("t4", table["t4"], "int8", costs_of("t4", table["t4"], encoder, "int8"), encoder, asked)
    [curves] = sensitivity.sensitivities([found], encoder, asked, lambda _done, _of: None)
    assert abs(curves.devices(400, 30) - found.devices) <= 1
    assert curves.devices(400, 30) <= curves.devices(4000, 30)
    assert curves.devices(4000, 30) <= curves.devices(4000, 8)
    assert curves.devices(4000, 30, 0.5) <= curves.devices(4000, 30, 2.0)
    assert math.isnan(curves.devices(400, 1))


def test_an_objective_below_a_lone_text_is_refused_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """No number of replicas helps, and the exit code says that none holds."""
    code, out, _ = run(capsys, "bert-large", "--lengths", "384", "--rate", "9", "--slo", "p99=5ms", "--on", "t4")
    assert code == 1
    assert "t4 fp16: no number of devices meets the SLO: the unloaded p99 is" in out
    assert "no candidate meets the SLO at any count" in out


CARD = {"title": "Mine", "kind": "gpu", "memory_gb": 8, "bandwidth_gb_s": 100, "tera_per_s": {"fp16": 20}}
MINE = "bert-base --candidates FILE --on mine"
CANNOT: list[tuple[str, str] | tuple[str, str, object]] = [
    ("nothing-here", "nothing-here/config.json|nothing-here: No such file"),
    ("bert-base --rate 0", "--rate must be above 0"),
    ("bert-base --slo errors=1%", "must be one percentile and its limit, such as p99=50ms"),
    ("bert-base --slo p99=5", "the limit must be in us, ms or s"),
    ("bert-base --lengths long", "must look like 128, 8:70,32:30 or 10-250, or be the path of a file"),
    ("bert-base --lengths http://127.0.0.1:9", "refused"),
    ("bert-base --on t5", "--on: unknown candidate 't5'. Available: t4, l4"),
    ("bert-base --price t5=1", "--price: unknown candidate 't5'"),
    ("bert-base --price t4", "must look like t4=0.35"),
    ("bert-base --candidates none.json", "--candidates none.json: No such file"),
    ("bert-base --precision fp32 --on t4", "no candidate supports it"),
    # A configuration must be whole, and of a kind of model that is known.
    ("FILE", "hidden_size must be a positive integer, not 'wide'", {**KNOWN["bert-base"], "hidden_size": "wide"}),
    ("FILE", "model_type 'gpt2' is not known; supported: bert,", {"model_type": "gpt2"}),
    ("FILE", "must be an object", []),
    # A table of one's own.
    (MINE, "mine.memory_gb must be above 0", {"mine": {**CARD, "memory_gb": 0}}),
    (MINE, "mine.cores is missing", {"mine": {**CARD, "kind": "cpu"}}),
    (MINE, "speed", {"mine": {**CARD, "speed": 1}}),
]


@pytest.mark.parametrize("case", CANNOT, ids=lambda case: case[1])
def test_what_cannot_be_sized_is_said(
    case: tuple[str, str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, with what would be right."""
    words, told, *content = case
    file = tmp_path / "config.json"
    for each in content:
        file.write_text(json.dumps(each))
    usual = {"--lengths": "128", "--rate": "10", "--slo": "p99=50ms"}
    given = words.replace("FILE", str(file)).split()
    given += [word for key, value in usual.items() if key not in given for word in (key, value)]
    code, out, error = run(capsys, *given)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert any(part in error for part in told.split("|")), error


def test_what_is_measured_here_is_said_before_and_told_without_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine, in which precisions and for how long; then, where nobody has a terminal, a line now and then."""
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps({**KNOWN["bert-base"], "num_hidden_layers": 1, "hidden_size": 12, "intermediate_size": 8})
    )
    monkeypatch.setattr(Progress, "_every_s", 0.0)
    words = (str(file), "--lengths", "8", "--rate", "1", "--slo", "p99=1s", "--on", "here", "--seconds", "0.1")
    code, _, said = run(capsys, *words, "--threads", "1", "--precision", "fp32")
    first, *others = said.splitlines()
    assert code in {0, 2}
    assert first.startswith("measuring this machine (1 threads) in fp32: about 0 s of runs and the export")
    assert any("exporting 1 of 1 layers" in line for line in others)
    assert "\x1b" not in said


def test_a_table_of_ones_own_takes_the_place_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its prices are not known."""
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"mine": CARD}))
    load = ("--lengths", "32", "--rate", "20", "--slo", "p99=90ms", "--json")
    code, out, _ = run(capsys, "bert-base", *load, "--candidates", str(file), "--on", "mine")
    [row] = json.loads(out)["candidates"]
    assert (code, row["name"], row["basis"], row["price_per_hour"]) == (0, "mine", "computed", None)


def test_lengths_of_a_file_of_texts(tmp_path: Path) -> None:
    """Estimated from words where there is no tokenizer, which is said; longer ones are cut."""
    file = tmp_path / "texts.txt"
    file.write_text("one two three\n\n" + "word " * 1000 + "\n")
    found = read_lengths(str(file), 512)
    assert found.mix == {6: 1.0, 512: 1.0}
    assert "estimated from words" in found.fact
    assert "50.0% are truncated to 512 tokens" in found.fact


def test_lengths_of_a_running_server(fake_server: Server) -> None:
    """Its histogram: each text counts within its bucket, evenly spread."""
    texts = ["one two three"] * 5 + ["word " * 60]
    assert post_json(fake_server.http, "/embed", json.dumps({"inputs": texts}).encode()).status == 200
    found = read_lengths(f"http://{fake_server.metrics}", 512)
    assert set(range(1, 9)) <= set(found.mix)
    assert all(found.mix[tokens] == found.mix[1] > 0 for tokens in range(1, 9))
    assert sum(found.mix[tokens] for tokens in range(49, 65)) >= 1
    assert "assumed uniform within each bucket" in found.fact


def test_lengths_of_a_server_beyond_its_buckets() -> None:
    """They count as the longest bound, which the sentence says; so do a server without texts and one without them."""
    shown = 'bertserve_text_tokens_bucket{le="2.0"} 2.0\nbertserve_text_tokens_bucket{le="4.0"} 4.0\n'
    with _metrics(f'{shown}bertserve_text_tokens_bucket{{le="+Inf"}} 5.0\n') as url:
        found = read_lengths(url, 512)
    assert found.mix == {1: 1.0, 2: 1.0, 3: 1.0, 4: 2.0}
    assert "1 of them longer than 4 tokens" in found.fact


@pytest.mark.parametrize(
    ("shown", "error"),
    [
        (
            'bertserve_text_tokens_bucket{le="2.0"} 0.0\nbertserve_text_tokens_bucket{le="+Inf"} 0.0\n',
            "not processed any texts",
        ),
        ("up 1\n", "use the URL of the metrics port"),
    ],
)
def test_a_server_without_lengths_is_refused(shown: str, error: str) -> None:
    """By what is missing."""
    with _metrics(shown) as url, pytest.raises(BenchError, match=error):
        read_lengths(url, 512)


@contextmanager
def _metrics(text: str) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None: ...

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
