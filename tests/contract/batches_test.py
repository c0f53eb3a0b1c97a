"""OpenAI's Files and Batches API, driven by OpenAI's own client."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import resource
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import openai
import pytest

from tests.support.batches import client_of, ended, lines_of, request_line, results_of, started, to_file
from tests.support.clients import UPLOAD, RawConnection, get, http_call, metric
from tests.support.credentials import FIRST, SECOND, bearer, write_keys
from tests.support.models import NAME
from tests.support.server import MEASURED, Server
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SLOW = ("--engine", "fake", "--precision", "fp32", "--fake-ms", "5", "--max-batch-tokens", "64", "--threads", "1")
"""Settings of a server that takes a second or so for a few hundred lines."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="module")
def server(models: Path, folder: Path) -> Iterator[Server]:
    """A server with two keys, small files and few of them, and room for four uploads at a time."""
    keys = write_keys(folder / "keys", FIRST, SECOND)
    limits = ("--batch-file-mb", "1", "--batch-disk-mb", "3", "--batch-max-files", "12", "--batch-max-lines", "300")
    limits += ("--buffer-limit-mb", "1", "--body-limit-bytes", "262144", "--default-timeout-ms", "30000")
    where = ("--api-keys-file", str(keys), "--batch-dir", str(folder / "kept"))
    with Server(models, *SLOW, *where, *limits) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    """OpenAI's client with the first key; its files are deleted in the end."""
    made = client_of(server, FIRST)
    yield made
    for file in made.files.list():
        made.files.delete(file.id)


def kept(folder: Path) -> set[str]:
    return {path.name for part in ("files", "incoming") for path in (folder / "kept" / part).iterdir()}


def test_upload_batch_poll_download(client: openai.OpenAI, server: Server) -> None:
    """Each line is answered as the route itself answers, in the input's order; errors stand in a file of their own."""
    bodies: list[dict[str, Any]] = [{"model": NAME, "input": [f"text {n}", "again"]} for n in range(120)]
    bodies[3] = {"model": NAME, "input": [f"many {n}" for n in range(100)], "encoding_format": "base64"}
    bodies[5] = {"model": NAME, "input": []}
    bodies[7] = {"model": NAME, "input": "a", "dimension": "stranger", "dimensions": "stranger"}
    file = to_file(client, [request_line(f"r-{n}", body) for n, body in enumerate(bodies)])
    assert (file.purpose, file.filename, file.status) == ("batch", "input.jsonl", "processed")

    made = started(
        client,
        file.id,
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
    assert [(line["custom_id"], line["response"]["status_code"]) for line in errors] == [("r-5", 400), ("r-7", 400)]
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
    completed = metric(server, "bertserve_batch_lines_total", outcome="completed")
    assert completed >= 118
    assert metric(server, "bertserve_requests_total", protocol="batch", reason="ok") >= completed
    assert metric(server, "bertserve_request_seconds_count", protocol="batch") == 0
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
    made = [started(client, name).id for name in ids]
    for name in made:
        ended(client, name)
    page = client.batches.list(limit=2)
    assert ([batch.id for batch in page.data], page.has_more) == ([made[2], made[1]], True)
    assert client.batches.list(limit=1, after=made[1]).data[0].id == made[0]
    with pytest.raises(openai.BadRequestError):
        client.batches.list(limit=101)
    with pytest.raises(openai.NotFoundError):
        client.batches.list(after="batch_of_nobody")


def test_a_key_sees_its_own_alone(client: openai.OpenAI, server: Server, folder: Path) -> None:
    """What another key has made is not there: not listed, read, deleted, computed or cancelled; nor is any key."""
    file = to_file(client, [request_line("one", {"input": "text"})])
    batch = started(client, file.id)
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
        lambda: started(other, file.id),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()
    stored = b"".join(path.read_bytes() for path in (folder / "kept").rglob("*") if path.is_file())
    assert batch.id.encode() in stored
    digest = hashlib.sha256(FIRST.encode())
    assert not [one for one in (FIRST.encode(), digest.hexdigest().encode(), digest.digest()) if one in stored]


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
        "unknown_parameter": json.dumps({**good, "custom_id": "5"}).replace("custom_id", "customid"),
    }
    file = client.files.create(
        file=("bad.jsonl", "\n".join([json.dumps(good), *bad.values()]).encode()), purpose="batch"
    )
    batch = ended(client, started(client, file.id).id)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert [(error.line, error.code) for error in batch.errors.data or []] == list(enumerate(bad, 2))
    assert batch.output_file_id is batch.error_file_id is None
    for content, code in (
        (b"\n\n", "empty_file"),
        (lines_of([request_line(str(n), {}) for n in range(301)]), "too_many_lines"),
    ):
        again = client.files.create(file=("bad.jsonl", content), purpose="batch")
        failed = ended(client, started(client, again.id).id)
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
    with pytest.raises(openai.BadRequestError):
        client.files.create(file=("in", b"x"), purpose="assistants")
    with pytest.raises(openai.BadRequestError):
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
    with pytest.raises(openai.InternalServerError, match="the maximum"):
        client.files.create(file=("one more", b"x"), purpose="batch")
    for file in few:
        client.files.delete(file.id)
    assert kept(folder) == before


