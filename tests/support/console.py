"""The console in a browser, as its user works with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.support.clients import post_json

if TYPE_CHECKING:
    from tests.support.browser import Page
    from tests.support.server import Server

TEXT = "the server is in a text and it is not a server"
QUESTION, PASSAGE = "is it the server", "\U0001f600 it is a text of the server \U0001f600 and the server is with it"
DASH, MINUS = "\u2013", "\u2212"


def visit(page: Page, server: Server, where: str = "") -> Page:
    page.open(f"http://{server.http}/{where}")
    page.wait("!document.getElementById('main').hidden", "the form")
    return page


def answered(page: Page) -> None:
    page.wait("document.querySelector('#answer:not([hidden]) :is(#timing table, .refusal)')", "an answer")


def ask(page: Page, model: str, **values: str) -> None:
    page.fill("#model", model)
    page.run("document.getElementById('answer').hidden = true")
    for field, value in values.items():
        page.fill(f"#{field}", value)
    page.click("#run")
    answered(page)


def cells(page: Page, selector: str) -> list[list[str]]:
    rows: list[list[str]] = page.run(
        f"[...document.querySelectorAll('{selector} tbody tr')]"
        ".map((row) => [...row.cells].map((cell) => cell.innerText.trim()))"
    )
    return rows


def reply(server: Server, path: str, message: dict[str, Any]) -> Any:
    return post_json(server.http, path, message).json()
