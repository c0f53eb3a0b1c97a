"""The console at `/` as a browser shows it: every task, the live figures, errors, its files, and who can use it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

import numpy as np
import pytest

from bertserve.serving.http.apis.console_page import ASSETS
from tests.support.browser import PageError
from tests.support.clients import Tei, get, http_call, post_json
from tests.support.console import DASH, MINUS, PASSAGE, QUESTION, TEXT, answered, ask, cells, reply, visit
from tests.support.server import Server, measured
from tests.support.tasks import HIDDEN_SIZE, LABELS, TASKS, tiny_model, write_bundle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.browser import Page


MARKUP = '<img src="x" onerror="window.hit = 1"><script>window.hit = 1</script> & <b>it</b>'
DOCUMENTS = ["a text", "it is the server", "not of the text"]


def percent(share: float) -> str:
    return f"{share * 100:.1f}%"


def test_labels_are_bars(tasks_server: Server, page: Page) -> None:
    """Each class with its score, best first."""
    ask(visit(page, tasks_server), "classify", text=TEXT)
    (classes,) = reply(tasks_server, "/classify", {"inputs": TEXT})
    assert cells(page, "#drawing") == [[entry["label"], percent(entry["score"])] for entry in classes]
    widths = page.run("[...document.querySelectorAll('#drawing .bar span')].map((bar) => bar.style.width)")
    assert [float(width.rstrip("%")) for width in widths] == pytest.approx(
        [100 * entry["score"] for entry in classes], abs=0.001
    )
    assert page.text(".summary") == f"{classes[0]['label']}, {percent(classes[0]['score'])}"


def test_texts_are_compared_in_a_heat_map(tasks_server: Server, page: Page) -> None:
    """Every pair's cosine, in a cell as strong as it is similar."""
    ask(visit(page, tasks_server), "embed", texts=f"{TEXT}\n\n{PASSAGE}\n it is ")
    texts = [TEXT, PASSAGE, "it is"]
    vectors = np.array(reply(tasks_server, "/embed", {"inputs": texts}))
    shown = cells(page, ".heat")
    assert [row[0].split("\n")[-1] for row in shown] == texts
    found = [[float(value.replace(MINUS, "-")) for value in row[1:]] for row in shown]
    assert np.allclose(found, vectors @ vectors.T, atol=0.0051)
    heat = page.run(
        "[...document.querySelectorAll('.heat .cell')].map((cell) => Number(cell.style.getPropertyValue('--heat')))"
    )
    assert np.reshape(heat, (3, 3))[0, 1] == pytest.approx(max(0, vectors[0] @ vectors[1]), abs=1e-5)


def test_one_text_is_a_profile(tasks_server: Server, page: Page) -> None:
    """A bar for each component, and the vector's figures in words."""
    ask(visit(page, tasks_server), "embed", texts=TEXT)
    ((*vector,),) = reply(tasks_server, "/embed", {"inputs": TEXT})
    assert page.run("document.querySelector('.profile path').getAttribute('d').split('z').length - 1") == HIDDEN_SIZE
    facts = dict(cells(page, ".facts"))
    assert facts["Components"] == str(HIDDEN_SIZE)
    assert facts["Length"] == "1.0000"
    assert facts["Largest"] == f"{max(vector):.4f}"


def test_tokens_are_compared_in_a_heat_map(tasks_server: Server, page: Page) -> None:
    """A vector for each, and every pair's cosine."""
    ask(visit(page, tasks_server), "embed_tokens", text=TEXT)
    (found,) = reply(tasks_server, "/embed_all", {"inputs": TEXT})
    unit = np.array(found) / np.linalg.norm(found, axis=1, keepdims=True)
    assert page.text(".summary") == f"{len(found)} vectors"
    shown = [[float(value.replace(MINUS, "-")) for value in row[1:]] for row in cells(page, ".heat")]
    assert np.allclose(shown, unit @ unit.T, atol=0.0051)


