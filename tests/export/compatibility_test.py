"""The command behind the tables of `docs/reference/compatibility.md`: what it measures, keeps and writes."""

from __future__ import annotations

import json
import statistics
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bertserve.export.recipe import ARTIFACTS
from bertserve.loadtest.benchmarks.exports import popular_models
from bertserve.loadtest.benchmarks.exports.__main__ import BENCHMARKS
from bertserve.loadtest.benchmarks.exports.compatibility import facts, tables
from bertserve.loadtest.benchmarks.exports.random_checkpoints import SMALL
from bertserve.loadtest.benchmarks.runner import main
from bertserve.loadtest.benchmarks.store import Store
from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.report import machine
from bertserve.serving.engine.base import InlineEngine
from bertserve.serving.engine.fake import FakeBackend
from bertserve.serving.records import EncodedText
from tests.support.specs import model_spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bertserve.serving.engine.base import Batch, BatchOutput

DOCS = Path(__file__).parents[2] / "docs"
TABLES = ("heads", "settings", "files", "speed", "agreement", "models")
PAGE = "".join(f"by hand\n<!-- made: {name} -->\nold\n<!-- made until here -->\n" for name in TABLES)


def run(folder: Path, *words: str) -> int:
    """The command over layers that take no time."""
    options = ["--page", str(folder / "page.md"), "--out", str(folder / "figures.json"), "--small", "--rounds", "3"]
    return main(BENCHMARKS, ["compatibility", *options, *words])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with the published figures of one family, and with those of one of its other tasks, measured here."""
    folder = tmp_path_factory.mktemp("compatibility")
    (folder / "page.md").write_text(PAGE)
    published = Store.read(DOCS / "benchmarks" / "compatibility.json").steps["bert"]
    Store(folder / "figures.json", {"machine": machine.facts(), **facts(SMALL)}).keep("bert", published)
    assert run(folder, "--only", "^bert tag$") == 0
    return folder


@pytest.fixture
def steps(folder: Path) -> Any:
    return json.loads((folder / "figures.json").read_text())["steps"]


@pytest.fixture
def step(steps: Any) -> Any:
    return steps["bert"]


def rows(folder: Path, heading: str) -> dict[str, list[str]]:
    """The rows of the table whose first cells these are, by their own first cell."""
    lines = (folder / "page.md").read_text().splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith(heading))
    table = lines[begin + 2 : begin + lines[begin:].index("")]
    return {first: cells for first, *cells in (line.strip("| ").split(" | ") for line in table)}


def check_forms(forms: Any) -> None:
    """Figures of a real export: fp32 answers as PyTorch, the others nearly so, and INT8 takes a third of the bytes."""
    assert forms.keys() == ARTIFACTS.keys()
    assert 0 < forms["fp32"]["max_abs_difference"] < 1e-5
    for form in ("fp16", "int8", "int8-openvino"):
        assert forms["fp32"]["max_abs_difference"] < forms[form]["max_abs_difference"]
        assert 0.95 < forms[form]["cosine_min"] < forms["fp32"]["cosine_min"]
        assert forms[form]["invariant"]
        assert forms[form]["broken"] == []
    assert forms["int8"]["size_bytes"] < forms["fp32"]["size_bytes"] / 3


def test_every_form_is_made_and_compared(steps: Any) -> None:
    """Of another task than the family's first; nothing is timed there."""
    check_forms(steps["bert tag"]["forms"])
    assert steps["bert tag"].keys() == {"forms"}


@pytest.mark.slow
def test_every_form_is_made_compared_and_timed_in_turns(tmp_path: Path) -> None:
    """A family's own step has a figure of each round, and the engine for the T4 or what stands against it."""
    (tmp_path / "page.md").write_text(PAGE)
    assert run(tmp_path, "--only", "^bert$") == 0
    step = Store.read(tmp_path / "figures.json").steps["bert"]
    check_forms(step["forms"])
    for by_form in step["texts_per_s"].values():
        assert by_form.keys() == {"fp32", "int8", "int8-openvino"}
        assert all(len(rates) == 3 and min(rates) > 0 for rates in by_form.values())
    assert len(step["t4"].keys() & {"size_bytes", "obstacle"}) == 1


