"""HTTP/2 and gRPC by programs that nobody here wrote: h2spec, h2load, curl and four clients."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from bertserve.loadtest.generator.frames import prefixed
from tests.support.certificates import Certificates
from tests.support.clients import MODEL_INFER, infer_request
from tests.support.expected import fake_answers
from tests.support.foreign import CLIENTS, h2load, missing
from tests.support.models import NAME
from tests.support.server import FAKE
from tests.support.skips import SHARED, needs_shared

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.server import Server


pytestmark = pytest.mark.external

STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
TEXTS = ["plain", "another text", "and one that is somewhat longer than the others"]
LARGE_BYTES = 3_500_000
GRPC_HEADERS = ("content-type: application/grpc", "te: trailers")


def message(text: str, *, padding: int = 0, model: str = NAME) -> bytes:
    request = infer_request([text], model=model)
    if padding:
        request.parameters["padding"].string_param = "x" * padding
    return bytes(request.SerializeToString())


def vectors(replies: list[str]) -> np.ndarray:
    parsed = [pb.ModelInferResponse.FromString(bytes.fromhex(reply)) for reply in replies]
    return np.array([np.frombuffer(reply.raw_output_contents[0], "<f4") for reply in parsed])


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client(fake_server: Server, models: Path, client: str) -> None:
    """One by one, a hundred at once, 3.5 MB, refused, cancelled and in a stream: each gets its own answer."""
    if reason := missing(client):
        pytest.skip(reason)
    job = {
        "address": fake_server.grpc,
        "unary": MODEL_INFER,
        "stream": STREAM,
        "good": [message(text).hex() for text in TEXTS],
        "large": [message(TEXTS[0], padding=LARGE_BYTES).hex()],
        "refused": [message("x", model="absent").hex()],
    }
    told = CLIENTS[client](job)
    expected = fake_answers(models, TEXTS)
    np.testing.assert_allclose(vectors(told["good"]), expected, atol=1e-5)
    np.testing.assert_allclose(vectors(told["together"]), [expected[0]] * 100, atol=1e-5)
    np.testing.assert_allclose(vectors(told["large"]), expected[:1], atol=1e-5)
    np.testing.assert_allclose(vectors(told["after a cancel"]), expected[:1], atol=1e-5)
    assert told["refused"] == "NOT_FOUND"
    streamed = [pb.ModelStreamInferResponse.FromString(bytes.fromhex(reply)) for reply in told["stream"]]
    assert [reply.error_message for reply in streamed] == [""] * len(TEXTS)
    found = [np.frombuffer(reply.infer_response.raw_output_contents[0], "<f4") for reply in streamed]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_curl(fake_server: Server, models: Path, tmp_path: Path) -> None:
    """A call by hand: `curl --http2-prior-knowledge`."""
    curl = shutil.which("curl")
    if (
        curl is None
        or "HTTP2" not in subprocess.run([curl, "--version"], capture_output=True, text=True, check=True).stdout
    ):
        pytest.skip("no curl with HTTP/2 here")
    asked, got, head = (tmp_path / name for name in ("asked", "got", "head"))
    asked.write_bytes(prefixed(message(TEXTS[0])))
    words = [word for line in GRPC_HEADERS for word in ("-H", line)]
    command = [curl, "--silent", "--show-error", "--http2-prior-knowledge", "--data-binary", f"@{asked}", *words]
    command += ["-o", str(got), "-D", str(head), f"http://{fake_server.grpc}{MODEL_INFER}"]
    subprocess.run(command, check=True, timeout=30)
    lines = head.read_text(encoding="latin-1").splitlines()
    assert lines[0].startswith("HTTP/2 200")
    assert "grpc-status: 0" in lines
    np.testing.assert_allclose(vectors([got.read_bytes()[5:].hex()]), fake_answers(models, TEXTS[:1]), atol=1e-5)


@pytest.mark.parametrize("wire", ["grpc", "http"])
def test_h2load(fake_server: Server, tmp_path: Path, wire: str) -> None:
    """2,000 calls of nghttp2's load generator, 32 at once on each of 4 connections, and as many over HTTP/1.1."""
    program = h2load()
    if program is None:
        pytest.skip("no h2load here (see make programs)")
    asked = tmp_path / "asked"
    if wire == "grpc":
        asked.write_bytes(prefixed(message(TEXTS[0])))
        words = ["-m", "32", *(word for line in GRPC_HEADERS for word in ("-H", line))]
        url = f"http://{fake_server.grpc}{MODEL_INFER}"
    else:
        asked.write_text(json.dumps({"inputs": TEXTS[0]}), encoding="utf-8")
        words, url = ["--h1", "-H", "content-type: application/json"], f"http://{fake_server.http}/embed"
    command = [*program, "-n", "2000", "-c", "4", "-d", str(asked), *words, url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert re.search(r"2000 succeeded, 0 failed, 0 errored, 0 timeout", done.stdout), done.stdout
    assert re.search(r"status codes: 2000 2xx", done.stdout), done.stdout


H2SPEC = SHARED / "tools" / "h2spec"
"""Built so that it asks with POST and gRPC's headers."""

CASES = 147

_NO_DATA = "expects data of a reply that is a status alone"
_NO_PRIORITIES = "RFC 9113, 5.3.2, dropped priorities, and what they depend on with them"
KNOWN = {
    "Sends a WINDOW_UPDATE frame on half-closed (remote) stream": _NO_DATA,
    "Sends a PRIORITY frame on half-closed (remote) stream": _NO_DATA,
    "Sends HEADERS frames that causes their advertised concurrent stream limit to be exceeded": (
        "expects streams to stay open that are answered at once"
    ),
    "Sends HEADERS frame that depends on itself": _NO_PRIORITIES,
    "Sends PRIORITY frame that depend on itself": _NO_PRIORITIES,
}
"""Cases that fail, and why they should."""


@needs_shared(H2SPEC)
def test_h2spec(serve: Callable[..., Server], fake_server: Server, tmp_path: Path) -> None:
    """No case fails but those whose rule no longer is one, or which ask for what no call of gRPC is."""
    secured = serve(*FAKE, tls=Certificates(tmp_path / "certificates"))
    # Side by side: nearly all of it is waiting for what does not come.
    with ThreadPoolExecutor() as pool:
        reports = [
            pool.submit(_failures, fake_server.grpc, tmp_path / "plain.xml"),
            pool.submit(_failures, secured.grpc, tmp_path / "tls.xml", "-t", "-k"),
        ]
    for report in reports:
        assert report.result().keys() == KNOWN.keys(), report.result()


def _failures(address: str, report: Path, *options: str) -> dict[str, str | None]:
    host, _, port = address.rpartition(":")
    path = ("-P", "/inference.GRPCInferenceService/ServerLive")
    command = [H2SPEC, "--strict", "-h", host, "-p", port, *path, "-j", report, *options]
    subprocess.run(command, capture_output=True, timeout=120, check=False)
    cases = list(ET.parse(report).iter("testcase"))  # noqa: S314  h2spec's own
    assert len(cases) == CASES
    return {case.attrib["classname"]: case.findtext("error") for case in cases if case.find("error") is not None}
