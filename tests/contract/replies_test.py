"""What comes with the vectors: headers, trailing metadata, metrics and pages."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pytest
from fastapi.openapi.models import OpenAPI

from tests.support.clients import (
    BOTH,
    TRANSPORTS,
    Grpc,
    get,
    http_call,
    metric,
    post_json,
)
from tests.support.expected import token_ids
from tests.support.models import HIDDEN_SIZE, NAME, ROOT
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.clients import Transport
    from tests.support.server import Server

STAGES = ("tokenize", "queue", "compute", "total")
TEXTS = ["What is a T4?", "A graphics card."]
_TIMING = re.compile(r"([a-z]+);dur=(\d+\.\d{3})")

HTTP_TRANSPORTS = [kind for kind in TRANSPORTS if kind.family != "grpc"]
GRPC_TRANSPORTS = [kind for kind in TRANSPORTS if kind.family == "grpc"]


@pytest.mark.parametrize("transport", HTTP_TRANSPORTS, ids=lambda kind: kind.name)
def test_server_timing(int8_server: Server, transport: type[Transport]) -> None:
    """`Server-Timing` names every stage in milliseconds with three decimals, and the parts fit into the total."""
    with transport(int8_server) as client:
        header = client.embed(TEXTS[:1]).headers["server-timing"]
    parts = [_TIMING.fullmatch(part) for part in header.split(", ")]
    assert all(parts), header
    times = {part[1]: float(part[2]) for part in parts if part}
    assert tuple(times) == STAGES
    assert times["compute"] > 0
    assert times["tokenize"] + times["queue"] + times["compute"] <= times["total"] + 0.01


@pytest.mark.parametrize("transport", GRPC_TRANSPORTS, ids=lambda kind: kind.name)
def test_trailing_metadata(int8_server: Server, transport: type[Transport], models: Path) -> None:
    """The trailing metadata of gRPC says the same, in whole microseconds, with the token counts."""
    with transport(int8_server) as client:
        trailers = client.embed(TEXTS[:1]).headers
    times = {stage: int(trailers[f"bertserve-{stage}-us"]) for stage in STAGES}
    assert times["compute"] > 0
    assert times["tokenize"] + times["queue"] + times["compute"] <= times["total"] + 3
    assert int(trailers["bertserve-tokens"]) == len(token_ids(models, TEXTS[0]))
    assert trailers["bertserve-truncated-tokens"] == "0"


@pytest.mark.parametrize("transport", HTTP_TRANSPORTS, ids=lambda kind: kind.name)
def test_token_counts(fake_server: Server, transport: type[Transport], models: Path) -> None:
    """`X-Compute-Tokens` counts the tokens of all texts, special ones included, padding not."""
    with transport(fake_server) as client:
        headers = client.embed(TEXTS).headers
    assert int(headers["x-compute-tokens"]) == sum(len(token_ids(models, text)) for text in TEXTS)
    assert headers["x-truncated-tokens"] == "0"
    assert headers["x-compute-type"] == "cpu"


@pytest.mark.parametrize("path", ["/embed", "/livez", "/metrics", "/no/such/path", "/v2"])
def test_request_id_comes_back(fake_server: Server, path: str) -> None:
    """Every reply carries the request's id, errors and operations too."""
    assert http_call(fake_server.http, "GET", path, headers={"X-Request-Id": "id-1"}).headers["x-request-id"] == "id-1"


@pytest.mark.parametrize("value", ["0", "-1", "soon", "1e3", "nan", "", "99999999999"])
def test_timeout_header_must_be_a_positive_number(fake_server: Server, value: str) -> None:
    """A timeout that is none is refused, not ignored."""
    assert post_json(fake_server.http, "/embed", b'{"inputs": "x"}', {"X-Request-Timeout-Ms": value}).status == 422


def test_v2_json_output_has_no_parameters(fake_server: Server) -> None:
    """A JSON output carries no `parameters`: Triton's C++ client would look for a size in them."""
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["x"]}
    reply = post_json(fake_server.http, f"/v2/models/{NAME}/infer", {"inputs": [tensor], "id": "7"})
    (output,) = reply.json()["outputs"]
    assert output.keys() == {"name", "datatype", "shape", "data"}
    assert output["shape"] == [1, HIDDEN_SIZE]
    assert reply.json()["id"] == "7"
    assert reply.json()["model_version"] == "1"


def test_v2_grpc_output_is_raw(fake_server: Server) -> None:
    """The vectors come in `raw_output_contents`, one entry for the one output: clients read nothing else."""
    with Grpc(fake_server) as client:
        reply = client.embed(TEXTS).message
    assert len(reply.raw_output_contents) == len(reply.outputs) == 1
    assert not reply.outputs[0].HasField("contents")
    assert len(reply.raw_output_contents[0]) == 4 * len(TEXTS) * HIDDEN_SIZE


