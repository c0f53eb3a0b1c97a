"""`bertserve load` and Locust against a server that wants a key and speaks mutual TLS."""

from __future__ import annotations

import contextlib
import signal
import ssl
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from bertserve.loadtest.cli import HELD, IMPOSSIBLE, main
from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.generator.http1 import HttpWire
from bertserve.loadtest.generator.http2 import GrpcWire
from bertserve.loadtest.generator.messages import KEY_VARIABLE
from bertserve.loadtest.generator.tls import Tls, TlsWire
from tests.support.certificates import Certificates
from tests.support.credentials import FIRST, WRONG, write_keys
from tests.support.models import ROOT
from tests.support.server import FAKE, Server
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOCUST = {"route=/embed ": "POST /embed", "/ModelInfer ": "gRPC ModelInfer"}
"""What the server's log says of a request of each of its users, and what Locust calls it."""

REPLY = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"), mutual=True)


@pytest.fixture(scope="module")
def secured(models: Path, certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = write_keys(tmp_path_factory.mktemp("keys") / "keys", FIRST)
    with Server(models, *FAKE, "--api-keys-file", str(keys), "--access-log", "true", tls=certificates) as server:
        yield server


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(KEY_VARIABLE, FIRST)
    return FIRST


def files(certificates: Certificates) -> list[str]:
    """What a client is given of them."""
    return ["--ca", str(certificates.ca), "--cert", str(certificates.client)]


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What is said where nothing can be measured."""
    assert main([*words, "--duration", "0.2"]) == IMPOSSIBLE
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert FIRST not in said
    return said


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_secured_server_is_measured(
    secured: Server,
    certificates: Certificates,
    key: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    protocol: str,
) -> None:
    """Every request is answered, and the key stands in nothing that is left behind."""
    target = f"https://{secured.http}" if protocol == "http" else f"grpcs://{secured.grpc}"
    words = ["--target", target, *files(certificates), "--duration", "0.5", "--slo", "p50=10s,errors=0%"]
    assert main([*words, "--out", str(tmp_path)]) == HELD
    shown = capsys.readouterr()
    for text in (shown.out, shown.err, *(path.read_text() for path in tmp_path.iterdir())):
        assert key not in text
    assert target in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(("given", "told"), [(None, "401"), (WRONG, "401"), ("two words", "one word of ASCII")])
def test_a_wrong_key_is_one_clear_line(
    secured: Server,
    certificates: Certificates,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    given: str | None,
    told: str,
) -> None:
    """None, another one, and what could not be sent at all."""
    if given is None:
        monkeypatch.delenv(KEY_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(KEY_VARIABLE, given)
    words = ["--target", f"https://{secured.http}", *files(certificates), "--out", str(tmp_path)]
    assert told in refusal(capsys, *words)


@pytest.mark.usefixtures("key")
def test_what_tls_refuses_is_one_clear_line(
    secured: Server, certificates: Certificates, fake_server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """An authority that is not trusted, a port without TLS, no certificate to show, and files that are none."""
    https, out = f"https://{secured.http}", ["--out", str(tmp_path)]
    assert "the server's certificate is not trusted" in refusal(capsys, "--target", https, *out)
    ca, cert = files(certificates)[:2], files(certificates)[2:]
    plain = f"https://{fake_server.http}"
    assert "TLS with the server failed" in refusal(capsys, "--target", plain, *ca, *out)
    assert "does not negotiate h2" in refusal(capsys, "--target", f"grpcs://{secured.http}", *ca, *cert, *out)
    assert "(--cert FILE)" in refusal(capsys, "--target", https, *ca, *out)
    no_ca = refusal(capsys, "--target", https, "--ca", str(certificates.key), *out)
    assert f"--ca {certificates.key}: " in no_ca
    assert "must be a PEM file of certificates" in no_ca
    no_key = refusal(capsys, "--target", https, *ca, "--cert", str(certificates.cert), *out)
    assert f"--cert {certificates.cert}: " in no_key
    assert "nothing/there: No such file" in refusal(capsys, "--target", https, "--ca", "nothing/there", *out)


def conversation(
    wire: TlsWire, certificates: Certificates, *protocols: str
) -> tuple[ssl.SSLObject, bytes, ssl.MemoryBIO]:
    """Shakes hands with a wire as its server, and answers it once.

    Returns the server's side, what the wire sent before it was asked, and where the server's bytes come out.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates.cert, certificates.key)
    context.set_alpn_protocols(list(protocols))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(incoming, outgoing, server_side=True)
    said = wire.opening() + wire.request(b"GET / HTTP/1.1\r\n\r\n", "the tag")
    while not wire.is_open:
        incoming.write(said)
        with contextlib.suppress(ssl.SSLWantReadError):
            server.do_handshake()
        assert not wire.feed(outgoing.read())
        said = wire.owed()
    incoming.write(said)
    server.do_handshake()
    heard = server.read()
    server.write(REPLY)
    for byte in outgoing.read():
        if found := wire.feed(bytes([byte])):
            assert [(reply.tag, reply.body) for reply in found] == [("the tag", b"ok")]
            return server, heard, outgoing
    raise AssertionError("the reply was not read")


