"""A node's cache that is not what it says, or that leads elsewhere: nothing in it is used, and one line says why.

Each case spoils an honest cache in one way, with right digests unless digests are the case.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from serving.models.bundle import Bundle, open_bundle
from serving.models.node_cache import DERIVED, CacheError, CacheWriter, open_entry, with_proofs
from tests.support.node_caches import FP32, TIMINGS, fill, proof
from tests.support.poison import ENGINE
from tests.support.tasks import tiny_model, write_bundle

if TYPE_CHECKING:
    from collections.abc import Callable

    Spoil = Callable[[Path], object]


class Case(NamedTuple):
    """One way to spoil an entry, and a word of the sentence that must say so."""

    spoil: Spoil
    word: str


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle whose only artifact nobody has compared with PyTorch."""
    return open_bundle(write_bundle(tmp_path_factory.mktemp("models"), tiny_model("tag"), proven=False))


def rewrite(name: str, data: bytes) -> Spoil:
    return lambda entry: (entry / name).write_bytes(data)


def edit(change: Callable[[dict[str, Any]], object]) -> Spoil:
    def spoil(entry: Path) -> None:
        derived = json.loads((entry / DERIVED).read_bytes())
        change(derived)
        (entry / DERIVED).write_text(json.dumps(derived), encoding="utf-8")

    return spoil


def put(part: str, **values: object) -> Spoil:
    """Alters the first of the proofs, engines or files."""
    return edit(lambda derived: derived[part][0].update(values))


def moved(name: str, back: Callable[[Path, Path], object]) -> Spoil:
    """Moves a file out of the entry, or the entry itself, and puts something in its place."""

    def spoil(entry: Path) -> None:
        outside = entry.parents[2] / "outside"
        place = Path(os.path.normpath(entry / name))
        place.rename(outside)
        back(place, outside)

    return spoil


def symbolic(path: Path, outside: Path) -> None:
    """A symbolic link that leads out."""
    path.symlink_to(outside)


CASES = {
    "manifest-missing": Case(lambda entry: (entry / DERIVED).unlink(), "missing"),
    "no-json": Case(rewrite(DERIVED, b"{"), "not a manifest"),
    "deep": Case(rewrite(DERIVED, b"[" * 100_000), "not a manifest"),
    "too-large": Case(rewrite(DERIVED, b" " * (1 << 21)), "allowed"),
    "unknown-field": Case(edit(lambda d: d.update(run="rm -rf /")), "unknown field"),
    "unknown-field-that-steers-the-terminal": Case(edit(lambda d: d.update({"\x1b[2J": 1})), "unknown field"),
    "schema-version": Case(edit(lambda d: d.update(schema_version=9)), "schema version"),
    "other-model": Case(edit(lambda d: d.update(model="other")), "another bundle"),
    "other-version": Case(edit(lambda d: d.update(version=2)), "another bundle"),
    "extra-file": Case(rewrite("sitecustomize.py", b"raise SystemExit"), "sitecustomize.py"),
    "file-missing": Case(lambda entry: (entry / TIMINGS).unlink(), "missing"),
    "bit-flipped": Case(rewrite(TIMINGS, b"timingS"), "SHA-256"),
    "grown": Case(rewrite(TIMINGS, b"timings and more"), "bytes"),
    "digest-too-short": Case(put("files", sha256="00"), "64 hexadecimal"),
    "two-of-a-name": Case(edit(lambda d: d["files"].append(d["files"][0])), "twice"),
    "name-of-the-manifest": Case(put("files", file=DERIVED), "plain name"),
    "up-and-away": Case(put("files", file="../../../models/x"), "plain name"),
    "absolute": Case(put("engines", file="/etc/passwd.engine"), "plain name"),
    "engine-is-a-graph": Case(
        put("engines", kind="onnx", file="a.onnx", target="cpu", engine=None), "an engine is none"
    ),
    "engine-says-it-is-proven": Case(
        put(
            "engines",
            parity={
                "texts": 1,
                "max_abs_difference": 0.0,
                **dict.fromkeys(["cosine_mean", "cosine_p01", "cosine_min"]),
            },
        ),
        "an engine is none",
    ),
    "file-named-as-an-artifact": Case(put("files", file=FP32), "the bundle's own"),
    "file-named-as-the-tokenizer": Case(put("files", file="tokenizer.json"), "listed twice"),
    "engine-of-another-gpu": Case(put("engines", target="sm80"), "compute capability"),
    "engine-of-another-version": Case(
        edit(lambda d: d["engines"][0]["engine"].update(version="1.8.0.1")), "was built by TensorRT 1.7.1"
    ),
    "proof-of-nothing": Case(put("proofs", file="model.int8.onnx"), "there is not"),
    "proven-twice": Case(edit(lambda d: d["proofs"].append(d["proofs"][0])), "twice"),
    "proof-without-invariance": Case(put("proofs", invariance=None), "not a manifest"),
    "proof-by-nobody": Case(put("proofs", libraries={}), "what ran it"),
    "proof-that-steers-the-terminal": Case(put("proofs", device="\x1b[2J"), "printable"),
    "file-is-a-link": Case(moved(TIMINGS, symbolic), "link"),
    "file-is-a-hard-link": Case(moved(TIMINGS, lambda path, outside: os.link(outside, path)), "hard link"),
    "manifest-is-a-link": Case(moved(DERIVED, symbolic), "link"),
    "file-is-a-pipe": Case(moved(TIMINGS, lambda path, _: os.mkfifo(path)), "plain file"),
    "model-is-a-link": Case(moved("../..", symbolic), "link"),
    "version-is-a-link": Case(moved("..", symbolic), "link"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_hostile_cache_is_not_used(
    bundle: Bundle, tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The entry is refused, nothing of it is proven, and the log says why in a line."""
    entry = fill(tmp_path / "cache", bundle)
    CASES[case].spoil(entry.path)
    with pytest.raises(CacheError, match=CASES[case].word):
        open_entry(tmp_path / "cache", bundle)
    assert not with_proofs(tmp_path / "cache", bundle).manifest.artifacts[0].proven
    (record,) = caplog.records
    assert CASES[case].word in record.getMessage()
    assert record.getMessage().isprintable()


def test_an_honest_cache_is_used(bundle: Bundle, tmp_path: Path) -> None:
    """The cache that the cases spoil is right in every part."""
    fill(tmp_path, bundle)
    assert with_proofs(tmp_path, bundle).manifest.artifacts[0].proven
    assert (entry := open_entry(tmp_path, bundle))
    assert [engine.file for engine in entry.derived.engines] == [ENGINE]


def test_an_entry_that_is_a_link_does_not_count(bundle: Bundle, tmp_path: Path) -> None:
    """Entries are directories; a link of a number is none of them."""
    entry = fill(tmp_path / "cache", bundle)
    shutil.move(entry.path, tmp_path / "outside")
    entry.path.symlink_to(tmp_path / "outside")
    assert open_entry(tmp_path / "cache", bundle) is None


def test_nothing_is_written_through_a_link(bundle: Bundle, tmp_path: Path) -> None:
    """A link in the place of the model's directory does not lead a proof elsewhere."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / bundle.manifest.model).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CacheError, match="not a link"), CacheWriter(tmp_path, bundle.manifest.model, 1) as writer:
        writer.publish(bundle, proofs={FP32: proof()})
    assert list((tmp_path / "elsewhere").iterdir()) == []
