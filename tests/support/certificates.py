"""Certificates for tests, and addresses that say that they speak TLS."""

from __future__ import annotations

import shutil
import ssl
from typing import TYPE_CHECKING

import grpc
import trustme

if TYPE_CHECKING:
    import datetime as dt
    from pathlib import Path


class Certificates:
    """Two authorities, the files that a server is given of them, and what a client needs.

    Attributes:
        cert: The server's certificate.
        key: Its key.
        ca: The authority's certificate, which clients trust.
        client: Certificate and key in one file, of a client whose authority is `client_ca`; None shows none.
        clients: The authority of clients.
        client_ca: Its certificate, which the server is told to trust.
    """

    def __init__(self, folder: Path, *, mutual: bool = False, not_after: dt.datetime | None = None) -> None:
        folder.mkdir(exist_ok=True)
        self.authority, self.clients = trustme.CA(), trustme.CA()
        self.cert, self.key, self.ca = folder / "cert.pem", folder / "key.pem", folder / "ca.pem"
        self.client_ca, self.client = folder / "client-ca.pem", folder / "client.pem" if mutual else None
        issued = self.authority.issue_cert("127.0.0.1", "localhost", not_after=not_after)
        issued.private_key_pem.write_to_path(self.key)
        for number, blob in enumerate(issued.cert_chain_pems):
            blob.write_to_path(self.cert, append=number > 0)
        self.authority.cert_pem.write_to_path(self.ca)
        if self.client is not None:
            self.clients.cert_pem.write_to_path(self.client_ca)
            self.clients.issue_cert("client@example.test").private_key_and_cert_chain_pem.write_to_path(self.client)

    def options(self) -> list[str]:
        words = ["--tls-cert-file", str(self.cert), "--tls-key-file", str(self.key)]
        return words + (["--tls-client-ca-file", str(self.client_ca)] if self.client else [])

    def context(self, *protocols: str) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.ca)
        if protocols:
            context.set_alpn_protocols(list(protocols))
        if self.client is not None:
            context.load_cert_chain(self.client)
        return context

    def channel_credentials(self) -> grpc.ChannelCredentials:
        client = self.client.read_bytes() if self.client else None
        return grpc.ssl_channel_credentials(self.ca.read_bytes(), client, client)

    def replace_by(self, other: Certificates) -> None:
        """Puts another's files in the places of these, one after another."""
        for ours, theirs in ((self.cert, other.cert), (self.key, other.key), (self.client_ca, other.client_ca)):
            if theirs.exists():
                aside = ours.with_suffix(".new")
                shutil.copyfile(theirs, aside)
                aside.replace(ours)


class Secured(str):
    """`host:port` of a port that speaks TLS."""

    __slots__ = ("certificates",)

    certificates: Certificates

    @classmethod
    def of(cls, address: str, certificates: Certificates) -> Secured:
        secured = cls(address)
        secured.certificates = certificates
        return secured


def client_context(address: str, *protocols: str) -> ssl.SSLContext | None:
    """A client's context where an address needs one."""
    return address.certificates.context(*protocols) if isinstance(address, Secured) else None


def open_channel(address: str, **options: object) -> grpc.Channel:
    """A channel of gRPC, secured where the address says so."""
    if isinstance(address, Secured):
        return grpc.secure_channel(address, address.certificates.channel_credentials(), **options)
    return grpc.insecure_channel(address, **options)