def test_a_query_and_a_text_are_compared_by_maxsim(tasks_server: Server, page: Page) -> None:
    """Every product of their vectors, and the sum of the largest of each vector of the query."""
    ask(visit(page, tasks_server), "embed_tokens", text=TEXT, query=QUESTION)
    (query,) = reply(tasks_server, "/embed_all", {"inputs": QUESTION, "input_type": "query"})
    (found,) = reply(tasks_server, "/embed_all", {"inputs": TEXT})
    products = np.array(query) @ np.array(found).T
    score = products.max(axis=1).sum()
    assert page.text(".summary").replace(MINUS, "-") == (
        f"MaxSim {score:.3f} of {len(query)} query vectors and {len(found)} text vectors"
    )
    shown = [[float(value.replace(MINUS, "-")) for value in row[1:]] for row in cells(page, ".heat")]
    assert np.allclose(shown, np.column_stack([products.max(axis=1), products]), atol=0.0051)


def test_weights_are_bars(tasks_server: Server, page: Page) -> None:
    """The heaviest tokens of a sparse vector, each as long as its share of the heaviest."""
    ask(visit(page, tasks_server), "embed_sparse", text=TEXT)
    (found,) = reply(tasks_server, "/embed_sparse", {"inputs": TEXT, "tokens": True})
    heaviest = sorted(found, key=lambda one: -one["value"])[:24]
    assert [[row[0], row[2]] for row in cells(page, "#drawing")] == [
        [one["token"], str(one["index"])] for one in heaviest
    ]
    assert [row[1] for row in cells(page, "#drawing")] == [f"{one['value']:.3f}" for one in heaviest]
    widths = page.run("[...document.querySelectorAll('#drawing .bar span')].map((bar) => bar.style.width)")
    assert [float(width.rstrip("%")) for width in widths] == pytest.approx(
        [100 * one["value"] / heaviest[0]["value"] for one in heaviest], abs=0.001
    )
    most = heaviest[0]
    assert page.text(".summary") == (
        f"{len(found)} tokens with a weight, the heaviest {most['token']}, {most['value']:.3f}"
    )


def test_entities_are_marked_in_their_text(tasks_server: Server, page: Page) -> None:
    """At the characters that the server names, each with its type; the text itself is unchanged."""
    ask(visit(page, tasks_server), "tag", text=PASSAGE)
    entities = reply(tasks_server, "/tag", {"inputs": PASSAGE})
    assert entities
    marks = page.run("[...document.querySelectorAll('.text mark')].map((mark) => mark.firstChild.data)")
    assert marks == [entity["word"] for entity in entities]
    assert page.run("[...document.querySelectorAll('.text .label')].map((label) => label.textContent)") == [
        entity["entity_group"] for entity in entities
    ]
    page.run("document.querySelectorAll('.text .label').forEach((label) => label.remove())")
    assert page.run("document.querySelector('.text').textContent") == PASSAGE


def test_an_answer_is_marked_in_its_passage(tasks_server: Server, page: Page) -> None:
    """Characters count as the server counts them, also behind those that JavaScript counts twice."""
    ask(visit(page, tasks_server), "answer", question=QUESTION, passage=PASSAGE)
    message = {"inputs": {"question": QUESTION, "context": PASSAGE}, "parameters": {"top_k": 3}}
    spans = reply(tasks_server, "/answer", message)
    assert page.run("document.querySelector('.text mark').firstChild.data") == spans[0]["answer"]
    assert page.run("document.querySelector('.text').textContent") == PASSAGE
    shown = cells(page, "#drawing")
    assert [[row[0], row[2]] for row in shown][:2] == [
        [span["answer"], f"{span['start']}{DASH}{span['end']}"] for span in spans[:2]
    ]


def test_documents_are_ranked(tasks_server: Server, page: Page) -> None:
    """By score, each with the line that it came from."""
    ask(visit(page, tasks_server), "rerank", query=QUESTION, documents="\n".join(DOCUMENTS))
    ranks = reply(tasks_server, "/rerank", {"query": QUESTION, "texts": DOCUMENTS})
    assert cells(page, "#drawing") == [
        [DOCUMENTS[rank["index"]], percent(rank["score"]), str(rank["index"] + 1)] for rank in ranks
    ]


