"""Received text in errors and logs: at most 64 characters of a name, wherever a client puts more."""

from __future__ import annotations

import http.client
import itertools
import json
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import grpc
import pytest
from grpc_health.v1 import health_pb2
from tritonclient.grpc import service_pb2

from bertserve.serving.bulk.errors import BatchError
from bertserve.serving.bulk.predictor import Model
from bertserve.serving.bulk.sources import Columns, find, parts
from tests.support.clients import TIMEOUT_S, HttpConnection, metadata
from tests.support.poison import light_tasks
from tests.support.server import FAKE, Server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from google.protobuf.descriptor import Descriptor, FieldDescriptor
    from google.protobuf.message import Message

WORD, DIGIT, MOST = "sEcReT", "7", 64
NAME, ODD, NUMBER = f"{WORD}_" * 30, f'{WORD} "\n\x07\u202e\\' * 30, int(DIGIT * 300)
HALF = f"{ODD}\ud83d"
VALUES: tuple[Any, ...] = (NAME, ODD, HALF, NUMBER, -NUMBER, [NAME, ODD], {NAME: ODD}, {"text": ODD, NAME: 1})
"""What is put into every place of a body."""

HEADERS = (
    *("Content-Type", "Content-Encoding", "Accept", "Accept-Encoding", "Host", "Origin", "Prefer", "Authorization"),
    *("traceparent", "tracestate", "Inference-Header-Content-Length", "Cookie"),
    *("X-Request-Id", "X-Request-Timeout-Ms", "X-Request-Priority", "Expect", "Connection", "Upgrade", "Via", NAME),
)
CALL = (
    "authorization",
    "grpc-timeout",
    "grpc-encoding",
    "x-request-id",
    "user-agent",
    "priority",
)
SERVICES = [
    service for file in (service_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR) for service in file.services_by_name.values()
]
METHODS = [f"/{method.containing_service.full_name}/{method.name}" for each in SERVICES for method in each.methods]


def check(said: str) -> None:
    """A reply or a line of the log holds no more than a name of what was sent, and is as short as ever."""
    word = f"{re.escape(WORD)}.{{0,40}}?"
    run = re.search(f"({word}){{2,}}|{DIGIT}{{2,}}", said, re.DOTALL)
    assert run is None or len(run[0]) <= MOST + 40, said[:1000]
    assert said.count(WORD) <= MOST // len(WORD), said[:1000]
    assert len(said) < 3000, said[:1000]
    assert said.isprintable(), said[:1000]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(light_tasks(), *FAKE, "--access-log", "true", "--model-control", "true") as running:
        yield running
        running.stop()
        for line in running.log.splitlines():
            check(line)


def places(schema: dict[str, Any], value: Any, schemas: dict[str, Any]) -> Iterator[Any]:
    """Copies of a body with each of the values in the place of each part, of each absent field, and as a new field."""
    yield from VALUES
    kinds = [schema]
    for kind in kinds:
        kinds += kind.get("anyOf", [])
        if "$ref" in kind:
            kinds.append(schemas[kind["$ref"].rpartition("/")[2]])
    if isinstance(value, list) and value:
        items = next((kind["items"] for kind in kinds if isinstance(kind.get("items"), dict)), {})
        yield from ([below, *value[1:]] for below in places(items, value[0], schemas))
    if isinstance(value, dict):
        yield from ({**value, name: VALUES[0]} for name in (NAME, ODD, HALF))
        known = {name: part for kind in kinds for name, part in kind.get("properties", {}).items()}
        for name, part in ({name: {} for name in value} | known).items():
            below = value.get(name, {} if "$ref" in str(part) else None)
            yield from ({**value, name: one} for one in places(part, below, schemas))


def test_no_route_repeats_what_a_body_holds(server: Server) -> None:
    """In none of its fields, nested ones too; bytes that are no JSON likewise."""
    with HttpConnection(server.http) as wire:
        document = wire.call("GET", "/openapi.json").json()
        count = 0
        for path, operations in document["paths"].items():
            for method, told in operations.items():
                content = told.get("requestBody", {}).get("content", {}).get("application/json")
                if content is None:
                    continue
                target = path.replace("{model}", "answer" if path.startswith("/v2/") else "embed")
                bodies = map(
                    json.dumps, places(content["schema"], content["example"], document["components"]["schemas"])
                )
                for body in itertools.chain(bodies, (ODD, NAME, f'{{"{NAME}', f'{{"inputs": {NAME}}}', DIGIT * 5000)):
                    reply = wire.call(
                        method.upper(),
                        target.replace("{version}", "1"),
                        body.encode(),
                        {"Content-Type": "application/json"},
                    )
                    count += 1
                    assert reply.status < 500, (target, body[:300], reply.body[:300])
                    if reply.status >= 400:
                        check(reply.body.decode())
                    check(str(reply.headers))
    assert count > 3000


