"""The comparison with other servers, without them: what is kept, how figures meet, what the page says."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest

from loadtest.benchmarks.peers import page, servers, store, tune, verdict
from loadtest.benchmarks.peers.__main__ import main, parse
from loadtest.benchmarks.peers.forms import FORMS, request_bytes
from loadtest.benchmarks.peers.subjects import MANY, ONE, ORT, RAW, V2, find, subjects
from loadtest.errors import BenchError
from loadtest.generator.wire import Reply
from loadtest.generator.workload import Bundle
from loadtest.report.sample import Sample

if TYPE_CHECKING:
    from pathlib import Path

MODEL = "minilm"
FACTS = store.Facts({"CPU": "a fast one"}, {"model": MODEL, "version": "1"}, 2.0)
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


def round_of(ours_ms: float, others_percent: float = 0.0) -> store.Round:
    """A round in which everybody else takes 1 ms and answers 1000 texts a second."""
    samples = {(subject.name, count): sample(1.0, 1000.0) for subject in subjects(MODEL) for count in (ONE, MANY)}
    samples[OURS.name, ONE] = sample(ours_ms, 1000.0, others_percent)
    return samples


def measured(*rounds: store.Round) -> store.Store:
    """A comparison at 8 tokens."""
    likeness = {subject.name: 0.99 for subject in subjects(MODEL)}
    return store.Store(FACTS, {8: list(rounds)}, likeness, {"triton": {"nvidia-pytriton": "0.7.0"}}, {"triton": 0.1})


def test_a_comparison_goes_on_where_it_ended(tmp_path: Path) -> None:
    """What was written is read again, sample by sample; the file that is not there holds nothing."""
    path = tmp_path / "peers.json"
    assert not store.read(path, FACTS).lengths
    kept = measured(round_of(0.5))
    kept.write(path)
    assert store.read(path, FACTS) == kept


def test_samples_of_another_machine_are_no_part_of_it(tmp_path: Path) -> None:
    """Figures of two machines, models or durations never stand in one table."""
    path = tmp_path / "peers.json"
    measured(round_of(0.5)).write(path)
    with pytest.raises(BenchError, match=r"with another machine; start afresh with --fresh"):
        store.read(path, store.Facts({"CPU": "a slow one"}, FACTS.model, FACTS.seconds))


def test_ratios_are_taken_within_a_round() -> None:
    """The median of the rounds' ratios, with the least and the greatest."""
    ratio = measured(round_of(0.5), round_of(0.9), round_of(0.6)).ratio(8, OURS, TRITON, ONE, "p50_ms")
    assert (ratio.median, ratio.low, ratio.high) == (0.6, 0.5, 0.9)


def test_a_disturbed_round_counts_only_where_there_is_no_other() -> None:
    """What others did to the machine is no figure of a server."""
    assert measured(round_of(0.5), round_of(9.0, 50.0)).ratio(8, OURS, TRITON, ONE, "p50_ms").high == 0.5
    assert measured(round_of(9.0, 50.0)).ratio(8, OURS, TRITON, ONE, "p50_ms").high == 9.0


def test_the_verdict_is_yes_no_or_not_measured() -> None:
    """Half of Triton's latency is enough at 8 tokens, equal throughput is not, and 32 tokens were not measured."""
    found = {
        (aim.figure.more, tokens): one.met
        for aim in verdict.AIMS
        if (aim.what, aim.protocol) == ("ORT beside Triton with ORT's own INT8", V2)
        for tokens, one in verdict.judge(measured(round_of(0.5)), MODEL, aim).items()
    }
    assert found[False, 8] is True
    assert found[True, 8] is False
    assert found[False, 32] is None


def test_the_page_and_its_plot_name_everybody(tmp_path: Path) -> None:
    """Each subject has its row and its bars; the plot is well-formed."""
    path = tmp_path / "peers.json"
    page.write(measured(round_of(0.5), round_of(0.7)), path, "python -m loadtest.benchmarks.peers")
    text = path.with_suffix(".md").read_text()
    drawn = ET.fromstring(path.with_suffix(".svg").read_text())  # noqa: S314  our own file
    words = [entry.text for entry in drawn.iter("{http://www.w3.org/2000/svg}text")]
    for subject in subjects(MODEL):
        assert f"| {subject.system} | {subject.engine} | {subject.protocol} |" in text
        assert words.count(subject.name) == 2
    assert "0.60 (0.50 to 0.70)" in text
    assert "at most 0.90: yes, 0.60 (0.50 to 0.70)" in text
    assert "at most 0.95: not measured" in text
    assert "nvidia-pytriton 0.7.0" in text
    assert "Idle, of one core: triton 0.1%" in text


