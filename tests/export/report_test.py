from __future__ import annotations

import re
from array import array
from html.parser import HTMLParser
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from bertserve.export.pages.tables import as_text, printable
from bertserve.export.proof.parity import Comparison, Reference
from bertserve.export.report import latency, page, terminal
from bertserve.serving.engine.base import Batch, BatchOutput, InlineEngine, LaneKind
from bertserve.serving.engine.specs import EngineBuild, ShapeProfile
from bertserve.serving.host import processor
from bertserve.serving.models.bundle import Bundle
from bertserve.serving.models.manifest import (
    Accuracy,
    Artifact,
    EndToEnd,
    FileEntry,
    Invariance,
    Manifest,
    Parity,
    ReferenceLibrary,
    Source,
)
from bertserve.serving.records import EncodedText
from bertserve.serving.tasks import TASKS
from bertserve.serving.tasks.parts import Labels
from tests.support.browser import fits_a_phone
from tests.support.specs import parts

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from tests.support.browser import Page

HOSTILE = '<img src="http://evil.example/x" onerror=alert(1)>\u202e\x1b[31m&amp;</table><script>alert(2)</script>'
TEXTS = [f"text {number}" for number in range(7)] + [HOSTILE]
COMPARISON = Comparison(
    differences=np.array([1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 6e-3, 7e-3, 8e-3]),
    cosines=np.array([0.999, 0.998, 0.997, 0.996, 0.995, 0.994, 0.993, 0.9]),
    points=np.array([[0.5, 0.51], [-0.25, -0.26], [1.0, 1.02]]),
)
INT8 = Artifact(
    file="model.int8.onnx",
    precision="int8",
    target="cpu",
    sha256="1" * 64,
    size_bytes=5_000_000,
    batch_invariant=False,
    parity=Parity(8, 8.25e-3, 0.984375, 0.90625, 0.890625, 0.9375, HOSTILE),
    invariance=Invariance(8, 0.0625, 0.96875),
    operators={"Attention": 6, "QAttention": 3},
    accuracy=(Accuracy("accuracy", "sst2.tsv", 872, 91.28, 90.94),),
    waived=("agreement",),
    limits={"cosine_min": 0.875},
)
ENGINE = Artifact(
    file="model.sm75.fp16.engine",
    precision="fp16",
    target="sm75",
    sha256="2" * 64,
    size_bytes=40_000_000,
    batch_invariant=False,
    parity=None,
    invariance=None,
    operators={},
    engine=EngineBuild("rtx", "1.7.0", "7.5", (ShapeProfile((1, 1), (4, 32), (8, 32)),)),
)
MANIFEST = Manifest(
    schema_version=4,
    model="moods",
    version=3,
    task="classify",
    hidden_size=384,
    vocab_size=30_522,
    max_length=128,
    special_ids={"pad": 0, "cls": 101, "sep": 102},
    inputs=TASKS["classify"].graph_inputs(segments=True),
    outputs=TASKS["classify"].graph_outputs(hidden_size=384, labels=2, candidates=0),
    artifacts=(INT8, ENGINE),
    files=(FileEntry("tokenizer.json", "3" * 64, 700_000),),
    source=Source("moods", "BertForSequenceClassification", "4" * 64),
    tools={"torch": "2.13.0", "onnxruntime": "1.31.1"},
    created="2026-11-21T14:00:00+00:00",
    labels=Labels(("good", HOSTILE)),
)


def test_figures_of_the_end_to_end_check_say_what_they_are_of() -> None:
    """With their limits, where there are any, and whether vectors have length 1."""
    found = msgspec.structs.replace(INT8, end_to_end=EndToEnd(106, 0.38, 0.9964), waived=(), limits={})
    vectors = msgspec.structs.replace(
        MANIFEST,
        task="embed",
        artifacts=(found,),
        reference_library=ReferenceLibrary("Sentence Transformers 6", 227),
        **parts("embed"),
    )
    assert terminal.end_to_end(vectors) == (
        "compared with Sentence Transformers 6, on the tokens of 227 texts; largest difference in a returned value"
        " (vectors scaled to length 1): model.int8.onnx 3.8e-01 over 106 texts (no limit), mean cosine 0.99640 (at"
        " least 0.99); no limit on the minimum cosine: these texts are edge cases on purpose"
    )
    unscaled = terminal.end_to_end(msgspec.structs.replace(vectors, **parts("embed", normalize=False)))
    assert "(vectors not scaled to length 1)" in unscaled
    scores = msgspec.structs.replace(found, precision="fp32", file="model.fp32.onnx", end_to_end=EndToEnd(106, 1e-6))
    said = terminal.end_to_end(msgspec.structs.replace(vectors, task="classify", artifacts=(scores,), embedding=None))
    assert said.endswith("(relative for values above 1): model.fp32.onnx 1.0e-06 over 106 texts (at most 0.0001)")


