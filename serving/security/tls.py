"""TLS, and mutual TLS.

TLS 1.2 at least; of its cipher suites those with forward secrecy and authenticated encryption. Whenever a file
changes, all is made anew: certificates that are trusted no more are refused at once, and no earlier session is resumed.
"""

from __future__ import annotations

import ssl
from _ssl import _test_decode_cert  # type: ignore[attr-defined]  # typeshed leaves it out
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from serving.errors import CredentialsError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""For TLS 1.2; those of 1.3 are all good."""

MIN_GOODBYE_S = 5.0
"""For at least this long, what a refused client still sends is thrown away, so that it can read the refusal."""


class HalfOpen(ssl.SSLObject):
    """One side of a connection on which the other may say that it sends no more, and still be answered.

    asyncio and uvloop end a connection at once when its client says so (close_notify). They never learn it where
    `on_end` is set, which is called instead: before what was read earlier is handed on.
    """

    on_end: Callable[[], object] | None = None

    def read(self, len: int = 1024, buffer: Any = None) -> Any:  # noqa: A002, ANN401  the standard library's
        data = super().read(len, buffer)
        if not data and self.on_end is not None:
            self.on_end()
            raise ssl.SSLWantReadError
        return data


@dataclass(slots=True, frozen=True)
class Tls:
    """What the connections of a server are secured with.

    Attributes:
        certificate: File of the server's certificate and those between it and its authority.
        client_ca: File of the authorities whose certificates clients must show; None asks for none.
        handshake_s: How long a handshake may take.
        goodbye_s: How long a peer may take to read the rest and to answer the end.
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
        """When the server's certificate ends, in seconds since 1970."""
        # The module's public part shows certificates of authorities and of peers alone.
        return float(ssl.cert_time_to_seconds(_test_decode_cert(str(self.certificate))["notAfter"]))

    def context(self, protocol: str) -> ssl.SSLContext:
        """A context for a server that speaks one protocol, as ALPN names it; raises CredentialsError."""
        context = _context()
        context.sslobject_class = HalfOpen
        context.set_alpn_protocols([protocol])
        load_pair(context, self.certificate, self.key)
        if self.client_ca is not None:
            load_authorities(context, self.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def check_certificate(path: Path) -> None:
    """Raises CredentialsError where a file holds no certificates."""
    load_authorities(_context(), path)


def check_pair(certificate: Path, key: Path) -> None:
    """Raises CredentialsError where a key cannot be used, or is not the certificate's."""
    load_pair(_context(), certificate, key)


def load_authorities(context: ssl.SSLContext, path: Path) -> None:
    """Trusts the certificates of a file; raises CredentialsError where there are none."""
    _check_readable(path)
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise CredentialsError(f"{path}: no certificate in PEM") from error


def load_pair(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    """Uses a certificate and its key; raises CredentialsError where they cannot be used, or do not belong together."""
    check_certificate(certificate)
    _check_readable(key)
    try:
        context.load_cert_chain(certificate, key, password=lambda: _no_password(key))
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise CredentialsError(f"{key}: not the key of the certificate in {certificate}") from error
        raise CredentialsError(f"{key}: no key in PEM that could be used ({error.reason or 'unknown'})") from error


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
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
    raise CredentialsError(f"{key}: the key is encrypted, and there is nobody to ask for its password")