def test_words_are_put_in_place_of_masks(tasks_server: Server, page: Page) -> None:
    """The best of each mask at first; the others can be tried by a click."""
    text = "the [MASK] is in a [MASK]."
    ask(visit(page, tasks_server), "fill_mask", text=text)
    slots = reply(tasks_server, "/fill-mask", {"inputs": text})
    words = [[candidate["token_str"].removeprefix("##").strip() for candidate in slot] for slot in slots]
    assert page.text(".text") == f"the {words[0][0]} is in a {words[1][0]}."
    page.click("#drawing table:last-of-type tr:nth-child(3) button")
    page.wait("document.querySelector('.text').textContent.endsWith(" + json.dumps(f"in a {words[1][2]}.") + ")")
    pressed = page.run("[...document.querySelectorAll('[aria-pressed=true]')].map((button) => button.innerText)")
    assert pressed == [words[0][0], words[1][2]]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("task", TASKS)
def test_an_example_is_one_click(tasks_server: Server, page: Page, task: str) -> None:
    """It fills the form and is answered, with the stages of its time, all in milliseconds from one on."""
    visit(page, tasks_server).fill("#model", task)
    page.click("#examples li:last-child button")
    answered(page)
    stages = {row[0]: row[1] for row in cells(page, ".timing")}
    assert list(stages) == ["Tokenize", "Queue", "Compute", "Rest", "Total"]
    unit = "ms" if stages["Total"].endswith(" ms") else "µs"
    times = {name: float(value.removesuffix(f" {unit}")) for name, value in stages.items()}
    assert times["Total"] >= times["Compute"] > 0
    assert times["Total"] >= 1 if unit == "ms" else times["Total"] <= 1000
    widths = page.run("[...document.querySelectorAll('.timing .bar span')].map((bar) => parseFloat(bar.style.width))")
    assert widths[2] == pytest.approx(100 * times["Compute"] / times["Total"], abs=1 if unit == "ms" else 5)
    assert page.run("document.querySelector('#route-docs').hash") in {
        f"#/{tag}/post_{path}"
        for tag, path in (
            *(("TEI", path) for path in ("embed", "embed_all", "embed_sparse", "rerank")),
            *(("Tasks", path) for path in ("classify", "answer", "tag", "fill_mask")),
        )
    }
    page.run("document.querySelector('#raw').open = true")
    page.wait("document.querySelector('#raw pre').textContent.length > 20", "the raw reply")


@pytest.fixture(scope="module")
def odd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of one model, whose labels look like markup and whose manifest holds figures."""
    repository: Path = tmp_path_factory.mktemp("odd")
    manifest = write_bundle(repository, tiny_model("classify"), "odd") / "manifest.json"
    said = json.loads(manifest.read_text())
    said["labels"]["names"] = [MARKUP, *LABELS["classify"][1:]]
    figures = {"metric": "accuracy", "reference": MARKUP, "examples": 1821, "pytorch": 88.85, "artifact": 89.18}
    said["artifacts"][0]["accuracy"] = [figures]
    said["artifacts"][0]["parity"] |= {"agreement": 0.992, "texts": 256}
    manifest.write_text(json.dumps(said))
    with Server(repository, *measured(repository)) as running:
        yield running


def test_data_never_becomes_markup(odd_server: Server, tasks_server: Server, page: Page) -> None:
    """Neither what was typed nor what the server says; the browser itself refuses to make it so."""
    ask(visit(page, odd_server), "odd", text=MARKUP)
    assert MARKUP in [row[0] for row in cells(page, "#drawing")]
    assert MARKUP in page.text("#models")
    for model, fields in (
        ("embed", {"texts": f"{MARKUP}\n{TEXT}"}),
        ("rerank", {"query": MARKUP, "documents": MARKUP}),
        ("answer", {"question": QUESTION, "passage": MARKUP}),
        ("tag", {"text": MARKUP}),
        ("fill_mask", {"text": f"[MASK] {MARKUP}"}),
    ):
        ask(visit(page, tasks_server), model, **fields)
        page.wait("[...document.querySelectorAll('#drawing')].some((place) => place.textContent.includes('onerror'))")
        assert page.run("document.querySelectorAll('#answer :is(img, script, b)').length") == 0
    assert page.run("window.hit ?? null") is None
    assert page.problems == []
    with pytest.raises(PageError, match="TrustedHTML"):
        page.run("document.body.innerHTML = 'a'")
    page.problems.clear()


def test_models_and_their_figures(odd_server: Server, page: Page) -> None:
    """What the bundle's manifest says; a model that is alone is asked on the plain route."""
    visit(page, odd_server)
    ((model, task, served, length, parity, accuracy),) = cells(page, ".models")
    assert model.split("\n") == ["odd", "version 1"]
    assert task.split("\n") == ["classification", "BertForSequenceClassification"]
    assert served.startswith("fp32, ")
    assert length == "64 tokens"
    assert parity.split("\n") == ["99.2% agree", "of 256 texts"]
    assert accuracy.split("\n")[0] == "accuracy 89.18"
    assert "PyTorch 88.85; 1,821 of" in accuracy
    assert page.text("#route") == "POST /classify"
    assert page.run("document.querySelector('#route-docs').hash") == "#/Tasks/post_classify"


