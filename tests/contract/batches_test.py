"""OpenAI's Files and Batches API, driven by OpenAI's own client."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import openai
import pytest

from tests.support.batches import client_of, ended, lines_of, request_line, results_of, to_file
from tests.support.clients import RawConnection, get, http_call, metric
from tests.support.credentials import FIRST, SECOND, bearer, write_keys
from tests.support.models import NAME
from tests.support.server import FAKE, MEASURED, Server, refused_start
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SLOW = ("--engine", "fake", "--precision", "fp32", "--fake-ms", "5", "--max-batch-tokens", "64", "--threads", "1")
"""Settings of a server that takes a second or so for a few hundred lines."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of files and jobs."""
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="module")
def server(models: Path, folder: Path) -> Iterator[Server]:
    """A server with two keys, small files, and few of them."""
    keys = write_keys(folder / "keys", FIRST, SECOND)
    limits = ("--batch-file-mb", "1", "--batch-disk-mb", "3", "--batch-max-files", "12", "--batch-max-lines", "300")
    where = ("--api-keys-file", str(keys), "--batch-dir", str(folder / "kept"))
    with Server(models, *FAKE, *where, *limits) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    """OpenAI's client with the first key; its files are deleted in the end."""
    made = client_of(server, FIRST)
    yield made
    for file in made.files.list():
        made.files.delete(file.id)


def kept(folder: Path) -> set[str]:
    """The names of everything that is stored."""
    return {path.name for part in ("files", "incoming") for path in (folder / "kept" / part).iterdir()}


