"""To which family a path belongs; what each family answers is listed in `tests/contract/surface/errors.txt`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serving.errors import BertserveError, EmptyInput, InvalidRequest, MethodNotAllowed, RouteNotFound, WrongTask
from serving.http.faults import error_body, status_of

TEI, V2 = "/embed", "/v2/models/m/infer"


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
    return json.loads(error_body(path, error, "id"))


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
