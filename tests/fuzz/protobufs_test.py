"""Protobufs that are nearly right: each call ends as a client's fault or well, never as UNKNOWN or INTERNAL."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from tests.support.clients import MODEL_INFER, TIMEOUT_S, bytes_tensor
from tests.support.fuzzing import each, sizes, spoiled

if TYPE_CHECKING:
    from tests.support.server import Server

ALLOWED = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED", "DEADLINE_EXCEEDED"}
SERVICE = MODEL_INFER.rpartition("/")[0]

_names = st.sampled_from(["text", "text_pair", "input_ids", "attention_mask", "token_type_ids", "embedding", ""])
_shapes = st.lists(st.integers(0, 4) | st.sampled_from([-1, 64, 65, 2**31, 2**62]), max_size=3)
_seldom = st.sampled_from([*[False] * 7, True])
"""For each of the things that can go wrong: so that in a few hundred messages all went right in some."""

_MODELS = "embed embed embed.tokens embed_tokens embed_sparse classify rerank answer tag fill_mask fill_mask.tokens x"
_models = st.sampled_from(_MODELS.split())
_inputs = st.sampled_from(
    [["text"], ["text"], ["text", "text_pair"], ["input_ids"], ["input_ids", "token_type_ids", "attention_mask"]]
) | st.lists(_names, max_size=3)
_texts = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), max_size=4)
_ids = st.lists(st.integers(0, 1) | st.integers(0, 60), max_size=8) | st.lists(st.integers(-(2**63), 2**63 - 1))
_parameters = st.sampled_from(["timeout", "truncate", "priority", "sequence_id", "shared_memory_region", "x"])


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """A request for inference whose parts fit one another sometimes, then perhaps spoiled."""
    request = pb.ModelInferRequest(model_name=draw(_models), id=draw(st.text(max_size=5)))
    request.model_version = draw(st.sampled_from(["", "", "1", "2"]))
    raw = draw(st.booleans())
    for name in draw(_inputs):
        tensor = request.inputs.add(name=name, datatype="BYTES" if name.startswith("text") else "INT64")
        if draw(_seldom):
            tensor.datatype = draw(st.sampled_from(["INT32", "BYTES", "FP32", "x"]))
        texts, ids = draw(_texts), draw(_ids)
        fitting = not draw(_seldom)
        if tensor.datatype == "BYTES":
            tensor.shape.extend([len(texts), 1] if fitting else draw(_shapes))
            blob = bytes_tensor(texts)
            tensor.contents.bytes_contents.extend(text.encode() for text in texts)
        else:
            tensor.shape.extend([1, len(ids)] if fitting else draw(_shapes))
            blob = b"".join(struct.pack("<q", value) for value in ids)
            tensor.contents.int64_contents.extend(ids)
        if raw:
            tensor.ClearField("contents")
            request.raw_input_contents.append(draw(spoiled(blob)) if draw(_seldom) else blob)
    for name in draw(st.lists(_names, max_size=2)) if draw(_seldom) else ():
        request.outputs.add(name=name)
    for name in draw(st.lists(_parameters, max_size=2)) if draw(_seldom) else ():
        draw(_value)(request.parameters[name])
    message = request.SerializeToString()
    return draw(spoiled(message)) if draw(_seldom) else message


_value = st.sampled_from(
    [
        lambda parameter: setattr(parameter, "bool_param", True),
        lambda parameter: setattr(parameter, "int64_param", 10**9),
        lambda parameter: setattr(parameter, "int64_param", -1),
        lambda parameter: setattr(parameter, "uint64_param", 2**64 - 1),
        lambda parameter: setattr(parameter, "string_param", "x"),
        lambda parameter: setattr(parameter, "double_param", float("nan")),
        lambda parameter: parameter.Clear(),
    ]
)

METHODS = (
    *("ModelInfer", "ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics", "ServerMetadata"),
    *("RepositoryIndex", "RepositoryModelLoad", "SystemSharedMemoryRegister", "NoSuchMethod"),
)


@sizes(5000)
def test_messages_for_inference(target: Server, examples: int) -> None:
    """Random requests, whole and spoiled, on `ModelInfer` and on a stream of their own."""
    seen: set[str] = set()
    with grpc.insecure_channel(target.grpc) as channel:
        unary = channel.unary_unary(MODEL_INFER)
        stream = channel.stream_stream(f"{SERVICE}/ModelStreamInfer")

        def check(data: bytes) -> None:
            status = _status(lambda: unary(data, timeout=TIMEOUT_S))
            seen.add(status)
            assert status in ALLOWED
            assert _status(lambda: list(stream(iter([data, data]), timeout=TIMEOUT_S))) in ALLOWED

        each(messages(), examples, check)
    assert {"OK", "INVALID_ARGUMENT", "NOT_FOUND"} <= seen


@sizes(5000)
@pytest.mark.parametrize("method", METHODS)
def test_bytes_for_any_method(target: Server, method: str, examples: int) -> None:
    """Random bytes are no message for any method, or one that it answers."""
    allowed = ALLOWED | {"PERMISSION_DENIED"}
    with grpc.insecure_channel(target.grpc) as channel:
        call = channel.unary_unary(f"{SERVICE}/{method}")

        def check(data: bytes) -> None:
            assert _status(lambda: call(data, timeout=TIMEOUT_S)) in allowed

        each(st.binary(max_size=40), max(1, examples // len(METHODS)), check)


def _status(call: Any) -> str:
    try:
        call()
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"
