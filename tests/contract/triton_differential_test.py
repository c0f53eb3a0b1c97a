"""The same v2 requests to our server and to a real Triton: answers differ only as docs/reference/protocols.md says."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import struct
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.support.clients import MODEL_INFER, TIMEOUT_S, http_call, infer_request
from tests.support.models import HIDDEN_SIZE, NAME, ROOT
from tests.support.server import FAKE, Server
from tests.support.triton import Triton, obstacle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from tests.support.clients import HttpReply

pytestmark = [pytest.mark.slow, pytest.mark.external(obstacle())]

TOKENS = f"{NAME}.tokens"
TEXT_PATH, TOKEN_PATH = f"/v2/models/{NAME}/infer", f"/v2/models/{TOKENS}/infer"
LENGTH = "Inference-Header-Content-Length"
GONE = 0
"""In place of a status: the server ended."""

CONFIG = """
name: "{name}"
backend: "python"
max_batch_size: 128
input {{ name: "{input}" data_type: {kind} dims: {dims} }}
output {{ name: "{output}" data_type: TYPE_FP32 dims: {hidden} }}
dynamic_batching {{ }}
instance_group {{ count: 1 kind: KIND_CPU }}
"""


class Request(NamedTuple):
    method: str
    path: str
    body: bytes | None = None
    headers: Mapping[str, str] = {}


class Difference(NamedTuple):
    """What docs/reference/protocols.md says of some requests."""

    said: str
    names: str
    ours: set[int]
    theirs: set[int]


DIFFERENCES = [
    Difference(said, names, *({int(status) for status in statuses.split()} for statuses in (ours, theirs)))
    for said, names, ours, theirs in (
        line.split("  ")
        # The words of docs/reference/protocols.md, requests by their names, our statuses, and Triton's.
        for line in r"""
