"""TLS and mutual TLS: who gets a connection, over what, and how certificates change."""

from __future__ import annotations

import contextlib
import datetime as dt
import shutil
import socket
import ssl
import time
from functools import partial
from typing import TYPE_CHECKING

import grpc
import openai
import pytest
import trustme

from bertserve.loadtest.generator.frames import PREFACE, settings
from tests.support.certificates import Certificates
from tests.support.clients import (
    TRANSPORTS,
    HttpConnection,
    RawConnection,
    get,
    grpc_raw,
    metric,
    post_json,
)
from tests.support.fronts import wait_all_logged
from tests.support.http2 import RawHttp2
from tests.support.models import NAME
from tests.support.server import Server, elapsed
from tests.support.triton_clients import FLAVOURS, TritonClient
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.clients import Transport

FAKE = ("--engine", "fake", "--precision", "fp32")
LIVEZ = b"GET /livez HTTP/1.1\r\nHost: test\r\n\r\n"
EXPIRY, RELOADED = "bertserve_certificate_expiry_timestamp_seconds", "bertserve_last_reload_successful"
CHECK = "/grpc.health.v1.Health/Check"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Those of a server that does, and of its clients."""
    return Certificates(tmp_path_factory.mktemp("mutual"), mutual=True)


@pytest.fixture(scope="module")
def server(models: Path, certificates: Certificates) -> Iterator[Server]:
    with Server(models, *FAKE, tls=certificates) as running:
        yield running


@pytest.fixture(scope="module")
def mutual_server(models: Path, mutual: Certificates) -> Iterator[Server]:
    with Server(models, *FAKE, tls=mutual) as running:
        yield running


def handshake(address: str, context: ssl.SSLContext, session: ssl.SSLSession | None = None) -> ssl.SSLSocket:
    """A connection on which nothing has been said.

    Raises:
        ssl.SSLError: There is none to be had.
    """
    host, _, port = address.rpartition(":")
    opened = socket.create_connection((host, int(port)), timeout=8)
    try:
        return context.wrap_socket(opened, server_hostname=host, session=session)
    except (ssl.SSLError, ConnectionError):
        opened.close()
        raise


def refuses(address: str, context: ssl.SSLContext, session: ssl.SSLSession | None = None) -> bool:
    """Whether a server ends a connection in the handshake; with TLS 1.3 a client hears of it only afterwards."""
    try:
        with handshake(address, context, session) as connection:
            http2 = connection.selected_alpn_protocol() == "h2"
            connection.sendall(PREFACE + settings() if http2 else LIVEZ)
            return not connection.recv(1)
    except (ssl.SSLError, ConnectionError):
        return True


def shown(address: str, certificates: Certificates, field: str) -> str:
    """What the certificate that a server shows has in a field, as OpenSSL's client reads it."""
    with handshake(address, certificates.context()) as connection:
        return str((connection.getpeercert() or {})[field])


def expiry(address: str, certificates: Certificates) -> float:
    return ssl.cert_time_to_seconds(shown(address, certificates, "notAfter"))


def serial(address: str, certificates: Certificates) -> str:
    return shown(address, certificates, "serialNumber")


# Clients.


@pytest.mark.parametrize("kind", ["server", "mutual_server"])
@pytest.mark.parametrize("transport", TRANSPORTS, ids=lambda kind: kind.name)
def test_every_transport(request: pytest.FixtureRequest, kind: str, transport: type[Transport]) -> None:
    """Whatever a client speaks, it speaks it over TLS too, with a certificate of its own where one is asked for."""
    with transport(request.getfixturevalue(kind)) as client:
        assert client.embed(["hello"]).vectors.shape == (1, 384)


@pytest.mark.parametrize("kind", ["server", "mutual_server"])
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_tritonclient(request: pytest.FixtureRequest, kind: str, flavour: str) -> None:
    """All four flavours, with `ssl=True`."""
    client = TritonClient(flavour, request.getfixturevalue(kind))
    assert client.call("is_server_ready")
    assert client.infer(NAME, {"text": ["hello"]}).as_numpy("embedding").shape == (1, 384)


def test_openai(mutual_server: Server, mutual: Certificates) -> None:
    with (
        openai.DefaultHttpx2Client(verify=mutual.context()) as wire,
        openai.OpenAI(base_url=f"https://{mutual_server.http}/v1", api_key="none", http_client=wire) as client,
    ):
        assert len(client.embeddings.create(model=NAME, input="hello").data) == 1