@pytest.mark.parametrize("transport", BOTH, ids=lambda kind: kind.name)
def test_metrics_count_requests(fake_server: Server, transport: type[Transport], models: Path) -> None:
    """`/metrics` counts each request once, with its texts and tokens, and its time in every stage."""
    names = {
        "bertserve_requests_total": {"reason": "ok"},
        "bertserve_texts_total": {},
        "bertserve_tokens_total": {},
        **{f"bertserve_{stage}_seconds_count": {} for stage in ("tokenize", "queue", "compute", "request")},
    }
    before = {name: metric(fake_server, name, **labels) for name, labels in names.items()}
    with transport(fake_server) as client:
        client.embed(TEXTS)
        client.embed(TEXTS)
    grown = {name: metric(fake_server, name, **labels) - before[name] for name, labels in names.items()}
    tokens = 2 * sum(len(token_ids(models, text)) for text in TEXTS)
    assert grown == {
        **dict.fromkeys(names, 2),
        "bertserve_texts_total": 2 * len(TEXTS),
        "bertserve_tokens_total": tokens,
    }


def openapi(server: Server) -> dict[str, dict[str, dict[str, dict[str, object]]]]:
    return get(server.http, "/openapi.json").json()


def test_openapi_is_valid(fake_server: Server) -> None:
    """`/openapi.json` is an OpenAPI 3.1 document."""
    document = openapi(fake_server)
    assert OpenAPI.model_validate(document).openapi.startswith("3.1")
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert set(re.findall(r'"\$ref": "([^"]+)"', json.dumps(document))) <= known


def test_every_route_of_a_protocol_is_documented(fake_server: Server) -> None:
    """What clients can ask is in the document, and what they cannot is not."""
    paths = set(openapi(fake_server)["paths"])
    assert {"/embed", "/v1/embeddings", "/v2/models/{model}/infer", "/livez", "/readyz", "/metrics"} <= paths
    assert {"/models/{model}/embed", "/tokenize", "/info", "/health", "/v1/models", "/v2/models/stats"} <= paths
    assert not {"/predict", "/rerank", "/v2/rerank", "/embed_all", "/v2/repository/models/{model}/load"} & paths
    assert not {"/classify", "/answer", "/tag", "/fill-mask"} & paths


def test_the_page_of_protocols_links_routes_to_their_documentation(fake_server: Server, tasks_server: Server) -> None:
    """Each link leads to an operation that `/docs` shows where a model of its task is served."""
    operations = [
        f"{operation['tags'][0]}/{operation['operationId']}"
        for server in (fake_server, tasks_server)
        for methods in openapi(server)["paths"].values()
        for operation in methods.values()
    ]
    links = re.findall(r"/docs#/([^)]+)\)", (ROOT / "docs/protocols.md").read_text(encoding="utf-8"))
    assert len(links) > 20
    assert {unquote(link) for link in links} <= set(operations)


def test_one_operation_has_one_identity(tasks_server: Server) -> None:
    """Clients are generated from the document: no two operations share their id."""
    paths = openapi(tasks_server)["paths"].values()
    identities = [operation["operationId"] for methods in paths for operation in methods.values()]
    assert len(set(identities)) == len(identities) > 40


_LINK = re.compile(rb"""(?:src|href)=["']([^"']+)["']""")


@pytest.mark.parametrize("page", ["/", "/docs"])
def test_pages_need_no_network(fake_server: Server, page: str) -> None:
    """A page names no address but this server's, and everything it loads is there."""
    reply = get(fake_server.http, page)
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.search(rb"(https?:)?//[a-z0-9]", reply.body)
    for link in _LINK.findall(reply.body):
        if not link.startswith(b"data:"):
            assert get(fake_server.http, link.decode()).status == 200, link


def test_the_announcement(serve: Callable[..., Server]) -> None:
    """Standard output shows a command that works; an engine that is started again is no second banner."""
    server = serve("--engine", "fake", "--precision", "fp32")
    server.wait_logged("curl ")
    line = next(line for line in server.log.splitlines() if line.strip().startswith("curl "))
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not on the PATH")
    done = subprocess.run(
        [curl, *shlex.split(line)[1:], "--silent", "--fail"], capture_output=True, check=True, timeout=30
    )
    assert len(json.loads(done.stdout)[0]) == HIDDEN_SIZE
    engine = server.engine_pid()
    assert engine is not None
    os.kill(engine, signal.SIGKILL)
    wait_for(lambda: server.log.count("bertserve: ready: ") == 2, "the second engine")
    server.stop()
    assert (server.log.count("bertserve is ready"), server.log.count("curl ")) == (1, 1)
