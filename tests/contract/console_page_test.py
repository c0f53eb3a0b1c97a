"""The console's page itself: its files, how it looks, and who can use it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pytest

from serving.http.apis.console_page import ASSETS
from tests.support.clients import get, http_call
from tests.support.console import PASSAGE, TEXT, answered, ask, visit
from tests.support.tasks import TASKS

if TYPE_CHECKING:
    from tests.support.browser import Page
    from tests.support.server import Server

WEB = Path(__file__).parents[2] / "serving" / "web"
PHONE = 360
CONTROLS = {"button", "textbox", "combobox", "link", "spinbutton", "checkbox", "image", "region", "table", "form"}
CONTRAST = 4.5
TARGET_PX = 24


def test_the_keyboard_is_enough(tasks_server: Server, page: Page) -> None:
    """A request is sent from within its text, and all that can be used is reached with Tab, in order."""
    visit(page, tasks_server).fill("#model", "answer")
    page.run("document.querySelector('#question').focus()")
    page.press("Enter", 13, control=True)
    answered(page)
    page.run("document.querySelector('nav a').focus()")
    reached = []
    for _ in range(40):
        page.press("Tab", 9)
        reached.append(page.run("document.activeElement.id || document.activeElement.innerText || ''").strip())
    wanted = ["model", "question", "passage", "run", "copy"]
    assert [name for name in dict.fromkeys(reached) if name in wanted] == wanted


@pytest.mark.sampled(2)
@pytest.mark.parametrize("task", TASKS)
def test_everything_has_a_name(tasks_server: Server, page: Page, task: str) -> None:
    """Whoever cannot see the page is told what each control, picture and table is."""
    visit(page, tasks_server).fill("#model", task)
    page.click("#examples button")
    answered(page)
    names = [(role, name) for role, name in page.names() if role in CONTROLS]
    assert len(names) > 10
    assert [role for role, name in names if not name.strip() and role != "form"] == []


_SEEN = """
(() => {
  const channels = (color) => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d");
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (color) => {
    const linear = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = channels(color).map((value) => linear(value / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (let place = element; place; place = place.parentElement) {
      const color = getComputedStyle(place).backgroundColor;
      if (channels(color)[3] === 255) return color;
    }
    return "white";
  };
  const low = [];
  for (const element of document.querySelectorAll("body *")) {
    const written = [...element.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!written || !element.checkVisibility()) continue;
    const [one, other] = [light(getComputedStyle(element).color), light(ground(element))];
    const contrast = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    if (contrast < %s) low.push([element.outerHTML.slice(0, 120), contrast]);
  }
  return { low, page: light(getComputedStyle(document.body).backgroundColor) };
})()
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_all_text_can_be_read(tasks_server: Server, page: Page, dark: bool) -> None:  # noqa: FBT001  a parameter of pytest
    """Its contrast is that of WCAG 2.2 AA, in both schemes, also on the hottest cells of a heat map."""
    page.look(dark=dark)
    visit(page, tasks_server)
    for model, fields in (
        ("embed", {"texts": f"{TEXT}\n{TEXT} it\nno"}),
        ("tag", {"text": PASSAGE}),
        ("fill_mask", {"text": "the [MASK]"}),
        ("fill_mask", {"text": "no mask"}),
    ):
        ask(page, model, **fields)
        found = page.run(_SEEN % CONTRAST)
        assert found["low"] == []
        assert (found["page"] < 0.1) is dark


@pytest.mark.sampled(2)
@pytest.mark.parametrize("task", TASKS)
def test_a_phone_shows_all_of_it(tasks_server: Server, page: Page, task: str) -> None:
    """At 360 pixels nothing lies outside, and what is touched is large enough to be hit."""
    page.look(width=PHONE, height=740)
    visit(page, tasks_server).fill("#model", task)
    page.click("#examples button")
    answered(page)
    assert page.run("document.documentElement.scrollWidth") <= PHONE
    small = page.run(
        "[...document.querySelectorAll('button, select, input, textarea, summary')]"
        ".filter((one) => one.checkVisibility())"
        f".filter((one) => one.getBoundingClientRect().height < {TARGET_PX - 0.5}).map((one) => one.outerHTML)"
    )
    assert small == []


def test_a_phone_shows_where_the_time_went(tasks_server: Server, page: Page) -> None:
    """Each stage with its time, and bars that are long enough to be compared, side by side with neither."""
    page.look(width=PHONE, height=740)
    ask(visit(page, tasks_server), "tag", text=TEXT)
    boxes = page.run(
        "[...document.querySelectorAll('.timing tbody tr')].map((row) => [...row.querySelectorAll('th, td:nth-child(2),"
        " .bar')].map((one) => one.getBoundingClientRect()).map(({ left, right }) => [left, right]))"
    )
    assert len(boxes) == 5
    for name, spent, *bar in boxes:
        assert 0 <= name[0] < name[1] <= spent[0] < spent[1] <= PHONE
        assert all(spent[1] <= left and right - left > 100 and right <= PHONE for left, right in bar)


def test_nothing_moves_where_that_is_not_wanted(tasks_server: Server, page: Page) -> None:
    """Bars grow for those who do not mind, and are there at once for those who do."""
    moving = (
        "[...document.querySelectorAll('*')].map((one) => getComputedStyle(one))"
        ".filter((style) => style.transitionDuration !== '0s' || style.animationName !== 'none').length"
    )
    ask(visit(page, tasks_server), "classify", text=TEXT)
    assert page.run(moving) > 0
    page.look(reduced=True)
    assert page.run(moving) == 0


def test_the_address_remembers_the_model(tasks_server: Server, page: Page) -> None:
    """A link leads to the same model; what was typed for one is there when it is chosen again."""
    visit(page, tasks_server, "#model=tag")
    assert page.run("document.getElementById('model').value") == "tag"
    page.fill("#text", "typed")
    page.fill("#model", "embed")
    assert page.run("location.hash") == "#model=embed"
    page.fill("#model", "tag")
    assert page.run("document.getElementById('text').value") == "typed"


def test_an_address_of_no_model_says_so(tasks_server: Server, page: Page) -> None:
    """With those that there are, each a link; the address stays until one is chosen."""
    visit(page, tasks_server, "#model=<b>nope")
    shown = page.run("document.getElementById('model').value")
    names = page.run("[...document.getElementById('model').options].map((option) => option.value)")
    assert set(names) == set(TASKS)
    assert page.text("#unserved") == f"Unknown model “<b>nope”. Available: {', '.join(names)}."
    assert unquote(page.run("location.hash")) == "#model=<b>nope"
    page.click("#unserved a:last-of-type")
    page.wait(f"document.getElementById('model').value === {json.dumps(names[-1])}", "the model of the link")
    assert shown != names[-1]
    assert page.text("#unserved") == ""
    # What is typed is not lost by an address that leads nowhere.
    field = page.run("document.querySelector('#fields textarea').id")
    page.fill(f"#{field}", "typed")
    page.run("location.hash = '#model=other'")
    page.wait("document.getElementById('unserved').textContent.startsWith('Unknown model “other”')", "the sentence")
    assert page.run("document.getElementById('model').value") == names[-1]
    assert page.run(f"document.getElementById('{field}').value") == "typed"
    page.fill("#model", "tag")
    assert (page.text("#unserved"), page.run("location.hash")) == ("", "#model=tag")


@pytest.mark.parametrize("name", ["", *ASSETS])
def test_static_files(fake_server: Server, name: str) -> None:
    """Each with its type and a policy that lets nothing in from elsewhere; unchanged, it is not sent again."""
    path = f"/console/{name}" if name else "/"
    whole = get(fake_server.http, path)
    assert whole.status == 200
    assert whole.body == (WEB / (name or "index.html")).read_bytes()
    kinds = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8", "svg": "image/svg+xml"}
    assert whole.headers["content-type"] == kinds.get(name.rpartition(".")[2], "text/html; charset=utf-8")
    rules = dict(rule.strip().partition(" ")[::2] for rule in whole.headers["content-security-policy"].split(";"))
    assert rules["default-src"] == "'none'"
    assert {rules[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}
    assert {rules[rule] for rule in ("base-uri", "form-action", "frame-ancestors")} == {"'none'"}
    assert whole.headers["x-content-type-options"] == "nosniff"
    assert whole.headers["cache-control"] == "no-cache"
    for given in (whole.headers["etag"], f'"other", W/{whole.headers["etag"]}'):
        unchanged = http_call(fake_server.http, "GET", path, headers={"If-None-Match": given})
        assert (unchanged.status, unchanged.body) == (304, b"")
        assert int(unchanged.headers["content-length"]) == len(whole.body)
    assert http_call(fake_server.http, "GET", path, headers={"If-None-Match": '"other"'}).status == 200
    assert http_call(fake_server.http, "HEAD", path).body == b""


def test_no_other_file_is_served(fake_server: Server) -> None:
    """Only the names that are listed, which are all that there are; and not on the port of the probes."""
    assert {"index.html", *ASSETS} == {file.name for file in WEB.iterdir()}
    for path in ("/console/", "/console", "/console/index.html", "/console/../cli.py", "/console/%2e%2e/cli.py"):
        assert get(fake_server.http, path).status == 404, path
    assert get(fake_server.metrics, "/").status == 404
    assert get(fake_server.metrics, "/console/api.js").status == 404
    assert http_call(fake_server.http, "POST", "/console/api.js").status == 405