def test_the_first_screen_and_the_figures(page: Page, serve: Callable[..., Server]) -> None:
    """Before the first request the panels say so; then they follow what was asked, without a reload."""
    server = serve("--engine", "fake")
    visit(page, server)
    assert page.text("#state") == "ready"
    assert page.text("[data-of=window]") == "no request yet"
    assert page.text("[data-of='request.p99_ms']") == DASH
    assert page.text("[data-of=batch-size]") == DASH
    assert page.run("document.getElementById('answer').hidden")
    assert "fake, " in page.text("[data-of=engine]")
    for _ in range(3):
        post_json(server.http, "/embed", {"inputs": ["a", "b"]})
    page.wait("document.querySelector('[data-of=window]').textContent.endsWith(', 3 requests')", "figures")
    exact = get(server.http, "/status").json()["recent"]["latency"]["request"]["p99_ms"]
    assert float(page.text("[data-of='request.p99_ms']").removesuffix(" ms")) == pytest.approx(exact, 0.005, 0.0051)
    assert page.text("[data-of=requests_per_s]") != "0"
    assert page.text("#since").split("\n")[:4] == ["Requests answered", "3", "Texts", "6"]
    page.wait("document.querySelector('#rate-steps').ariaLabel.includes('highest')", "a step with requests in it")


def test_of_many_requests_the_bound_is_shown(page: Page, serve: Callable[..., Server]) -> None:
    """As a bound: nobody kept the times of so many."""
    server = serve("--engine", "fake")
    with Tei(server) as client:
        for _ in range(1001):
            client.embed(["a"])
    visit(page, server)
    page.wait("document.querySelector('[data-of=window]').textContent.endsWith(', 1,001 requests')", "figures")
    assert re.fullmatch(r"≤ [\d.]+ ms", page.text("[data-of='request.p99_ms']"))
    page.wait("document.querySelector('#latency-steps').ariaLabel.includes('highest ≤ ')", "the step")


@pytest.mark.parametrize("width", [390, 1280])
def test_what_is_not_used_is_a_table(fp32_server: Server, page: Page, width: int) -> None:
    """An engine or two, why it does not run the models, and what to do; side by side, or below one another."""
    page.look(width=width)
    visit(page, fp32_server)
    rejected = get(fp32_server.http, "/status").json()["choice"]["rejected"]
    rows = cells(page, "#unused")
    assert ", ".join(engines for engines, _, _ in rows).split(", ") == [entry["engine"] for entry in rejected]
    assert rows[0] == [
        "tensorrt, ort-cuda",
        "No bundle has a GPU artifact.",
        "Export with --precision fp16 or --tensorrt.",
    ]
    assert page.run(
        "[...document.querySelectorAll('#unused tbody tr > *')].every((cell) =>"
        " getComputedStyle(cell).textAlign === 'left' && cell.getBoundingClientRect().right <= innerWidth)"
    )
    tops = page.run(
        "[...document.querySelector('#unused tbody tr').cells].map((cell) => cell.getBoundingClientRect().top)"
    )
    assert (len(set(tops)) == 1) is (width > 390)
    assert "tensorrt" not in page.text("#live")


