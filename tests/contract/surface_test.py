"""What users see and rely on: the lists in `surface/`, compared with what the product says of itself now.

`python -m tests.contract.surface_test` writes them anew; the diff shows what a change means to users. They hold neither
prose nor versions nor facts of the machine.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import msgspec
import pytest
import yaml
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.grpc.service_pb2 import ModelInferRequest

import bertserve
from bertserve.serving.errors import BertserveError
from bertserve.serving.grpc.services.standard import ReflectionService
from bertserve.serving.http.app import PROTOCOLS, App
from bertserve.serving.http.exchange import HttpRequest
from bertserve.serving.http.openapi import docs_router
from bertserve.serving.models.manifest import Manifest
from bertserve.serving.settings import ENVIRONMENT_PREFIX, Settings, flag_of
from tests.support.clients import MODEL_INFER, TIMEOUT_S, HttpConnection, infer_request
from tests.support.credentials import FIRST, bearer, write_keys
from tests.support.descriptions import kind, objects, operation, options, places, protobuf
from tests.support.fronts import FRONTS, wait_up
from tests.support.http_app import ready_api
from tests.support.models import NAME, ROOT, light_repository
from tests.support.poison import light_tasks
from tests.support.server import FAKE, Server
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.support.clients import HttpReply

LISTS, UPDATE = Path(__file__).with_name("surface"), "python -m tests.contract.surface_test"
JSON, TIMEOUT, ORIGIN = "application/json", "X-Request-Timeout-Ms", "https://app.example"
FAMILIES = {"tei": "/embed", "openai": "/v1/embeddings", "cohere": "/v2/rerank", "v2": "/v2", "own": "/status"}
"""A path of each family of errors."""
WORDS = {"reason", "error_type", "type", "code"}
OPEN_LABELS = {"model", "version", "engine", "task", "precision"}
"""Those whose values the models and libraries decide."""


class Product:
    """A server of a model of every task, with keys, whom nobody has asked yet; each method makes a list."""

    def __init__(self, server: Server, http: HttpConnection, probes: HttpConnection) -> None:
        self._server, self._http, self._probes = server, http, probes
        self._metrics = probes.call("GET", "/metrics").body.decode()
        self._status = probes.call("GET", "/status").json()
        self._document = self._ask("GET", "/openapi.json").json()

    def _ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> HttpReply:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self._http.call(method, path, body, bearer(FIRST) | {"Content-Type": JSON} | named)

    def routes(self) -> Iterator[str]:
        """Every route; what those in the API's document read, and type and headers of what they answer."""
        routes = [route for router in (*PROTOCOLS, docs_router(None)) for route in router.routes]
        for route in sorted(routes, key=lambda route: (route.path, route.method)):
            key = "key" if self._http.call(route.method, _filled(route.path)).status == 401 else "no key"
            port = "" if self._probes.call(route.method, _filled(route.path)).status == 404 else ", metrics port too"
            yield f"{', '.join(sorted(route.methods))} {route.path}: {key}{port}"
            if told := self._document["paths"].get(route.path, {}).get(route.method.lower()):
                yield from operation(told)

    def messages(self) -> Iterator[str]:
        """The bodies of requests and replies."""
        return objects(self._document["components"]["schemas"])

    def replies(self) -> Iterator[str]:
        """What comes of right and wrong requests: status, type of content or words of the error, names of headers."""
        preflight = self._http.call("OPTIONS", "/", headers={"Origin": ORIGIN, "Access-Control-Request-Method": "POST"})
        cors = preflight.headers | self._ask("GET", "/info", Origin=ORIGIN).headers
        yield from sorted(f"{name}: {value}" for name, value in cors.items() if name.startswith("access-control"))
        for path, operations in sorted(self._document["paths"].items()):
            for method, described in sorted(operations.items()):
                yield f"{method.upper()} {path}"
                for case, reply in self._cases(method.upper(), path, described):
                    words = reply.headers.get("content-type", "") if reply.status < 400 else _words(reply.body)
                    names = sorted(reply.headers.keys() - {"connection", "content-length", "content-type", "date"})
                    yield f"  {case}: {reply.status} {words}; {', '.join(names)}"

    def _cases(self, method: str, path: str, described: dict[str, Any]) -> Iterator[tuple[str, HttpReply]]:
        example = described.get("requestBody", {}).get("content", {}).get(JSON, {}).get("example")
        target, body = _filled(path), None if example is None else json.dumps(example).encode()
        yield "example", self._ask(method, target, body, Origin=ORIGIN, endpoint_load_metrics_format="TEXT")
        yield "other method", self._ask("PATCH", target)
        yield "no key", self._http.call(method, target, body)
        if "{model}" in path:
            yield "unknown model", self._ask(method, _filled(path.replace("{model}", "nobody")), body)
        if body is not None:
            yield "no JSON", self._ask(method, target, b"{")
            yield "no fields", self._ask(method, target, b"{}")
            yield "br", self._ask(method, target, b"{}", Content_Encoding="br")
        if any(parameter["name"] == TIMEOUT for parameter in described["parameters"]):
            yield "no time", self._ask(method, target, body, **{TIMEOUT: "0.001"})

    def grpc(self) -> Iterator[str]:
        """Methods, messages, and the names of metadata with a good and a bad answer."""
        yield from sorted(ReflectionService([]).methods())  # not all of them told below
        metadata = [(name.lower(), value) for name, value in bearer(FIRST).items()]
        with grpc.insecure_channel(self._server.grpc) as channel:
            ask = ServerReflectionStub(channel).ServerReflectionInfo

            def reflected(**request: str) -> Any:
                return next(ask(iter([ServerReflectionRequest(**request)]), metadata=metadata, timeout=TIMEOUT_S))

            services = [service.name for service in reflected(list_services="").list_services_response.service]
            described = [reflected(file_containing_symbol=name).file_descriptor_response for name in services]
            files = {data for each in described for data in each.file_descriptor_proto}
            for file in sorted(map(FileDescriptorProto.FromString, files), key=lambda file: file.package):
                yield from protobuf(file)
            infer = channel.unary_unary(MODEL_INFER, ModelInferRequest.SerializeToString)
            for model in ("embed", "nobody"):
                call = infer.future(infer_request(["a"], model=model), metadata=metadata, timeout=TIMEOUT_S)
                names = [name for name, _ in (*call.initial_metadata(), *call.trailing_metadata())]
                yield f"{call.code().name}: {', '.join(sorted(names))}"

    def metrics(self) -> Iterator[str]:
        """Name, type and labels of every metric, the values of a label, and the buckets of a histogram."""
        for family in sorted(text_string_to_metric_families(self._metrics), key=lambda family: family.name):
            yield f"{family.samples[0].name if family.type == 'counter' else family.name}: {family.type}"
            for label in sorted({label for sample in family.samples for label in sample.labels}):
                values = dict.fromkeys(sample.labels[label] for sample in family.samples if label in sample.labels)
                shown = () if label in OPEN_LABELS else values if label == "le" else sorted(values)
                yield f"  {label}: {' '.join(shown)}"

    def status(self) -> Iterable[str]:
        """What `/status` tells, to the console too."""
        return places(self._status)

    def log(self) -> Iterable[str]:
        """Members of the lines in JSON that tell of the server's state and of requests."""
        self._ask("POST", "/embed", b"{}", X_Request_Id="last")
        wait_for(lambda: '"last"' in self._server.log, "the last line")
        lines = [json.loads(line) for line in self._server.log.splitlines()]
        told = [line for line in lines if {"state", "status"} & line.keys()]
        return sorted({f"{line['logger']}: {', '.join(sorted(line.keys() - {'hidden'}))}" for line in told})

    def errors(self) -> Iterator[str]:
        """Each reason with its code of gRPC, and the status and words of each family of routes."""
        kinds = [BertserveError]
        for each in kinds:
            kinds += each.__subclasses__()
        app = App(ready_api())
        for error in sorted((each("why") for each in kinds), key=lambda error: (error.reason, type(error).__name__)):
            yield f"{error.reason}: gRPC {error.grpc_code}"
            for family, path in FAMILIES.items():
                reply = app.refuse(error, HttpRequest("GET", path, {}, b"", "id", 0.0))
                yield f"  {family} {reply.status} {_words(reply.body)}"

    def settings(self) -> Iterator[str]:
        """Option, environment variable, key in the file, type and default."""
        for name, schema in sorted(Settings.model_json_schema()["properties"].items()):
            default = json.dumps(schema.get("default"))
            yield f"{flag_of(name)} {ENVIRONMENT_PREFIX}{name.upper()} {name}: {kind(schema)} = {default}"

    def commands(self) -> Iterator[str]:
        """Verbs with their options; `doctor` reads `--json` and those of `serve`."""
        for verb in sorted(bertserve.VERBS):
            yield f"bertserve {verb}"
            if verb != "doctor":
                yield from options("doctor" if verb == "serve" else verb)  # `serve` first changes how signals are met

    def python(self) -> Iterator[str]:
        """What `from bertserve import` gives."""
        for name, module in sorted(bertserve.OFFERED.items()):
            offered = getattr(importlib.import_module(module), name)
            yield f"{name}{inspect.signature(offered)}"
            yield from [f"  called: {inspect.signature(offered.__call__)}"] if inspect.isclass(offered) else []

    def bundle(self) -> Iterator[str]:
        """The files of a bundle, and what its manifest holds."""
        yield from sorted(file.name for file in (light_repository() / NAME / "1").iterdir())
        yield from objects(msgspec.json.schema(Manifest)["$defs"])

    def deploy(self) -> Iterator[str]:
        """What stands in `deploy/`: Kubernetes objects, components and overlays, rules of Prometheus, images."""
        for file in sorted(file for file in (ROOT / "deploy").rglob("*.*") if file.suffix != ".pyc"):
            yield str(file.relative_to(ROOT))
            for found in yaml.safe_load_all(file.read_text(encoding="utf-8")) if file.suffix == ".yaml" else ():
                yield f"  {found.get('kind', '')} {found.get('metadata', {}).get('name', '')}".rstrip()
                rules = [rule for group in found.get("groups", ()) for rule in group.get("rules", ())]
                yield from sorted(f"  {rule.get('alert') or rule['record']}" for rule in rules)