def test_upload_batch_poll_download(client: openai.OpenAI, server: Server) -> None:
    """Each line is answered as the route itself answers, in the input's order; errors stand in a file of their own."""
    bodies: list[dict[str, Any]] = [{"model": NAME, "input": [f"text {n}", "again"]} for n in range(120)]
    bodies[3] = {"model": NAME, "input": [f"many {n}" for n in range(100)], "encoding_format": "base64"}
    bodies[5] = {"model": NAME, "input": []}
    bodies[7] = {"model": NAME, "input": "a", "stranger": 1}
    file = to_file(client, [request_line(f"r-{n}", body) for n, body in enumerate(bodies)])
    assert (file.purpose, file.filename, file.status) == ("batch", "input.jsonl", "processed")

    made = client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/embeddings",
        completion_window="24h",
        metadata={"job": "nightly"},
        output_expires_after={"anchor": "created_at", "seconds": 7200},
    )
    assert made.status == "validating"
    batch = ended(client, made.id)
    assert batch.status == "completed"
    assert batch.metadata == {"job": "nightly"}
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 120, "completed": 118, "failed": 2}
    output, errors = results_of(client, batch)
    assert [line["custom_id"] for line in output] == [f"r-{n}" for n in range(120) if n not in {5, 7}]
    assert [(line["custom_id"], line["response"]["status_code"]) for line in errors] == [("r-5", 422), ("r-7", 422)]
    assert "stranger" not in errors[0]["response"]["body"]["error"]["message"]
    assert all(line["error"] is None and line["response"]["request_id"] == line["id"] for line in output + errors)
    for line in (output[0], output[3]):
        body = json.dumps(bodies[int(line["custom_id"][2:])]).encode()
        headers = {"Content-Type": "application/json", **bearer(FIRST)}
        assert line["response"]["body"] == http_call(server.http, "POST", "/v1/embeddings", body, headers).json()
    shown = client.files.retrieve(str(batch.output_file_id))
    assert (shown.purpose, shown.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert shown.expires_at is not None
    assert shown.expires_at - shown.created_at == 7200
    assert metric(server, "bertserve_batch_lines_total", outcome="completed") >= 118
    status = get(server.metrics, "/status").json()["jobs"]
    assert status["states"]["completed"] >= 1
    assert metric(server, "bertserve_batch_files_bytes") == status["bytes"] > 0


def test_a_list_has_pages(client: openai.OpenAI) -> None:
    """Of files, either way, and of batches, the latest first."""
    files = [to_file(client, [request_line("only", {"input": f"text {n}"})]) for n in range(3)]
    ids = [file.id for file in files]
    assert [file.id for file in client.files.list(limit=2)] == ids[::-1]
    assert [file.id for file in client.files.list(limit=2, order="asc", purpose="batch")] == ids
    assert client.files.list(limit=2, after=ids[2]).data[0].id == ids[1]
    made = [
        client.batches.create(input_file_id=name, endpoint="/v1/embeddings", completion_window="24h").id for name in ids
    ]
    for name in made:
        ended(client, name)
    page = client.batches.list(limit=2)
    assert ([batch.id for batch in page.data], page.has_more) == ([made[2], made[1]], True)
    assert client.batches.list(limit=1, after=made[1]).data[0].id == made[0]
    with pytest.raises(openai.UnprocessableEntityError):
        client.batches.list(limit=101)
    with pytest.raises(openai.NotFoundError):
        client.batches.list(after="batch_of_nobody")


def test_a_key_sees_its_own_alone(client: openai.OpenAI, server: Server) -> None:
    """What another key has made is not there: not listed, read, deleted, computed or cancelled."""
    file = to_file(client, [request_line("one", {"input": "text"})])
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    ended(client, batch.id)
    other = client_of(server, SECOND)
    assert other.files.list().data == []
    assert other.batches.list().data == []
    for ask in (
        lambda: other.files.retrieve(file.id),
        lambda: other.files.content(file.id),
        lambda: other.files.delete(file.id),
        lambda: other.files.list(after=file.id),
        lambda: other.batches.retrieve(batch.id),
        lambda: other.batches.cancel(batch.id),
        lambda: other.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()


def test_a_bad_file_fails_with_every_problem(client: openai.OpenAI) -> None:
    """Each line that breaks a rule is named with a code, and nothing is computed."""
    good = request_line("good", {"input": "text"})
    bad = {
        "invalid_json_line": "{]",
        "missing_required_parameter": json.dumps({**good, "url": None}).replace('"url": null, ', ""),
        "duplicate_custom_id": json.dumps(good),
        "invalid_method": json.dumps({**good, "custom_id": "2", "method": "GET"}),
        "invalid_url": json.dumps({**good, "custom_id": "3", "url": "/v1/chat/completions"}),
        "invalid_type": json.dumps({**good, "custom_id": "4", "body": ["text"]}),
        "invalid_custom_id": json.dumps({**good, "custom_id": ""}),
        "unknown_parameter": json.dumps({**good, "custom_id": "5", "stranger": 1}),
    }
    file = client.files.create(
        file=("bad.jsonl", "\n".join([json.dumps(good), *bad.values()]).encode()), purpose="batch"
    )
    batch = ended(
        client, client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h").id
    )
    assert batch.status == "failed"
    assert batch.errors is not None
    assert [(error.line, error.code) for error in batch.errors.data or []] == list(enumerate(bad, 2))
    assert batch.output_file_id is batch.error_file_id is None
    for content, code in (
        (b"\n\n", "empty_file"),
        (lines_of([request_line(str(n), {}) for n in range(301)]), "too_many_lines"),
    ):
        again = client.files.create(file=("bad.jsonl", content), purpose="batch")
        failed = ended(
            client, client.batches.create(input_file_id=again.id, endpoint="/v1/embeddings", completion_window="24h").id
        )
        assert code in {error.code for error in (failed.errors and failed.errors.data) or []}


def test_what_is_refused_leaves_nothing_behind(client: openai.OpenAI, server: Server, folder: Path) -> None:
    """A file that is too large, a form that is none or is cut, fields that are wrong, a disk that is full."""
    before = kept(folder)
    with pytest.raises(openai.APIStatusError) as refused:
        client.files.create(file=("big", b"x" * ((1 << 20) + 1)), purpose="batch")
    assert refused.value.status_code == 413
    with pytest.raises(openai.APIStatusError) as refused:
        client.files.create(file=("big", b"x" * (2 << 20)), purpose="batch")
    assert refused.value.status_code == 413
    with pytest.raises(openai.UnprocessableEntityError):
        client.files.create(file=("in", b"x"), purpose="assistants")
    with pytest.raises(openai.UnprocessableEntityError):
        client.files.create(file=("in", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 1})
    headers = {"Content-Type": "multipart/form-data; boundary=b", **bearer(FIRST)}
    cut = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\ndata'
    assert http_call(server.http, "POST", "/v1/files", cut, headers).status == 400
    assert http_call(server.http, "POST", "/v1/files", b"{}", {**headers, "Content-Type": "a/b"}).status == 415
    assert kept(folder) == before

    full = [client.files.create(file=("part", b"x" * (1 << 20)), purpose="batch") for _ in range(2)]
    with pytest.raises(openai.InternalServerError) as refused:  # noqa: PT012  results of other tests take some room
        for _ in range(2):
            full += [client.files.create(file=("part", b"x" * (1 << 20)), purpose="batch")]
    assert (refused.value.status_code, refused.value.code) == (507, "storage_full")
    for file in full:
        client.files.delete(file.id)
    few = [client.files.create(file=("few", b"x"), purpose="batch") for _ in range(12)]
    with pytest.raises(openai.InternalServerError, match="as many as there may be"):
        client.files.create(file=("one more", b"x"), purpose="batch")
    for file in few:
        client.files.delete(file.id)
    assert kept(folder) == before


def test_a_client_that_leaves_in_the_middle_leaves_nothing(server: Server, folder: Path) -> None:
    """Its upload is dropped, and the room that it had is free again."""
    before = kept(folder)
    head = (
        f"POST /v1/files HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {FIRST}\r\nContent-Length: 900000\r\n"
        "Content-Type: multipart/form-data; boundary=b\r\n\r\n"
        '--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    ).encode()
    with RawConnection(server.http) as connection:
        connection.send(head + b"x" * 400_000)
        wait_for(lambda: kept(folder) != before, "the upload")
    wait_for(lambda: kept(folder) == before, "the end of the upload")
    wait_for(lambda: metric(server, "bertserve_buffer_bytes") == 0, "its room")


def test_an_upload_is_refused_before_its_body(server: Server) -> None:
    """A stranger's, and one that says that it is too large: at once, and the connection ends."""
    for head, status in (("", 401), (f"Authorization: Bearer {FIRST}\r\n", 413)):
        with RawConnection(server.http) as connection:
            connection.send(f"POST /v1/files HTTP/1.1\r\nHost: h\r\n{head}Content-Length: 5000000\r\n\r\n".encode())
            assert connection.status() == status


def test_cancelling_keeps_what_is_done(models: Path, tmp_path: Path) -> None:
    """Lines that were not computed stand in the error file; an input in use cannot be deleted."""
    with Server(models, *SLOW, "--batch-dir", str(tmp_path / "kept")) as server:
        client = client_of(server)
        file = to_file(client, [request_line(f"r-{n}", {"input": [f"text {n}"] * 8}) for n in range(2000)])
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
        wait_for(lambda: completed(client, batch.id) > 0, "progress")
        with pytest.raises(openai.ConflictError):
            client.files.delete(file.id)
        assert client.batches.cancel(batch.id).status in {"cancelling", "cancelled"}
        done = ended(client, batch.id)
        assert done.status == "cancelled"
        output, errors = results_of(client, done)
        assert 0 < len(output) < 2000
        assert [line["custom_id"] for line in output + errors] == [f"r-{n}" for n in range(2000)]
        assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
        with pytest.raises(openai.ConflictError):
            client.batches.cancel(batch.id)
        client.files.delete(file.id)


def completed(client: openai.OpenAI, batch_id: str) -> int:
    """Lines of a batch that are done."""
    counts = client.batches.retrieve(batch_id).request_counts
    return counts.completed if counts else 0


@pytest.mark.parametrize(
    ("kills", "number"),
    [
        (1, signal.SIGKILL),
        (1, signal.SIGTERM),
        pytest.param(20, signal.SIGKILL, marks=pytest.mark.long),
    ],
)
def test_a_server_that_ends_in_the_middle_goes_on(
    models: Path, tmp_path: Path, kills: int, number: signal.Signals
) -> None:
    """Killed or told to stop: accepted files and batches are there, each line is answered once, in its order."""
    total = 200 + 200 * kills
    options = (*SLOW, "--batch-dir", str(tmp_path / "kept"))
    with Server(models, *options) as server:
        client = client_of(server)
        file = to_file(client, [request_line(f"r-{n}", {"input": f"text {n % 7}"}) for n in range(total)])
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
        _end_after(server, client, batch.id, 50, number)
    for kill in range(1, kills):
        with Server(models, *options) as server:
            _end_after(server, client_of(server), batch.id, 50 + kill * total // (kills + 1), number)
    with Server(models, *options) as server:
        client = client_of(server)
        done = ended(client, batch.id, 60.0)
        assert done.status == "completed"
        output, errors = results_of(client, done)
        assert errors == []
        assert [line["custom_id"] for line in output] == [f"r-{n}" for n in range(total)]
        assert len({line["id"] for line in output}) == total
        for line in output:
            n = int(line["custom_id"][2:])
            assert line["response"]["body"] == output[n % 7]["response"]["body"]
        assert client.files.content(file.id).content == lines_of(
            [request_line(f"r-{n}", {"input": f"text {n % 7}"}) for n in range(total)]
        )
        assert kept(tmp_path) == {file.id, done.output_file_id}


def _end_after(server: Server, client: openai.OpenAI, batch_id: str, lines: int, number: signal.Signals) -> None:
    wait_for(lambda: completed(client, batch_id) >= lines, "progress", 30.0)
    client.close()
    server.signal(number)
    assert server.wait() == (0 if number is signal.SIGTERM else -number)


def test_one_server_to_a_folder(server: Server, models: Path, folder: Path) -> None:
    """A second one is told so, and the first goes on."""
    told = refused_start("--models", str(models), *FAKE, "--http-port", "0", "--batch-dir", str(folder / "kept"))
    assert told.returncode == 1
    assert "another server uses this folder" in told.stdout + told.stderr
    assert server.process.poll() is None


def test_off_unless_a_folder_is_named(fake_server: Server) -> None:
    """Every route says how it is switched on, and the documentation leaves them out."""
    for method, path in (
        ("GET", "/v1/files"),
        ("POST", "/v1/files"),
        ("GET", "/v1/batches"),
        ("DELETE", "/v1/files/a"),
    ):
        reply = http_call(fake_server.http, method, path)
        assert reply.status == 403
        assert "--batch-dir" in reply.json()["error"]["message"]
    assert not {path for path in get(fake_server.http, "/openapi.json").json()["paths"] if "batches" in path}


def test_the_documentation_lists_the_routes(server: Server) -> None:
    """Where they are on, with the form, the parameters and an example of each reply."""
    paths = http_call(server.http, "GET", "/openapi.json", headers=bearer(FIRST)).json()["paths"]
    assert "multipart/form-data" in paths["/v1/files"]["post"]["requestBody"]["content"]
    assert {entry["name"] for entry in paths["/v1/files"]["get"]["parameters"]} >= {"limit", "after", "order"}
    assert paths["/v1/batches"]["post"]["responses"]["200"]["content"]["application/json"]["example"]["object"]


def test_vectors_are_the_models_own(models: Path, tmp_path: Path) -> None:
    """With the real engine: those of the route, whatever else is in flight."""
    texts = ["A short text.", "Another one, which is somewhat longer than the first.", "Third."] * 4
    with Server(models, "--precision", "fp32", "--batch-dir", str(tmp_path / "kept"), *MEASURED) as server:
        client = client_of(server)
        file = to_file(client, [request_line(f"r-{n}", {"input": text}) for n, text in enumerate(texts)])
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
        output, _ = results_of(client, ended(client, batch.id))
        found = np.array([line["response"]["body"]["data"][0]["embedding"] for line in output])
        right = np.array([row.embedding for row in client.embeddings.create(model=NAME, input=texts).data])
        assert np.abs(found - right).max() < 1e-4
