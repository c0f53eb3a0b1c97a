"""Each value in a checkpoint's JSON files is untrusted: it is exported right, or rejected in a sentence."""

from __future__ import annotations

import random

import pytest

from bertserve.export import build
from tests.support import json_values

SAMPLED = {"embed": 12, "router": 8, "own, filled": 6, "modernbert": 6}
"""How many values of a folder are replaced in the tests of every change."""


@pytest.fixture(autouse=True)
def _lean(few_texts_of_pytorch: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001  undone here
    """Without timings and the report, which no value changes."""
    monkeypatch.setattr(build.latency, "measure", lambda *_, **__: [])
    monkeypatch.setattr(build.page, "render", lambda *_: "")


@pytest.mark.parametrize("name", SAMPLED)
def test_a_value_that_is_something_else_ends_in_a_sentence_or_a_compared_bundle(name: str) -> None:
    """Never in a traceback, in a bundle that no library was compared with, or in more than 2 GB."""
    drawn = random.Random(name).sample(json_values.cases(name), SAMPLED[name])
    assert json_values.faults(drawn) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", json_values.FOLDERS)
def test_all_values_of_a_folder(name: str) -> None:
    """The same of every value."""
    assert json_values.faults(case for case in json_values.cases() if case.folder == name) == []