JSON of another shape, numbers that fit no type  .*  400  500 0
`null` for an optional field  .*=None|.*null  200  400 500
an unread parameter of another type  (output |input )?(mine|sequence|shared_memory_[bo]|triton_)\S*=.*  200  400 500
a `timeout` beyond 64 bits  timeout=18.*  200  500
`parameters` that are not an object  (input|output) parameters=.*  400  200
a body that is not an object  (index|load|unload) (a list|a text|broken|parameters=.*)  400  200
a repeated output  outputs twice  400  200
data nested deeper than its shape  .*deep  400  200
a size beyond 32 bits  shape \[\d{10,}.*  400  200
no IDs in a row  tokens shape .1, 0.|raw tokens, none  400  200
IDs outside the vocabulary  ids (2\^31|negative|vocabulary)  400  200
text that is not UTF-8, a byte order mark  .*not UTF-8|byte order mark  400  200
a priority beyond 4  priority=\d+  400  200
a header length that is not a number  header length .*  400  200
an empty body without a header  empty body|no body|gzip of nothing  400  200
a compressed body that is cut off  gzip (cut|and more|for deflate)|no gzip  400  200
texts of the shape [n], IDs of INT32  shape .1.|tokens datatype=INT32  200  400
a deadline that has passed  timeout=[127]  504  200
`classification`, shared memory  .*(classification|_region)=.*|GET .*(setting|logging|sharedmem).*  501  200 400 404 500
an unknown model or version  GET .*(stats|9999|versions/01|versions/x/ready)|stats after  400 404  200 400 404
loads and unloads of an unknown model  (load|unload) .*  404  200 500
An unknown `Content-Encoding`  encoding .*  415  501
the name of an encoding in capitals, or none  encoding (GZIP|)  200  501
HEAD, percent-encoded names  HEAD .*|GET .*%.*  200  404 405
paths outside v2  GET /v[13]|GET .*generate  404  404 405
replies of health, readiness, loading and unloading  GET .*(live|ready)|(load|unload).*  200  200
the index names a reason, configuration and statistics have fewer fields  index .*|GET .*(config|stats.*)  200  200
Replies are compressed  accept .*  200  200
""".strip().splitlines()
    )
]


def text(*texts: str, **changes: Any) -> dict[str, Any]:
    """A tensor of texts; `changes` replace fields, and take them away where they are ...."""
    tensor = {"name": "text", "datatype": "BYTES", "shape": [len(texts), 1], "data": list(texts), **changes}
    return {name: value for name, value in tensor.items() if value is not ...}


def ids(**changes: Any) -> dict[str, Any]:
    tensor = {"name": "input_ids", "datatype": "INT64", "shape": [1, 2], "data": [101, 102], **changes}
    return {name: value for name, value in tensor.items() if value is not ...}


def infer(**changes: Any) -> dict[str, Any]:
    return {"inputs": [text("a")], **changes}


ODD: tuple[Any, ...] = (None, [], {}, "x", 1, True, -1, 1.5)
NUMBERS: tuple[Any, ...] = (0, 1, 2, 7, -1, 10**7, 2**63, 2**64, "1", "x", 1.5, True, False, None, [])
SHAPES: tuple[Any, ...] = (
    *([-1, 1], [-1], [1, -1], [1], [0, 1], [0], [1, 0], [], [1, 1, 1], [2, 1], [1, 2], [129, 1], [2**31, 1]),
    *([2**32 + 1, 1], [2**63 - 1, 1], [2**63, 1], [2**64, 1], [2**64 + 1, 1], [-(2**63), 1], [10**30, 1]),
    *([1.0, 1], [1.5, 1], ["1", 1], [None, 1], [True, 1], [[1], 1], [2**33, 2**33]),
)
TOKEN_SHAPES = (
    *([-1, 2], [1, -1], [2], [1, 2, 1], [2, 1], [1, 0], [0, 2], [2**32, 2**32]),
    *([2**31, 2], [1, 2**63 - 1], [1, 2**62], [1]),
)
IDS = {
    "float": "[101.0, 102.0]",
    "exponent": "[1e2, 102]",
    "half": "[1.5, 102]",
    "2^31": "[2147483648, 102]",
    "2^63": "[9223372036854775808, 102]",
    "huge": f"[{'9' * 400}, 102]",
    "1e400": "[1e400, 102]",
    "NaN": "[NaN, 102]",
    "negative": "[-1, 102]",
    "minus zero": "[-0, 102]",
    "vocabulary": "[30522, 102]",
    "null in them": "[null, 102]",
    "texts": '["101", "102"]',
    "booleans": "[true, false]",
    "nested": "[[101, 102]]",
    "ragged": "[[101], [102]]",
    "deep": "[[[101, 102]]]",
    "uneven": "[[101], [102, 103]]",
    "few": "[101]",
    "many": "[101, 102, 103]",
    "objects": "[{}, {}]",
    "hexadecimal": "[0x65, 102]",
    "zero first": "[0101, 102]",
}
ELEMENT = struct.pack("<I", 1) + b"a"
ROW = struct.pack("<2q", 101, 102)


def binary(size: Any, tail: bytes, tensor: dict[str, Any] | None = None, **top: Any) -> tuple[bytes, dict[str, str]]:
    """A body with its only input behind the JSON, and its headers; a size of ... is left out."""
    described = {**(tensor or text("a"))}
    del described["data"]
    if size is not ...:
        described["parameters"] = {"binary_data_size": size}
    head = json.dumps({"inputs": [described], **top}).encode()
    return head + tail, {LENGTH: str(len(head)), "Content-Type": "application/octet-stream"}


def posts(path: str, bodies: Mapping[str, Any]) -> dict[str, Request]:
    """Requests of bodies: bytes as they are, anything else as JSON."""
    return {
        name: Request("POST", path, body if isinstance(body, bytes | None) else json.dumps(body).encode())
        for name, body in bodies.items()
    }


def json_requests() -> dict[str, Request]:
    """Every field of the JSON, missing, null, unknown and of every wrong type."""
    plain: dict[str, Any] = {
        "one text": infer(),
        "two texts": {"inputs": [text("a", "b")]},
        "unknown at the top": infer(model_name="x", nonsense={"a": [1]}),
        "unknown of an input": {"inputs": [text("a", nonsense=1)]},
        "unknown of an output": infer(outputs=[{"name": "embedding", "nonsense": 1}]),
        "id": infer(id="7"),
        "empty id": infer(id=""),
        "long id": infer(id="x" * 5000),
        "outputs once": infer(outputs=[{"name": "embedding"}]),
        "outputs twice": infer(outputs=[{"name": "embedding"}] * 2),
        "output unknown": infer(outputs=[{"name": "x"}]),
        "inputs twice": {"inputs": [text("a")] * 2},
        "input of another name": {"inputs": [text("a", name="x")]},
        "one input too many": {"inputs": [text("a"), text("a", name="x")]},
        "no inputs": {"outputs": []},
        "nul in a text": {"inputs": [text("a\0b")]},
        "a list": [infer()],
        "a string": "x",
        "a number": 1,
        "the word null": b"null",
        "spaces": b"  ",
        "broken": b'{"inputs":',
        "no body": None,
        "empty body": b"",
        "more behind it": json.dumps(infer()).encode() + b"x",
        "byte order mark": b"\xef\xbb\xbf" + json.dumps(infer()).encode(),
        "UTF-16": json.dumps(infer()).encode("utf-16"),
        "a key twice": b'{"id":"1","id":"2",' + json.dumps(infer()).encode()[1:],
        "JSON that is not UTF-8": json.dumps(infer()).encode().replace(b'"a"', b'"\xff"'),
        "half a surrogate": json.dumps(infer()).encode().replace(b'"a"', b'"\\ud800"'),
    }
    plain |= {f"id={value!r}": infer(id=value) for value in (None, 7, {})}
    for name in ("parameters", "outputs", "inputs"):
        plain |= {f"{name}={value!r}": infer(**{name: value}) for value in ODD[:6]}
        plain |= {f"{name}=[{value!r}]": infer(**{name: [value]}) for value in ODD[:5] if name != "parameters"}
    for name in ("name", "datatype", "shape", "data", "parameters"):
        plain |= {f"input {name}={value!r}": {"inputs": [text("a", **{name: value})]} for value in ODD}
        plain[f"input without {name}"] = {"inputs": [text("a", **{name: ...})]}
    for name in ("name", "parameters"):
        plain |= {f"output {name}={value!r}": infer(outputs=[{"name": "embedding", name: value}]) for value in ODD[:5]}
    plain |= {f"shape {shape}": {"inputs": [text("a", shape=shape)]} for shape in SHAPES}
    for name, data in {"few": [], "many": ["a", "b"], "numbers": [1], "nested": [["a"]], "deep": [[["a"]]]}.items():
        plain[f"texts {name}"] = {"inputs": [text("a", data=data)]}
    plain |= {
        f"datatype={kind}": {"inputs": [text("a", datatype=kind)]}
        for kind in ("bytes", "INT64", "FP32", "BOOL", "STRING", "TYPE_STRING", "")
    }
    for name in ("priority", "timeout", "sequence_id", "sequence_start", "sequence_end", "binary_data_output"):
        plain |= {f"{name}={value!r}": infer(parameters={name: value}) for value in NUMBERS}
    for value in ("x", 1, 2**63, 2**64, -1, 1.5, True, None, [1], {"a": 1}):
        plain[f"mine={value!r}"] = infer(parameters={"mine": value})
        plain[f"input mine={value!r}"] = {"inputs": [text("a", parameters={"mine": value})]}
        plain[f"output mine={value!r}"] = infer(outputs=[{"name": "embedding", "parameters": {"mine": value}}])
    plain |= {f"{name}=True": infer(parameters={name: True}) for name in ("triton_x", "headers")}
    shared_memory = [f"shared_memory_{end}" for end in ("region", "byte_size", "offset")]
    for name in ("binary_data", "classification", *shared_memory):
        plain |= {
            f"output {name}={value!r}": infer(outputs=[{"name": "embedding", "parameters": {name: value}}])
            for value in NUMBERS
        }
        plain |= {
            f"input {name}={value!r}": {"inputs": [text("a", parameters={name: value})]}
            for value in ("x", 1, True, None)
        }
    tokens: dict[str, Any] = {f"tokens shape {shape}": {"inputs": [ids(shape=shape)]} for shape in TOKEN_SHAPES}
    tokens |= {
        f"tokens datatype={kind}": {"inputs": [ids(datatype=kind)]} for kind in ("INT32", "UINT64", "FP32", "BYTES")
    }
    tokens |= {
        f"ids {name}": json.dumps({"inputs": [ids(data=0)]}).replace('"data": 0', f'"data": {data}').encode()
        for name, data in IDS.items()
    }
    tokens["ids"] = {"inputs": [ids()]}
    return posts(TEXT_PATH, plain) | posts(TOKEN_PATH, tokens)


def binary_requests() -> dict[str, Request]:
    behind: dict[str, tuple[bytes, dict[str, str]]] = {
        **{
            f"size {size!r}": binary(size, ELEMENT)
            for size in (0, 4, 5, 6, -1, 2**31, 2**63, 2**64, 1.5, "5", True, [])
        },
        "size left out": binary(..., ELEMENT),
        "too little": binary(5, ELEMENT[:3]),
        "nothing": binary(5, b""),
        "too much": binary(5, ELEMENT + b"x"),
        "an element beyond the end": binary(5, struct.pack("<I", 2) + b"a"),
        "an element of 4 GB": binary(5, struct.pack("<I", 2**32 - 1) + b"a"),
        "half a length": binary(6, ELEMENT + b"x"),
        "two for one": binary(10, ELEMENT * 2),
        "one for two": binary(5, ELEMENT, text("a", "b")),
        "no rows": binary(0, b"", text(shape=[0, 1])),
        "an empty element": binary(4, bytes(4)),
        "an element that is not UTF-8": binary(5, struct.pack("<I", 1) + b"\xff"),
        "all outputs binary": binary(5, ELEMENT, parameters={"binary_data_output": True}),
        "one output binary": binary(5, ELEMENT, outputs=[{"name": "embedding", "parameters": {"binary_data": True}}]),
    }
    found = {name: Request("POST", TEXT_PATH, *parts) for name, parts in behind.items()}
    rows = {
        "ids behind the JSON": binary(16, ROW, ids()),
        "too few ids": binary(8, ROW[:8], ids()),
        "too many ids": binary(24, ROW + ROW[:8], ids()),
        "ids of the shape -1": binary(16, ROW, ids(shape=[1, -1])),
    }
    found |= {name: Request("POST", TOKEN_PATH, *parts) for name, parts in rows.items()}
    body, _ = binary(5, ELEMENT)
    both = json.dumps({"inputs": [text("a", parameters={"binary_data_size": 5})]}).encode()
    found["data twice"] = Request("POST", TEXT_PATH, both + ELEMENT, {LENGTH: str(len(both))})
    for length in ("-1", "x", "", "1.5", "5", "+5", "99999", "18446744073709551616", "0x10"):
        found[f"header length {length!r}"] = Request("POST", TEXT_PATH, body, {LENGTH: length})
    raw = {LENGTH: "0", "Content-Type": "application/octet-stream"}
    for name, path, content in (
        ("raw", TEXT_PATH, b"hello world"),
        ("raw, none", TEXT_PATH, b""),
        ("raw, JSON", TEXT_PATH, json.dumps(infer()).encode()),
        ("raw, not UTF-8", TEXT_PATH, b"\xff\xfe"),
        ("raw of a version", f"/v2/models/{NAME}/versions/1/infer", b"hello"),
        ("raw of no model", "/v2/models/no/infer", b"hello"),
        ("raw tokens", TOKEN_PATH, ROW),
        ("raw tokens, odd", TOKEN_PATH, ROW[:-1]),
        ("raw tokens, none", TOKEN_PATH, b""),
    ):
        found[name] = Request("POST", path, content, raw)
    found["raw as gzip"] = Request("POST", TEXT_PATH, gzip.compress(b"hello"), {**raw, "Content-Encoding": "gzip"})
    found["raw, gzip accepted"] = Request("POST", TEXT_PATH, b"hello", {**raw, "Accept-Encoding": "gzip"})
    whole = json.dumps(infer()).encode()
    packed = gzip.compress(whole)
    for name, encoding, content in (
        ("gzip", "gzip", packed),
        ("deflate", "deflate", zlib.compress(whole)),
        ("gzip and more", "gzip", packed + b"x"),
        ("gzip cut", "gzip", packed[:-9]),
        ("gzip for deflate", "deflate", packed),
        ("gzip of nothing", "gzip", gzip.compress(b"")),
        ("no gzip", "gzip", b"x"),
        ("encoding identity", "identity", whole),
        ("encoding GZIP", "GZIP", packed),
        ("encoding ", "", whole),
        ("encoding br", "br", b"x"),
        ("encoding x-bzip", "x-bzip", b"x"),
    ):
        found[name] = Request("POST", TEXT_PATH, content, {"Content-Encoding": encoding})
    for accepted in ("gzip", "deflate", "identity", "gzip, deflate", "br", "*", "gzip;q=0", ""):
        found[f"accept {accepted}"] = Request("POST", TEXT_PATH, whole, {"Accept-Encoding": accepted})
    for kind in ("text/plain", "application/x-www-form-urlencoded", "nonsense", ""):
        found[f"type {kind}"] = Request("POST", TEXT_PATH, whole, {"Content-Type": kind})
    return found


def other_requests() -> dict[str, Request]:
    """Metadata, versions, methods and the repository; the last ones take a model out of service and back."""
    model = f"/v2/models/{NAME}"
    one = f"{model}/versions"
    paths = f"""
        /v2 /v2/ /v1 /v3 /v2/nonsense /v2/health /v2/health/live /v2/health/ready /v2/models /v2/models/
        /v2/models/stats /v2/models/no /v2/models/no/ready /v2/models/no/config /v2/models/no/stats /v2//models/x
        /v2/repository /v2/repository/index /v2/logging /v2/trace/setting /v2/systemsharedmemory/status
        /v2/cudasharedmemory/status /v2/models/%6dinilm {model} {model}/ {model}/ready {model}/config {model}/stats
        {model}/nonsense {model}/infer {one} {one}/1 {one}/1/ready {one}/1/config {one}/1/stats {one}/1/ {one}/9
        {one}/9/ready {one}/9/config {one}/9/stats {one}/x {one}/x/ready {one}/-1 {one}/01 {one}/99999999999999999999
        {model}/generate {model}/trace/setting
    """.split()
    found = {f"GET {path}": Request("GET", path) for path in paths}
    for method in ("PUT", "DELETE", "PATCH", "HEAD"):
        for path in ("/v2", model, TEXT_PATH, "/v2/repository/index"):
            found[f"{method} {path}"] = Request(method, path)
    for path in ("/v2", "/v2/health/live", model, f"{model}/config", f"{model}/ready", f"{model}/stats"):
        found[f"POST {path}"] = Request("POST", path, b"{}")
    for version in ("no/infer", f"{NAME}/versions/1/infer", f"{NAME}/versions/9/infer", f"{NAME}/versions/x/infer"):
        found[f"POST {version}"] = Request("POST", f"/v2/models/{version}", json.dumps(infer()).encode())
    index = {"none": None, "empty": b"", "object": {}, "unknown": {"x": 1}, "a list": [], "broken": b"{"}
    index |= {f"ready={value!r}": {"ready": value} for value in (True, False, "x", 1)}
    found |= posts("/v2/repository/index", {f"index {name}": body for name, body in index.items()})
    control = {"none": None, "empty": b"", "object": {}, "unknown": {"x": 1}, "broken": b"{", "a list": []}
    control |= {f"parameters={value!r}": {"parameters": value} for value in ({}, [], "x")}
    repository = "/v2/repository/models"
    found |= posts(f"{repository}/{TOKENS}/load", {f"load {name}": body for name, body in control.items()})
    found |= posts(f"{repository}/no/unload", {f"unload {name}": body for name, body in control.items()})
    found["load no model"] = Request("POST", f"{repository}/no/load", b"{}")
    found["unload"] = Request("POST", f"{repository}/{TOKENS}/unload", b"{}")
    for end in ("", "/ready", "/config"):
        found[f"afterwards {end}"] = Request("GET", f"/v2/models/{TOKENS}{end}")
    found["afterwards infer"] = Request("POST", TOKEN_PATH, json.dumps({"inputs": [ids()]}).encode())
    found["load again"] = Request("POST", f"{repository}/{TOKENS}/load", b"{}")
    found["infer again"] = Request("POST", TOKEN_PATH, json.dumps({"inputs": [ids()]}).encode())
    return found


@pytest.fixture(scope="module")
def ours(models: Path) -> Iterator[Server]:
    with Server(models, *FAKE, "--model-control", "true") as server:
        yield server


class Rival:
    """A real Triton with models of the same names and tensors; it is started again where a request ends it."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._starts = 0
        self._repository = work / "repository"
        form = {"hidden": HIDDEN_SIZE}
        for name, more in {
            NAME: {"input": "text", "kind": "TYPE_STRING", "dims": 1, "output": "embedding"},
            TOKENS: {"input": "input_ids", "kind": "TYPE_INT64", "dims": -1, "output": "pooled"},
        }.items():
            folder = self._repository / name
            (folder / "1").mkdir(parents=True)
            (folder / "config.pbtxt").write_text(CONFIG.format(name=name, **form, **more))
            shutil.copy(ROOT / "tests" / "support" / "triton_zeros.py", folder / "1" / "model.py")
        self.start()

    def start(self) -> None:
        self._starts += 1
        work = self._work / f"start-{self._starts}"
        work.mkdir()
        self.triton = Triton(self._repository, work, NAME, TOKENS)
        self.triton.__enter__()

    def stop(self) -> None:
        self.triton.__exit__(None, None, None)

    def asked(self, ask: Callable[[Triton], Any]) -> Any:
        """What it answers; None where it ends instead."""
        try:
            answer = ask(self.triton)
        except OSError:
            if isinstance(self.triton.process.wait(TIMEOUT_S), int):
                self.stop()
                self.start()
            return None
        return answer


@pytest.fixture(scope="module")
def rival(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rival]:
    rival = Rival(tmp_path_factory.mktemp("triton"))
    yield rival
    rival.stop()


def shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: shape(item) for name, item in sorted(value.items())}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


