"""A server of gRPC's own library, for clients of ours."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SERVICE = "inference.GRPCInferenceService"


@contextmanager
def grpc_server(answer: Callable[[bytes, Any], bytes]) -> Iterator[str]:
    """A server whose `ModelInfer` is a function from bytes to bytes; gives its target."""
    handler = grpc.unary_unary_rpc_method_handler(answer)
    with ThreadPoolExecutor(4) as pool:
        running = grpc.server(pool)
        running.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"ModelInfer": handler}),))
        port = running.add_insecure_port("127.0.0.1:0")
        running.start()
        yield f"127.0.0.1:{port}"
        running.stop(None).wait()
