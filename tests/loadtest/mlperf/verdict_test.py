"""Verdicts, gates and command lines of MLPerf runs, without LoadGen. Costs less than a second of CPU."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

from loadtest.errors import BenchError
from loadtest.mlperf.__main__ import IMPOSSIBLE, main
from loadtest.mlperf.accuracy import ERROR, judge, read_log, squad
from loadtest.mlperf.library import Library
from loadtest.mlperf.verdict import read_verdict

if TYPE_CHECKING:
    from pathlib import Path

SERVER = """\
================================================
MLPerf Results Summary
================================================
SUT name : PySUT
Scenario : Server
Mode     : PerformanceOnly
Scheduled samples per second : 101.50
Result is : INVALID
  Performance constraints satisfied : Yes
  Min duration satisfied : NO
  Early stopping satisfied: NO
50.00 percentile latency (ns)   : 1230000
99.00 percentile latency (ns)   : 4560000

1 ERROR encountered. See detailed log.
"""
STREAM = """\
Scenario : SingleStream
99.00 percentile latency (ns)   : 4560000
50.00 percentile latency (ns)   : 1230000
Result is : VALID
Early Stopping Result:
 * Early stopping 90.0th percentile estimate: 2340000
 * Early stopping 99.0th percentile estimate: 9990000
"""


def test_a_summary_is_read(tmp_path: Path) -> None:
    """LoadGen's own verdict, the figure that the rules judge by, and what was lacking."""
    file = tmp_path / "mlperf_log_summary.txt"
    file.write_text(SERVER)
    found = read_verdict(file)
    assert (found.valid, found.metric, found.p50_ms, found.p99_ms, found.errors) == (False, 101.5, 1.23, 4.56, 1)
    assert found.reasons == ("min duration", "early stopping")
    assert found.text().startswith("Server, performance: INVALID (min duration, early stopping not satisfied), ")
    file.write_text(STREAM)
    found = read_verdict(file)
    assert (found.valid, found.metric, found.errors, found.reasons) == (True, 2.34, 0, ())
    file.write_text(STREAM.partition("Early")[0])
    assert math.isnan(read_verdict(file).metric)
    file.write_text(STREAM.replace("Result is", "Result"))
    with pytest.raises(BenchError, match="no line 'Result is'"):
        read_verdict(file)


@pytest.mark.parametrize(
    ("answer", "right", "exact", "f1"),
    [
        ("The  Eiffel-Tower!", ["eiffel tower", "eiffeltower"], 100, 100),
        ("in Paris", ["Paris", "London"], 0, 200 / 3),
        ("", ["Paris"], 0, 0),
        ("cat cat", ["cat"], 0, 200 / 3),
    ],
)
def test_f1_is_as_squad_has_it(answer: str, right: list[str], exact: float, f1: float) -> None:
    """Case, punctuation, articles and spaces do not count; of several right answers the nearest does."""
    assert [float(one[0]) for one in squad([right], [answer])] == pytest.approx([exact, f1])


def test_the_gate_of_questions_is_99_percent_of_fp32() -> None:
    """What fp32 has wrong may be wrong; an answer lost in a hundred passes, two do not."""
    gold = tuple((f"word{index}",) for index in range(101))
    library = Library("answer", "", tuple({"question": "", "context": ""} for _ in gold), gold)
    fp32 = [b"wrong", *(one.encode() for (one,) in gold[1:])]
    found = judge(library, [b"wrong", b"wrong", *fp32[2:]], fp32)
    assert found.held
    assert found.others["% of fp32's answers"] == pytest.approx(100 * 100 / 101)
    # One of n differs, by 100: the deviation is 100 * sqrt(n - 1) / n.
    assert found.others[ERROR] == pytest.approx(100 * math.sqrt(100) / 101 / math.sqrt(101))
    assert not judge(library, [b"wrong", b"wrong", b"wrong", *fp32[3:]], fp32).held
    with pytest.raises(BenchError, match="answers no question correctly"):
        judge(library, fp32, [b"wrong"] * len(gold))


def test_the_gate_of_embeddings_is_the_mean_cosine() -> None:
    """Lengths do not count, angles do; the worst text is told of."""
    library = Library("embed", "", ("a", "b"))
    fp32 = [np.array(one, "<f4").tobytes() for one in ([1, 0], [0, 1])]
    near = [np.array(one, "<f4").tobytes() for one in ([2, 0], [0.15, 1])]
    far = [np.array(one, "<f4").tobytes() for one in ([2, 0], [0.25, 1])]
    assert judge(library, near, fp32).held
    found = judge(library, far, fp32)
    assert not found.held
    assert found.others["least cosine"] == pytest.approx(1 / math.hypot(0.25, 1))
    with pytest.raises(BenchError, match="vectors of 3 numbers"):
        judge(library, [bytes(12)] * 2, fp32)


def test_an_accuracy_log_must_be_whole(tmp_path: Path) -> None:
    """Every sample has an answer; of a sample that fills a query and comes again, the first one counts."""
    file = tmp_path / "mlperf_log_accuracy.json"
    entries = [{"seq_id": 0, "qsl_idx": 1, "data": "62"}, {"seq_id": 1, "qsl_idx": 0, "data": "61"}]
    file.write_text(json.dumps([*entries, {**entries[0], "data": "63"}]))
    assert read_log(file, 2) == [b"a", b"b"]
    with pytest.raises(BenchError, match="answers to 2 samples of 3"):
        read_log(file, 3)
    file.write_text(json.dumps([{**entries[0], "qsl_idx": 2}]))
    with pytest.raises(BenchError, match="an answer to sample 2, of 2"):
        read_log(file, 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--scenario", "server"], "--rate is missing"),
        (["--scenario", "offline", "--mode", "accuracy"], "--reference is missing"),
        (["--scenario", "offline", "--seconds", "0"], "--seconds must be above 0, not 0"),
        (["--scenario", "offline", "--target", "https://127.0.0.1:1"], "the LoadGen client does not support TLS"),
        (["--scenario", "offline", "--target", "grpc://127.0.0.1:1"], "HTTP has its own port"),
    ],
)
def test_a_wrong_command_line_is_one_line(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    """It says what is missing or wrong, before any load."""
    assert main(words) == IMPOSSIBLE
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "not SQuAD 1.1's JSON"),
        ('{"data": []}', "there must be one question"),
        ('{"data": [{"paragraphs": [{"context": "c", "qas": [{"question": "q", "answers": []}]}]}]}', "one answer"),
    ],
)
def test_questions_need_answers(tmp_path: Path, text: str, said: str) -> None:
    """A file without them is refused by name."""
    file = tmp_path / "questions.json"
    file.write_text(text)
    with pytest.raises(BenchError, match=said):
        Library.read("answer", file)
    with pytest.raises(BenchError, match="needs --data FILE"):
        Library.read("answer", None)