def form(reply: HttpReply | None) -> tuple[int, Any]:
    """The status and the shape of a reply: its JSON, what lies behind it, its encoding."""
    if reply is None:
        return GONE, None
    body, encoding = reply.body, reply.headers.get("content-encoding", "")
    if encoding in {"gzip", "deflate"}:
        body = zlib.decompress(body, 32 + zlib.MAX_WBITS)
    length = int(reply.headers.get(LENGTH.lower(), len(body)))
    head = shape(json.loads(body[:length])) if body else None
    return reply.status, (head, len(body) - length, encoding)


@pytest.fixture(scope="module")
def documented() -> str:
    return re.sub(r"\s+", " ", (ROOT / "docs/reference/protocols.md").read_text())


def explained(name: str, ours: int, theirs: int) -> Difference | None:
    for difference in DIFFERENCES:
        if re.fullmatch(difference.names, name) and ours in difference.ours and theirs in difference.theirs:
            return difference
    return None


def test_http(ours: Server, rival: Rival, documented: str) -> None:
    """Every request has the status and the shape of Triton's answer, or a difference that is documented."""
    requests = json_requests() | binary_requests() | other_requests()
    assert len(requests) > 500
    unexplained: dict[str, Any] = {}
    seen: set[str] = set()
    for name, request in requests.items():
        mine = form(http_call(ours.http, *request))
        theirs = form(rival.asked(lambda triton, request=request: http_call(triton.http, *request)))
        if mine == theirs:
            continue
        difference = explained(name, mine[0], theirs[0])
        if difference is None:
            unexplained[name] = (mine, theirs)
        else:
            seen.add(difference.said)
    assert not unexplained
    assert [difference.said for difference in DIFFERENCES if difference.said not in seen] == []
    assert [difference.said for difference in DIFFERENCES if difference.said not in documented] == []


