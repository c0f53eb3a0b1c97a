"""`bertserve load` with every task over every protocol, against a real server of all tasks."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import pytest

from bertserve.loadtest.cli import IMPOSSIBLE, main
from bertserve.loadtest.generator.messages import Target
from bertserve.loadtest.generator.probe import Probe
from bertserve.loadtest.generator.routes import ROUTES
from tests.support.open_loop import EVEN

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.server import Server

RERANK = {"query": "Where is it?", "texts": ["In Paris.", "It rains.", "Over there."]}


def url(server: Server, protocol: str) -> str:
    return f"grpc://{server.grpc}" if protocol == "grpc" else f"http://{server.http}"


@pytest.mark.parametrize(("protocol", "task"), [(name, task) for name, routes in ROUTES.items() for task in routes])
def test_every_task_is_answered_over_every_protocol(tasks_server: Server, protocol: str, task: str) -> None:
    """The probe's requests are what the server takes, and its replies what the task must answer."""
    host, _, port = url(tasks_server, protocol).rpartition("/")[2].rpartition(":")
    with Probe(Target(protocol, host, int(port), task, in_path=True)) as probe:
        assert probe.tokens(task, "some words of a text") > 4


def test_a_server_of_several_models_is_told_apart(
    tasks_server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is guessed: the names are said, of those that the protocol can ask."""
    for protocol, told in (("v2", "embed (embed), "), ("grpc", "tag (tag)"), ("tei", "classify (classify)")):
        words = ["--target", url(tasks_server, protocol), "--protocol", protocol, "--out", str(tmp_path)]
        assert main(words) == IMPOSSIBLE
        said = capsys.readouterr().err
        assert "has several models: " in said
        assert told in said
        assert said.endswith("choose one with --model\n")


def test_a_model_without_the_task_is_said(
    tasks_server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A protocol that cannot ask the model is refused before any load."""
    words = ["--target", url(tasks_server, "openai"), "--protocol", "openai", "--model", "tag", "--out", str(tmp_path)]
    assert main(words) == IMPOSSIBLE
    assert "has no model for embed over openai; it has tag (tag)" in capsys.readouterr().err


@pytest.mark.parametrize("protocol", ["http", "cohere-v1", "v2", "grpc"])
def test_texts_of_a_file_are_sent(tasks_server: Server, tmp_path: Path, protocol: str) -> None:
    """The fields of a task, several texts for a query too, and plain lines beside a query that is made up."""
    fields, plain = tmp_path / "fields.jsonl", tmp_path / "plain.txt"
    fields.write_text(json.dumps(RERANK) + "\n\n" + json.dumps({**RERANK, "texts": ["One."]}) + "\n")
    plain.write_text("First line.\nSecond line.\n")
    host, _, port = url(tasks_server, protocol).rpartition("/")[2].rpartition(":")
    for file, count in ((fields, 2), (plain, 2)):
        with Probe(Target(protocol, host, int(port), "rerank")) as probe:
            [kind] = probe.kinds(dataclasses.replace(EVEN, tasks={"rerank": 1.0}), None, file)
            assert len(kind.texts) == count
            assert all(probe.tokens("rerank", text) > 0 for text in kind.texts)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("missing.txt", None, "No such file"),
        ("empty.txt", " \n", "has no texts"),
        ("latin.txt", b"caf\xe9", "not UTF-8 at byte 3"),
        ("a.jsonl", "{", "line 1 is not JSON"),
        ("b.jsonl", '{"query": "q", "texts": ["t"]}\n[]', "line 2 must be an object"),
        ("c.jsonl", '{"query": "q"}', "line 1 has no 'texts'; the task rerank needs query and texts"),
        ("d.jsonl", '{"query": "q", "texts": ["t"], "k": 1}', "line 1: 'k' is unknown"),
        ("e.jsonl", '{"query": "q", "texts": []}', "line 1: 'texts' must be a list of one or more strings"),
        ("f.jsonl", '{"query": 1, "texts": ["t"]}', "line 1: 'query' must be a string, not 1"),
    ],
)
def test_a_file_that_holds_no_such_texts_is_one_clear_line(
    tasks_server: Server,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: str | bytes | None,
    sentence: str,
) -> None:
    """The file, the line and what would be right."""
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    words = ["--target", tasks_server.http, "--task", "rerank", "--texts", str(file), "--out", str(tmp_path / "out")]
    assert main(words) == IMPOSSIBLE
    said = capsys.readouterr().err
    assert f"--texts {file}: " in said
    assert sentence in said
    assert said.count("\n") == 1