def test_forms_are_timed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a block at each length in every round, in one order and then in the other."""
    from bertserve.loadtest.benchmarks.exports import compatibility_runs  # noqa: PLC0415  brings PyTorch

    monkeypatch.setattr(compatibility_runs, "_BLOCK_S", 1e-6)
    blocks: list[str] = []

    class Told(FakeBackend):
        def __init__(self, form: str) -> None:
            super().__init__([model_spec(max_length=128)], 1)
            self.form = form

        def run(self, batch: Batch) -> BatchOutput:
            blocks.append(f"{self.form} {len(batch.texts[0].ids)}")
            return super().run(batch)

    engines = {form: InlineEngine(Told(form)) for form in ("fp32", "int8")}
    text = EncodedText(array("i", [101, 7, 102]))
    found = compatibility_runs.texts_per_s(engines, [text], 2)
    assert found.keys() == {"32", "128"}
    for by_form in found.values():
        assert by_form.keys() == engines.keys()
        assert all(len(rates) == 2 and min(rates) > 0 for rates in by_form.values())
    turns = ["int8 32", "fp32 32", "int8 128", "fp32 128", "fp32 32", "int8 32", "fp32 128", "int8 128"]
    assert blocks[-len(turns) :] == turns


def test_the_tables_tell_the_figures(folder: Path, step: Any) -> None:
    """Ratios are medians over the rounds; what is written by hand stays; what was not measured says so."""
    text = (folder / "page.md").read_text()
    assert (text.count("by hand\n"), text.count("old\n")) == (len(TABLES), 0)
    by_form = step["texts_per_s"]["128"]
    ratio = statistics.median(a / b for a, b in zip(by_form["int8"], by_form["fp32"], strict=True))
    assert f"\n- INT8 is {ratio:.2f} to {ratio:.2f} times as fast as fp32 at 128 tokens.\n" in text
    assert f"\n- `bert`: {ratio:.2f}, " in text
    assert "\n- `mpnet`: not measured\n" in text
    agreement = rows(folder, "| artifact")
    assert len(agreement) == len(ARTIFACTS)
    assert agreement["INT8"][0] == f"{step['forms']['int8']['cosine_min']:.4f}"
    assert [cell != "-" for cell in agreement["fp32"]] == [True, *[False] * 4, True, *[False] * 2]
    assert "`tag`, `fill_mask`, `embed_sparse`\n- all but `nomic_bert`, `gte`, `new`: `answer`\n" in text


def test_agreement_is_the_worst_of_all_families(folder: Path, step: Any) -> None:
    """The largest difference of fp32, and the lowest cosine of the others."""
    store = Store.read(folder / "figures.json")
    fp32, fp16 = step["forms"]["fp32"], step["forms"]["fp16"]
    worse = {"fp32": {**fp32, "max_abs_difference": 5e-5}, "fp16": {**fp16, "cosine_min": 0.5}}
    better = {**step["forms"]["int8"], "cosine_min": 1.0}
    store.steps["mpnet"] = {**step, "forms": {**step["forms"], **worse, "int8": better}}
    text = tables(PAGE, store)
    assert "\n| fp32 | 5e-05 |" in text
    assert "\n| fp16 | 0.5000 |" in text
    assert f"\n| INT8 | {step['forms']['int8']['cosine_min']:.4f} |" in text


def test_what_was_measured_is_kept(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step is measured anew only if it is named; figures of other circumstances do not stand beside these."""
    content = json.loads((folder / "figures.json").read_text())
    kept, damaged = tmp_path / "figures.json", tmp_path / "page.md"
    kept.write_text(json.dumps({**content, "facts": content["facts"] | {"CPU": "another"}}))
    damaged.write_text(PAGE)
    assert run(tmp_path, "--only", "^bert$") == 1
    assert capsys.readouterr().err.endswith("was measured with another CPU; start afresh with --fresh\n")
    # The tables alone can be written anywhere.
    assert run(tmp_path, "--page-only") == 0
    assert "CPU another" in damaged.read_text()
    kept.write_text("{}")
    assert run(tmp_path, "--page-only") == 1
    assert "holds no measurements (KeyError: 'facts')" in capsys.readouterr().err


def test_what_stands_against_an_artifact_stands_in_its_place(folder: Path, step: Any) -> None:
    """A form or an engine that cannot be made, a family that cannot, a broken limit, and one that is not invariant."""
    store = Store.read(folder / "figures.json")
    broken = {**step["forms"]["int8"], "broken": ["cosine_min"], "invariant": False}
    forms = {**step["forms"], "int8": broken, "fp16": {"obstacle": "Mod has no form in fp16"}}
    store.steps |= {
        "bert": {**step, "forms": forms, "t4": {"obstacle": "no Einsum"}},
        "mpnet": {"obstacle": "Transformers has no MPNet"},
    }
    text = tables(PAGE, store)
    assert "\n- `bert` fp16 cannot be made (Mod has no form in fp16): `embed`\n" in text
    assert "\n- `bert` has no engine for the T4 (no Einsum): `embed`\n" in text
    assert "\n- `bert` INT8 breaks a limit of the export: `embed`\n" in text
    assert "\n- `bert` INT8 is not batch-invariant, so texts run alone: `embed`\n" in text
    assert "\n- INT8 has " in text
    assert "\n- fp16 has " not in text
    assert "\n- `mpnet`: Transformers has no MPNet\n" in text


def test_a_page_without_a_place_for_a_table_is_refused(folder: Path) -> None:
    """No table is lost without a word."""
    with pytest.raises(
        BenchError, match="must have a place for each of heads, settings, files, speed, agreement, models, and has"
    ):
        tables(PAGE.replace("made: speed", "speed"), Store.read(folder / "figures.json"))


def test_the_page_tells_the_figures_and_families_of_today() -> None:
    """The page is what `python -m bertserve.loadtest.benchmarks.exports compatibility --page-only` would write."""
    text = (DOCS / "reference/compatibility.md").read_text(encoding="utf-8")
    assert text == tables(text, Store.read(DOCS / "benchmarks" / "compatibility.json"))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("sentence-transformers/all-MiniLM-L6-v2", {"family": "`bert`", "answers": "`embed` (mean, normalized)"}),
        ("BAAI/bge-reranker-v2-m3", {"family": "`xlm-roberta`", "answers": "`rerank`"}),
        ("google-bert/bert-base-uncased", {"family": "`bert`", "answers": "`fill_mask`"}),
    ],
)
def test_a_model_is_judged_by_the_exporter_itself(name: str, found: dict[str, str]) -> None:
    """From the settings that it is published with; a kind of model that is not taken gets the exporter's sentence."""
    models: Sequence[popular_models.Model] = popular_models.read()
    (model,) = [model for model in models if model.name == name]
    assert popular_models.verdict(model) == found
    refused = popular_models.verdict(popular_models.Model("a/name", model.config | {"architectures": ["ColBERTModel"]}))
    assert refused["refused"].startswith("ColBERTModel says that this is ColBERT")
