"""Bodies that are nearly right, on every route that takes one: each gets a documented answer, and none is a 500."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from bertserve.loadtest.benchmarks.processes import resident_bytes
from tests.support.clients import HttpConnection, get
from tests.support.fuzzing import each, nearly, parts

if TYPE_CHECKING:
    from tests.support.server import Server

_NAMED = re.compile(r"(?:[A-Za-z0-9_.-]{1,64}(?:, (?=.))?){0,8}(?:\+[0-9]+)?")
_GROWTH_BYTES = 8 << 20
"""What the allocator and caches of the libraries take after their first hundreds of requests, with room to spare."""


@parts(1000, 5000, 200_000)
def test_bodies(target: Server, seed: int, examples: int) -> None:
    """Each reply has a status of the document, an error repeats no body, memory stays, and the log has no error."""
    routes = _routes(target)
    assert len(routes) > 20
    seen: dict[int, int] = {}
    log_before, memory = len(target.log), 0
    named = asked = 0
    with HttpConnection(target.http) as connection:

        def check(case: tuple[str, bytes]) -> None:
            nonlocal named, asked, memory
            path, body = case
            reply = connection.call("POST", path, body, {"Content-Type": "application/json"})
            assert reply.status in routes[path][1], (reply.status, reply.body)
            assert reply.status < 500, reply.body
            json.loads(reply.body)
            seen[reply.status] = seen.get(reply.status, 0) + 1
            if (ignored := reply.headers.get("x-ignored-fields")) is not None:
                assert reply.status == 200
                assert _NAMED.fullmatch(ignored), ignored
                named += 1
            asked += 1
            if asked == examples // 2:
                memory = resident_bytes(target.pid)

        cases = st.sampled_from(sorted(routes)).flatmap(lambda path: st.tuples(st.just(path), nearly(routes[path][0])))
        each(cases, examples, check, seed)
    assert {200, 400, 422} <= seen.keys(), "the bodies are too wrong, or not wrong enough, to prove anything"
    assert named > examples // 100, "hardly any has a field that nobody reads"
    assert resident_bytes(target.pid) - memory < _GROWTH_BYTES
    assert not re.findall(r"^\S+ (?:ERROR|CRITICAL) .*", target.log[log_before:], re.MULTILINE)


def _routes(server: Server) -> dict[str, tuple[Any, set[int]]]:
    """Each documented path that takes a body: its example, and the statuses that it may answer."""
    routes = {}
    for path, methods in get(server.http, "/openapi.json").json()["paths"].items():
        if "requestBody" not in methods.get("post", {}):
            continue
        operation = methods["post"]
        places = [parameter for parameter in operation["parameters"] if parameter.get("in") == "path"]
        named = {parameter["name"]: parameter["schema"]["enum"] for parameter in places}
        example = operation["requestBody"]["content"]["application/json"]["example"]
        for model in named.get("model", [""]):
            real = path.replace("{model}", model).replace("{version}", "1")
            routes[real] = (example, {int(status) for status in operation["responses"]})
    return routes
