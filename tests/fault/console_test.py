"""The console while its server is overloaded, away, or wants a key; and while nobody looks."""

from __future__ import annotations

import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.clients import post_json
from tests.support.console import TEXT, answered, visit
from tests.support.credentials import FIRST, SECOND, WRONG, write_keys
from tests.support.engines import engine_of
from tests.support.server import ONE_AT_A_TIME, Server, free_port
from tests.support.stopping import stop

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.browser import Page


def test_an_overloaded_server(models: Path, page: Page) -> None:
    """What waits is shown, a refusal says when to come back, and the page goes on."""
    slow = ("--fake-ms", "100", "--default-timeout-ms", "60000")
    body = json.dumps({"inputs": "a text of nine words is eleven tokens long"}).encode()
    with Server(models, *ONE_AT_A_TIME, *slow) as server, ThreadPoolExecutor(40) as pool:
        visit(page, server)
        asked = [pool.submit(post_json, server.http, "/embed", body) for _ in range(40)]
        page.wait("/^\\d+, \\d+ tokens$/.test(document.querySelector('[data-of=waiting]').textContent)", "a queue")
        page.fill("#deadline", "1500")
        page.click("#run")
        answered(page)
        assert page.text(".refusal").startswith("429 Too Many Requests")
        assert re.search(r"try again in [\d.]+ m?s", page.text(".refusal"))
        assert {one.result().status for one in asked} == {200}
        page.wait("document.querySelector('[data-of=waiting]').textContent === '0'", "the end of the queue")
        page.wait("document.querySelector('#since').textContent.includes('overloaded')", "the count of refusals")


def test_a_server_that_ends_and_comes_back(models: Path, page: Page) -> None:
    """Meanwhile the page says so and keeps what was typed; then it goes on by itself."""
    ports = ("--engine", "fake", "--http-port", str(free_port()))
    with Server(models, *ports) as server:
        visit(page, server).fill("#texts", TEXT)
    page.wait("document.querySelector('#state-name').textContent === 'not reachable'", "the end")
    assert "cannot be reached" in page.text("#state-more")
    page.click("#run")
    answered(page)
    assert page.text(".refusal").split() == ["No", "reply", "The", "server", "cannot", "be", "reached."]
    with Server(models, *ports):
        page.click("#again")
        page.wait("document.querySelector('#state-name').textContent === 'ready'", "the new server")
        page.click("#run")
        page.wait("document.querySelector('.profile')", "an answer")
        assert page.run("document.querySelector('#texts').value") == TEXT


HELD_CLOCK = """
window.timers = new Map();
window.setTimeout = (work, ms) => {
  const name = {};
  timers.set(name, { work, ms });
  return name;
};
window.clearTimeout = (name) => timers.delete(name);
"""
"""Timers wait until a test lets them ring."""

_POLLS = "[...timers].filter(([, { ms }]) => ms !== 400)"


def next_poll_ms(page: Page) -> float:
    """When the page, which waits for nothing else now, will ask for the status again."""
    page.wait(f"{_POLLS}.length === 1 && {_POLLS}[0][1].ms !== 5000", "a timer")
    return float(page.run(f"{_POLLS}[0][1].ms"))


def ring(page: Page) -> None:
    page.run(f"(() => {{ const [name, {{ work }}] = {_POLLS}[0]; timers.delete(name); work(); }})()")


def test_an_unreachable_server_is_asked_less_and_less(fake_server: Server, page: Page) -> None:
    """Twice as late each time, up to half a minute; at the first reply every two seconds again."""
    page.call("Page.addScriptToEvaluateOnNewDocument", source=HELD_CLOCK)
    visit(page, fake_server)
    assert next_poll_ms(page) == 2000
    page.offline(True)
    waits = []
    for _ in range(6):
        ring(page)
        waits.append(next_poll_ms(page) / 1000)
    assert waits == pytest.approx([2, 4, 8, 16, 30, 30], rel=0.11)
    assert page.text("#state-name") == "not reachable"
    page.offline(False)
    ring(page)
    assert next_poll_ms(page) == 2000
    assert page.text("#state-name") == "ready"


