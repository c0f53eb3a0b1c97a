"""Paths and their handlers."""

from __future__ import annotations

import pytest

from serving.errors import MethodNotAllowed, RouteNotFound
from serving.http.exchange import HttpReply, HttpRequest, Operation
from serving.http.routing import Routes


async def _infer(_: HttpRequest) -> HttpReply:
    return HttpReply(b"infer")


async def _ready(_: HttpRequest) -> HttpReply:
    return HttpReply(b"ready")


def _routes() -> Routes:
    return Routes(
        [
            Operation("POST", "/v2/models/{model}/infer", _infer, "", ""),
            Operation("GET", "/v2/models/{model}/ready", _ready, "", ""),
        ]
    )


def _request(method: str, path: str) -> HttpRequest:
    return HttpRequest(method, path, {}, b"", "id", 0.0)


def test_every_request_has_the_parts_of_its_own_path() -> None:
    """Also when paths come again, and when more have come than are remembered."""
    routes = _routes()
    for number in [*range(600), *range(5)]:
        request = _request("POST", f"/v2/models/m{number}/infer")
        assert routes.find(request) is _infer
        assert request.parameters == {"model": f"m{number}"}


def test_what_is_not_served_is_not_remembered() -> None:
    """Neither a wrong path nor a wrong method becomes a right one by coming twice."""
    routes = _routes()
    for _ in range(2):
        with pytest.raises(RouteNotFound):
            routes.find(_request("POST", "/v2/models/m/nothing"))
        with pytest.raises(MethodNotAllowed, match="POST"):
            routes.find(_request("GET", "/v2/models/m/infer"))
        assert routes.find(_request("GET", "/v2/models/m/ready")) is _ready
