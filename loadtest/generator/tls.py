"""TLS around a client's wire. It has no socket either, so open and closed loops use it like any other wire."""

from __future__ import annotations

import functools
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bertserve.loadtest.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bertserve.loadtest.generator.wire import Reply, Served, Wire

_READ_BYTES = 1 << 16


@dataclass(slots=True, frozen=True)
class Tls:
    """Trusted authorities and client certificate.

    Attributes:
        ca: CA certificates file; empty: the system's trust store.
        cert: Client certificate chain file; empty for none.
        key: Private key file; empty: `cert` contains it.
    """

    ca: str = ""
    cert: str = ""
    key: str = ""

    @classmethod
    def of(cls, ca: Path | None, cert: Path | None, key: Path | None) -> Tls | None:
        """The TLS options of a command line; None if there are none.

        Raises:
            BenchError: There is a key without a certificate.
        """
        if key and not cert:
            raise BenchError(f"--key {key} needs --cert FILE, the certificate of the key")
        words = [str(path or "") for path in (ca, cert, key)]
        return cls(*words) if any(words) else None

    def context(self, alpn: str) -> ssl.SSLContext:
        """The SSL context, shared by all connections.

        Raises:
            BenchError: A file cannot be used.
        """
        return _context(self, alpn)

    def wrap(self, wire: Wire, host: str, alpn: str) -> Wire:
        """Wraps a wire in TLS.

        Args:
            wire: A new one.
            host: Host name that the server's certificate must match.
            alpn: The offered protocol; for `h2` the server must agree.

        Raises:
            BenchError: A file cannot be used.
        """
        return TlsWire(wire, self.context(alpn), host, alpn)


@functools.cache
def _context(tls: Tls, alpn: str) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=tls.ca or None)
    except OSError as error:  # ssl.SSLError is one
        raise BenchError(f"--ca {tls.ca}: {_reason(error)}; it must be a PEM file of certificates") from error
    try:
        if tls.cert:
            # Without a password callback, OpenSSL would prompt in the terminal.
            context.load_cert_chain(tls.cert, tls.key or None, password=lambda: b"")
    except OSError as error:
        files = f"--cert {tls.cert}" + (f" --key {tls.key}" if tls.key else "")
        raise BenchError(f"{files}: {_reason(error)}; must be a PEM certificate and its unencrypted key") from error
    context.set_alpn_protocols([alpn])
    return context


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "not PEM").lower().replace("_", " ")
    return error.strerror or str(error)


class TlsWire:
    """Wraps another wire in TLS and holds its data until the handshake is complete."""

    def __init__(self, wire: Wire, context: ssl.SSLContext, host: str, alpn: str) -> None:
        """Starts a new connection; see `Tls.wrap`."""
        self._wire = wire
        self._alpn = alpn
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        self._held = wire.opening()
        self._heard = False
        self.is_open = False

    def opening(self) -> bytes:
        """The first handshake message."""
        self._shake_hands()
        return self._outgoing.read()

    def room(self) -> int:
        return self._wire.room()

    def request(self, message: bytes, tag: object) -> bytes:
        """The request in TLS; empty during the handshake."""
        return self._sealed(self._wire.request(message, tag))

    def feed(self, data: bytes) -> Sequence[Reply]:
        """Takes received bytes and returns the complete replies.

        Raises:
            BenchError: The server is not trusted or does not speak TLS, or the inner wire failed.
        """
        if not data:
            if not self.is_open:
                raise BenchError("the server closed the connection during the TLS handshake")
            if not self._heard:  # in TLS 1.3 the client finishes before the server checks its certificate
                raise BenchError(
                    "the server closed the connection right after the TLS handshake; it may require a client"
                    " certificate (--cert FILE)"
                )
            return self._wire.feed(data)
        self._incoming.write(data)
        replies: list[Reply] = []
        try:
            if not self.is_open:
                self._shake_hands()
            while self.is_open and (self._incoming.pending or self._tls.pending()):
                read = self._tls.read(_READ_BYTES)
                if not read:
                    break  # the end of TLS, perhaps right after a reply; the connection closes next
                replies += self._wire.feed(read)
                self._heard = True
        except ssl.SSLWantReadError:
            pass  # an incomplete record
        except ssl.SSLError as error:
            raise BenchError(f"the server ended TLS: {_reason(error)}") from error
        return replies

    def owed(self) -> bytes:
        """Handshake messages, data held during the handshake, and what the inner wire owes."""
        return self._sealed(self._wire.owed())

    def served(self, head: bytes) -> Served:
        return self._wire.served(head)

    def _sealed(self, data: bytes) -> bytes:
        if not self.is_open:
            self._held += data
        elif data:
            self._tls.write(data)
        return self._outgoing.read() if self._outgoing.pending else b""

    def _shake_hands(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return
        except ssl.SSLCertVerificationError as error:
            raise BenchError(f"the server's certificate is not trusted: {error.verify_message}") from error
        except ssl.SSLError as error:
            if "no application protocol" in str(error):  # the alert, for which Python has no name
                raise self._no_protocol() from error
            raise BenchError(f"TLS with the server failed: {_reason(error)}") from error
        if self._alpn == "h2" and self._tls.selected_alpn_protocol() != self._alpn:
            raise self._no_protocol()
        self.is_open = True
        held, self._held = self._held, b""
        if held:
            self._tls.write(held)

    def _no_protocol(self) -> BenchError:
        return BenchError(f"the server does not negotiate {self._alpn} (ALPN); use its port of that protocol")
