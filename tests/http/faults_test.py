from __future__ import annotations

import json
from typing import Any

import pytest

from serving.errors import (
    BertserveError,
    BodyTooLarge,
    DeadlineExceeded,
    EmptyInput,
    EngineFault,
    EngineLost,
    Forbidden,
    HeadersTooLarge,
    InvalidRequest,
    MalformedRequest,
    MethodNotAllowed,
    ModelNotFound,
    ModelNotNamed,
    NonFiniteOutput,
    NotReady,
    Overloaded,
    RouteNotFound,
    SlowRequest,
    Unsupported,
    UnsupportedMediaType,
    WrongTask,
)
from serving.http.faults import error_body, status_of

TEI, OPENAI, V2, OTHER = "/embed", "/v1/embeddings", "/v2/models/m/infer", "/livez"

STATUSES: dict[type[BertserveError], tuple[int, int, int, int]] = {
    #                      TEI, OpenAI, V2, other
    InvalidRequest: (422, 422, 400, 422),
    MalformedRequest: (400, 400, 400, 400),
    EmptyInput: (400, 400, 400, 400),
    WrongTask: (424, 400, 400, 400),
    ModelNotNamed: (400, 400, 400, 400),
    Forbidden: (403, 403, 403, 403),
    Unsupported: (501, 501, 501, 501),
    RouteNotFound: (404, 404, 404, 404),
    ModelNotFound: (404, 404, 404, 404),
    SlowRequest: (408, 408, 408, 408),
    BodyTooLarge: (413, 413, 413, 413),
    UnsupportedMediaType: (415, 415, 415, 415),
    HeadersTooLarge: (431, 431, 431, 431),
    Overloaded: (429, 429, 429, 429),
    DeadlineExceeded: (504, 504, 504, 504),
    NotReady: (503, 503, 503, 503),
    EngineLost: (503, 503, 503, 503),
    EngineFault: (500, 500, 500, 500),
    NonFiniteOutput: (500, 500, 500, 500),
}


@pytest.mark.parametrize("kind", STATUSES)
def test_each_family_has_the_statuses_of_its_protocol(kind: type[BertserveError]) -> None:
    """The table, as the protocols' own servers answer."""
    error = kind("why")
    assert tuple(status_of(path, error) for path in (TEI, OPENAI, V2, OTHER)) == STATUSES[kind]


@pytest.mark.parametrize("path", ["/v2", "/v2/", V2])
def test_every_path_below_v2_is_of_its_family(path: str) -> None:
    """A schema that is broken is 400 there."""
    assert status_of(path, InvalidRequest("why")) == 400
    assert json.loads(error_body(path, InvalidRequest("why"), "id")) == {"error": "why"}


@pytest.mark.parametrize("path", ["/v2x", "/embed/", "/embeddings/", "/v1", "/v20/models"])
def test_what_only_begins_alike_is_of_no_family(path: str) -> None:
    """It has the server's own body and statuses."""
    assert status_of(path, InvalidRequest("why")) == 422
    assert body(path, InvalidRequest("why"))["error"]["request_id"] == "id"


@pytest.mark.parametrize("path", ["/models/m/embed", "/models/embed/rerank", "/models/m/tokenize"])
def test_a_route_of_a_named_model_is_of_the_family_behind_the_name(path: str) -> None:
    """TEI's stay TEI's."""
    assert status_of(path, WrongTask("why")) == 424
    assert body(path, EmptyInput("why")) == {"error": "why", "error_type": "Empty"}


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
def test_cohere_errors_are_a_message_with_an_id(path: str) -> None:
    """With our own statuses, though one of the paths begins as v2's do."""
    assert status_of(path, InvalidRequest("why")) == 422
    assert body(path, InvalidRequest("why")) == {"id": "id", "message": "why"}


def body(path: str, error: BertserveError) -> Any:
    """An error's body, decoded."""
    return json.loads(error_body(path, error, "id"))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (EmptyInput, "Empty"),
        (WrongTask, "Backend"),
        (InvalidRequest, "Validation"),
        (MalformedRequest, "Validation"),
        (Overloaded, "Overloaded"),
        (NotReady, "Unhealthy"),
        (EngineLost, "Unhealthy"),
        (EngineFault, "Backend"),
        (DeadlineExceeded, "Backend"),
    ],
)
def test_tei_errors_have_the_types_of_its_clients(kind: type[BertserveError], name: str) -> None:
    """`error` is a text and `error_type` one of the known names."""
    assert body(TEI, kind("why")) == {"error": "why", "error_type": name}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (InvalidRequest, "invalid_request_error"),
        (ModelNotFound, "invalid_request_error"),
        (Overloaded, "rate_limit_error"),
        (NotReady, "server_error"),
        (EngineFault, "server_error"),
    ],
)
def test_openai_errors_are_objects_with_four_keys(kind: type[BertserveError], name: str) -> None:
    """The code is our reason."""
    expected = {"message": "why", "type": name, "param": None, "code": kind.reason}
    assert body(OPENAI, kind("why")) == {"error": expected}


@pytest.mark.parametrize("path", ["/livez", "/v1", "/v1x", "/models", "/models/m/tag"])
def test_other_errors_carry_the_requests_id(path: str) -> None:
    """Also where a path only begins as a family's do."""
    expected = {"reason": "not_found", "message": "why", "request_id": "id"}
    assert body(path, RouteNotFound("why")) == {"error": expected}


def test_a_method_that_is_not_allowed_names_those_that_are() -> None:
    """As HTTP asks for."""
    error = MethodNotAllowed("why", allowed="POST")
    assert (status_of(TEI, error), error.allowed) == (405, "POST")


def test_text_of_any_alphabet_is_written_as_json() -> None:
    """Quotes and line ends do not break the body."""
    message = 'a "quoted"\nläne \u2028'
    assert body(V2, InvalidRequest(message)) == {"error": message}
