"""The four flavours of tritonclient behind one interface: HTTP and gRPC, each blocking and on asyncio."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio

from tests.support.certificates import Secured

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from tests.support.server import Server

FLAVOURS = {
    "http": tritonclient.http,
    "grpc": tritonclient.grpc,
    "http-aio": tritonclient.http.aio,
    "grpc-aio": tritonclient.grpc.aio,
}


class TritonClient:
    """One flavour and one server; a connection for each call."""

    def __init__(self, flavour: str, server: Server) -> None:
        self._module = FLAVOURS[flavour]
        self.wire = flavour.partition("-")[0]
        self._tensors = FLAVOURS[self.wire]
        self._address = getattr(server, self.wire)
        self._options = _secure(flavour, self._address)
        self._aio = flavour.endswith("aio")

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        if self._aio:
            return asyncio.run(self._later(method, *arguments, **options))
        with self._module.InferenceServerClient(self._address, **self._options) as client:
            return getattr(client, method)(*arguments, **options)

    def told(self, method: str, *arguments: Any) -> Any:
        """The same, as plain data whatever the wire."""
        return self.call(method, *arguments, **({"as_json": True} if self.wire == "grpc" else {}))

    def infer(
        self, model: str, tensors: Mapping[str, Sequence[Any] | NDArray[Any]], outputs: Sequence[str] = (), **more: Any
    ) -> Any:
        wanted = [self._tensors.InferRequestedOutput(name) for name in outputs] or None
        return self.call("infer", model, self.inputs(tensors), outputs=wanted, **more)

    def inputs(self, tensors: Mapping[str, Sequence[Any] | NDArray[Any]]) -> list[Any]:
        """Texts as BYTES [n, 1], arrays as they are."""
        inputs = []
        for name, values in tensors.items():
            array = values
            if not isinstance(values, np.ndarray):
                array = np.array([[text.encode()] for text in values], dtype=np.object_)
            kind = {"O": "BYTES", "i4": "INT32", "i8": "INT64"}[array.dtype.str[-2:].strip("|")]
            tensor = self._tensors.InferInput(name, list(array.shape), kind)
            tensor.set_data_from_numpy(array)
            inputs.append(tensor)
        return inputs

    async def _later(self, method: str, *arguments: Any, **options: Any) -> Any:
        client = self._module.InferenceServerClient(self._address, **self._options)
        try:
            return await getattr(client, method)(*arguments, **options)
        finally:
            await client.close()


def _secure(flavour: str, address: str) -> dict[str, Any]:
    if not isinstance(address, Secured):
        return {}
    certificates = address.certificates
    client = str(certificates.client) if certificates.client else None
    if flavour == "http-aio":
        return {"ssl": True, "ssl_context": certificates.context("http/1.1")}
    if flavour == "http":
        context = {"ssl_context_factory": lambda: certificates.context("http/1.1")}
        return {"ssl": True, **context}
    return {"ssl": True, "root_certificates": str(certificates.ca), "private_key": client, "certificate_chain": client}
