"""Requests that schemathesis makes of the OpenAPI document: what it allows, and what it does not."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import pytest
import requests

from tests.support.fuzzing import each, sizes

if TYPE_CHECKING:
    from tests.support.server import Server

MODES = ("positive", "negative")
TIMEOUT = "x-request-timeout-ms"


@sizes(5000)
@pytest.mark.parametrize("mode", MODES)
def test_every_documented_route(target: Server, mode: str, examples: int) -> None:
    """Each reply's status, content type and body are those that the document promises, and no reply is a 500."""
    # Slow to import, and for this test alone.
    schemathesis: Any = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    from schemathesis.generation import GenerationMode  # noqa: PLC0415
    from schemathesis.specs.openapi.checks import (  # noqa: PLC0415
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    checks = [
        schemathesis.checks.not_a_server_error,
        status_code_conformance,
        content_type_conformance,
        response_schema_conformance,
    ]
    schema = schemathesis.openapi.from_url(f"http://{target.http}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) > 40
    kind = GenerationMode(mode)
    answered = 0
    with requests.Session() as session:
        for operation in operations:
            if mode == "negative" and "{" not in operation.path and "requestBody" not in operation.definition.raw:
                continue  # there is nothing in it that could be wrong

            def check(case: Any) -> None:
                nonlocal answered
                reply = case.call(session=session, timeout=60)
                answered += reply.status_code == 200
                # A deadline of a millisecond may pass; the document has that status too.
                late = reply.status_code == HTTPStatus.GATEWAY_TIMEOUT and TIMEOUT in {*map(str.lower, case.headers)}
                case.validate_response(reply, checks=checks[1:] if late else checks)

            each(operation.as_strategy(generation_mode=kind), max(2, examples // len(MODES) // len(operations)), check)
    if mode == "positive":
        assert answered > len(operations) // 2