class Reader(HTMLParser):
    """Reads a page strictly: every element ends where it must, and no two have one id."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.ids: list[str | None] = []
        self.words = ""
        self.feed(content)
        self.close()
        assert self.open == []
        assert len(self.ids) == len(set(self.ids))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Opens an element; none may carry a handler of events."""
        self.tags.append(tag)
        links = [value or "" for name, value in attrs if name in {"src", "href", "action", "xlink:href"}]
        self.links += [link for link in links if not link.startswith("#")]
        self.ids += [value for name, value in attrs if name == "id"]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Closes the innermost element."""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Collects what a person reads."""
        self.words += data


def rendered(manifest: Manifest = MANIFEST, comparison: Comparison = COMPARISON) -> str:
    """The page of a manifest."""
    encoded = [EncodedText(array("i", [101, *range(number), 102])) for number in range(len(TEXTS))]
    finding = page.Finding(comparison, [latency.Latency(1, 16, 1.25, 15), latency.Latency(1, 128, 217.0, 1)])
    return page.render(
        manifest, Reference(TEXTS, encoded, []), {INT8.file: finding}, page.Machine("A processor", threads=2)
    )


def test_the_page_holds_every_figure() -> None:
    """What the manifest says of an artifact stands in the page, figure by figure."""
    words = Reader(rendered()).words
    figures = ["8.25e-03", "0.984375", "0.906250", "0.890625", "0.937500", "6.25e-02", "0.968750"]
    figures += ["91.28", "90.94", "-0.34", "872 of sst2.tsv", "6 Attention, 3 QAttention", "4.8 MiB", "38.1 MiB"]
    figures += ["1.25 ms", "217 ms", "A processor, 2 threads", "1.7.0 (rtx)", "1 x 1 to 4 x 32 to 8 x 32", "128 tokens"]
    figures += [digit * 64 for digit in "1234"] + ["torch 2.13.0", "onnxruntime 1.31.1", "pad 0, cls 101, sep 102"]
    assert [figure for figure in figures if figure not in words] == []


def test_the_page_is_honest_about_what_is_not_proven() -> None:
    """Waived limits, broken invariance and unproven engines are told in words, at the top and at the artifact."""
    words = Reader(rendered()).words
    assert "0 of 2 artifacts were run and meet every limit" in words
    assert "model.int8.onnx breaks limits that the export waived: agreement." in words
    assert "Written although it breaks these limits, which the export waived: agreement." in words
    assert "broken, waived" in words
    assert "no: runs one text at a time, unpadded" in words
    assert "model.sm75.fp16.engine is unproven: it is for TensorRT, compute capability 7.5" in words
    assert "at least 0.875" in words  # as the recipe set it
    assert "at least 0.95" in words  # as the table has it


def test_the_page_needs_nothing_from_outside() -> None:
    """No link, no script, no external address; the page's own policy forbids them too."""
    reader = Reader(rendered())
    assert not {"script", "link", "img", "iframe", "object", "embed", "form"} & set(reader.tags)
    assert reader.links == []
    assert "default-src 'none'; style-src 'unsafe-inline'" in rendered()
    assert not re.search(r"url\((?!#)|@import|https?://(?!evil\.example)", rendered())


def test_the_page_fits_a_phone(page: Page, tmp_path: Path) -> None:
    """Its tables and pictures are wide, and it has no script."""
    file = tmp_path / "report.html"
    file.write_text(rendered(), encoding="utf-8")
    page.open(file.as_uri())
    fits_a_phone(page)


