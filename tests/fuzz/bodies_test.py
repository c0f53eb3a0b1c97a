"""Bodies that are nearly right, on every route that takes one: each gets a documented answer, and none is a 500."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from tests.support.clients import HttpConnection, get
from tests.support.fuzzing import each, nearly, sizes

if TYPE_CHECKING:
    from tests.support.server import Server


@sizes(20_000)
def test_bodies(target: Server, examples: int) -> None:
    """Every reply has a status that the document lists, and an error never repeats the body."""
    routes = _routes(target)
    assert len(routes) > 20
    seen: dict[int, int] = {}
    with HttpConnection(target.http) as connection:

        def check(case: tuple[str, bytes]) -> None:
            path, body = case
            reply = connection.call("POST", path, body, {"Content-Type": "application/json"})
            assert reply.status in routes[path][1], (reply.status, reply.body)
            assert reply.status < 500, reply.body
            json.loads(reply.body)
            seen[reply.status] = seen.get(reply.status, 0) + 1

        cases = st.sampled_from(sorted(routes)).flatmap(lambda path: st.tuples(st.just(path), nearly(routes[path][0])))
        each(cases, examples, check)
    assert {200, 400, 422} <= seen.keys(), "the bodies are too wrong, or not wrong enough, to prove anything"


def _routes(server: Server) -> dict[str, tuple[Any, set[int]]]:
    """Each documented path that takes a body: its example, and the statuses that it may answer."""
    routes = {}
    for path, methods in get(server.http, "/openapi.json").json()["paths"].items():
        if "requestBody" not in methods.get("post", {}):
            continue
        operation = methods["post"]
        parts = [parameter for parameter in operation["parameters"] if parameter.get("in") == "path"]
        named = {parameter["name"]: parameter["schema"]["enum"] for parameter in parts}
        example = operation["requestBody"]["content"]["application/json"]["example"]
        for model in named.get("model", [""]):
            real = path.replace("{model}", model).replace("{version}", "1")
            routes[real] = (example, {int(status) for status in operation["responses"]})
    return routes