def test_the_metrics_port_speaks_plainly(mutual_server: Server) -> None:
    """A kubelet has no certificate: probes, metrics and gRPC's health service need none there."""
    for path in ("/livez", "/readyz", "/metrics"):
        assert get(mutual_server.metrics, path).status == 200
    assert grpc_raw(mutual_server.metrics, CHECK, b"") == b"\x08\x01"


# Handshakes.


@pytest.mark.parametrize(("port", "protocol"), [("http", "http/1.1"), ("grpc", "h2")])
def test_what_is_spoken_is_agreed_on(server: Server, certificates: Certificates, port: str, protocol: str) -> None:
    """ALPN names the protocol, whatever else a client offers."""
    with handshake(getattr(server, port), certificates.context("h3", "http/1.1", "h2")) as connection:
        assert connection.selected_alpn_protocol() == protocol


LONG = tuple(f"{number:0>200}" for number in range(200))
"""Names for which a ClientHello takes several records, and arrives in pieces."""


@pytest.mark.parametrize("port", ["http", "grpc"])
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("more", [(), LONG], ids=["short", "long"])
def test_what_nobody_speaks_is_told(
    server: Server, certificates: Certificates, port: str, version: ssl.TLSVersion, more: tuple[str, ...]
) -> None:
    """A client whose ALPN names another protocol alone gets the alert of RFC 7301, 3.2, and the log stays as it is."""
    ours, other = {"http": ("http/1.1", "h2"), "grpc": ("h2", "http/1.1")}[port]
    log = server.log
    for offered, told in (((other,), True), (("foo",), True), ((other, ours), False)):
        context = certificates.context(*more, *offered)
        context.minimum_version = context.maximum_version = version
        if told:
            with pytest.raises(ssl.SSLError, match="alert no application protocol"):
                handshake(getattr(server, port), context)
        else:
            assert not refuses(getattr(server, port), context)
    assert server.log == log


def test_who_goes_on_after_the_alert_is_cut_off(server: Server, certificates: Certificates) -> None:
    """Once it was told, nothing is read from a client any more, long before its time for a handshake is over."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = certificates.context("foo").wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    with RawConnection(str(server.http)) as connection:
        connection.send(outgoing.read())
        assert connection.socket.recv(100) == b"\x15\x03\x03\x00\x02\x02\x78"  # fatal, no_application_protocol
        connection.send(b"\x16\x03\x03\x00\x01\x00")
        assert connection.read_to_end() == b""


def test_grpc_without_alpn_is_closed(server: Server, certificates: Certificates) -> None:
    """HTTP/2 over TLS is agreed on or not spoken."""
    with handshake(server.grpc, certificates.context()) as connection:
        connection.sendall(PREFACE + settings())
        assert connection.recv(1) == b""


def test_http_without_alpn_is_answered(server: Server, certificates: Certificates) -> None:
    assert not refuses(server.http, certificates.context())


def limited(certificates: Certificates, version: ssl.TLSVersion, ciphers: str = "ALL:@SECLEVEL=0") -> ssl.SSLContext:
    """A client's context of one version and some ciphers."""
    context = certificates.context("http/1.1", "h2")
    context.set_ciphers(ciphers)
    context.minimum_version = context.maximum_version = version
    return context


