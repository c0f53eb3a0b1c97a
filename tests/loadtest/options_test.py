"""Every two values of the options that `bertserve load --help` lists, together in one run of a second: ten minutes."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING

import pytest

from bertserve.loadtest.cli import HELD, IMPOSSIBLE, MISSED, main, parser
from bertserve.loadtest.generator.routes import PROTOCOLS
from bertserve.loadtest.generator.scenario import SCENARIOS
from bertserve.loadtest.report.result import Result
from bertserve.serving.tasks import TASKS
from tests.support.certificates import Certificates
from tests.support.server import Server, measured

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

AXES: dict[str, tuple[str, ...]] = {
    "ways": (
        "--protocol http --task embed",
        "--model tag",
        "--protocol tei --task classify",
        "--protocol openai --model embed",
        "--protocol cohere-v1 --model rerank",
        "--protocol cohere-v2 --task rerank --model rerank",
        "--protocol v2 --model fill_mask",
        "--protocol grpc --model answer",
        "--protocol v2 --task embed_tokens --model embed_tokens",
        "--protocol grpc --model embed_sparse",
    ),
    "scenario": ("", *(f"--scenario {name}" for name in SCENARIOS), "--scenario FOLDER/own.toml"),
    "texts": ("", "--texts FOLDER/plain.txt", "--texts FOLDER/fields.jsonl"),
    "judged": ("", "--slo p50=10s,errors=50%", "--slo p99=1us", "--slo max=1us --find-capacity"),
    "rate": ("--rate 3", "--rate 40"),
    "secured": ("", "--ca CA --cert CLIENT", "--ca CA --cert CERT --key KEY"),
    "timeout": ("", "--timeout-ms 9000"),
    "models": ("", "--models REPOSITORY"),
    "seed": ("", "--seed 7"),
}
"""Values of each option, or of several where one needs another."""

FIELDS = {
    "answer": {"question": "What sat?", "context": "the cat sat"},
    "rerank": {"query": "cat", "texts": ["the cat sat", "a dog ran"]},
    "fill_mask": {"text": "the [MASK] sat"},
}
OWN = "lengths = { 8 = 1 }\n[[phases]]\nseconds = 1\nfrom = 0\nto = 1\n"


def rows() -> list[tuple[str, ...]]:
    """Few command lines in which every two values of two options meet, by the greedy rule."""
    axes = list(AXES.values())
    left = {
        (a, x, b, y)
        for (a, xs), (b, ys) in itertools.combinations(enumerate(axes), 2)
        for x in range(len(xs))
        for y in range(len(ys))
    }
    found = []
    while left:
        a, x, b, y = min(left)
        row = {a: x, b: y}
        for axis in sorted(set(range(len(axes))) - {a, b}):
            fitting = [sum(pair in left for pair in _pairs({**row, axis: value})) for value in range(len(axes[axis]))]
            row[axis] = fitting.index(max(fitting))
        left -= _pairs(row)
        found.append(tuple(axes[axis][row[axis]] for axis in range(len(axes))))
    return found


def _pairs(row: dict[int, int]) -> set[tuple[int, int, int, int]]:
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(sorted(row), 2)}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"), mutual=True)


@pytest.fixture(scope="module")
def secured(tasks_repository: Path, certificates: Certificates) -> Iterator[Server]:
    with Server(tasks_repository, *measured(tasks_repository), tls=certificates) as running:
        yield running


def test_every_option_has_its_values_here() -> None:
    """So that a new option, protocol, task or scenario is run as well; `--compare` measures nothing."""
    given = " ".join(itertools.chain.from_iterable(AXES.values())).split()
    options = {words[-1] for action in parser()._actions if (words := action.option_strings)}
    assert options - set(given) == {"--help", "--target", "--duration", "--out", "--compare"}
    assert set(PROTOCOLS) | set(TASKS) | set(SCENARIOS) <= set(given)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("row", rows(), ids=lambda row: " ".join(filter(None, row)))
def test_options_work_together(
    tasks_server: Server,
    secured: Server,
    certificates: Certificates,
    tasks_repository: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    row: tuple[str, ...],
) -> None:
    """Each command line measures, leaves a report that can be read again, and ends with its verdict.

    With the name of a model alone its task is found out.
    """
    words = " ".join(filter(None, row)).split()
    task = words[words.index("--model" if "--model" in words else "--task") + 1]
    protocol = words[words.index("--protocol") + 1] if "--protocol" in words else "http"
    (tmp_path / "own.toml").write_text(OWN)
    (tmp_path / "plain.txt").write_text("the cat sat\nthe dog ran to the door\n")
    (tmp_path / "fields.jsonl").write_text(json.dumps(FIELDS.get(task, {"text": "the cat sat"})) + "\n")
    server = secured if "--ca" in words else tasks_server
    scheme = ("grpc" if "grpc" in words else "http") + ("s" if "--ca" in words else "")
    address = str(server.grpc if "grpc" in words else server.http)
    places = {
        "FOLDER": tmp_path,
        "REPOSITORY": tasks_repository,
        "CA": certificates.ca,
        "CLIENT": certificates.client,
        "CERT": certificates.client,
        "KEY": certificates.client,
    }
    given = [str(places.get(word, word)).replace("FOLDER", str(tmp_path)) for word in words]
    seconds = "0.2" if "--find-capacity" in words else "1"
    out = tmp_path / "out"
    code = main(["--target", f"{scheme}://{address}", *given, "--duration", seconds, "--out", str(out)])
    assert code != IMPOSSIBLE, capsys.readouterr().err
    assert code == (MISSED if any("1us" in word for word in words) else HELD)
    assert "</html>" in (out / "report.html").read_text(encoding="utf-8")
    if "--find-capacity" not in words:
        result = Result.read(out / "report.json")
        assert not result.faults
        assert (result.facts["task"], result.facts["protocol"].partition(":")[0]) == (task, protocol)
        assert f"{task} over {protocol}: " in capsys.readouterr().out
