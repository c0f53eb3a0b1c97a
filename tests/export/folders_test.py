"""Generated checkpoint folders: each is answered as its own libraries answer it, or refused with a reason.

A folder is a choice for each axis of `tests/support/folders/grammar.py`, drawn from one seed. To see one again:

    python -c "from tests.support.folders.search import search; print(*search([SEED], fused=True)[0])"
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.checkpoints import edit_json
from tests.support.folders import answering, grammar, search
from tests.support.server import Server

if TYPE_CHECKING:
    from pathlib import Path


_PARTS = [
    *(range(start, start + 10) for start in range(0, 60, 10)),
    *(range(start, start + 15) for start in range(60, 150, 15)),
    *(range(start, start + 50) for start in range(150, 3000, 50)),
]
_LONG, _WHOLE, _ENDURANCE = 20, 60, 150
"""Seeds from which parts are long, which leave nothing out, and which take hours and leave the same out."""


def _marks(seeds: range) -> list[pytest.MarkDecorator]:
    if seeds.start >= _ENDURANCE:
        return [pytest.mark.endurance]
    return [pytest.mark.slow] if seeds.start >= _LONG else []


@pytest.mark.parametrize(
    "seeds", [pytest.param(part, id=f"{part.start}-{part.stop - 1}", marks=_marks(part)) for part in _PARTS]
)
def test_a_folder_is_answered_as_by_its_libraries(request: pytest.FixtureRequest, seeds: range) -> None:
    """Every number within 1e-5, every text and label the same; a refusal names a field or a file, and has a reason."""
    if _WHOLE <= seeds.start < _ENDURANCE:
        request.getfixturevalue("whole_proof")
    else:
        request.getfixturevalue("unpickled_here")
    findings, counts = search.search(seeds, fused=seeds.start >= _WHOLE)
    assert not findings, "\n".join(map(str, findings))
    # A grammar of folders that nobody can load, or that are all refused, would show nothing.
    assert counts["same"] >= 0.5 * len(seeds), counts


@pytest.mark.slow
@pytest.mark.usefixtures("whole_proof")
def test_a_real_server_answers_them_over_http(tmp_path: Path) -> None:
    """Folders of every task and many families, all of one server."""
    cases = [
        search.prepared(grammar.drawn(seed), seed, tmp_path, f"seed-{seed}", fused=True) for seed in range(60, 100)
    ]
    compared = [case for case in cases if isinstance(case, search.Case)]
    assert {case.task for case in compared} == grammar.HEADS.keys()
    with Server(tmp_path / "models", "--precision", "fp32", start_limit_s=300) as server:
        for case in compared:
            verdict = search.answered(case, answering.Asked(server.http, case.name, case.task))
            assert verdict == search.Verdict("same"), case.name


@pytest.mark.slow
@pytest.mark.usefixtures("unpickled_here")
def test_the_search_finds_a_field_that_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exporter that does not see one field is found out, and the folder is reduced to that field."""
    export = search.export_graph

    def blind(folder: Path, models: Path, name: str, task: str | None, *, fused: bool) -> Path:
        edit_json(folder / "tokenizer_config.json", do_lower_case=None)
        return export(folder, models, name, task, fused=fused)

    monkeypatch.setattr(search, "export_graph", blind)
    field = {"tokenizer_config.json do_lower_case": "False"}
    draw = {"family": "electra", "task": "classify", **field, "dtype": "float16", "epsilon": "1e-5"}
    monkeypatch.setattr(grammar, "drawn", lambda _seed: draw)
    (finding,), counts = search.search([7], fused=False)
    assert counts == {"fault": 1}
    assert finding.least == {"family": "bert", "task": "classify", **field}
    assert str(finding).startswith("seed 7: bert, classify: tokenizer_config.json do_lower_case: False\n")


def test_answers_are_compared_by_number_and_by_text() -> None:
    """A number by its size, anything else exactly; what is not a number is no answer."""
    assert answering.difference([["a", 200.0]], [["a", 200.001]]) == pytest.approx(5e-6, rel=1e-4)
    for found in ([["b", 200.0]], [["a"]], [], None, [["a", float("nan")]]):
        assert answering.difference(found, [["a", 200.0]]) == float("inf")


def test_every_choice_of_the_grammar_is_drawn() -> None:
    """A seed draws one folder, always the same; between them, 3,000 have everything that a folder may have."""
    draws = [grammar.drawn(seed) for seed in range(3000)]
    assert draws[7] == grammar.drawn(7)
    drawn = {(name, choice) for draw in draws for name, choice in draw.items()}
    assert {("family", name) for name in grammar.FAMILIES} | {("task", name) for name in grammar.HEADS} <= drawn
    for name, axis in grammar.AXES.items():
        assert not [choice for choice in axis.choices if (name, choice) not in drawn and choice != axis.usual], name
    settings = {(draw["family"], draw["settings"]) for draw in draws if "settings" in draw}
    every = {(name, choice) for name, family in grammar.FAMILIES.items() for choice in family.variants}
    assert {choice for _, choice in every - settings} <= grammar.AXES["settings"].refused.keys()