def wrapped(certificates: Certificates, wire: HttpWire | GrpcWire, name: str, protocol: str) -> TlsWire:
    found = Tls(str(certificates.ca)).wrap(wire, name, protocol)
    assert isinstance(found, TlsWire)
    return found


def test_a_request_waits_for_the_handshake(certificates: Certificates) -> None:
    """It is sent with the handshake's end; a reply may come byte by byte, and together with the connection's end."""
    wire = wrapped(certificates, HttpWire(), "localhost", "http/1.1")
    server, heard, outgoing = conversation(wire, certificates, "http/1.1")
    assert heard == b"GET / HTTP/1.1\r\n\r\n"
    assert server.selected_alpn_protocol() == "http/1.1"
    wire.request(b"GET / HTTP/1.1\r\n\r\n", "the last")
    server.write(REPLY)
    with contextlib.suppress(ssl.SSLWantReadError):
        server.unwrap()
    assert [reply.tag for reply in wire.feed(outgoing.read())] == ["the last"]


@pytest.mark.parametrize(
    ("wire", "name", "protocol", "offered", "sentence"),
    [
        # A certificate of a trusted authority for another name is not enough.
        (HttpWire(), "other.example", "http/1.1", ["http/1.1"], "not trusted: Hostname mismatch"),
        # A server that agrees on no protocol is not sent any frame.
        (GrpcWire("localhost", "/a/b"), "localhost", "h2", [], "does not negotiate h2"),
    ],
    ids=["another-name", "no-protocol"],
)
def test_a_server_that_is_not_the_one_asked_for_is_refused(
    certificates: Certificates, wire: HttpWire | GrpcWire, name: str, protocol: str, offered: list[str], sentence: str
) -> None:
    """No request reaches it."""
    with pytest.raises(BenchError, match=sentence):
        conversation(wrapped(certificates, wire, name, protocol), certificates, *offered)


def test_locust_asks_a_secured_server(secured: Server, certificates: Certificates, key: str) -> None:
    """Users of both protocols show key and certificate."""
    before = len(secured.log)
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless", "--protocol", "both"),
            *("--host", f"https://{secured.http}", "--grpc-target", str(secured.grpc), "-u", "2"),
            *files(certificates),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as locust:
        try:
            wait_for(lambda: all(route in secured.log[before:] for route in LOCUST), "requests of both users", 60)
        finally:
            locust.send_signal(signal.SIGTERM)
            said, _ = locust.communicate(timeout=60)
    for name in LOCUST.values():
        assert any(line.startswith(name) and line.endswith(", 0 failed") for line in said.splitlines()), said
    assert key not in said
