"""What an error tells whoever has to act: the models that there are, and the setting behind a limit."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.clients import Grpc, RawConnection, Refused, grpc_raw, metric, post_json
from tests.support.server import ONE_AT_A_TIME, Server
from tests.support.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MODEL_INFER = "/inference.GRPCInferenceService/ModelInfer"
HEAD = b"POST /embed HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
SMALL = ("--body-limit-bytes", "2048", "--header-limit-bytes", "1024", "--header-limit-count", "20")
SHORT = ("--header-timeout-s", "0.2", "--body-timeout-s", "0.2", "--max-client-batch-size", "2")
FEW = ("--max-openai-batch-size", "3", "--max-v2-batch-size", "4", "--max-queue-tokens", "100")


@pytest.fixture(scope="module")
def narrow(models: Path) -> Iterator[Server]:
    """A server whose limits are all near."""
    with Server(models, *ONE_AT_A_TIME, *SMALL, *SHORT, *FEW, "--max-bulk-tokens", "50") as server:
        yield server


def told(server: Server, path: str, message: Any, **headers: str) -> str:
    reply = post_json(server.http, path, message, headers)
    assert reply.status >= 400
    return reply.body.decode()


def raw(server: Server, data: bytes) -> str:
    """The text of what is answered to bytes."""
    with RawConnection(server.http) as connection:
        connection.send(data)
        return connection.read_to_end().decode()


@pytest.mark.parametrize(
    ("path", "message", "flag"),
    [
        ("/embed", {"inputs": ["a"] * 3}, "--max-client-batch-size"),
        ("/v1/embeddings", {"input": ["a"] * 4, "model": "x"}, "--max-openai-batch-size"),
        ("/embed", {"inputs": "a" * 4000}, "--body-limit-bytes"),
        ("/embed", {"inputs": ["a " * 150, "a " * 150]}, "--max-queue-tokens"),
    ],
)
def test_a_limit_names_its_setting(narrow: Server, path: str, message: dict[str, Any], flag: str) -> None:
    """The operator reads in the error what to raise."""
    assert f"({flag})" in told(narrow, path, message)


def test_a_limit_of_bulk_work_names_its_own(narrow: Server) -> None:
    """Its tokens are counted apart."""
    assert "(--max-bulk-tokens)" in told(narrow, "/embed", {"inputs": "a " * 300}, **{"X-Request-Priority": "4"})


@pytest.mark.parametrize(
    ("data", "flag"),
    [
        (HEAD + b"X-Padding: " + b"x" * 2000 + b"\r\n\r\n", "--header-limit-bytes"),
        (HEAD + b"".join(b"X-%d: y\r\n" % number for number in range(30)) + b"\r\n", "--header-limit-count"),
        (HEAD + b"X-Half: ", "--header-timeout-s"),
        (HEAD + b"Content-Length: 100\r\n\r\n{", "--body-timeout-s"),
    ],
)
def test_a_limit_of_the_transport_names_its_setting(narrow: Server, data: bytes, flag: str) -> None:
    """The same of what is refused before it is read."""
    assert f"({flag})" in raw(narrow, data)


def test_a_limit_over_grpc_names_its_setting(narrow: Server) -> None:
    """Its inputs, messages and metadata have limits too."""
    with Grpc(narrow) as client, pytest.raises(Refused) as refused:
        client.embed(["a"] * 5)
    assert "(--max-v2-batch-size)" in refused.value.text
    with pytest.raises(Refused) as refused:
        grpc_raw(narrow.grpc, MODEL_INFER, b"x" * 3000)
    assert "(--body-limit-bytes)" in refused.value.text
    with pytest.raises(Refused) as refused:
        grpc_raw(narrow.grpc, MODEL_INFER, b"", headers=[("padding", "x" * 2000)])
    assert "(--header-limit-bytes)" in refused.value.text


def test_a_timeout_above_the_maximum_names_it(serve: Callable[..., Server]) -> None:
    """It counts as the maximum: the error of what took longer says so, whatever missed it, and no other error does."""
    server = serve(*ONE_AT_A_TIME, "--fake-ms", "150", "--max-timeout-ms", "100", "--engine-hang-s", "60")
    longest = "a timeout is 100 ms at most (--max-timeout-ms)"
    assert longest in told(server, "/embed", {"inputs": "a"}, **{"X-Request-Timeout-Ms": "5000"})
    assert longest not in told(server, "/embed", {"inputs": "a"}, **{"X-Request-Timeout-Ms": "50"})
    assert "at most 999999999" in told(server, "/embed", {"inputs": "a"}, **{"X-Request-Timeout-Ms": "9999999999"})


def test_a_wrong_model_lists_what_is_served(tasks_server: Server) -> None:
    """With the task of each."""
    error = told(tasks_server, "/v2/models/nobody/infer", {"inputs": []})
    assert set(re.findall(r"(\w+) \((\w+)\)", error)) == {(task, task) for task in TASKS}


def test_a_wrong_task_lists_the_models_of_that_task(tasks_server: Server, fake_server: Server) -> None:
    """Where there is none, all that are served."""
    error = told(tasks_server, "/models/classify/embed", {"inputs": "a"})
    assert "model 'classify' is for the task classify, not for embed; models of that task: embed" in error
    error = told(fake_server, "/rerank", {"query": "a", "texts": ["a"]})
    assert re.search(r"no model of the task rerank is served here; served here: \S+ \(embed\)", error)
    assert metric(fake_server, "bertserve_requests_total", reason="wrong_task") > 0