def message(*texts: str, **changes: Any) -> pb.ModelInferRequest:
    """A request for texts over gRPC; `changes` are fields of its tensor."""
    request = infer_request(texts)
    del request.inputs[:]
    request.inputs.add(**{"name": "text", "datatype": "BYTES", "shape": [len(texts), 1], **changes})
    return request


def first(request: pb.ModelInferRequest) -> Any:
    return request.inputs[0]


SPOILED: dict[str, Callable[[pb.ModelInferRequest], object]] = {
    "one text": lambda _: None,
    "no model": lambda request: setattr(request, "model_name", "nobody"),
    "version": lambda request: setattr(request, "model_version", "1"),
    "unknown version": lambda request: setattr(request, "model_version", "9"),
    "version of letters": lambda request: setattr(request, "model_version", "x"),
    "no inputs": lambda request: (request.ClearField("inputs"), request.ClearField("raw_input_contents")),
    "another input": lambda request: setattr(first(request), "name", "x"),
    "another datatype": lambda request: setattr(first(request), "datatype", "INT64"),
    "no datatype": lambda request: setattr(first(request), "datatype", ""),
    "data twice": lambda request: first(request).contents.bytes_contents.append(b"a"),
    "no data": lambda request: request.ClearField("raw_input_contents"),
    "one raw too many": lambda request: request.raw_input_contents.append(b""),
    "raw cut off": lambda request: request.raw_input_contents.__setitem__(0, ELEMENT[:-1]),
    "raw of more": lambda request: request.raw_input_contents.__setitem__(0, ELEMENT * 2),
    "contents": lambda request: contents(request, bytes_contents=[b"a"]),
    "contents of more": lambda request: contents(request, bytes_contents=[b"a"] * 2),
    "contents of another kind": lambda request: contents(request, int64_contents=[1]),
    "output": lambda request: request.outputs.add(name="embedding"),
    "unknown output": lambda request: request.outputs.add(name="x"),
    "outputs twice": lambda request: [request.outputs.add(name="embedding") for _ in range(2)],
    "shared memory": lambda request: asked(first(request), "shared_memory_region", string_param="x"),
    "classification": lambda request: asked(request.outputs.add(name="embedding"), "classification", int64_param=1),
    "mine=text": lambda request: asked(request, "mine", string_param="x"),
    "mine=double": lambda request: asked(request, "mine", double_param=1.5),
    "priority=1": lambda request: asked(request, "priority", uint64_param=1),
    "priority=9": lambda request: asked(request, "priority", uint64_param=9),
    "priority=text": lambda request: asked(request, "priority", string_param="x"),
    "timeout=text": lambda request: asked(request, "timeout", string_param="x"),
    "timeout=long": lambda request: asked(request, "timeout", int64_param=10**7),
    "sequence_id=text": lambda request: asked(request, "sequence_id", string_param="x"),
    "triton_x=True": lambda request: asked(request, "triton_x", bool_param=True),
}
GRPC_SHAPES = ((-1, 1), (1, -1), (1,), (0, 1), (2, 1), (1, 1, 1), (2**31, 1), (2**63 - 1, 1), (-(2**63), 1))