def test_clients_that_leave_in_the_middle_leave_nothing(server: Server, folder: Path) -> None:
    """Uploads are held by a window each, as many as there is room for; when they are dropped it is free again."""
    before = kept(folder)
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            connection = stack.enter_context(RawConnection(server.http))
            connection.send(UPLOAD % b"Authorization: Bearer %b\r\n" % FIRST.encode() + b"x" * 400_000)
        wait_for(lambda: len(kept(folder) - before) == 4, "the uploads")
        assert metric(server, "bertserve_buffer_bytes") == 1 << 20
        with RawConnection(server.http) as one_more:
            one_more.send(UPLOAD % b"Authorization: Bearer %b\r\n" % FIRST.encode())
            assert one_more.status() == 503
    wait_for(lambda: kept(folder) == before, "the end of the upload")
    wait_for(lambda: metric(server, "bertserve_buffer_bytes") == 0, "its room")


def test_uploads_as_clients_send_them(server: Server, folder: Path) -> None:
    """With an offer of another protocol, with leave to go on behind another request, with an end of sending."""
    before = kept(folder)
    form = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n{}\r\n--b\r\n'
    form += b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'
    key = f"Host: h\r\nAuthorization: Bearer {FIRST}\r\n".encode()
    head = b"POST /v1/files HTTP/1.1\r\n%bContent-Type: multipart/form-data; boundary=b\r\n" % key
    sized = b"Content-Length: %d\r\n" % len(form)
    offer = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
    chunked = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(form), form)
    first = b"GET /v1/models HTTP/1.1\r\n%b\r\n" % key
    with RawConnection(server.http) as connection:
        connection.send(head + sized + offer + b"\r\n" + form + first + head + offer + chunked + first)
        data = b""
        while b"HTTP/1.1 200" not in data:  # a connection has room for two uploads at a time
            data += connection.socket.recv(1 << 16)
        connection.send(head + sized + b"Expect: 100-continue\r\n\r\n")
        while not data.endswith(b"HTTP/1.1 100 Continue\r\n\r\n"):
            part = connection.socket.recv(1 << 16)
            assert part, data
            data += part
        connection.send(form)
        connection.end()
        data += connection.read_to_end()
    assert re.findall(rb"HTTP/1\.1 (\d+) ", data) == [b"200"] * 4 + [b"100", b"200"]
    files = re.findall(rb'"id":"(file-[^"]+)"', data)
    assert len(set(files)) == 3
    for file in files:
        reply = http_call(server.http, "GET", f"/v1/files/{file.decode()}/content", None, bearer(FIRST))
        assert reply.body == b"{}"
        # No browser shows it as a page of this server, whatever is in it.
        assert reply.headers["content-disposition"].startswith("attachment;")
        shown_as = (reply.headers["content-type"], reply.headers["x-content-type-options"])
        assert shown_as == ("application/octet-stream", "nosniff")
        http_call(server.http, "DELETE", f"/v1/files/{file.decode()}", None, bearer(FIRST))
    with RawConnection(server.http) as connection:
        connection.send(first + head + sized + b"\r\n" + form[:-20])
        connection.end()
        assert connection.status() == 200, "only the request before the upload is whole"
    wait_for(lambda: kept(folder) == before, "the end of what has no end")


def test_an_upload_is_refused_before_its_body(server: Server) -> None:
    """A stranger's, and one that says that it is too large: at once, and the connection ends."""
    for head, status in (("", 401), (f"Authorization: Bearer {FIRST}\r\n", 413)):
        with RawConnection(server.http) as connection:
            connection.send(f"POST /v1/files HTTP/1.1\r\nHost: h\r\n{head}Content-Length: 5000000\r\n\r\n".encode())
            assert connection.status() == status