@pytest.mark.parametrize("port", ["http", "grpc"])
@pytest.mark.parametrize(
    ("version", "ciphers", "fits"),
    [
        (ssl.TLSVersion.TLSv1_3, "ALL", True),
        (ssl.TLSVersion.TLSv1_2, "ECDHE+AESGCM", True),
        (ssl.TLSVersion.TLSv1_2, "ECDHE+CHACHA20", True),
        (ssl.TLSVersion.TLSv1_2, "ECDHE+AES:!AESGCM:!AESCCM:@SECLEVEL=0", False),
        (ssl.TLSVersion.TLSv1_2, "kRSA:@SECLEVEL=0", False),
        (ssl.TLSVersion.TLSv1_1, "ALL:@SECLEVEL=0", False),
    ],
    ids=["1.3", "1.2-gcm", "1.2-chacha", "1.2-cbc", "1.2-rsa", "1.1"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_versions_and_ciphers(
    server: Server,
    certificates: Certificates,
    port: str,
    version: ssl.TLSVersion,
    ciphers: str,
    fits: bool,  # noqa: FBT001
) -> None:
    """TLS 1.2 at least, with forward secrecy and authenticated encryption."""
    assert refuses(getattr(server, port), limited(certificates, version, ciphers)) is not fits


@pytest.mark.parametrize("port", ["http", "grpc"])
@pytest.mark.parametrize(
    ("said", "then"),
    [(b"", b""), (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b""), (b"\x16\x03\x01\x02\x00", b"\x01")],
    ids=["nothing", "half", "trickled"],
)
def test_row_08_a_handshake_that_does_not_end(server: Server, port: str, said: bytes, then: bytes) -> None:
    """A client that stops in the handshake, or trickles it, is gone after `header_timeout_s`, without a line."""
    started, log, received = time.monotonic(), server.log, None
    with RawConnection(str(getattr(server, port)), timeout_s=0.1) as connection:
        connection.send(said)
        while received is None and elapsed(started) < 15:
            connection.send(then)
            with contextlib.suppress(TimeoutError):
                received = connection.read_to_end()
    assert received == b""
    assert server.log == log


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\nHost: test\r\n\r\n", PREFACE + settings(), b"\x00" * 100, b"\x16\x03\x01\xff"],
)
@pytest.mark.parametrize("port", ["http", "grpc"])
def test_row_01_what_is_no_tls_is_closed(server: Server, port: str, data: bytes) -> None:
    """Nobody who speaks plainly gets more than a sentence, and that over HTTP alone, and nothing else is logged."""

    def log() -> list[str]:
        return [line for line in server.log.splitlines() if "plain HTTP request" not in line]

    before = log()
    with RawConnection(str(getattr(server, port))) as connection:
        connection.send(data)
        received = connection.read_to_end()
    assert received.startswith(b"HTTP/1.1 400 ") == (port == "http" and data[:1].isalpha())
    assert received.count(b"HTTP/1.1") <= 1
    assert log() == before


@pytest.mark.parametrize("kind", ["server", "mutual_server"])
def test_plain_http_on_the_tls_port_is_told_so(request: pytest.FixtureRequest, kind: str) -> None:
    """With the status that nginx gives; a body that is still on its way does not cost the client its reply.

    Each is counted, and logged under the id that its client is told; many take no place for long.
    """
    server = request.getfixturevalue(kind)
    address = str(server.http)
    counted = partial(metric, server, "bertserve_requests_total", reason="malformed_request", protocol="http", model="")
    before = counted()
    for reply in (get(address, "/livez"), post_json(address, "/embed", b" " * 1_000_000)):
        assert reply.status == 400
        error = reply.json()["error"]
        assert "https://" in error["message"]
        wait_for(lambda identity=error["request_id"]: identity and identity in server.log, "its line in the log")
    assert counted() == before + 2
    with contextlib.ExitStack() as stack:
        plain = [stack.enter_context(RawConnection(address)) for _ in range(40)]
        for connection in plain:
            connection.send(LIVEZ)
        assert {400} <= {connection.status() for connection in plain} <= {400, 0}
    assert get(server.http, "/livez").status == 200


# Certificates of clients.


def strangers(folder: Path, server: Certificates) -> dict[str, ssl.SSLContext]:
    """Clients that a server should not take: with no certificate, another's, one that has expired."""
    contexts = {name: ssl.create_default_context(cafile=server.ca) for name in ("none", "other", "expired")}
    trustme.CA().issue_cert("stranger@example.test").private_key_and_cert_chain_pem.write_to_path(folder / "other")
    expired = server.clients.issue_cert("late@example.test", not_after=dt.datetime.now(dt.UTC) - dt.timedelta(days=1))
    expired.private_key_and_cert_chain_pem.write_to_path(folder / "expired")
    for name in ("other", "expired"):
        contexts[name].load_cert_chain(folder / name)
    return contexts


@pytest.mark.parametrize("port", ["http", "grpc"])
@pytest.mark.parametrize("name", ["none", "other", "expired"])
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_strangers_get_no_connection(
    mutual_server: Server, mutual: Certificates, tmp_path: Path, port: str, name: str, version: ssl.TLSVersion
) -> None:
    """Without a good certificate no byte of an answer comes, not even from a probe, and the log stays as it is."""
    log = mutual_server.log
    context = strangers(tmp_path, mutual)[name]
    context.set_alpn_protocols(["http/1.1", "h2"])
    context.minimum_version = context.maximum_version = version
    assert refuses(getattr(mutual_server, port), context)
    assert mutual_server.log == log


def test_grpcio_without_a_certificate(mutual_server: Server, mutual: Certificates) -> None:
    """The client of gRPC itself hears UNAVAILABLE, as with any connection it cannot have."""
    credentials = grpc.ssl_channel_credentials(mutual.ca.read_bytes())
    with grpc.secure_channel(str(mutual_server.grpc), credentials) as channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary(CHECK)(b"", timeout=10)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


# Certificates that change.


def test_certificates_are_read_again(serve: Callable[..., Server], tmp_path: Path) -> None:
    """New connections see the new certificate, on both ports; those that are open go on."""
    soon = dt.datetime.now(dt.UTC) + dt.timedelta(days=3)
    before, after = Certificates(tmp_path / "before"), Certificates(tmp_path / "after", not_after=soon)
    server = serve(*FAKE, tls=before)
    assert metric(server, EXPIRY) == expiry(server.http, before) > soon.timestamp() + 1
    old = Certificates.__new__(Certificates)
    old.__dict__.update(before.__dict__, ca=shutil.copyfile(before.ca, tmp_path / "ca-before"))
    first = serial(server.http, before)
    assert serial(server.grpc, before) == first
    with HttpConnection(server.http) as http, RawHttp2(server.grpc) as connection:
        assert http.call("GET", "/livez").status == 200
        before.replace_by(after)
        after.ca.replace(before.ca)
        wait_all_logged(server, "certificates: reloaded")
        assert serial(server.http, before) == serial(server.grpc, before) != first
        assert metric(server, EXPIRY) == expiry(server.http, before) == int(soon.timestamp())
        assert f"certificates: reloaded, valid until {soon:%Y-%m-%d %H:%M} UTC" in server.log
        assert refuses(server.http, old.context())
        assert http.call("GET", "/livez").status == 200
        connection.call(1, b"", CHECK)
        assert connection.reply(1).status == 0
    assert "Traceback" not in server.log


def test_a_broken_pair_changes_nothing(serve: Callable[..., Server], tmp_path: Path) -> None:
    """A key that does not belong, a file that is none: the old ones stay in use, and the log says why."""
    before, after = Certificates(tmp_path / "before"), Certificates(tmp_path / "after")
    server = serve(*FAKE, tls=before)
    first = serial(server.http, before)
    shutil.copyfile(after.key, before.key)
    wait_all_logged(server, "does not match the certificate")
    before.cert.write_text("nonsense", encoding="utf-8")
    wait_all_logged(server, "contains no PEM certificate")
    assert metric(server, RELOADED, files="certificates") == 0
    assert metric(server, EXPIRY) == expiry(server.http, before)
    assert serial(server.http, before) == serial(server.grpc, before) == first
    shutil.copyfile(after.cert, before.cert)
    wait_all_logged(server, "certificates: reloaded")
    assert metric(server, RELOADED, files="certificates") == 1
    after.ca.replace(before.ca)
    assert serial(server.http, before) != first
    assert "Traceback" not in server.log
    assert "PRIVATE" not in server.log


@pytest.mark.parametrize(
    "version", [ssl.TLSVersion.TLSv1_2, pytest.param(ssl.TLSVersion.TLSv1_3, marks=pytest.mark.slow)]
)
def test_an_authority_that_is_taken_away(serve: Callable[..., Server], tmp_path: Path, version: ssl.TLSVersion) -> None:
    """Clients of an authority that is trusted no more get no connection, not even by a session of before."""
    mutual, others = Certificates(tmp_path / "ours", mutual=True), Certificates(tmp_path / "others", mutual=True)
    server = serve(*FAKE, tls=mutual)
    context = limited(mutual, version)
    with handshake(server.http, context) as connection:
        connection.sendall(LIVEZ)
        assert connection.recv(100)
        session = connection.session
    assert session is not None
    shutil.copyfile(others.client_ca, mutual.client_ca)
    wait_all_logged(server, "certificates: reloaded")
    assert refuses(server.http, context)
    assert refuses(server.http, context, session)
    assert others.client is not None
    context = limited(mutual, version)
    context.load_cert_chain(others.client)
    assert not refuses(server.http, context)