NAMES = [name for name in vars(Product) if not name.startswith("_")]


def _filled(path: str) -> str:
    model = "answer" if path.startswith("/v2/") else "embed"  # v2's example is for the first model
    return path.replace("{model}", model).replace("{version}", "1").replace("{", "").replace("}", "")


def _words(body: bytes) -> str:
    """The members of an error's body, with the values that programs read."""
    error = json.loads(body)
    flat = error["error"] if isinstance(error.get("error"), dict) else error
    return " ".join(f"{name}={flat[name]}" if name in WORDS else name for name in flat)


def lists() -> dict[str, str]:
    """The content of each list by its name."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        files = ("--api-keys-file", str(write_keys(folder / "keys", FIRST)))
        told = ("--log-format", "json", "--access-log", "true", "--cors-origins", ORIGIN, "--threads", "2")
        server = stack.enter_context(Server(light_tasks(), *FAKE, *FRONTS, *files, *told, wait_ready=False))
        server.wait_state()
        wait_up(server)
        wires = [stack.enter_context(HttpConnection(port)) for port in (server.http, server.metrics)]
        product = Product(server, *wires)
        made = {name: [f"# {getattr(product, name).__doc__}", *getattr(product, name)()] for name in NAMES}
    return {name: "".join(f"{line.rstrip()}\n" for line in lines) for name, lines in made.items()}


@pytest.fixture(scope="module")
def today() -> dict[str, str]:
    """The lists as the product is."""
    return lists()


@pytest.mark.parametrize("name", NAMES)
def test_users_see_what_is_listed(today: dict[str, str], name: str) -> None:
    """Whatever goes, comes or changes shows as a difference."""
    listed = (LISTS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    differing = [*difflib.unified_diff(listed, today[name].splitlines(), f"{name}.txt", "now", lineterm="")]
    if differing:
        pytest.fail("\n".join([*differing, "", f"If users shall see this: {UPDATE}"]), pytrace=False)


if __name__ == "__main__":
    for list_name, content in lists().items():
        (LISTS / f"{list_name}.txt").write_text(content, encoding="utf-8")
