"""Help texts: sentences that start with a noun or an imperative, short and in American spelling."""

from __future__ import annotations

import argparse
import re

import pytest

import bertserve
from bertserve.serving.settings import GROUPS, Settings
from tests.support.descriptions import parser_of

PARSERS = sorted(bertserve.VERBS.keys() - {"serve", "doctor"})
"""Verbs with a parser of their own: `serve` has the settings, and `doctor` takes them."""

MAX_WORDS = 25
"""Of a first sentence."""

NEITHER_NOUN_NOR_IMPERATIVE = {
    *("a", "an", "the", "this", "that", "these", "those", "its", "it", "they", "he", "you", "your", "we", "our"),
    *("of", "in", "on", "by", "at", "as", "to", "from", "for", "with", "without", "where", "after", "before", "beside"),
    *("what", "who", "whose", "which", "whether", "when", "how", "why", "if", "else", "and", "or", "but", "then"),
    *("is", "are", "was", "were", "has", "have", "does", "do", "can", "may", "must", "should", "would", "not", "no"),
    *("answers", "builds", "checks", "compares", "exports", "gives", "makes", "prints", "runs", "says", "sends"),
    *("serves", "sets", "shows", "takes", "tells", "turns", "uses", "verifies", "writes", "likewise"),
}
"""Articles, pronouns, prepositions, conjunctions and other words that begin neither, and verbs in the third person."""

BRITISH = re.compile(r"\b\w*(?:lled|lling|isation|ise|ised|ises|ising|colour|behaviour|licence)\b", re.IGNORECASE)
AMERICAN = re.compile(r"(?:called|filled|installed|rolled|killed|precise|otherwise|raise[ds]?|likewise|controlled)$")


def faults(text: str | None) -> list[str]:
    """What is wrong with a help text."""
    if not text:
        return ["no help"]
    text = " ".join(text.split())
    first = re.split(r"(?<=[.?!])\s", text)[0]
    opening = re.split(r"[\s:,.]", first)[0].strip("`")
    british = [word for word in BRITISH.findall(text) if not AMERICAN.search(word.lower())]
    found = {
        f"{len(first.split())} words": len(first.split()) > MAX_WORDS,
        f"starts with {opening}": opening.lower() in NEITHER_NOUN_NOR_IMPERATIVE,
        "starts with a small letter": first[0].islower(),
        "is no sentence": text[-1] not in ".?",
        f"spelled {british}": bool(british),
    }
    return [fault for fault, is_so in found.items() if is_so]


@pytest.mark.parametrize("name", Settings.model_fields)
def test_settings_are_explained(name: str) -> None:
    """Those for tests too."""
    assert faults(Settings.model_fields[name].description) == []


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: str(group.__name__))
def test_groups_are_explained(group: type) -> None:
    """In one sentence."""
    assert faults(group.__doc__) == []


@pytest.mark.parametrize("verb", bertserve.VERBS)
def test_verbs_are_explained(verb: str) -> None:
    """In one sentence, with which their own help begins; the parser of `serve` is what `doctor` reads with."""
    _, purpose = bertserve.VERBS[verb]
    assert faults(purpose) == []
    if verb != "doctor":
        description = parser_of("doctor" if verb == "serve" else verb).description or ""
        assert description.startswith(purpose)


@pytest.mark.parametrize("verb", PARSERS)
def test_options_are_explained(verb: str) -> None:
    """As settings are."""
    shown = [action for action in parser_of(verb)._actions if action.help != argparse.SUPPRESS]
    told = {action.dest: faults(action.help) for action in shown}
    assert {name: found for name, found in told.items() if found} == {}


def test_a_command_without_a_verb_says_what_to_do_first(capsys: pytest.CaptureFixture[str]) -> None:
    """Commands with verbs and options that there are; the exit code says that nothing was done."""
    assert bertserve.main([]) == 2
    told = capsys.readouterr().err
    assert told.index("First steps:") < told.index("Verbs:")
    for step, why in bertserve.FIRST_STEPS.items():
        verb, *words = step.split()
        options = parser_of("doctor" if verb == "serve" else verb)._option_string_actions
        assert f"bertserve {step}" in told
        assert [word for word in words if word.startswith("--") and word not in options] == []
        assert faults(why) == []
