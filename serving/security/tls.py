"""TLS and mutual TLS.

TLS 1.2 or newer, with cipher suites that have forward secrecy and authenticated encryption. Each change of a file
creates a new context. Certificates that are no longer trusted are therefore rejected at once, and no earlier session is
resumed.
"""

from __future__ import annotations

import ssl
from _ssl import _test_decode_cert  # type: ignore[attr-defined]  # missing in typeshed
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any

from bertserve.serving.errors import CredentialsError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Cipher suites for TLS 1.2; all of TLS 1.3's are acceptable."""

_HANDSHAKE = b"\x16"
"""The type of a record of the handshake (RFC 8446, 5.1)."""

_ALPN = b"\x00\x10"
"""The number of the extension (RFC 7301, 3.1)."""

_NO_APPLICATION_PROTOCOL = 120
"""The alert of RFC 7301, 3.2, for a client that offers none of our protocols."""

MIN_GOODBYE_S = 5.0
"""Minimum seconds for which input of a rejected client is discarded, so that the client can read the rejection."""


class HalfOpen(ssl.SSLObject):
    """The server's side of a TLS connection that still replies after the client's close_notify.

    asyncio and uvloop end a connection at once on close_notify. With `on_end` set they do not see it; `on_end` is
    called instead, before earlier data has been passed on.

    A client that offers other protocols alone is told so (RFC 7301, 3.2). Python's `ssl` goes on with it, and does not
    show what a client offers: it is read from the ClientHello.
    """

    on_end: Callable[[], object] | None = None
    incoming: ssl.MemoryBIO
    hello: bytearray | None
    """What has arrived of the ClientHello; None once it was checked."""
    is_refused = False

    def do_handshake(self) -> None:
        """Lets the event loop send the alert to a refused client, which closes then: it sends none with an error."""
        if self.hello is not None:
            data = self.incoming.read()
            self.hello += data
            self.incoming.write(data)
        try:
            super().do_handshake()
        except ssl.SSLWantReadError:
            raise
        except ssl.SSLError:
            if not self.is_refused:
                raise
            self.is_refused = False  # whoever goes on is cut off
            raise ssl.SSLWantReadError from None

    def check_hello(self, protocol: bytes) -> int | None:
        """Called with the whole ClientHello. Returns an alert, if any."""
        hello, self.hello = self.hello, None
        offered = [] if hello is None else _offered_protocols(hello)
        self.is_refused = bool(offered) and protocol not in offered
        return _NO_APPLICATION_PROTOCOL if self.is_refused else None

    def read(self, len: int = 1024, buffer: Any = None) -> Any:  # noqa: A002, ANN401  the standard library's
        data = super().read(len, buffer)
        if not data and self.on_end is not None:
            self.on_end()
            raise ssl.SSLWantReadError
        return data


class _Context(ssl.SSLContext):
    """A context whose connections see what arrives in the handshake."""

    def wrap_bio(self, incoming: ssl.MemoryBIO, *others: Any, **named: Any) -> Any:  # noqa: ANN401  the standard library's
        made: Any = super().wrap_bio(incoming, *others, **named)
        made.incoming, made.hello = incoming, bytearray()
        return made


@dataclass(slots=True, frozen=True)
class Tls:
    """The TLS configuration of a server.

    Attributes:
        certificate: File of the server's certificate chain.
        client_ca: File of authorities for client certificates; None: clients need no certificate.
        handshake_s: Maximum duration of a handshake.
        goodbye_s: Maximum time for a peer to read the rest and to answer the shutdown.
    """

    certificate: Path
    key: Path
    client_ca: Path | None
    handshake_s: float
    goodbye_s: float

    @property
    def paths(self) -> list[Path]:
        return [path for path in (self.certificate, self.key, self.client_ca) if path is not None]

    def expires_at(self) -> float:
        """Expiry time of the server's certificate, in seconds since 1970."""
        # The public API of `ssl` decodes only certificates of authorities and peers.
        return float(ssl.cert_time_to_seconds(_test_decode_cert(str(self.certificate))["notAfter"]))

    def context(self, protocol: str) -> ssl.SSLContext:
        """A server context for one ALPN protocol; raises CredentialsError."""
        context = _context()
        context.sslobject_class = HalfOpen
        context.set_alpn_protocols([protocol])
        # Called for clients that name no server, too.
        context.sni_callback = lambda connection, *_: connection.check_hello(protocol.encode())
        load_pair(context, self.certificate, self.key)
        if self.client_ca is not None:
            load_authorities(context, self.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def check_certificate(path: Path) -> None:
    """Raises CredentialsError if a file holds no certificates."""
    load_authorities(_context(), path)


def check_pair(certificate: Path, key: Path) -> None:
    """Raises CredentialsError if a key cannot be used or does not match the certificate."""
    load_pair(_context(), certificate, key)


def load_authorities(context: ssl.SSLContext, path: Path) -> None:
    """Trusts the certificates of a file; raises CredentialsError if there are none."""
    _check_readable(path)
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise CredentialsError(f"{path}: contains no PEM certificate") from error


def load_pair(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    """Loads a certificate and its key; raises CredentialsError if they cannot be used or do not match."""
    check_certificate(certificate)
    _check_readable(key)
    try:
        context.load_cert_chain(certificate, key, password=lambda: _no_password(key))
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise CredentialsError(f"{key}: does not match the certificate in {certificate}") from error
        raise CredentialsError(f"{key}: contains no usable PEM key ({error.reason or 'unknown'})") from error


def _offered_protocols(received: bytes | bytearray) -> list[bytes]:
    """The protocols that a valid ClientHello offers by ALPN (RFC 8446, 4.1.2)."""
    records, message = BytesIO(received), b""
    while records.read(3)[:1] == _HANDSHAKE:
        message += _vector(records, 2)
    hello = BytesIO(message)
    hello.seek(38)  # type, length, version, random
    for size in (1, 2, 1):  # session, cipher suites, compression
        _vector(hello, size)
    extensions = BytesIO(_vector(hello, 2))
    while number := extensions.read(2):
        data = _vector(extensions, 2)
        if number == _ALPN:
            return list(iter(partial(_vector, BytesIO(data[2:]), 1), b""))
    return []


def _vector(source: BytesIO, size: int) -> bytes:
    """Bytes behind their length, which takes `size` bytes."""
    return source.read(int.from_bytes(source.read(size)))


def _context() -> ssl.SSLContext:
    context = _Context(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    context.options |= ssl.OP_NO_RENEGOTIATION
    return context


def _check_readable(path: Path) -> None:
    try:
        path.open("rb").close()
        if path.is_dir():
            raise IsADirectoryError(0, "is a directory")
    except OSError as error:
        raise CredentialsError(f"{path}: {error.strerror}") from error


def _no_password(key: Path) -> str:
    raise CredentialsError(f"{key}: the key is encrypted; use a key without a password")
