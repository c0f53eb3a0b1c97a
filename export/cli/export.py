"""`bertserve export`: exports a PyTorch BERT to a verified model bundle."""

from __future__ import annotations

import argparse
import importlib.util
import math
from pathlib import Path
from typing import TYPE_CHECKING

from bertserve.export.checkpoint.labels import REGRESSION
from bertserve.export.checkpoint.layouts.case import CASES
from bertserve.export.checkpoint.reader import open_checkpoint
from bertserve.export.checkpoint.source import DEMO, locate
from bertserve.export.checkpoint.token_heads import OUTPUTS
from bertserve.export.cli.command import run
from bertserve.export.engines.tensorrt import GRAPH, NATIVE
from bertserve.export.engines.tensorrt import TARGETS as TENSORRT_TARGETS
from bertserve.export.errors import ExportError, LeftOutError
from bertserve.export.pages.tables import show
from bertserve.export.recipe import (
    ARTIFACTS,
    DEFAULT_ARTIFACTS,
    LIMIT_NAMES,
    LIMITED,
    OPENVINO_ARTIFACT,
    WAIVABLE,
    Recipe,
)
from bertserve.export.report import terminal
from bertserve.serving.engine.kinds import ENGINES
from bertserve.serving.errors import BundleError
from bertserve.serving.models.bundle import BundleWriter, open_bundle, read_bundle
from bertserve.serving.models.manifest import ENGINE_GRAPHS
from bertserve.serving.models.staging_dir import exclusive
from bertserve.serving.models.verified_dir import versions
from bertserve.serving.options import OptionParser, positive
from bertserve.serving.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bertserve.export.checkpoint.source import Located
    from bertserve.export.progress import Progress
    from bertserve.serving.models.bundle import Bundle


_MODULES = frozenset(
    {
        "google_crc32c",
        "huggingface_hub",
        "jinja2",
        "matplotlib",
        "onnx",
        "onnxruntime",
        "safetensors",
        "sentence_transformers",
        "sympy",
        "torch",
        "transformers",
    }
)
"""Modules of the extra."""


def main(argv: list[str]) -> int:
    """Runs one export; exit codes as in `command.run`."""
    arguments = parser()
    return run(
        arguments,
        argv,
        lambda options, progress: _export(recipe_of(options, arguments), progress),
        path="out",
        modules=_MODULES,
        extras="cpu,export",
    )


def _export(recipe: Recipe, progress: Progress) -> int:
    located = locate(recipe.source, recipe.revision, recipe.token)
    if not recipe.if_changed:
        return _make(recipe, located, progress)
    model = BundleWriter(recipe.out, recipe.name or located.source.model).directory
    with exclusive(model, lambda: progress.notice(f"another process is exporting {model.name}; waiting for it")):
        made = _made_before(recipe, located, model, progress)
        if made is None:
            return _make(recipe, located, progress)
        _show_bundle(made, "already exported from the same source with the same options")
        return 0


def _made_before(recipe: Recipe, located: Located, model: Path, progress: Progress) -> Bundle | None:
    """The model's newest version, if it is whole and has the same checkpoint and recipe."""
    try:
        bundle = open_bundle(model / str(max(versions(model))))
    except (BundleError, ValueError):
        return None
    source, revision = bundle.manifest.source, located.revision()
    if (source.name, bundle.manifest.recipe) != (located.source.name, recipe.sha256()):
        return None
    if not revision:
        progress.notice("the hub cannot be reached, so this may not be the newest commit")
    return bundle if revision in {"", source.revision} else None


