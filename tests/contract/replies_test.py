"""What comes with the vectors, and what an error tells whoever has to act."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urljoin

import onnx
import pytest
from fastapi.openapi.models import OpenAPI
from tritonclient.utils import InferenceServerException

from tests.support.clients import (
    BOTH,
    TRANSPORTS,
    Grpc,
    Refused,
    get,
    grpc_raw,
    http_call,
    infer_request,
    metric,
    post_json,
)
from tests.support.expected import token_ids
from tests.support.models import HIDDEN_SIZE, NAME, ROOT
from tests.support.poison import edit_manifest, sign
from tests.support.server import FAKE, ONE_AT_A_TIME, Server
from tests.support.tasks import MAX_LENGTH, TASKS, write_bundle
from tests.support.triton_clients import TritonClient
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.clients import Transport
    from tests.support.tasks import TinyModel


STAGES = ("tokenize", "queue", "compute", "total")
TEXTS = ["What is a T4?", "A graphics card."]
_TIMING = re.compile(r"([a-z]+);dur=(\d+\.\d{3})")


def told(headers: dict[str, str]) -> tuple[dict[str, float], int, int]:
    """The milliseconds of each stage, and how many tokens there were and were cut off, as each wire says it."""
    if "server-timing" in headers:
        parts = [_TIMING.fullmatch(part) for part in headers["server-timing"].split(", ")]
        assert all(parts), headers["server-timing"]
        times = {part[1]: float(part[2]) for part in parts if part}
        assert headers["x-compute-type"] == "cpu"
    else:
        times = {stage: int(headers[f"bertserve-{stage}-us"]) / 1e3 for stage in STAGES}
    tokens, truncated = (
        int(headers.get(f"x-{one}-tokens") or headers[f"bertserve-{other}"])
        for one, other in (("compute", "tokens"), ("truncated", "truncated-tokens"))
    )
    return times, tokens, truncated


@pytest.mark.parametrize("transport", TRANSPORTS, ids=lambda kind: kind.name)
def test_times_and_tokens(int8_server: Server, transport: type[Transport], models: Path) -> None:
    """`Server-Timing`, or trailing metadata in whole microseconds: every stage, whose parts fit into the total.

    The tokens are those of all texts, special ones included, padding not.
    """
    with transport(int8_server) as client:
        times, *_ = told(client.embed(TEXTS[:1]).headers)
        _, tokens, truncated = told(client.embed(TEXTS).headers)
    assert tuple(times) == STAGES
    assert times["compute"] > 0
    assert times["tokenize"] + times["queue"] + times["compute"] <= times["total"] + 0.01
    assert (tokens, truncated) == (sum(len(token_ids(models, text)) for text in TEXTS), 0)


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
    """`/metrics` counts each request once, with its tokens, and its time in every stage."""
    names = {
        "bertserve_requests_total": {"reason": "ok"},
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
    links = re.findall(r"/docs#/([^)]+)\)", (ROOT / "docs/reference/protocols.md").read_text(encoding="utf-8"))
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
            assert get(fake_server.http, urljoin(page, link.decode())).status == 200, link


@pytest.mark.external
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


MODEL_INFER = "/inference.GRPCInferenceService/ModelInfer"
HEAD = b"POST /embed HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
NARROW = ("--body-limit-bytes", "2048", "--max-client-batch-size", "2", "--max-queue-tokens", "100")


@pytest.fixture(scope="module")
def narrow(models: Path) -> Iterator[Server]:
    """A server whose limits are all near."""
    with Server(models, *ONE_AT_A_TIME, *NARROW) as server:
        yield server


def refusal_of(server: Server, path: str, message: Any, **headers: str) -> str:
    reply = post_json(server.http, path, message, headers)
    assert reply.status >= 400
    return reply.body.decode()


def by_http(path: str, message: Any, **headers: str) -> Callable[[Server], str]:
    return lambda server: refusal_of(server, path, message, **headers)


def by_grpc(data: bytes, *headers: tuple[str, str]) -> Callable[[Server], str]:
    def ask(server: Server) -> str:
        with pytest.raises(Refused) as refused:
            grpc_raw(server.grpc, MODEL_INFER, data, headers=headers)
        return refused.value.text

    return ask


LIMITS: dict[str, list[Callable[[Server], str]]] = {
    "--max-client-batch-size": [
        by_http("/embed", {"inputs": ["a"] * 3}),
        by_http("/v1/embeddings", {"input": ["a"] * 3, "model": "x"}),
        by_grpc(infer_request(["a"] * 3).SerializeToString()),
    ],
    "--max-queue-tokens": [by_http("/embed", {"inputs": ["a " * 150, "a " * 150]})],
    "--body-limit-bytes": [by_http("/embed", {"inputs": "a" * 4000}), by_grpc(b"x" * 3000)],
}


@pytest.mark.parametrize("flag", LIMITS)
def test_a_limit_names_its_setting(narrow: Server, flag: str) -> None:
    """The operator reads in the error what to raise, over each wire."""
    assert [f"({flag})" in ask(narrow) for ask in LIMITS[flag]] == [True] * len(LIMITS[flag])


def test_a_timeout_above_the_maximum_names_it(serve: Callable[..., Server]) -> None:
    """It counts as the maximum: the error of what took longer says so, whatever missed it, and no other error does."""
    server = serve(*ONE_AT_A_TIME, "--fake-ms", "150", "--max-timeout-ms", "100", "--engine-hang-s", "60")
    longest = "the maximum timeout is 100 ms (--max-timeout-ms)"
    assert longest in refusal_of(server, "/embed", {"inputs": "a"}, **{"X-Request-Timeout-Ms": "5000"})
    assert longest not in refusal_of(server, "/embed", {"inputs": "a"}, **{"X-Request-Timeout-Ms": "50"})
    assert "up to 999999999" in refusal_of(server, "/embed", {"inputs": "a"}, **{"X-Request-Timeout-Ms": "9999999999"})


def test_a_wrong_model_lists_what_is_served(tasks_server: Server) -> None:
    """With the task of each."""
    error = refusal_of(tasks_server, "/v2/models/nobody/infer", {"inputs": []})
    assert set(re.findall(r"(\w+) \((\w+)\)", error)) == {(task, task) for task in TASKS}


def test_a_wrong_task_lists_the_models_of_that_task(tasks_server: Server, fake_server: Server) -> None:
    """Where there is none, all that are served."""
    error = refusal_of(tasks_server, "/models/classify/embed", {"inputs": "a"})
    assert "model 'classify' has the task classify, not embed; available: embed" in error
    error = refusal_of(fake_server, "/rerank", {"query": "a", "texts": ["a"]})
    assert re.search(r"no model with the task rerank is available; available: \S+ \(embed\)", error)
    assert metric(fake_server, "bertserve_requests_total", reason="wrong_task") > 0


WIDE = 17_000
"""Numbers for each token, so that 31 texts of 64 tokens are more than an answer may have."""


@pytest.fixture(scope="module")
def wide_server(tiny_models: dict[str, TinyModel], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    def widen(manifest: dict[str, Any]) -> None:
        manifest["hidden_size"] = manifest["outputs"][0]["shape"][2] = WIDE

    repository = tmp_path_factory.mktemp("wide")
    bundle = write_bundle(repository, tiny_models["embed_tokens"])
    graph = onnx.load(bundle / "model.fp32.onnx")
    graph.graph.output[0].type.tensor_type.shape.dim[2].dim_value = WIDE
    onnx.save(graph, bundle / "model.fp32.onnx")
    edit_manifest(bundle, widen)
    sign(bundle)
    with Server(repository, *FAKE) as server:
        yield server


LONG_TEXT, TEXT = "server " * (MAX_LENGTH - 2), "server"


def test_an_answer_that_would_be_too_large_is_rejected(wide_server: Server) -> None:
    """Vectors of tokens are a thousand times as large as their text: a small request must not fill the memory."""
    reply = post_json(wide_server.http, "/embed_all", {"inputs": [LONG_TEXT] * 31})
    assert (reply.status, reply.json()["error"]) == (
        422,
        f"the answer would have {31 * MAX_LENGTH * WIDE} numbers; the maximum is 33554432. Send fewer or shorter texts",
    )


@pytest.mark.parametrize("flavour", ["http", "grpc"])
def test_padding_counts_towards_the_size_of_an_answer(wide_server: Server, flavour: str) -> None:
    """One long text among short ones: v2 pads all of them. A reply larger than all buffers arrives."""
    client = TritonClient(flavour, wide_server)
    with pytest.raises(InferenceServerException, match=f"would have {32 * MAX_LENGTH * WIDE} numbers"):
        client.infer("embed_tokens", {"text": [LONG_TEXT] + [TEXT] * 31})
    found = client.infer("embed_tokens", {"text": [LONG_TEXT] + [TEXT] * 15})
    assert found.as_numpy("embeddings").shape == (16, MAX_LENGTH, WIDE)
    assert found.as_numpy("tokens").tolist() == [MAX_LENGTH] + [3] * 15
    assert not found.as_numpy("embeddings")[1:, 3:].any()
