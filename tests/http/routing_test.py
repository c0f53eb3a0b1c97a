"""Which requests the connection answers past ASGI, and what a path that is not served is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bertserve.serving.http.exchange import HttpReply, HttpRequest
from bertserve.serving.http.port import HotRoutes
from bertserve.serving.http.routes import ApiRoute, Docs, Router, methods_of

if TYPE_CHECKING:
    from bertserve.serving.http.app_context import AppContext

router = Router("Test")


@router.hot("/v2/models/{model}/infer", Docs())
@router.hot("/plain", Docs())
@router.hot("/models/{model}", Docs())
async def _infer(_: AppContext, __: HttpRequest) -> HttpReply:
    """Infer."""
    return HttpReply(b"infer")


@router.get("/v2/models/{model}/ready")
async def _ready(_: AppContext, __: HttpRequest) -> HttpReply:
    """Tell whether a model is ready."""
    return HttpReply(b"ready")


def _request(method: str, path: str) -> HttpRequest:
    return HttpRequest(method, path, {}, b"", "id", 0.0)


def test_every_request_has_the_parts_of_its_own_path() -> None:
    """Also when paths come again, and when more have come than are remembered."""
    hot = HotRoutes(router.routes)
    for number in [*range(600), *range(5)]:
        request = _request("POST", f"/v2/models/m{number}/infer" if number % 2 else f"/models/m{number}")
        route = hot.find(request)
        assert route is not None
        assert route.direct is _infer
        assert request.parameters == {"model": f"m{number}"}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v2/models/m/ready"),
        ("GET", "/plain"),
        ("GET", "/v2/models/m/infer"),
        ("POST", "/v2/models/m/infer/"),
        ("POST", "/v2/models/m/n/infer"),
        ("POST", "/v2/models/m\n/infer"),
        ("POST", "/plain\n"),
        ("POST", "/infer"),
        ("GET", "/models/m"),
        ("POST", "/models/m/n"),
    ],
)
def test_all_else_goes_to_the_application(method: str, path: str) -> None:
    """Other routes, other methods, and paths that only look alike; coming twice makes none of them a hot one."""
    hot = HotRoutes(router.routes)
    assert hot.find(_request("POST", "/v2/models/m/infer")) is not None
    assert [hot.find(_request(method, path)) for _ in range(2)] == [None, None]


def test_the_methods_of_a_path() -> None:
    """Those of every route that it has; none where there is no such path."""
    scope = {"type": "http", "method": "PUT", "path": "/v2/models/m/infer", "headers": []}
    two = [*router.routes, ApiRoute("GET", "/plain", _ready, None, tag="", summary="", public=False)]
    assert methods_of(two, scope) == ["POST"]
    assert methods_of(two, {**scope, "path": "/plain"}) == ["GET", "HEAD", "POST"]
    assert methods_of(two, {**scope, "path": "/v2/models/m/nothing"}) == []
    assert methods_of(two, {**scope, "path": "/v2/models/m/infer\n"}) == []


def test_a_route_below_a_model_has_the_same_endpoint() -> None:
    """And says so in its summary; GET answers HEAD too."""
    named = Router("Test")
    named.named("GET", "/ready")(_ready)
    routes: list[ApiRoute] = named.routes
    assert [(route.path, route.direct, route.summary) for route in routes] == [
        ("/ready", _ready, "Tell whether a model is ready."),
        ("/models/{model}/ready", _ready, "Tell whether a model is ready, with a named model."),
    ]
    assert all(route.methods == {"GET", "HEAD"} for route in routes)
