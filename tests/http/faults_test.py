"""To which protocol a path belongs; what each protocol answers is listed in `tests/contract/surface/errors.txt`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bertserve.serving.errors import (
    BertserveError,
    EmptyInput,
    InvalidRequest,
    MethodNotAllowed,
    RouteNotFound,
    WrongTask,
)
from bertserve.serving.http.app import App
from bertserve.serving.http.exchange import HttpRequest
from tests.support.http_app import ready_api

WHY, OF_ANY_ALPHABET = "why", 'a "quoted"\nläne \u2028'
V2 = "/v2/models/m/infer"


def own(reason: str) -> dict[str, Any]:
    """The server's own body, which carries the request's id."""
    return {"error": {"reason": reason, "message": WHY, "request_id": "id"}}


@pytest.mark.parametrize(
    ("paths", "error", "status", "body"),
    [
        (("/v2", "/v2/", V2), InvalidRequest(WHY), 400, {"error": WHY}),
        ((V2,), InvalidRequest(OF_ANY_ALPHABET), 400, {"error": OF_ANY_ALPHABET}),
        # What only begins as a family's paths do is of none.
        (
            ("/v2x", "/embed/", "/embeddings/", "/v1", "/v20/models"),
            InvalidRequest(WHY),
            422,
            own("invalid_request"),
        ),
        (("/livez", "/v1", "/v1x", "/models", "/models/m/tag"), RouteNotFound(WHY), 404, own("not_found")),
        # A route of a named model is of the family behind the name.
        (
            ("/models/m/embed", "/models/embed/rerank", "/models/m/tokenize"),
            EmptyInput(WHY),
            400,
            {"error": WHY, "error_type": "Empty"},
        ),
        (("/models/m/embed", "/models/embed/rerank", "/models/m/tokenize"), WrongTask(WHY), 424, None),
        # Cohere's have our own statuses, though one of the paths begins as v2's do.
        (("/v1/rerank", "/v2/rerank"), InvalidRequest(WHY), 422, {"id": "id", "message": WHY, "detail": WHY}),
        (("/embed",), MethodNotAllowed(WHY, allowed="POST"), 405, None),
    ],
    ids=["v2", "any alphabet", "alike", "none", "TEI's", "TEI's task", "Cohere's", "a method"],
)
def test_what_a_path_s_family_answers(paths: tuple[str, ...], error: BertserveError, status: int, body: Any) -> None:
    """Its status, and its body as JSON."""
    app = App(ready_api())
    for path in paths:
        reply = app.refuse(error, HttpRequest("GET", path, {}, b"", "id", 0.0))
        assert reply.status == status, path
        assert body is None or json.loads(reply.body) == body, path
