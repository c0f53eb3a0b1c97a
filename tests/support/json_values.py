"""Made-up checkpoint folders with one JSON value replaced, and what `bertserve export` makes of each."""

from __future__ import annotations

import functools
import json
import os
import resource
import shutil
import tempfile
import traceback
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bertserve.export.cli.export import main
from bertserve.serving.models.bundle import open_bundle
from tests.support.bge_m3 import write_m3
from tests.support.checkpoints import write_checkpoint, write_task_checkpoint
from tests.support.multi_vectors import LAYOUTS
from tests.support.own_forms import TWIN
from tests.support.sparse_encoders import write_idf, write_modules_of_version_5, write_plain, write_router

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

VALUES: dict[str, Any] = {
    "null": None,
    "true": True,
    "-1": -1,
    "10^9": 10**9,
    "empty": "",
    "list": [],
    "object": {},
    "surrogate": "\ud800",
    "outside": "../../outside",
}
"""What takes the place of a value."""

FOLDERS: dict[str, Callable[[Path], Path]] = {
    "embed": write_checkpoint,
    **{
        task: functools.partial(write_task_checkpoint, model_type="bert", task=task)
        for task in ("classify", "rerank", "tag", "answer", "fill_mask")
    },
    "sparse": lambda folder: write_modules_of_version_5(write_plain(folder)),
    "router": lambda folder: write_router(write_plain(folder)),
    "idf": lambda folder: write_idf(write_plain(folder)),
    **{name: LAYOUTS[name] for name in ("own, filled", "pylate", "old pylate", "stanford")},
    "bge-m3": write_m3,
    **{
        family: functools.partial(write_task_checkpoint, model_type=family, task=task)
        for family, task in (
            *(("roberta", "embed"), ("distilbert", "classify"), ("electra", "tag"), ("mpnet", "embed")),
            *(("albert", "embed"), ("deberta", "embed"), ("deberta-v2", "classify"), ("modernbert", "rerank")),
            *(("nomic_bert", "embed"), ("gte", "embed"), ("new", "embed"), ("jina_bert", "embed"), ("ernie", "embed")),
        )
    },
}
"""A folder of each task, layout and kind of settings."""

OWN_CODE = ("new", "jina_bert")
"""Folders that no library reads without code of theirs: PyTorch alone is the reference."""

_JSON = ("*.json", "*/*.json", "artifact.metadata")
_EACH = 2
"""Values that are replaced of a list or an object with many values of one kind, such as a vocabulary."""
_MANY = 8

MEMORY_BYTES = 2 << 30
_CPU_S = 120
_TRACEBACK = 70
"""Exit code of a process whose export ended in an exception."""


@dataclass(frozen=True)
class Case:
    """One value of one file, and what takes its place."""

    folder: str
    file: str
    place: tuple[str | int, ...]
    value: str

    def __str__(self) -> str:
        return f"{self.folder}: {self.file}: {'.'.join(map(str, self.place)) or 'all of it'} = {self.value}"


@dataclass(frozen=True)
class Outcome:
    """What became of a case: the exit code, what was said, the most memory beyond that before, whether it is proven."""

    code: int
    words: str
    memory_bytes: int
    proven: bool
    folder: str

    @property
    def fault(self) -> str:
        """What is wrong with it; empty for one sentence and 1, or a bundle that was compared."""
        if self.memory_bytes > MEMORY_BYTES:
            return f"{self.memory_bytes >> 20} MiB"
        if self.code == 0:
            return "" if self.proven or self.folder in OWN_CODE else f"not compared: {self.words[-300:]}"
        if self.code == 1 and self.words.count("\n") == 1 and self.words.startswith("bertserve export: "):
            return ""
        return f"exit code {self.code}: {self.words[-300:]}"


@functools.cache
def _written() -> Path:
    return Path(tempfile.mkdtemp(prefix="json-values-"))


@functools.cache
def folder_of(name: str) -> Path:
    folder = _written() / name.replace(" ", "-").replace(",", "")
    FOLDERS[name](folder)
    shutil.rmtree(folder / TWIN, ignore_errors=True)  # beside forms that Transformers lacks
    return folder


@functools.cache
def cases(*names: str) -> list[Case]:
    """Every value of a place that no folder before had alike, and one of each other place."""
    found, seen = [], set[str]()
    for name in names or FOLDERS:
        folder = folder_of(name)
        for path in sorted({path for pattern in _JSON for path in folder.glob(pattern)}):
            document, file = json.loads(path.read_bytes()), str(path.relative_to(folder))
            for place in _places(document, is_tokenizer=path.name == "tokenizer.json"):
                value = _at(document, place)
                alike = path.name == "tokenizer.json" or isinstance(value, dict | list)
                key = json.dumps([path.name, place, type(value).__name__ if alike else value])
                values = [list(VALUES)[len(found) % len(VALUES)]] if key in seen else VALUES
                seen.add(key)
                found += [Case(name, file, place, each) for each in values]
    return found


def _places(value: Any, place: tuple[str | int, ...] = (), *, is_tokenizer: bool) -> Iterator[tuple[str | int, ...]]:
    """Every place, but of members that are many and alike the first ones."""
    yield place
    members = [*(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())]
    alike = len({type(member) for _, member in members}) == 1 and (is_tokenizer or len(members) > _MANY)
    for key, member in members[:_EACH] if alike else members:
        yield from _places(member, (*place, key), is_tokenizer=is_tokenizer)


def _replaced(document: Any, place: tuple[str | int, ...], value: Any) -> Any:
    if not place:
        return value
    _at(document, place[:-1])[place[-1]] = value
    return document


def _at(document: Any, place: tuple[str | int, ...]) -> Any:
    return functools.reduce(lambda each, key: each[key], place, document)


def outcome(case: Case) -> Outcome:
    """Exports a case in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="json-value-") as place:
        return _exported(case, Path(place))


def _exported(case: Case, place: Path) -> Outcome:
    folder = shutil.copytree(folder_of(case.folder), place / folder_of(case.folder).name)
    file = folder / case.file
    document = _replaced(json.loads(file.read_bytes()), case.place, VALUES[case.value])
    file.write_text(json.dumps(document), encoding="utf-8")
    child = os.fork()
    if not child:
        os._exit(_child(folder, place))
    _, status, usage = os.wait4(child, 0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    words = (place / "err").read_text(errors="replace")
    bundle = place / "models" / folder.name / "1"
    code = os.waitstatus_to_exitcode(status)
    proven = code == 0 and not open_bundle(bundle).manifest.reference_library.unproven
    return Outcome(code, words, max(0, (usage.ru_maxrss << 10) - before), proven, case.folder)


def _child(folder: Path, place: Path) -> int:
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 4 * MEMORY_BYTES,) * 2)
    torch.set_num_threads(1)
    with (place / "err").open("w") as err, (place / "out").open("w") as out, redirect_stderr(err), redirect_stdout(out):
        try:
            return main([str(folder), "--out", str(place / "models"), "--precision", "fp32"])
        except BaseException:  # noqa: BLE001  what a test looks for
            traceback.print_exc()
            return _TRACEBACK


def faults(found: Iterable[Case]) -> list[str]:
    """The faults of these cases, in their order."""
    outcome(Case("embed", "config.json", ("architectures",), "null"))  # imports here what every fork would import
    return [f"{case}: {fault}" for case in found if (fault := outcome(case).fault)]
