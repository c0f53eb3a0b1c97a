"""What the Open Inference Protocol v2 says of the server and its models over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from serving.errors import Unsupported
from serving.http.apis.oip import MODEL, TAG, VERSION
from serving.http.apis.oip_messages import ControlRequest, IndexRequest, Liveness, ModelReadiness, Readiness
from serving.http.decoding import JsonDecoder
from serving.http.documentation import UNLISTED
from serving.http.exchange import HttpReply, Operation
from serving.oip.service import SETTINGS, SHARED_MEMORY, ModelState, ServerMetadata, StatisticsReply
from serving.oip.views import ModelConfig, ModelMetadata

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.http.exchange import Handler, HttpRequest
    from serving.oip.service import V2Service

_BAD_REQUEST = 400
_NOT_READY = b'{"error":"the model is not ready, or no model of that name and version is served"}'


def operations(service: V2Service) -> list[Operation]:
    """The routes of this protocol that do not infer."""
    return [*_server(service), *_models(service), *_repository(service), *_left_out()]


def _server(service: V2Service) -> list[Operation]:
    lifecycle = service.lifecycle

    async def server(_: HttpRequest) -> HttpReply:
        return _json(service.server_metadata())

    async def live(_: HttpRequest) -> HttpReply:
        return _json(Liveness(lifecycle.live), 200 if lifecycle.live else _BAD_REQUEST)

    async def ready(_: HttpRequest) -> HttpReply:
        return _json(Readiness(lifecycle.ready), 200 if lifecycle.ready else _BAD_REQUEST)

    return [
        Operation("GET", "/v2", server, "What this server is.", TAG, reply=ServerMetadata),
        Operation(
            *("GET", "/v2/health/live", live, "Whether the server runs.", TAG),
            reply=Liveness,
            statuses=(400,),
            open=True,
        ),
        Operation(
            "GET", "/v2/health/ready", ready, "Whether it is ready.", TAG, reply=Readiness, statuses=(400,), open=True
        ),
    ]


def _models(service: V2Service) -> list[Operation]:
    async def model(http: HttpRequest) -> HttpReply:
        return _json(service.view(*_named(http)).metadata())

    async def ready(http: HttpRequest) -> HttpReply:
        if service.model_ready(*_named(http)):
            return _json(ModelReadiness(http.parameters["model"], ready=True))
        return HttpReply(_NOT_READY, _BAD_REQUEST)

    async def config(http: HttpRequest) -> HttpReply:
        return _json(service.config(*_named(http)))

    async def statistics(http: HttpRequest) -> HttpReply:
        return _json(service.statistics(*_named(http)))

    async def all_statistics(_: HttpRequest) -> HttpReply:
        return _json(service.statistics(None))

    names = service.names
    values = {"model": names, "version": sorted({service.view(name).model.version for name in names})}

    def route(path: str, handler: Handler, summary: str, reply: type, statuses: Sequence[int] = ()) -> list[Operation]:
        """A route of a model, and the same with a version."""
        return [
            Operation("GET", MODEL + version + path, handler, text, TAG, reply=reply, values=values, statuses=statuses)
            for version, text in (("", summary), (VERSION, f"{summary[:-1]}, with a version."))
        ]

    return [
        Operation("GET", "/v2/models/stats", all_statistics, "What each model did.", TAG, reply=StatisticsReply),
        *route("", model, "What a model takes and gives.", ModelMetadata),
        *route("/ready", ready, "Whether a model is ready.", ModelReadiness, (_BAD_REQUEST,)),
        *route("/config", config, "A model as Triton describes it.", ModelConfig),
        *route("/stats", statistics, "What a model has answered.", StatisticsReply),
    ]


def _repository(service: V2Service) -> list[Operation]:
    index_decoder, control_decoder = JsonDecoder(IndexRequest), JsonDecoder(ControlRequest)

    async def index(http: HttpRequest) -> HttpReply:
        wanted = index_decoder.decode(http.body) if http.body else IndexRequest()
        return HttpReply(msgspec.json.encode(service.index(ready=wanted.ready)))

    async def load(http: HttpRequest) -> HttpReply:
        message = control_decoder.decode(http.body) if http.body else ControlRequest()
        await service.load(http.parameters["model"], message.parameters)
        return HttpReply(b"{}")

    async def unload(http: HttpRequest) -> HttpReply:
        if http.body:
            control_decoder.decode(http.body)
        service.unload(http.parameters["model"])
        return HttpReply(b"{}")

    return [
        Operation(
            "POST",
            "/v2/repository/index",
            index,
            "The models of the repository.",
            TAG,
            IndexRequest,
            list[ModelState],
            {"ready": True},
            body_optional=True,
        ),
        *[
            Operation(
                "POST",
                f"/v2/repository/models/{{model}}/{verb}",
                handler,
                f"{verb.capitalize()} a model of the repository.",
                TAG if service.control else UNLISTED,
                ControlRequest,
                dict[str, int],
                {},
                values={"model": service.names},
                statuses=(403,),
                body_optional=True,
            )
            for verb, handler in (("load", load), ("unload", unload))
        ],
    ]


def _left_out() -> list[Operation]:
    """What Triton has beyond this, so that its clients are told that it is not here."""

    def refusal(text: str) -> Handler:
        async def refuse(_: HttpRequest) -> HttpReply:
            raise Unsupported(text)

        return refuse

    shared, settings = refusal(SHARED_MEMORY), refusal(SETTINGS)
    region = "/region/{region}"
    routes: list[tuple[str, str, Handler]] = [
        (method, f"/v2/{kind}sharedmemory{path}", shared)
        for kind in ("system", "cuda")
        for method, path in (
            ("GET", "/status"),
            ("POST", "/unregister"),
            ("GET", f"{region}/status"),
            ("POST", f"{region}/register"),
            ("POST", f"{region}/unregister"),
        )
    ]
    routes += [
        (method, path, settings)
        for method in ("GET", "POST")
        for path in ("/v2/logging", "/v2/trace/setting", f"{MODEL}/trace/setting")
    ]
    return [Operation(method, path, handler, "Not here.", UNLISTED) for method, path, handler in routes]


def _named(http: HttpRequest) -> tuple[str, str | None]:
    return http.parameters["model"], http.parameters.get("version")


def _json(message: Any, status: int = 200) -> HttpReply:  # noqa: ANN401  any record
    return HttpReply(msgspec.json.encode(message), status)