def test_no_route_repeats_a_part_of_its_path_or_a_header(server: Server) -> None:
    """Nor does an unknown path."""
    with HttpConnection(server.http) as wire:
        document = wire.call("GET", "/openapi.json").json()
        paths = [path for path in document["paths"] if "{" in path]
        for path in (*paths, "/NAME", "/models/NAME/NAME/embed", "/v1/models/NAME/NAME", "/embed?NAME=NAME"):
            for sent, method in itertools.product((NAME, ODD, DIGIT * 300), ("GET", "POST", "DELETE", "BREW")):
                reply = wire.call(method, re.sub(r"NAME|\{\w+\}", quote(sent, safe=""), path), b"{}")
                assert 400 <= reply.status < 500
                check(reply.body.decode() + str(reply.headers))
    for name, sent in itertools.product(HEADERS, (NAME, f"{WORD} " * 30, DIGIT * 300)):
        with HttpConnection(server.http) as wire:
            try:
                reply = wire.call(
                    "POST", "/embed", b'{"inputs": "a"}', {"Content-Type": "application/json", name: sent}
                )
            except http.client.HTTPException:
                continue
            check(f"{reply.body.decode() if reply.status >= 400 else ''}{reply.headers}")


def filled(kind: Descriptor, sent: str, depth: int = 3) -> Iterator[Message]:
    """Messages with a text in one of the fields each, nested ones too."""
    for field in kind.fields:
        for value in values(field, sent, depth):
            message = kind._concrete_class()
            place = getattr(message, field.name)
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                if field.message_type.fields_by_name["value"].message_type is None:
                    place[value.key] = value.value
                else:
                    place[value.key].CopyFrom(value.value)
            elif field.is_repeated:
                place.append(value)
            elif field.message_type is not None:
                place.CopyFrom(value)
            else:
                setattr(message, field.name, value)
            yield message


def values(field: FieldDescriptor, sent: str, depth: int) -> Iterator[Any]:
    if field.type == field.TYPE_STRING:
        yield sent
    elif field.type == field.TYPE_BYTES:
        yield sent.encode()
    elif field.message_type is not None and depth:
        yield from filled(field.message_type, sent, depth - 1)


@pytest.mark.parametrize("method", METHODS)
def test_no_call_repeats_what_a_message_holds(server: Server, method: str) -> None:
    """In none of its fields."""
    service, _, name = method[1:].partition("/")
    (told,) = (each.methods_by_name[name] for each in SERVICES if each.full_name == service)
    with grpc.insecure_channel(server.grpc) as channel:
        call = channel.stream_stream(method)
        for sent in (NAME, ODD):
            for message in filled(told.input_type, sent):
                refused(call(iter([message.SerializeToString()]), timeout=TIMEOUT_S))


def refused(call: Any) -> None:
    try:
        next(call, None)
        call.cancel()
    except grpc.RpcError as error:
        check(f"{error.details()} {metadata(error)}")


def test_no_call_repeats_its_method_or_metadata(server: Server) -> None:
    """Nor does one of an unknown service."""
    with grpc.insecure_channel(server.grpc) as channel:
        for path in (f"/{NAME}/Check", f"/grpc.health.v1.Health/{NAME}"):
            refused(channel.stream_stream(path)(iter([b""]), timeout=TIMEOUT_S))
        for name, method in itertools.product(CALL, METHODS):
            refused(channel.stream_stream(method)(iter([b""]), timeout=TIMEOUT_S, metadata=[(name, NAME)]))


def test_no_line_of_a_batch_is_repeated_in_its_reason(tmp_path: Path) -> None:
    """Nor are the names of a file's columns."""
    path = tmp_path / "docs.jsonl"
    lines = [{"id": value, "text": value} for value in VALUES] + [{NAME: 1}, {ODD: 1}, VALUES[5], NAME]
    path.write_text("\n".join([*map(json.dumps, lines), NAME, f'{{"{NAME}', f'{{"id": "a", "text": {NAME}}}']))
    for columns in (Columns(("text",)), Columns(("text",), "id"), Columns((NAME, ODD), HALF)):
        (file,) = find([path], columns)
        for part in parts(file, columns, 5, ()):
            for row in part.rows:
                check(row.reason)
    table = tmp_path / "docs.csv"
    table.write_text(",".join(f"{WORD}{number}{NAME}" for number in range(1000)))
    with pytest.raises(BatchError) as found:
        find([table], Columns((NAME,)))
    said = str(found.value).removeprefix(str(table))
    assert len(said) < 1000
    assert re.search(f"({WORD}_){{10,}}", said) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"task": ODD},
        {"model": ODD},
        {"prompt_name": ODD},
        *({"options": {name: ODD}} for name in ("dimensions", "dimensons", "truncation")),
        {"options": {"dimensions": NUMBER}},
        {"task": "tag", "options": {"aggregation": ODD}},
        {"task": "classify", "options": {"function": NAME}},
    ],
    ids=lambda wrong: str(wrong)[:40],
)
def test_no_option_of_a_batch_is_repeated(wrong: dict[str, Any]) -> None:
    with pytest.raises(BatchError) as found:
        Model(light_tasks(), **({"task": "embed", "engine": "fake"} | wrong))
    check(str(found.value))
