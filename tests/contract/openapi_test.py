"""The OpenAPI document says what the server does: its examples are asked and compared, its sentences are there."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from jsonschema import Draft202012Validator

from tests.support.browser import fits_a_phone
from tests.support.clients import get, http_call

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.browser import Page
    from tests.support.server import Server

JSON = "application/json"
COUNTED = "errors"
"""An object whose names come with what has happened."""


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def example_of(operation: dict[str, Any], path: str) -> tuple[str, dict[str, str], bytes | None]:
    """Path, headers and body of the request that the document shows."""
    headers = {}
    for parameter in operation["parameters"]:
        if parameter["in"] == "path":
            path = path.replace(f"{{{parameter['name']}}}", parameter["schema"]["enum"][0])
        elif "examples" in parameter["schema"]:
            headers[parameter["name"]] = parameter["schema"]["examples"][0]
    if "requestBody" not in operation:
        return path, headers, None
    return (
        path,
        {**headers, "Content-Type": JSON},
        json.dumps(operation["requestBody"]["content"][JSON]["example"]).encode(),
    )


def alike(example: Any, reply: Any, at: str = "") -> list[str]:
    """Where two replies are of different shapes: other names, other types, or lists of other things."""
    if example is None or reply is None:
        return []
    if isinstance(example, dict) and isinstance(reply, dict):
        if at.endswith(COUNTED):
            return []
        differing = [f"{at}.{name}" for name in example.keys() ^ reply.keys()]
        return differing + [
            found
            for name in example.keys() & reply.keys()
            for found in alike(example[name], reply[name], f"{at}.{name}")
        ]
    if isinstance(example, list) and isinstance(reply, list):
        return alike(example[0], reply[0], f"{at}[]") if example and reply else []
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (example, reply))
    return [] if numbers or type(example) is type(reply) else [f"{at}: {example!r} and {reply!r}"]


@pytest.fixture
def document(tasks_server: Server) -> Any:
    return get(tasks_server.http, "/openapi.json").json()


def test_every_example_is_what_the_server_does(tasks_server: Server, document: dict[str, Any]) -> None:
    """Its request gets 200 and a reply of the example's shape, and both satisfy their schemas."""
    compared = []
    for method, path, operation in operations(document):
        target, headers, body = example_of(operation, path)
        reply = http_call(tasks_server.http, method, target, body, headers)
        assert reply.status == 200, (path, reply.body)
        for name in operation["responses"]["200"]["headers"].keys() - {
            "Inference-Header-Content-Length",
            "Content-Encoding",
            "X-Cache",
            "X-Ignored-Fields",
        }:
            assert name.lower() in reply.headers, (path, name)
        content = operation["responses"]["200"].get("content", {}).get(JSON)
        if content is None:
            continue
        schema = {**content["schema"], "components": document["components"]}
        for value in (content["example"], reply.json()):
            Draft202012Validator(schema).validate(value)
        assert alike(content["example"], reply.json()) == [], path
        compared.append(path)
    assert len(compared) > 40


def test_every_error_says_when_it_comes(document: dict[str, Any]) -> None:
    """In a sentence for each status, which names what the route has and nothing else."""
    for _, path, operation in operations(document):
        for status, response in operation["responses"].items():
            assert response["description"].endswith("."), (path, status)
            assert len(response["description"].split()) > 3 or status == "200", (path, status)
        answered = operation["responses"].keys()
        assert ("404" in answered) >= ("{model}" in path), path
        assert not {"422", "429", "504"} & answered or "requestBody" in operation, path
    embed = document["paths"]["/embed"]["post"]["responses"]
    assert "4,194,304 bytes" in embed["413"]["description"]
    assert embed["424"]["description"] == "The model is for another task."


def test_the_page_fits_a_phone_and_leads_back_to_the_console(tasks_server: Server, page: Page) -> None:
    """With a route opened, whose tables are wide; the way back stands above all that Swagger draws."""
    page.open(f"http://{tasks_server.http}/docs")
    page.wait("document.querySelectorAll('.opblock').length > 30", "the routes")
    page.click(".opblock-summary-control")
    page.wait("document.querySelector('.responses-table')", "the route")
    fits_a_phone(page)
    color = page.run("getComputedStyle(document.querySelector('.header-col')).color")
    assert max(map(int, re.findall(r"\d+", color)[:3])) > 128, "Swagger's own is dark on dark"
    page.look()
    page.click("body > p a")
    page.wait("location.pathname === '/' && !document.getElementById('main')?.hidden", "the console")


def test_the_page_lists_an_endpoint_once(
    tasks_server: Server, fake_server: Server, document: dict[str, Any], page: Page
) -> None:
    """With a model's name in its path where several answer; its other paths are told below it. Schemas are folded."""
    for server, tokenizing in ((fake_server, "/tokenize"), (tasks_server, "/models/{model}/tokenize")):
        page.open(f"http://{server.http}/docs")
        page.wait("document.querySelector('.opblock')", "the routes")
        paths = page.run("[...document.querySelectorAll('.opblock-summary-path')].map((path) => path.dataset.path)")
        assert {"/embed", tokenizing, "/health", "/v1/embeddings", "/v2/models/{model}/infer"} <= set(paths)
        assert [path.removeprefix("/models/{model}") for path in paths].count("/tokenize") == 1
        assert not {"/ping", "/embeddings", "/models/{model}/embed"} & set(paths)
        assert page.text("section.models") == "Schemas"
    assert sorted(paths) == sorted(path for _, path, each in operations(document) if "x-alias-of" not in each)
    for method, _, alias in operations(document):
        if "x-alias-of" in alias:
            main = document["paths"][alias["x-alias-of"]][method.lower()]
            assert "x-alias-of" not in main
            assert alias["summary"] in main["description"]


def test_trying_a_route_sends_no_header_unasked(tasks_server: Server, page: Page) -> None:
    """Neither a deadline nor a priority."""
    sent: list[dict[str, str]] = []
    page.on["Network.requestWillBeSent"] = lambda event: sent.append(event["request"]["headers"])
    page.open(f"http://{tasks_server.http}/docs")
    page.wait("document.querySelector('#operations-TEI-post_embed')", "the routes")
    page.click("#operations-TEI-post_embed .opblock-summary-control")
    page.wait("document.querySelector('.try-out__btn')", "the route")
    page.click(".try-out__btn")
    page.wait("document.querySelector('button.execute')", "the form")
    assert (
        page.run("[...document.querySelectorAll('.parameters input, .parameters select')].map((one) => one.value)")
        == [""] * 4
    )
    page.click("button.execute")
    page.wait(
        "document.querySelector('.live-responses-table tbody .response-col_status')?.innerText.includes('200')",
        "a reply",
    )
    assert not {"x-request-timeout-ms", "x-request-priority"} & {name.lower() for name in sent[-1]}
