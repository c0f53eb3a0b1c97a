"""Generated checkpoint folders: each is answered as its own libraries answer it, or refused with a reason.

A folder is a choice for each axis of `tests/support/folders/grammar.py`, drawn from one seed. To see one again:

    python -c "from tests.support.folders.search import search; print(*search([SEED], fused=True)[0])"
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

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
    faults, counts = search.search(seeds, fused=seeds.start >= _WHOLE)
    assert not faults, "\n".join(faults)
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
