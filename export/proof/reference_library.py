"""Loads a checkpoint's folder with its reference library."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import transformers

from bertserve.export.checkpoint.weights import unpickle
from bertserve.export.errors import ExportError
from bertserve.export.progress import quiet
from bertserve.export.tasks import EXPORTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bertserve.export.checkpoint.reader import Checkpoint
    from bertserve.export.tasks.libraries.library import Library

_LONGEST_REASON = 200
_DROPPED = frozenset({"alibi", "relative_key", "relative_key_query"})
"""Kinds of positions that Transformers' BERT silently treats as absolute."""


class NotLoadedError(Exception):
    """No library can load this folder; the sentence says why."""


def load(checkpoint: Checkpoint, *, cut: bool) -> Library:
    """Loads a checkpoint's folder with its reference library, offline.

    Raises:
        NotLoadedError: The library needs code of the checkpoint, or has no such model.
        ExportError: The library rejects the folder, or a pickle in it holds other content than weights.
    """
    if checkpoint.encoder.folder.imported is not None:
        raise NotLoadedError("no library loads a folder of this layout")
    positions = checkpoint.encoder.config.get("position_embedding_type")
    if positions in _DROPPED:
        raise NotLoadedError(
            f"Transformers {transformers.__version__} has no model with position_embedding_type {positions!r}"
        )
    kind = EXPORTS[checkpoint.task].library
    failure = failing_as(NotLoadedError, f"{kind.title} cannot load the folder")
    try:
        with quiet(), _no_bars(), _without_pickles(checkpoint) as folder, failure:
            library = kind(checkpoint, folder)
    except NotLoadedError as error:
        # Without its own code it has no model of this form.
        if checkpoint.encoder.family.own_prefix or isinstance(error.__cause__, ImportError):
            raise
        raise ExportError(f"checkpoint {checkpoint.source.path}: {error}") from error
    # Without a limit in the folder, RoBERTa's position table would be exceeded.
    library.longest = checkpoint.max_length if cut else min(library.longest, checkpoint.positions)
    return library


@contextmanager
def failing_as(kind: type[Exception], sentence: str) -> Iterator[None]:
    """Turns any exception of a library into one of this kind that begins with a sentence."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:_LONGEST_REASON]
        raise kind(f"{sentence}: {reason}") from error


@contextmanager
def _no_bars() -> Iterator[None]:
    bars: Any = transformers.utils.logging  # without types
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


@contextmanager
def _without_pickles(checkpoint: Checkpoint) -> Iterator[Path]:
    """The folder for a library; with safetensors in place of pickled weights.

    Pickles are only read in a separate process, see `export.checkpoint.unpickle`.
    """
    source = checkpoint.source.path
    files = [path for pattern in ("*", "*/*") for path in source.glob(pattern) if path.is_file()]
    if not any(path.suffix == ".bin" for path in files):
        yield source
        return
    with TemporaryDirectory(prefix="bertserve-library-") as made:
        for path in files:
            target = Path(made) / path.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            if ".bin" not in path.suffixes:
                target.symlink_to(path.resolve())
            elif path.name.startswith("pytorch_model") and not path.with_name(_safe_name(path.name)).exists():
                _without_pickle(path, target.with_name(_safe_name(path.name)))
        yield Path(made)


def _without_pickle(path: Path, target: Path) -> None:
    if path.suffix == ".bin":
        unpickle(path, target)
        return
    index = json.loads(path.read_bytes())
    index["weight_map"] = {name: _safe_name(file) for name, file in index["weight_map"].items()}
    target.write_text(json.dumps(index))


def _safe_name(name: str) -> str:
    return name.replace("pytorch_model", "model").replace(".bin", ".safetensors")