def test_cancelling_keeps_what_is_done(client: openai.OpenAI) -> None:
    """Lines that were not computed stand in the error file; an input in use cannot be deleted."""
    file = to_file(client, [request_line(f"r-{n}", {"input": [f"text {n}"] * 64, "dimensions": 4}) for n in range(300)])
    batch = started(client, file.id)
    wait_for(lambda: completed(client, batch.id) > 0, "progress")
    with pytest.raises(openai.ConflictError):
        client.files.delete(file.id)
    assert client.batches.cancel(batch.id).status in {"cancelling", "cancelled"}
    done = ended(client, batch.id)
    assert done.status == "cancelled"
    output, errors = results_of(client, done)
    assert 0 < len(output) < 300
    assert [line["custom_id"] for line in output + errors] == [f"r-{n}" for n in range(300)]
    assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def completed(client: openai.OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    return counts.completed if counts else 0


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_a_server_that_ends_in_the_middle_goes_on(models: Path, tmp_path: Path, kills: int) -> None:
    """Killed, or told to stop: what was accepted is there, and each line is answered once, in its order."""
    total = 250 + 200 * kills
    lines = [request_line(f"r-{n}", {"input": f"text {n % 7}", "encoding_format": "base64"}) for n in range(total)]
    where = ("--batch-dir", str(tmp_path / "kept"))
    with Server(models, *SLOW, *where) as server:
        client = client_of(server)
        file = to_file(client, lines)
        _, most = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
        # What is begun and not settled has room, and some of the results of all lines.
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (700_000, most))
        batch = started(client, file.id)
        server.wait_logged("batches are paused, no disk space", 30.0)
        with pytest.raises(openai.InternalServerError, match="disk is full"):
            client.files.create(file=("large", b"x" * 800_000), purpose="batch")
        assert kept(tmp_path) == {file.id, *results_under_way(tmp_path)}
        assert 0 < completed(client, batch.id) < total
        end(server, client, signal.SIGKILL)
    for kill in range(1, kills):
        with Server(models, *SLOW, *where) as server:
            client = client_of(server)
            wait_for(lambda: completed(client, batch.id) >= kill * total // (kills + 1), "progress", 30.0)  # noqa: B023
            end(server, client, signal.SIGTERM if kill % 4 == 0 else signal.SIGKILL)
    real = ("--precision", "fp32", *MEASURED)
    with Server(models, *real, *where) as server, RawConnection(server.http) as slow:
        slow.send(UPLOAD % b"" + b"x" * 400)
        client = client_of(server)
        done = ended(client, batch.id, 60.0)
        assert done.status == "completed"
        output, errors = results_of(client, done)
        assert errors == []
        assert [line["custom_id"] for line in output] == [f"r-{n}" for n in range(total)]
        assert len({line["id"] for line in output}) == total
        rows = [line["response"]["body"]["data"][0]["embedding"] for line in output[-7:]]
        found = [np.frombuffer(base64.b64decode(row), np.float32) for row in rows]
        asked = client.embeddings.create(model=NAME, input=[line["body"]["input"] for line in lines[-7:]])
        assert np.abs(np.array(found) - [row.embedding for row in asked.data]).max() < 1e-4
        assert client.files.content(file.id).content == lines_of(lines)
        assert slow.status() == 408
        wait_for(lambda: kept(tmp_path) == {file.id, done.output_file_id}, "the end of the slow upload")


def results_under_way(folder: Path) -> set[str]:
    """The names of files that belong to a batch which has not ended."""
    return {name for name in kept(folder) if name.endswith(("-output", "-error"))}


def end(server: Server, client: openai.OpenAI, number: signal.Signals) -> None:
    client.close()
    server.signal(number)
    assert server.wait() == (0 if number is signal.SIGTERM else -number)


def test_the_documentation_lists_the_routes(server: Server) -> None:
    """Where they are on, with the form, the parameters and an example of each reply."""
    paths = http_call(server.http, "GET", "/openapi.json", headers=bearer(FIRST)).json()["paths"]
    assert "multipart/form-data" in paths["/v1/files"]["post"]["requestBody"]["content"]
    assert {entry["name"] for entry in paths["/v1/files"]["get"]["parameters"]} >= {"limit", "after", "order"}
    assert paths["/v1/batches"]["post"]["responses"]["200"]["content"]["application/json"]["example"]["object"]