def test_a_hidden_tab_asks_nothing(fake_server: Server, page: Page) -> None:
    page.call("Page.addScriptToEvaluateOnNewDocument", source=HELD_CLOCK)
    visit(page, fake_server)
    next_poll_ms(page)
    see = "Object.defineProperty(document, 'hidden', {{ value: {}, configurable: true }});"
    tell = "document.dispatchEvent(new Event('visibilitychange'))"
    page.run(see.format("true") + tell)
    assert page.run(f"{_POLLS}.length") == 0
    before = len(page.requests)
    page.run(see.format("false") + tell)
    assert next_poll_ms(page) == 2000
    assert len(page.requests) == before + 1


def test_a_key_is_asked_for(serve: Callable[..., Server], page: Page, tmp_path: Path) -> None:
    """Once a reply is 401; it is kept for the tab and sent with everything, and another one can be given."""
    file = write_keys(tmp_path / "keys", FIRST)
    server = serve("--engine", "fake", "--precision", "fp32", "--api-keys-file", str(file))
    seen: list[tuple[str, str | None]] = []

    def note(event: dict[str, Any]) -> None:
        request = event["request"]
        seen.append((request["url"].rpartition("/")[2], request["headers"].get("Authorization")))

    page.on["Network.requestWillBeSent"] = note
    page.open(f"http://{server.http}/")
    page.wait("!document.getElementById('key-form').hidden", "the question")
    assert page.text("#key-message") == "The server says: missing API key; send `Authorization: Bearer KEY`"
    assert page.text("#state") == "key required"
    assert page.run("document.getElementById('main').hidden && document.activeElement.id === 'key'")
    give_key(page, WRONG)
    page.wait("document.querySelector('#state-name').textContent === 'invalid key'", "a refusal")
    give_key(page, FIRST)
    page.wait("document.getElementById('key-form').hidden && !document.getElementById('main').hidden", "the page")
    assert page.run("[...document.querySelectorAll('a.docs')].every((link) => link.hidden)")
    page.click("#run")
    answered(page)
    assert page.run("document.querySelector('.refusal')") is None
    assert next(given for path, given in seen if path == "status") is None
    assert ("embed", f"Bearer {FIRST}") in seen
    assert page.run("[localStorage.length, document.cookie, Object.keys(sessionStorage)]") == [0, "", ["bertserve-key"]]
    assert FIRST not in page.text("body")
    command = page.run("document.querySelector('#curl pre').textContent")
    assert '-H "Authorization: Bearer $BERTSERVE_KEY"' in command
    # The key is taken back while the page is open: the page asks for another.
    write_keys(file, SECOND)
    page.wait("!document.getElementById('key-form').hidden", "the question after the change of keys")
    give_key(page, SECOND)
    page.wait("document.getElementById('key-form').hidden && !document.getElementById('main').hidden", "the page")
    page.click("#forget")
    page.wait("!document.getElementById('key-form').hidden", "the question again")
    assert page.run("sessionStorage.length") == 0
    assert page.run("document.getElementById('main').hidden")


def give_key(page: Page, key: str) -> None:
    page.fill("#key", key)
    page.click("#key-form button")


def test_a_slow_request_can_be_cancelled(models: Path, page: Page) -> None:
    """After a moment the page says that it waits; cancelled, nobody waits for an answer any more."""
    with Server(models, "--engine", "fake", "--default-timeout-ms", "60000", "--engine-hang-s", "600") as server:
        visit(page, server).fill("#texts", TEXT)
        engine = engine_of(server)
        stop(engine)
        page.click("#run")
        page.wait("!document.getElementById('cancel').hidden", "the wait")
        assert page.text("#outcome").startswith("Waiting for the answer")
        page.click("#cancel")
        page.wait("document.getElementById('outcome').innerText === 'Cancelled.'", "the end")
        assert page.run("document.getElementById('cancel').hidden && document.getElementById('answer').hidden")
        page.wait("document.querySelector('#since').textContent.includes('client_gone')", "its count")
        os.kill(engine, signal.SIGCONT)
        page.click("#run")
        page.wait("document.querySelector('.profile')", "an answer")
