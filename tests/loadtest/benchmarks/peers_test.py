"""The comparison with other servers, without them: what is kept, how figures meet, what the page says."""

from __future__ import annotations

import itertools
import struct
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest

from bertserve.loadtest.benchmarks.__main__ import BENCHMARKS
from bertserve.loadtest.benchmarks.peers import closed_loop, who
from bertserve.loadtest.benchmarks.peers.open_loop import GROUPS, OpenLoopBenchmark
from bertserve.loadtest.benchmarks.peers.who import MANY, ONE, ORT, RAW, V2, find, subjects
from bertserve.loadtest.benchmarks.runner import main, parser
from bertserve.loadtest.benchmarks.store import Store
from bertserve.loadtest.benchmarks.turns import Round, Samples
from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.generator.forms import FORMS
from bertserve.loadtest.generator.http1 import post_bytes
from bertserve.loadtest.generator.wire import Reply
from bertserve.loadtest.generator.workload import Bundle
from bertserve.loadtest.report.sample import Sample

if TYPE_CHECKING:
    from pathlib import Path

MODEL = "minilm"
OURS, TRITON = (find(MODEL, system, ORT, V2) for system in ("bertserve", "Triton"))


def sample(p50_ms: float, per_s: float, others_percent: float = 0.0) -> Sample:
    """A measurement."""
    return Sample(
        requests=100,
        exchanges=120,
        per_s=per_s,
        p50_ms=p50_ms,
        p99_ms=2 * p50_ms,
        client_cpu_us=15.0,
        others_percent=others_percent,
    )


def round_of(ours_ms: float) -> Round:
    """A round in which everybody else takes 1 ms and answers 1000 texts a second."""
    samples = {subject.key(count): sample(1.0, 1000.0) for subject in subjects(MODEL) for count in (ONE, MANY)}
    samples[OURS.key(ONE)] = sample(ours_ms, 1000.0)
    return samples


def measured(*rounds: Round) -> Samples:
    """A comparison at 8 tokens."""
    return Samples({8: rounds})


def test_ratios_are_those_of_a_round() -> None:
    """Ours divided by theirs at each measured length; a protocol that the other lacks has none."""
    latency, throughput = (
        each for each in closed_loop.COMPARED if (each.ours, each.theirs) == (ORT, ("Triton", who.DYNAMIC))
    )
    samples = measured(round_of(0.5))
    assert latency.cells(samples, MODEL, V2) == "0.50"
    assert throughput.cells(samples, MODEL, V2) == "1.00"
    plain = next(each for each in closed_loop.COMPARED if each.theirs[0] == who.TRITON_PLAIN)
    assert plain.cells(samples, MODEL, "gRPC") == "-"


@pytest.mark.parametrize("name", FORMS)
def test_a_form_asks_with_the_text_and_its_length(name: str) -> None:
    """The body is as long as its header says and holds the text."""
    headers, content = FORMS[name].request("Grüße")
    head, _, body = post_bytes("127.0.0.1:80", "/path", content, headers=headers).partition(b"\r\n\r\n")
    assert head.startswith(b"POST /path HTTP/1.1\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert "Grüße".encode() in body or b"Gr\\u00fc\\u00dfe" in body


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("embed", b"[[0.5,0.25]]"),
        ("v2", b'{"outputs":[]}' + struct.pack("<2f", 0.5, 0.25)),
        ("openai", b'{"data":[{"embedding":[0.5,0.25]}]}'),
        ("sparse", b'[[{"index":1,"value":0.25},{"index":0,"value":0.5}]]'),
    ],
)
def test_a_form_knows_an_embedding(name: str, body: bytes) -> None:
    """It reads the vector, and takes neither a failure nor a short body for one."""
    check = FORMS[name].check(2, 8)
    check(Reply(0.0, "", b"", body))
    assert FORMS[name].vector(body, 2) == [0.5, 0.25]
    for wrong in (Reply(0.0, "429", b"", body), Reply(0.0, "", b"", b"{}")):
        with pytest.raises(BenchError, match="wrong HTTP reply"):
            check(wrong)


def kit(folder: Path) -> who.Kit:
    """Of a bundle that is not there."""
    bundle = Bundle(folder, MODEL, 1, 384, 256, ("input_ids",), folder / "model.onnx", "int8", batch_invariant=True)
    return who.Kit(folder, dict.fromkeys(("ort", "dynamic", "openvino"), bundle), folder, 2)


def test_triton_serves_every_model_that_it_is_asked_for(tmp_path: Path) -> None:
    """No more and no less, and what changes its answers in company is computed together only where that is said."""
    models = list(who.triton_models(kit(tmp_path), who.CLOSED_LOOP))
    endpoints = [end for subject in subjects(MODEL) if subject.server == "triton" for end in subject.endpoints]
    assert {model.name for model in models} == {end.split("/")[3] if "/" in end else end for end in endpoints}
    together = [model.name for model in models if "dynamic" in model.name and model.together]
    batched = find(MODEL, "Triton", who.DYNAMIC_BATCHED, V2)
    assert together == [batched.endpoints[1].split("/")[3]]
    [model] = [model for model in models if model.name == "minilm-ort-one"]
    assert 'parameters { key: "threads" value { string_value: "2" } }' in model.config