def _make(recipe: Recipe, located: Located, progress: Progress) -> int:
    for name in sorted(_MODULES):  # before anything is loaded from the hub, and anything slow imported
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(name=name)
    with progress.stage(f"opening {recipe.source}"):
        checkpoint = open_checkpoint(
            located.load(), recipe.max_length, progress.notice, recipe.task, recipe.case, recipe.outputs
        )
        writer = BundleWriter(recipe.out, recipe.name or checkpoint.source.model)
        if not recipe.change_task:
            _check_task(recipe.out / writer.model, checkpoint.task)
    with progress.stage("starting PyTorch"):
        # Slow to import; errors of the command line and of the checkpoint's files are reported first.
        from bertserve.export import build  # noqa: PLC0415
    built = build.build(recipe, checkpoint, writer, progress)
    _show_bundle(built.bundle, f"in {progress.elapsed_s:.0f} s")
    if not recipe.if_changed:
        print(f"\nServe it:  {terminal.serve_command(recipe.out, built.bundle.artifacts)}")
    if built.refused:
        left_out = f"{built.bundle.path} was written, but {'; '.join(built.refused)}"
        if not recipe.if_changed:
            raise LeftOutError(left_out)
        progress.notice(left_out)  # run again it would find the bundle, and end well
    return 0


def _show_bundle(bundle: Bundle, ending: str) -> None:
    manifest = bundle.manifest
    show(
        f"\n{bundle.path}: {terminal.answer(manifest)}, up to {manifest.max_length} tokens\n",
        *terminal.tables(manifest.artifacts),
        f"  end to end: {terminal.end_to_end(manifest)}\n\n{ending}",
    )


def _check_task(model: Path, task: str) -> None:
    """Rejects a new task for an existing model, because servers do."""
    numbers = versions(model) if model.is_dir() else []
    if not numbers:
        return
    try:
        last = read_bundle(model / str(numbers[-1])).manifest.task
    except BundleError:
        return  # no server takes it either
    if last != task:
        raise ExportError(
            f"{model}: version {numbers[-1]} is for the task {last}, but this export is for {task}; set another "
            "--name, or allow it with --change-task"
        )


def recipe_of(options: argparse.Namespace, arguments: argparse.ArgumentParser) -> Recipe:
    """The recipe of parsed arguments; ends with a usage error if they contradict one another."""
    if NATIVE in options.tensorrt and options.cache_dir is None:
        arguments.error(
            "--tensorrt native needs --cache-dir: the engine works only on this node, so it goes into its cache"
        )
    if options.tensorrt_precisions and not options.tensorrt:
        arguments.error("--tensorrt-precision needs --tensorrt")
    if options.if_changed and NATIVE in options.tensorrt:
        arguments.error("--if-changed checks only the bundle, so it cannot be used with --tensorrt native")
    if options.calibration_column is not None and options.calibration is None:
        arguments.error("--calibration-column needs --calibration")
    chosen = options.artifacts or default_artifacts()
    fields = vars(options) | {
        "artifacts": tuple(name for name in ARTIFACTS if name in chosen),
        "tensorrt": tuple(dict.fromkeys(options.tensorrt)),
        "tensorrt_precisions": tuple(one for one in ENGINE_GRAPHS if one in (options.tensorrt_precisions or ["fp16"])),
        "references": tuple(options.references),
        "limits": dict(options.limits),
        "allowed": frozenset(options.allowed),
    }
    return Recipe(**fields)


def default_artifacts() -> tuple[str, ...]:
    """The artifacts that `serve` uses by default with the libraries of this machine."""
    return (*DEFAULT_ARTIFACTS, OPENVINO_ARTIFACT) if ENGINES["openvino"].installed else DEFAULT_ARTIFACTS