def asked(part: Any, name: str, **value: Any) -> None:
    part.parameters[name].MergeFrom(pb.InferParameter(**value))


def contents(request: pb.ModelInferRequest, **values: Any) -> None:
    """Gives the data in the tensor and not behind it."""
    request.ClearField("raw_input_contents")
    first(request).contents.MergeFrom(pb.InferTensorContents(**values))


def grpc_requests() -> dict[str, bytes]:
    found = {name: message("a") for name in SPOILED} | {"two texts": message("a", "b")}
    for name, spoil in SPOILED.items():
        spoil(found[name])
    found |= {f"shape {list(shape)}": message("a", shape=shape) for shape in GRPC_SHAPES}
    encoded = {name: request.SerializeToString() for name, request in found.items()}
    return encoded | {
        "empty": b"",
        "no protobuf": b"\xff\xff",
        "unknown fields": encoded["one text"] + b"\xfa\x7d\x03abc",
    }


GRPC_DIFFERENCES = {
    "version of letters": ("400 for a version that is not a number over gRPC", "NOT_FOUND", "INVALID_ARGUMENT"),
    "one raw too many": ("more raw contents than inputs", "INVALID_ARGUMENT", "OK"),
    "outputs twice": ("a repeated output", "INVALID_ARGUMENT", "OK"),
    "shared memory": ("`classification`, shared memory", "UNIMPLEMENTED", "INVALID_ARGUMENT"),
    "classification": ("`classification`, shared memory", "UNIMPLEMENTED", "OK"),
    "priority=9": ("a priority beyond 4", "INVALID_ARGUMENT", "OK"),
    "triton_x=True": ("a reserved name (`triton_`)", "OK", "INVALID_ARGUMENT"),
    "shape [1]": ("texts of the shape [n]", "OK", "INVALID_ARGUMENT"),
    "shape [0, 1]": ("no texts", "INVALID_ARGUMENT", "OK"),
    "shape [-9223372036854775808, 1]": ("a size beyond 32 bits or below -1", "INVALID_ARGUMENT", "OK"),
    "no protobuf": ("a gRPC message that is not protobuf", "INVALID_ARGUMENT", "INTERNAL"),
}
"""By request: the words of docs/reference/protocols.md, our status, and Triton's."""


def call(address: str, data: bytes) -> tuple[str, Any]:
    with grpc.insecure_channel(address) as channel:
        try:
            reply = channel.unary_unary(MODEL_INFER)(data, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return error.code().name, None
    response = pb.ModelInferResponse.FromString(reply)
    outputs = [(output.name, output.datatype, tuple(output.shape)) for output in response.outputs]
    return "OK", (response.model_name, response.model_version, outputs, [*map(len, response.raw_output_contents)])


def test_grpc(ours: Server, rival: Rival, documented: str) -> None:
    """The same over gRPC: status, outputs, their shapes and sizes."""
    found = {}
    for name, data in grpc_requests().items():
        mine, theirs = call(ours.grpc, data), call(rival.triton.grpc, data)
        if mine != theirs:
            found[name] = (mine[0], theirs[0])
    assert found == {name: (mine, theirs) for name, (_, mine, theirs) in GRPC_DIFFERENCES.items()}
    assert all(said in documented for said, *_ in GRPC_DIFFERENCES.values())