@pytest.mark.parametrize("name", FORMS)
def test_a_form_asks_with_the_text_and_its_length(name: str) -> None:
    """The body is as long as its header says and holds the text."""
    head, _, body = request_bytes(FORMS[name], 80, "/path", "Grüße").partition(b"\r\n\r\n")
    assert head.startswith(b"POST /path HTTP/1.1\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert "Grüße".encode() in body or b"Gr\\u00fc\\u00dfe" in body


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("embed", b"[[0.5,0.25]]"),
        ("v2", b'{"outputs":[]}' + struct.pack("<2f", 0.5, 0.25)),
        ("openai", b'{"data":[{"embedding":[0.5,0.25]}]}'),
    ],
)
def test_a_form_knows_an_embedding(name: str, body: bytes) -> None:
    """It reads the vector, and takes neither a failure nor a short body for one."""
    check = FORMS[name].check(2)
    check(Reply(0.0, "", b"", body))
    assert FORMS[name].vector(body, 2) == [0.5, 0.25]
    for wrong in (Reply(0.0, "429", b"", body), Reply(0.0, "", b"", b"{}")):
        with pytest.raises(BenchError, match="a wrong reply over HTTP"):
            check(wrong)


def test_triton_is_tried_with_instances_threads_and_batching(tmp_path: Path) -> None:
    """Each artifact in every combination; what Triton puts together is computed together."""
    bundle = Bundle(
        tmp_path, MODEL, 1, 384, 256, ("input_ids",), tmp_path / "model.onnx", "int8", batch_invariant=False
    )
    models = tune.candidates(servers.Kit(tmp_path, bundle, bundle, bundle, tmp_path, 2))
    assert len({model.name for model in models}) == len(models) == 18
    assert all(model.together == (model.batch > 1) for model in models)
    assert 'string_value: "openvino"' in models[-1].config
    assert "dynamic_batching" in models[-1].config


def test_triton_serves_every_model_that_it_is_asked_for(tmp_path: Path) -> None:
    """No more and no less, and what changes its answers in company is computed together only where that is said."""
    bundle = Bundle(
        tmp_path, MODEL, 1, 384, 256, ("input_ids",), tmp_path / "model.onnx", "int8", batch_invariant=False
    )
    models = servers.triton_models(servers.Kit(tmp_path, bundle, bundle, bundle, tmp_path, 2))
    places = {place for subject in subjects(MODEL) if subject.server == "triton" for place in subject.places}
    assert {model.name for model in models} == {place.split("/")[3] if "/" in place else place for place in places}
    assert [model.name for model in models if "dynamic" in model.name and model.together] == ["minilm-dynamic-batched"]


def test_what_was_tried_stands_in_a_table(tmp_path: Path) -> None:
    """A row for each configuration, a column for each length; no table where nothing was tried."""
    samples = tmp_path / "peers.json"
    assert tune.table(samples) is None
    shared = {"artifact": "model.onnx", "instances": 2, "threads": 1, "batch": 8, "p50_ms": 1.5, "per_s": 900.0}
    (tmp_path / "peers-triton.json").write_text(json.dumps([{**shared, "tokens": tokens} for tokens in (8, 32)]))
    table = tune.table(samples)
    assert table is not None
    assert table.rows == [["model.onnx", "2 of 1 threads", "up to 8", "1.50 ms, 900/s", "1.50 ms, 900/s"]]


def test_an_environment_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who has not installed the peers is told how."""
    assert main(["--models", str(tmp_path), "--out", str(tmp_path / "peers.json")]) == 1
    assert capsys.readouterr().err.startswith(f"bench-peers: {tmp_path} holds no model")


def test_the_raw_engine_is_no_server() -> None:
    """Everybody else has a server, a form and a place for each number of connections."""
    assert RAW in subjects(MODEL)
    for subject in subjects(MODEL):
        assert (subject is RAW) or (subject.server in ("triton", *_OTHERS) and all(subject.places))


_OTHERS = ("ours-ort", "ours-openvino", "infinity-torch", "infinity-onnx", "fastapi")


def test_settings_must_be_positive(capsys: pytest.CaptureFixture[str]) -> None:
    """A benchmark of nothing is refused."""
    with pytest.raises(SystemExit, match="2"):
        parse(["--seconds", "0"])
    assert "must be positive" in capsys.readouterr().err
