"""`bertserve export`: a PyTorch BERT in, a verified model bundle out."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from export.checkpoint.reader import open_checkpoint
from export.checkpoint.source import DEMO, find
from export.cli.command import positive, run
from export.engines.tensorrt import GRAPH, NATIVE
from export.engines.tensorrt import TARGETS as TENSORRT_TARGETS
from export.recipe import DEFAULT_FORMS, FORMS, LIMIT_NAMES, TASKS, WAIVABLE, Recipe
from export.report import terminal
from export.triton import repository
from serving.models.bundle import BundleWriter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from export.progress import Progress

_EXTRA = frozenset({"huggingface_hub", "onnx", "onnxruntime", "safetensors", "sympy", "torch", "transformers"})
"""Modules that the extra `export` (or `cpu`) brings."""


def main(argv: list[str]) -> int:
    """Runs one export: 0 done, 1 failed with one line on stderr, 2 not understood, 130 or 143 interrupted."""
    try:
        recipe = _recipe(argv)
    except SystemExit as end:
        return int(end.code or 0)
    return run(
        "export",
        lambda progress: _export(recipe, progress),
        path=recipe.out,
        modules=_EXTRA,
        extras="cpu,export",
    )


def _export(recipe: Recipe, progress: Progress) -> int:
    with progress.stage(f"opening {recipe.source}"):
        checkpoint = open_checkpoint(find(recipe.source), recipe.max_length, progress.notice, recipe.task)
        writer = BundleWriter(recipe.out, recipe.name or checkpoint.source.model)
    with progress.stage("starting PyTorch"):
        # Slow to import; what is wrong with the command line or the checkpoint's files is said without it.
        from export import build  # noqa: PLC0415
    bundle = build.build(recipe, checkpoint, writer, progress)
    manifest = bundle.manifest
    if recipe.triton is not None:
        repository.write(bundle, recipe.triton, progress.notice)
    print(
        f"\n{bundle.path}: {terminal.answer(manifest)}, up to {manifest.max_length} tokens\n\n"
        f"{terminal.table(manifest.artifacts)}\n\nin {progress.elapsed_s:.0f} s"
    )
    return 0


def _recipe(argv: list[str]) -> Recipe:
    parser = _parser()
    given = parser.parse_args(argv)
    if NATIVE in given.tensorrt and given.cache_dir is None:
        parser.error("--tensorrt native builds for this node alone, so it goes into the node's cache: give --cache-dir")
    if given.calibration_column is not None and given.calibration is None:
        parser.error("--calibration-column is of a --calibration file")
    chosen = given.precision or DEFAULT_FORMS
    return Recipe(
        source=given.source,
        out=given.out,
        name=given.name,
        forms=tuple(form for form in FORMS if form in chosen),
        tensorrt=tuple(dict.fromkeys(given.tensorrt)),
        cache_dir=given.cache_dir,
        triton=given.triton,
        max_length=given.max_length,
        task=given.task,
        references=tuple(given.reference),
        limits=dict(given.limit),
        allowed=frozenset(given.allow),
        calibration=given.calibration,
        calibration_column=given.calibration_column,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bertserve export",
        description="Turns a BERT checkpoint into a model bundle whose answers were compared with PyTorch's.",
    )
    parser.add_argument("source", metavar="SOURCE", help=f"a checkpoint folder, a hub id, or `{DEMO}`")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the model repository to write to")
    parser.add_argument("--name", help="the model's name (default: from SOURCE)")
    parser.add_argument("--task", choices=TASKS, help="what to export it for (default: from its architecture)")
    parser.add_argument(
        "--precision",
        action="append",
        choices=FORMS,
        help=f"an artifact to make; may be given more than once (default: {' and '.join(DEFAULT_FORMS)})",
    )
    parser.add_argument(
        "--tensorrt",
        action="append",
        default=[],
        choices=(*TENSORRT_TARGETS, GRAPH),
        help="a TensorRT engine to build, for that GPU or for the one at hand (native), or the graph that each node "
        "builds its own of (graph); may be given more than once",
    )
    parser.add_argument(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help="the node's cache, which the engine of --tensorrt native goes into",
    )
    parser.add_argument(
        "--triton", type=Path, metavar="DIR", help="write the bundle as a Triton model repository there too"
    )
    parser.add_argument(
        "--max-length",
        type=positive,
        metavar="N",
        help="tokens of the longest input (default: the checkpoint's own limit)",
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="texts that INT8 takes its ranges from: one a line, .jsonl with `text` and perhaps `pair`, or a column of "
        "a .csv or .tsv (default: the package's own)",
    )
    parser.add_argument(
        "--calibration-column",
        metavar="NAME",
        help="the column, by its name in the first row or its number (default: 1)",
    )
    _add_proof(parser)
    return parser


def _add_proof(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--reference",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="labelled text to judge PyTorch and every artifact by the task's own metric; may be given more than once",
    )
    parser.add_argument(
        "--limit",
        action="append",
        default=[],
        type=_limit,
        metavar="[ARTIFACT.]NAME=VALUE",
        help=f"a limit that artifacts must keep: {', '.join(LIMIT_NAMES)}",
    )
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        type=_limit_name,
        metavar="[ARTIFACT.]NAME",
        help="a limit that an artifact may break; the manifest will say so",
    )


def _limit(word: str) -> tuple[str, float]:
    name, _, value = word.partition("=")
    number = float(value)
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{word!r}: a limit is a number")
    return _known(name, LIMIT_NAMES), number


def _limit_name(word: str) -> str:
    return _known(word, WAIVABLE)


def _known(word: str, names: Sequence[str]) -> str:
    form, _, name = word.rpartition(".")
    if name not in names or form not in ("", *FORMS):
        raise argparse.ArgumentTypeError(f"{word!r}: the limits are {', '.join(names)}")
    return word
