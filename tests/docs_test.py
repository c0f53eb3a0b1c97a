"""Documents are in plain English, and what they name exists: links, headings, paths of the repository, commands."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from bertserve.serving import logs
from bertserve.serving.fields import rule
from bertserve.serving.grpc import calls, dispatch
from bertserve.serving.grpc import connection as grpc_connection
from bertserve.serving.grpc.h2.frames import Limits as Http2Limits
from bertserve.serving.http import connection as http_connection
from bertserve.serving.http import decoding
from bertserve.serving.inference import tokenizer_process, tokenizer_rules
from bertserve.serving.net import buffers
from bertserve.serving.security import watch
from bertserve.serving.settings import Settings

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")])

_PATH = re.compile(r"(?<![\w/.:{$-])(?:serving|export|loadtest|tests|deploy|docs)/[\w*./-]*[\w*/]")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_MODULE = re.compile(r"python -m ((?:serving|export|loadtest)[\w.]*\w)")

MAX_SENTENCE_WORDS = 35

BANNED = tuple((ROOT / "tests/support/banned_words.txt").read_text(encoding="utf-8").splitlines())
"""Literary, legal and private words, of which each had a plain one."""

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    lines = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in lines}


def prose(text: str) -> list[str]:
    """The paragraphs, list items and table cells of a page, without code blocks, addresses and markup."""
    text = re.sub(r"^(```|~~~).*?^\1", "\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^\|[-:| ]+\|$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^(?:    .*|<.*>)$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*#|]|\d+\. ))|(?<!\\)\|", text)
    return [" ".join(block.split()).lstrip("-*#> ") for block in blocks if block.strip()]


def sentences(text: str) -> list[str]:
    """Those of `prose`; a colon before a line of its own kind does not end one."""
    return [one for block in prose(text) for one in re.split(r"(?<=[.?!])\s+(?=[A-Z`\"(\[0-9-])", block)]


def words(sentence: str) -> list[str]:
    """Those of a sentence; code counts as one word."""
    return [word for word in re.sub(r"`[^`]*`", "code", sentence).split() if re.search(r"\w", word)]


@every_page
def test_sentences_are_short(page: Path) -> None:
    """No sentence has more than 35 words."""
    found = [one for one in sentences(page.read_text(encoding="utf-8")) if len(words(one)) > MAX_SENTENCE_WORDS]
    assert found == []


def banned_words(text: str) -> list[str]:
    """Banned words of a page's prose, outside code."""
    plain = " ".join(re.sub(r"`[^`]*`", "", block) for block in prose(text)).lower()
    return [word for word in BANNED if re.search(rf"\b{re.escape(word)}\b", plain)]


@every_page
def test_banned_words_do_not_come_back(page: Path) -> None:
    """`tests/support/banned_words.txt` lists them."""
    assert banned_words(page.read_text(encoding="utf-8")) == []


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    """To a file of the repository, and to a heading that it has."""
    for link in _LINK.findall(page.read_text(encoding="utf-8")):
        if not re.match(r"[a-z]+:", link):
            path, _, heading = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not heading or heading in headings(target), link


@every_page
def test_paths_of_the_repository_exist(page: Path) -> None:
    """Files and folders that a page names; a star stands for any."""
    for path in _PATH.findall(page.read_text(encoding="utf-8")):
        assert any(ROOT.glob(path.rstrip("/"))), path


@every_page
def test_modules_that_are_run_exist(page: Path) -> None:
    """`python -m ...`."""
    for name in _MODULE.findall(page.read_text(encoding="utf-8")):
        assert importlib.util.find_spec(name) is not None, name


def test_the_readme_names_commands_that_exist() -> None:
    """Every make target that the README and the guide for contributors show is in the Makefile."""
    targets = {line.split(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if "## " in line}
    for page in ("README.md", "CONTRIBUTING.md"):
        words = (ROOT / page).read_text(encoding="utf-8").replace("`", " ").split()
        shown = {after for before, after in pairwise(words) if before == "make" and re.fullmatch(r"[a-z-]+", after)}
        assert {"run", "test"} <= shown
        assert shown <= targets


def test_links_of_a_clone_lead_to_its_folders() -> None:
    """One that led nowhere stood in the place of `models/`, so that the README's first command failed."""
    listed = subprocess.run(["git", "ls-files", "--stage"], cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S607
    links = {line.partition("\t")[2] for line in listed.stdout.splitlines() if line.startswith("120000 ")}
    assert links == {f"src/bertserve/{name}" for name in ("serving", "export", "loadtest")}
    assert all((ROOT / link).resolve() == ROOT / Path(link).name for link in links)


def test_the_readme_is_short() -> None:
    """Three screens at most, and a page for the architecture and for contributors: the rest is in `docs/`."""
    for page, lines in (("README.md", 120), ("docs/design/architecture.md", 75), ("CONTRIBUTING.md", 60)):
        assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= lines, page


def test_the_pages_of_security_name_the_bounds_of_today() -> None:
    """Each figure is the one that the code has."""
    http2, settings = Http2Limits(), Settings.load([], {})
    said = {
        "SECURITY.md": [
            f"{tokenizer_process.CPU_S} s of CPU time and {tokenizer_process.MEMORY_BYTES >> 20} MiB for each call",
            f"more than {tokenizer_rules.MAX_GROWTH} times as long",
            f"at most eight names of `{rule._NAME.pattern}`",
            f"(`--buffer-limit-mb`, {settings.buffer_limit_bytes >> 20} MiB)",
            f"Up to {buffers.FREE_BYTES >> 10} KiB are free",
            f"beyond {grpc_connection._FREE_BYTES >> 10} KiB of a connection",
            f"those up to {calls.UNCOUNTED_BYTES >> 10} KiB that arrive at once are free",
            f"{http_connection._TURN_BYTES >> 10} KiB are parsed in a turn",
            f"more than {decoding._MAX_ELEMENTS:,} texts and lists",
            f"{http2.streams} at a time",
            f"`--response-cache-mb` ({settings.response_cache_mb} by default)",
            f"{logs._BURST} lines of each kind, then one a second",
            f"the address is {settings.host} unless",
        ],
        "docs/guides/security.md": [
            f"messages of at most {dispatch.OPEN_BYTES >> 10} KiB",
            "The file is looked at twice a second and read again once it has stood still for half a second",
        ],
    }
    assert (rule._NAMED, logs._PER_S, watch._POLL_S) == (8, 1.0, 0.5)
    for page, phrases in said.items():
        text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        assert [phrase for phrase in phrases if phrase not in text] == []


def test_no_document_is_left_alone() -> None:
    """Every page is reached from the README by links."""
    reached, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page not in reached and page.suffix == ".md" and page.exists():
            reached.add(page)
            links = _LINK.findall(page.read_text(encoding="utf-8"))
            todo += [(page.parent / link.partition("#")[0]).resolve() for link in links if ":" not in link]
    assert {page for page in PAGES if page not in reached} == set()
