"""Which route answers a request, and which methods a path has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bertserve.serving.http.exchange import HttpReply, HttpRequest
from bertserve.serving.http.routes import Router, RouteTable

if TYPE_CHECKING:
    from bertserve.serving.http.app_context import AppContext

router = Router("Test")


@router.post("/v2/models/{model}/infer")
@router.post("/plain")
@router.post("/models/{model}")
async def _infer(_: AppContext, __: HttpRequest) -> HttpReply:
    """Infer."""
    return HttpReply(b"infer")


@router.get("/v2/models/{model}/ready")
@router.get("/plain")
async def _ready(_: AppContext, __: HttpRequest) -> HttpReply:
    """Tell whether a model is ready."""
    return HttpReply(b"ready")


def _request(method: str, path: str) -> HttpRequest:
    return HttpRequest(method, path, {}, b"", "id", 0.0)


def test_every_request_has_the_parts_of_its_own_path() -> None:
    """Also when paths come again, and when more have come than are remembered."""
    table = RouteTable(router.routes)
    for number in [*range(600), *range(5)]:
        request = _request("POST", f"/v2/models/m{number}/infer" if number % 2 else f"/models/m{number}")
        route = table.find(request)
        assert route is not None
        assert route.endpoint is _infer
        assert request.parameters == {"model": f"m{number}"}


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", ["/v2/models/m/ready", "/plain"])
def test_get_routes_answer_head_too(method: str, path: str) -> None:
    """With parameters and without."""
    route = RouteTable(router.routes).find(_request(method, path))
    assert route is not None
    assert route.endpoint is _ready


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PUT", "/plain"),
        ("GET", "/v2/models/m/infer"),
        ("POST", "/v2/models/m/infer/"),
        ("POST", "/v2/models/m/n/infer"),
        ("POST", "/v2/models/m\n/infer"),
        ("POST", "/v2/models/m/infer\n"),
        ("POST", "/plain\n"),
        ("POST", "/infer"),
        ("GET", "/models/m"),
        ("POST", "/models/m/n"),
        ("POST", "/models/"),
    ],
)
def test_what_only_looks_alike_has_no_route(method: str, path: str) -> None:
    """Other methods and paths; coming twice gives none of them a route."""
    table = RouteTable(router.routes)
    assert table.find(_request("POST", "/v2/models/m/infer")) is not None
    assert [table.find(_request(method, path)) for _ in range(2)] == [None, None]


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v2/models/m/infer", ["POST"]),
        ("/plain", ["GET", "HEAD", "POST"]),
        ("/v2/models/m/nothing", []),
        ("/v2/models/m/infer\n", []),
    ],
)
def test_the_methods_of_a_path(path: str, methods: list[str]) -> None:
    """Those of every route that it has; none where there is no such path."""
    assert RouteTable(router.routes).methods(path) == methods


def test_a_route_below_a_model_has_the_same_endpoint() -> None:
    """And says so in its summary."""
    named = Router("Test")
    named.named("GET", "/ready")(_ready)
    assert [(route.path, route.endpoint, route.summary) for route in named.routes] == [
        ("/ready", _ready, "Tell whether a model is ready."),
        ("/models/{model}/ready", _ready, "Tell whether a model is ready, with a named model."),
    ]