def test_errors_are_shown_as_what_they_say(tasks_server: Server, page: Page) -> None:
    """The status, the server's own sentence, and the request's id."""
    text = "nothing is missing here"
    ask(visit(page, tasks_server), "fill_mask", text=text)
    refused = post_json(tasks_server.http, "/fill-mask", {"inputs": text})
    error = refused.json()["error"]
    shown = page.text(".refusal").split("\n")
    assert shown[0].startswith(str(refused.status))
    assert error["message"] in shown
    assert shown[-1].startswith(f"{error['reason']} · request ")
    assert error["message"] in page.text("#outcome")
    bad = page.run("getComputedStyle(document.documentElement).getPropertyValue('--bad')")
    assert [_color(page, place) for place in ("#outcome", ".refusal strong")] == [_rgb(bad)] * 2
    # The next good one takes its place.
    ask(page, "fill_mask", text="a [MASK]")
    assert page.run("document.querySelector('.refusal')") is None
    assert _color(page, "#outcome") != _rgb(bad)
    page.fill("#text", "  ")
    page.click("#run")
    page.wait("document.querySelector('#outcome').textContent === 'Text is empty.'")
    assert page.run("document.activeElement.id") == "text"
    assert _color(page, "#outcome") == _rgb(bad)


def _color(page: Page, selector: str) -> str:
    return str(page.run(f"getComputedStyle(document.querySelector('{selector}')).color"))


def _rgb(color: str) -> str:
    return "rgb({}, {}, {})".format(*bytes.fromhex(color.strip().removeprefix("#")))


def test_long_texts_are_clipped(tasks_server: Server, page: Page) -> None:
    """The beginning is shown, and the whole where it is asked for; a short one stays as it is."""
    long = "it is the server " * 100 + "and the end"
    ask(visit(page, tasks_server), "rerank", query="a", documents=f"{long}\na text")
    (shown, short) = sorted((row[0] for row in cells(page, "#drawing")), key=len, reverse=True)
    assert short == "a text"
    assert shown.endswith(f"… all {len(long):,} characters")
    assert shown.split(" … ")[0] == long[: len(shown.split(" … ")[0])]
    assert len(shown) < 200
    page.click("#drawing .clipped summary")
    page.wait("document.querySelector('#drawing .clipped').open", "the whole text")
    assert long in page.text("#drawing .clipped")


def test_the_request_as_curl(tasks_server: Server, page: Page, tmp_path: Path) -> None:
    """A command that a shell takes as it stands, and that gets the same reply."""
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not on the PATH")
    visit(page, tasks_server).fill("#model", "classify")
    page.fill("#priority", "3")
    ask(page, "classify", text='it\'s a "text" with $HOME, \\ and `date`\nin two lines')
    page.click("#copy")
    page.wait("document.querySelector('.copying [role=status]').textContent", "the copy")
    script = tmp_path / "copied.sh"
    page.fill("#text", "")
    script.write_text(page.paste("#text"))
    assert "X-Request-Priority: 3" in script.read_text()
    done = subprocess.run(["/bin/sh", str(script)], capture_output=True, timeout=30, check=True)
    page.run("document.querySelector('#raw').open = true")
    page.wait("document.querySelector('#raw pre').textContent", "the reply")
    assert json.loads(done.stdout) == json.loads(page.run("document.querySelector('#raw pre').textContent"))


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


def sha256_source(script: str) -> str:
    """A script in a page as a policy allows it (Content Security Policy Level 3, 2.3.1)."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


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
    assert {rules[f"{kind}-src"] for kind in ("style", "img", "connect")} == {"'self'"}
    inline = re.findall(r"<script>(.*?)</script>", (WEB / "index.html").read_text(), re.DOTALL)
    assert rules["script-src"].split() == ["'self'", *map(sha256_source, inline)]
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