def parser() -> argparse.ArgumentParser:
    """The names of its arguments are the fields of `Recipe`."""
    arguments = OptionParser(
        prog="bertserve export",
        description="Export a BERT checkpoint as a verified model bundle. Every artifact is compared with PyTorch.",
    )
    add = arguments.add_argument
    add("source", metavar="SOURCE", help=f"Checkpoint folder, Hugging Face model ID, or `{DEMO}`.")
    add("--out", type=Path, required=True, metavar="DIR", help="Model repository to write to.")
    add("--name", help="Name of the model (default: from SOURCE).")
    add("--revision", metavar="REVISION", help="Branch, tag or commit on the hub (default: the main branch).")
    add(
        "--token",
        metavar="TOKEN",
        help="Hugging Face access token. Prefer the environment variable `HF_TOKEN` (default: `HF_TOKEN`, or the token "
        "of `hf auth login`).",
    )
    add("--task", choices=(*TASKS, REGRESSION), help="Task to export for (default: from the checkpoint).")
    add(
        "--case",
        choices=CASES,
        help="Case of a TensorFlow or Megatron-LM checkpoint's vocabulary, if its files do not say.",
    )
    add(
        "--outputs",
        type=_outputs,
        metavar="NAME,...",
        help=f"Outputs of an encoder with several, such as bge-m3: {', '.join(OUTPUTS)}. The dense output is always "
        "exported (default: all that the checkpoint has).",
    )
    add("--change-task", action="store_true", help="Allow another task than the last version has.")
    add(
        "--if-changed",
        action="store_true",
        help="Skip the export if the newest version has the same source, options and bertserve version. Concurrent"
        " commands are safe: one exports, the others wait.",
    )
    add(
        "--precision",
        dest="artifacts",
        action="append",
        choices=ARTIFACTS,
        help=f"Artifact to export. Can be repeated (default: {' and '.join(DEFAULT_ARTIFACTS)}, and "
        f"{OPENVINO_ARTIFACT} if OpenVINO is installed).",
    )
    add(
        "--tensorrt",
        action="append",
        default=[],
        choices=(*TENSORRT_TARGETS, GRAPH),
        help="TensorRT engine to build, for a type of GPU or for this machine's (`native`). `graph`: the graph from "
        "which each node builds its own engine. Can be repeated.",
    )
    add(
        "--tensorrt-precision",
        dest="tensorrt_precisions",
        action="append",
        default=[],
        choices=ENGINE_GRAPHS,
        help="Precision of TensorRT engines. Can be repeated (default: fp16).",
    )
    add(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help="Cache directory of this node, for the engine of `--tensorrt native`.",
    )
    add(
        "--max-length",
        type=positive,
        metavar="N",
        help="Maximum input length, in tokens (default: the checkpoint's limit).",
    )
    add(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="File of texts for INT8 calibration (default: built-in texts). Formats: one text per line, .jsonl with "
        "`text` and optionally `pair`, or a column of a .csv or .tsv.",
    )
    add(
        "--calibration-column",
        metavar="NAME",
        help="Column of `--calibration`, by header or number (default: 1).",
    )
    _add_proof(arguments)
    return arguments


def _outputs(argument: str) -> tuple[str, ...]:
    names = argument.split(",")
    if unknown := [name for name in names if name not in OUTPUTS]:
        raise argparse.ArgumentTypeError(f"unknown output {unknown[0]!r}; available: {', '.join(OUTPUTS)}")
    return tuple(output for output in OUTPUTS if output in names)


def _add_proof(arguments: argparse.ArgumentParser) -> None:
    arguments.add_argument(
        "--reference",
        dest="references",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="File of labeled texts, to score PyTorch and every artifact by the task's metric. Can be repeated.",
    )
    arguments.add_argument(
        "--limit",
        dest="limits",
        action="append",
        default=[],
        type=_limit,
        metavar="[ARTIFACT.]NAME=VALUE",
        help=f"Limit that artifacts must keep. Names: {', '.join(LIMIT_NAMES)}. Can be repeated.",
    )
    arguments.add_argument(
        "--allow",
        dest="allowed",
        action="append",
        default=[],
        type=_waivable,
        metavar="[ARTIFACT.]NAME",
        help="Limit that an artifact may break. The manifest records it. Can be repeated.",
    )


def _limit(argument: str) -> tuple[str, float]:
    name, _, value = argument.partition("=")
    number = float(value)
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{argument!r}: a limit must be a number")
    return _limit_name(name, LIMIT_NAMES), number


def _waivable(argument: str) -> str:
    return _limit_name(argument, WAIVABLE)


def _limit_name(argument: str, names: Sequence[str]) -> str:
    artifact, _, name = argument.rpartition(".")
    if name not in names or artifact not in ("", *LIMITED):
        raise argparse.ArgumentTypeError(
            f"unknown limit {argument!r}; use {', '.join(names)}, or ARTIFACT.NAME with one of {', '.join(LIMITED)}"
        )
    return argument