def test_what_strangers_wrote_stays_text() -> None:
    """Labels and texts that hold markup, escapes or changes of direction are shown and do nothing."""
    content = rendered()
    reader = Reader(content)
    assert reader.words.count("<script>alert(2)</script>") >= 2
    assert "\u202e" not in content
    assert "\x1b" not in content


def test_the_worst_texts_come_first() -> None:
    """The page quotes the five texts with the least cosine, the worst first."""
    words = Reader(rendered()).words
    after = words[words.index("The texts farthest from PyTorch") :]
    places = [after.index(text) for text in ("<img", "text 6", "text 5", "text 4", "text 3")]
    assert places == sorted(places)
    assert "text 2" not in after


def test_answers_that_are_not_numbers_are_counted() -> None:
    """A text whose answer is NaN is the worst of all, and the charts say that they leave it out."""
    spoiled = Comparison(COMPARISON.differences.copy(), None, np.array([[0.5, np.nan], [np.inf, 1], [1, 1]]))
    spoiled.differences[3] = np.nan
    assert spoiled.worst_first()[0] == 3
    assert "1 texts with answers that are not numbers" in Reader(rendered(comparison=spoiled)).words


class RecordingBackend:
    """Answers nothing, and notes what it was asked."""

    name = "recording"

    def __init__(self) -> None:
        self.batches: list[tuple[int, int]] = []

    def lanes(self) -> list[LaneKind]:
        """One lane."""
        return [LaneKind.WIDE]

    def runner(self, _lane: int) -> RecordingBackend:
        """Itself."""
        return self

    def run(self, batch: Batch) -> BatchOutput:
        """Notes the shape."""
        self.batches.append((len(batch.texts), batch.padded_length))
        return BatchOutput([], [], 0.0)


def test_the_grid_is_measured_up_to_the_models_length() -> None:
    """Every batch and sequence is run at its true shape, in a handful of runs; lengths end where the model's do."""
    backend = RecordingBackend()
    texts = [EncodedText(array("i", [101, 5, 6, 7, 102]))]
    counted: list[tuple[int, int]] = []
    found = latency.measure(
        InlineEngine(backend), texts, max_length=24, batches=(1, 8), count=lambda done, of: counted.append((done, of))
    )
    assert [(cell.batch, cell.tokens) for cell in found] == [(1, 16), (1, 24), (8, 16), (8, 24)]
    assert set(backend.batches) == {(1, 16), (1, 24), (8, 16), (8, 24)}
    assert all(1 <= cell.runs <= 15 and cell.p50_ms >= 0 for cell in found)
    assert counted == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_cells_beyond_the_time_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model costs the export seconds, not minutes: what would not fit is not begun."""
    clock = iter(np.arange(0, 1e4, 0.4).tolist())
    monkeypatch.setattr(latency.time, "perf_counter", lambda: next(clock))
    texts = [EncodedText(array("i", [101, 5, 102]))]
    found = latency.measure(
        InlineEngine(RecordingBackend()), texts, max_length=512, batches=(1, 8), count=lambda _done, _of: None
    )
    assert (1, 16) in {(cell.batch, cell.tokens) for cell in found}
    assert not [cell for cell in found if cell.batch == 8]


def test_the_processor_is_named(tmp_path: Path) -> None:
    """By the name that it gives itself, or by its architecture where the system keeps none."""
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: A processor of 2 GHz\nmodel name : another\n")
    assert processor(tmp_path / "cpuinfo") == "A processor of 2 GHz"
    assert processor(tmp_path / "none") != ""


def test_a_terminal_is_not_steered_by_labels(tmp_path: Path) -> None:
    """What moves a cursor or turns the writing direction is written out."""
    assert printable("a\x1b[31mb\u202ec é 界") == "a\\x1b[31mb\\u202ec é 界"
    worst = msgspec.structs.replace(INT8, parity=msgspec.structs.replace(INT8.parity, worst="\x1b[2J"))
    bundle = Bundle(tmp_path, msgspec.structs.replace(MANIFEST, artifacts=(worst, ENGINE)), "0" * 64)
    text = as_text(*terminal.whole(bundle))
    assert "\x1b" not in text
    assert "\\x1b[2J" in text
    for word in ("moods, version 3", "cosine_min 0.875", "6 Attention", "unproven", "1.7.0 (rtx)", "8 x 32", "4" * 64):
        assert word in text