@pytest.mark.parametrize(("name", "words"), [("infinity-onnx", "--engine optimum"), ("fastapi", "fastapi_app:app")])
def test_a_program_of_others_is_told_what_it_serves(tmp_path: Path, name: str, words: str) -> None:
    """Its own port, in its own environment."""
    server = kit(tmp_path).server(name)
    command = " ".join(server.command)
    assert words in command
    assert f"--host 127.0.0.1 --port {server.http_port}" in command
    assert command.startswith(f"{tmp_path}/{name.partition('-')[0]}/bin/")


def test_an_environment_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who has not installed the peers is told how."""
    assert main(BENCHMARKS, ["peers", "--models", str(tmp_path), "--out", str(tmp_path / "peers.json")]) == 1
    assert capsys.readouterr().err.startswith(f"peers: {tmp_path} has no models")


def test_the_raw_engine_is_no_server() -> None:
    """Everybody else has a server, a form and a place for each number of connections."""
    assert RAW in subjects(MODEL)
    for subject in subjects(MODEL):
        assert (subject is RAW) or (subject.server in ("triton", *_OTHERS) and all(subject.endpoints))


_OTHERS = ("ours-ort-cpu", "ours-cpu", "ours-openvino", "infinity-torch", "infinity-onnx", "fastapi")


def open_loop_store(path: Path) -> Store:
    """Two rounds in which every entrant answers alike, but ours at the rates that are compared."""
    facts = {"machine": {"CPU": "a fast one"}, "model": MODEL, "version": "1", "seconds": 8.0}
    store = Store(path, facts, {"versions": {"triton": {"nvidia-pytriton": "0.7.0"}}})
    for engine, entrants in GROUPS.items():
        store.keep(f"capacity 1 {engine}", {"per_s": 50.0})
        for number, entrant in itertools.product((1, 2), entrants):
            factor = 0.4 if entrant.is_ours else 1.0
            for share in entrant.shares:
                rate = 50.0 * share
                figures = {"rate": rate, "offered_per_s": rate, "answered_per_s": rate / 2, "good_per_s": 10 / factor}
                tails = {"p50_ms": 20.0, "p99_ms": 100.0 * factor, "short_p99_ms": 50.0 * factor}
                store.keep(f"block {number} {share:g} {entrant.name}", {**figures, **tails})
    return store


def test_the_page_of_the_open_loop_compares_and_draws(tmp_path: Path) -> None:
    """Ours divided by theirs within a round; everybody has rows, and the picture a line for each system."""
    path = tmp_path / "open-loop.json"
    open_loop_store(path)
    assert main(BENCHMARKS, ["open-loop", "--page-only", "--out", str(path)]) == 0
    text = path.with_suffix(".md").read_text()
    assert "| bertserve, ort-cpu | Triton, ORT, one by one | 0.40 | 0.40 | 2.50 |" in text
    for entrant in itertools.chain(*GROUPS.values()):
        assert f"| {entrant.name} |" in text
    drawn = ET.fromstring(path.with_suffix(".svg").read_text())  # noqa: S314  our own file
    words = [entry.text for entry in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"bertserve", "FastAPI", "infinity", "Triton one by one"} <= set(words)


def test_who_takes_no_deadlines_is_asked_at_no_rate_above_its_collapse(tmp_path: Path) -> None:
    """Its queue would outlast the block; Triton and ours are asked at every rate."""
    options = ["open-loop", "--models", str(tmp_path), "--rounds", "1"]
    benchmark = OpenLoopBenchmark(parser(BENCHMARKS).parse_args(options))
    benchmark.store = open_loop_store(tmp_path / "open-loop.json")
    benchmark.store.steps["block 1 0.6 FastAPI, ORT"]["good_per_s"] = 1.0
    names = [name for name, _ in benchmark.steps()]
    assert [name for name in names if "FastAPI" in name] == []
    assert "block 1 2 infinity, ORT" in names
    assert "block 1 2 Triton, ORT, one by one" in names


def test_triton_is_told_of_deadlines(tmp_path: Path) -> None:
    """Its queue refuses what has waited too long, and it has a model for everybody who is asked."""
    models = list(who.triton_models(kit(tmp_path), who.OPEN_LOOP, who.QUEUE_MS))
    asked = {entrant.target(1, MODEL).model for group in GROUPS.values() for entrant in group if entrant.model}
    assert {model.name for model in models} == asked
    assert all("default_timeout_microseconds: 125000 allow_timeout_override: true" in model.config for model in models)
    assert {model.multiple for model in models} == {1, 16}
