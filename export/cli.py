"""`bertserve export`: a PyTorch BERT in, a verified model bundle out."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from export import report
from export.checkpoint import open_checkpoint
from export.errors import ExportError
from export.interrupts import Interrupted, Interrupts
from export.progress import Progress
from export.recipe import PRECISIONS, Recipe
from export.source import DEMO, find
from serving.bundle import BundleError, BundleWriter

_FAILED = 1
_EXTRA = frozenset({"huggingface_hub", "onnx", "onnxruntime", "safetensors", "sympy", "torch", "transformers"})
"""Modules that the extra `export` (or `cpu`) brings."""


def main(argv: list[str]) -> int:
    """Runs one export: 0 done, 1 failed with one line on stderr, 2 not understood, 130 or 143 interrupted."""
    try:
        recipe = _recipe(argv)
    except SystemExit as end:
        return int(end.code or 0)
    try:
        with Interrupts() as interrupts:
            progress = Progress(sys.stdout, interrupts.check)
            try:
                _export(recipe, progress)
            finally:
                progress.clear()
    except Interrupted as signal:
        print(f"bertserve export: {signal}", file=sys.stderr)
        return signal.exit_code
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA:
            raise
        return _fail(f"the module {error.name} is missing: pip install bertserve[cpu,export]")
    except (ExportError, BundleError) as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"{error.filename or recipe.out}: {error.strerror or error}")
    return 0


def _export(recipe: Recipe, progress: Progress) -> None:
    with progress.stage(f"opening {recipe.source}"):
        checkpoint = open_checkpoint(find(recipe.source), recipe.max_length, progress.notice)
        writer = BundleWriter(recipe.out, recipe.name or checkpoint.source.model)
    with progress.stage("starting PyTorch"):
        # Slow to import; what is wrong with the command line or the checkpoint's files is said without it.
        from export import build  # noqa: PLC0415
    bundle = build.build(recipe.precisions, checkpoint, writer, progress)
    manifest = bundle.manifest
    print(
        f"\n{bundle.path}: {manifest.task}, {manifest.pooling} pooling, {manifest.hidden_size} components, "
        f"up to {manifest.max_length} tokens\n\n{report.table(bundle)}\n\nin {progress.elapsed_s:.0f} s"
    )


def _fail(sentence: str) -> int:
    print(f"bertserve export: {' '.join(sentence.split())}", file=sys.stderr)
    return _FAILED


def _recipe(argv: list[str]) -> Recipe:
    parser = argparse.ArgumentParser(
        prog="bertserve export",
        description="Turns a BERT checkpoint into a model bundle whose answers were compared with PyTorch's.",
    )
    parser.add_argument("source", metavar="SOURCE", help=f"a checkpoint folder, a hub id, or `{DEMO}`")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the model repository to write to")
    parser.add_argument("--name", help="the model's name (default: from SOURCE)")
    parser.add_argument(
        "--precision",
        action="append",
        choices=PRECISIONS,
        help="an artifact to make; may be given more than once (default: all)",
    )
    parser.add_argument(
        "--max-length",
        type=_positive,
        metavar="N",
        help="tokens of the longest input (default: the checkpoint's own limit)",
    )
    given = parser.parse_args(argv)
    chosen = given.precision or PRECISIONS
    precisions = tuple(precision for precision in PRECISIONS if precision in chosen)
    return Recipe(given.source, given.out, given.name, precisions, given.max_length)


def _positive(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number
