"""What documents name exists: links and their headings, paths of the repository, modules, commands."""

from __future__ import annotations

import importlib.util
import re
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")])

TO_BE_MADE = {"docs/benchmarks/gpu-costs.json"}
"""Figures that nobody has measured yet."""
_PATH = re.compile(r"(?<![\w/.:{$-])(?:serving|export|loadtest|simulate|sizing|tests|deploy|docs)/[\w*./-]*[\w*/]")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_MODULE = re.compile(r"python -m ((?:serving|export|loadtest|simulate|sizing)[\w.]*\w)")

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    lines = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in lines}


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    """To a file of the repository, and to a heading that it has."""
    for link in _LINK.findall(page.read_text(encoding="utf-8")):
        if not re.match(r"[a-z]+:", link):
            path, _, heading = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if str(target.relative_to(ROOT)) not in TO_BE_MADE:
                assert target.exists(), link
                assert not heading or heading in headings(target), link


@every_page
def test_paths_of_the_repository_exist(page: Path) -> None:
    """Files and folders that a page names; a star stands for any."""
    for path in _PATH.findall(page.read_text(encoding="utf-8")):
        assert path in TO_BE_MADE or any(ROOT.glob(path.rstrip("/"))), path


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


def test_the_readme_is_short() -> None:
    """Three screens at most, and a page for the architecture and for contributors: the rest is in `docs/`."""
    for page, lines in (("README.md", 120), ("docs/architecture.md", 75), ("CONTRIBUTING.md", 60)):
        assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= lines, page


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
