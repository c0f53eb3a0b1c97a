"""`bertserve export`: a PyTorch BERT in, a verified model bundle out."""

from __future__ import annotations

import argparse
import importlib.util
import math
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from export.checkpoint.labels import REGRESSION
from export.checkpoint.layouts.case import CASES
from export.checkpoint.reader import open_checkpoint
from export.checkpoint.source import DEMO, locate
from export.cli.command import run
from export.engines.tensorrt import GRAPH, NATIVE
from export.engines.tensorrt import TARGETS as TENSORRT_TARGETS
from export.errors import ExportError, LeftOutError
from export.pages.tables import show
from export.recipe import DEFAULT_FORMS, FORMS, LIMIT_NAMES, LIMITED, SECOND, SPLIT_FORMS, WAIVABLE, Recipe
from export.report import terminal
from export.triton import repository
from serving.engine.kinds import ENGINES
from serving.errors import BundleError
from serving.models.bundle import BundleWriter, open_bundle, read_bundle
from serving.models.manifest import ENGINE_GRAPHS
from serving.models.staging_dir import exclusive
from serving.models.verified_dir import versions
from serving.options import OptionParser, positive
from serving.records import SplitBy
from serving.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from export.checkpoint.source import Located
    from export.progress import Progress
    from serving.models.bundle import Bundle


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
"""What the extra installs."""

_MOST_PARTS = 16


def main(argv: list[str]) -> int:
    """Runs one export; the exit codes are those of `command.run`."""
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
        _tell(made, "made before, of the same by the same recipe")
        return 0


def _made_before(recipe: Recipe, located: Located, model: Path, progress: Progress) -> Bundle | None:
    """The model's newest version, where it is whole and this recipe would make the same again of this checkpoint."""
    try:
        bundle = open_bundle(model / str(max(versions(model))))
    except (BundleError, ValueError):
        return None
    source, revision = bundle.manifest.source, located.revision()
    if (source.name, bundle.manifest.recipe) != (located.source.name, recipe.sha256()):
        return None
    if not revision:
        progress.notice("the hub cannot be asked, so this may not be its newest commit")
    return bundle if revision in {"", source.revision} else None


def _make(recipe: Recipe, located: Located, progress: Progress) -> int:
    for name in sorted(_MODULES):  # before anything is loaded from the hub, and anything slow imported
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(name=name)
    with progress.stage(f"opening {recipe.source}"):
        checkpoint = open_checkpoint(located.load(), recipe.max_length, progress.notice, recipe.task, recipe.case)
        writer = BundleWriter(recipe.out, recipe.name or checkpoint.source.model)
        if not recipe.change_task:
            _check_task(recipe.out / writer.model, checkpoint.task)
    with progress.stage("starting PyTorch"):
        # Slow to import; faults of the command line and of the checkpoint's files are reported before.
        from export import build  # noqa: PLC0415
    built = build.build(recipe, checkpoint, writer, progress)
    if recipe.triton is not None:
        repository.write(built.bundle, recipe.triton, progress.notice)
    _tell(built.bundle, f"in {progress.elapsed_s:.0f} s")
    if not recipe.if_changed:
        print(f"\nServe it:  {terminal.serve_command(recipe.out, built.bundle.artifacts)}")
    if built.refused:
        left_out = f"{built.bundle.path} is written, but {'; '.join(built.refused)}"
        if not recipe.if_changed:
            raise LeftOutError(left_out)
        progress.notice(left_out)  # run again it would find the bundle, and end well
    return 0


def _tell(bundle: Bundle, ending: str) -> None:
    manifest = bundle.manifest
    show(
        f"\n{bundle.path}: {terminal.answer(manifest)}, up to {manifest.max_length} tokens\n",
        *terminal.tables(manifest.artifacts),
        f"  end to end: {terminal.end_to_end(manifest)}\n\n{ending}",
    )


def _check_task(model: Path, task: str) -> None:
    """Keeps the next version of a model to its task, since servers refuse another one."""
    numbers = versions(model) if model.is_dir() else []
    if not numbers:
        return
    try:
        last = read_bundle(model / str(numbers[-1])).manifest.task
    except BundleError:
        return  # no server takes it either
    if last != task:
        raise ExportError(
            f"{model}: its version {numbers[-1]} is for the task {last}, and this export is for {task}; give another "
            "--name, or --change-task to make it the next version all the same"
        )


def recipe_of(options: argparse.Namespace, arguments: argparse.ArgumentParser) -> Recipe:
    """The recipe that parsed arguments ask for; ends with a usage error where they do not go together."""
    if NATIVE in options.tensorrt and options.cache_dir is None:
        arguments.error(
            "--tensorrt native builds for this node alone, so it goes into the node's cache: give --cache-dir"
        )
    if options.tensorrt_precisions and not options.tensorrt:
        arguments.error("--tensorrt-precision is of TensorRT engines: give --tensorrt too")
    if options.if_changed and (options.triton is not None or NATIVE in options.tensorrt):
        arguments.error("--if-changed looks at the bundle alone, so --triton and --tensorrt native do not go with it")
    if options.calibration_column is not None and options.calibration is None:
        arguments.error("--calibration-column is of a --calibration file")
    chosen = options.forms or default_forms(options.split)
    if options.split > 1 and (options.triton or GRAPH in options.tensorrt or not SPLIT_FORMS.issuperset(chosen)):
        arguments.error(
            f"--split is of {', '.join(sorted(SPLIT_FORMS))} for ONNX Runtime and of engines that are built now, so "
            "--triton, --tensorrt graph and other precisions do not go with it"
        )
    if (
        options.split > 1
        and options.split_by == "tensors"
        and (options.tensorrt or tuple(options.forms or ()) != ("fp32",))
    ):
        arguments.error("--split-by tensors is of fp32 on CPUs: give --precision fp32 alone, and no --tensorrt")
    fields = vars(options) | {
        "forms": tuple(form for form in FORMS if form in chosen),
        "tensorrt": tuple(dict.fromkeys(options.tensorrt)),
        "tensorrt_precisions": tuple(one for one in ENGINE_GRAPHS if one in (options.tensorrt_precisions or ["fp16"])),
        "references": tuple(options.references),
        "limits": dict(options.limits),
        "allowed": frozenset(options.allowed),
    }
    return Recipe(**fields)


def default_forms(split: int) -> tuple[str, ...]:
    """What `serve` takes by default where the libraries are those of this machine."""
    return (*DEFAULT_FORMS, SECOND) if split == 1 and ENGINES["openvino"].installed else DEFAULT_FORMS


def parser() -> argparse.ArgumentParser:
    """Its arguments are called as the fields of `Recipe`."""
    arguments = OptionParser(
        prog="bertserve export",
        description="Turns a BERT checkpoint into a model bundle whose answers were compared with PyTorch's.",
    )
    add = arguments.add_argument
    add("source", metavar="SOURCE", help=f"a checkpoint folder, a hub id, or `{DEMO}`")
    add("--out", type=Path, required=True, metavar="DIR", help="the model repository to write to")
    add("--name", help="the model's name (default: from SOURCE)")
    add("--revision", metavar="REVISION", help="the hub's branch, tag or commit (default: its main branch)")
    add("--token", metavar="TOKEN", help="of an account of the hub (default: HF_TOKEN, or the one of its own login)")
    add("--task", choices=(*TASKS, REGRESSION), help="what to export it for (default: from the checkpoint)")
    add(
        "--case",
        choices=CASES,
        help="whether the words of a TensorFlow or Megatron-LM checkpoint keep their case, where its files do not say",
    )
    add("--change-task", action="store_true", help="let the model's next version have another task than its last")
    add(
        "--if-changed",
        action="store_true",
        help="make nothing where the model's newest version was made of the same files or commit, with the same options"
        " and version; of several such commands at once, one works and the others wait",
    )
    add(
        "--precision",
        dest="forms",
        action="append",
        choices=FORMS,
        help=f"an artifact to make; may be given more than once (default: {' and '.join(DEFAULT_FORMS)}, and {SECOND} "
        "where OpenVINO is installed)",
    )
    add(
        "--tensorrt",
        action="append",
        default=[],
        choices=(*TENSORRT_TARGETS, GRAPH),
        help="a TensorRT engine to build, for that GPU or for the one at hand (native), or the graph that each node "
        "builds its own of (graph); may be given more than once",
    )
    add(
        "--tensorrt-precision",
        dest="tensorrt_precisions",
        action="append",
        default=[],
        choices=ENGINE_GRAPHS,
        help="what TensorRT's engines compute in; may be given more than once (default: fp16)",
    )
    add(
        "--split",
        type=_parts,
        default=1,
        metavar="N",
        help=f"cut each artifact into N parts, {_MOST_PARTS} at most, that run in as many processes, for a model that "
        "one cannot hold",
    )
    add(
        "--split-by",
        choices=get_args(SplitBy),
        default="layers",
        help="whether each part of --split has some of the layers, or a share of every layer (default: layers)",
    )
    add(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help="the node's cache, which the engine of --tensorrt native goes into",
    )
    add("--triton", type=Path, metavar="DIR", help="write the bundle as a Triton model repository there too")
    add(
        "--max-length",
        type=positive,
        metavar="N",
        help="tokens of the longest input (default: the checkpoint's own limit)",
    )
    add(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="texts that INT8 takes its ranges from: one a line, .jsonl with `text` and perhaps `pair`, or a column of "
        "a .csv or .tsv (default: the package's own)",
    )
    add(
        "--calibration-column",
        metavar="NAME",
        help="the column, by its name in the first row or its number (default: 1)",
    )
    _add_proof(arguments)
    return arguments


def _parts(argument: str) -> int:
    number = int(argument)
    if not 1 <= number <= _MOST_PARTS:
        raise argparse.ArgumentTypeError(f"{argument!r}: a model is cut into 2 to {_MOST_PARTS} parts")
    return number


def _add_proof(arguments: argparse.ArgumentParser) -> None:
    arguments.add_argument(
        "--reference",
        dest="references",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="labelled text to judge PyTorch and every artifact by the task's own metric; may be given more than once",
    )
    arguments.add_argument(
        "--limit",
        dest="limits",
        action="append",
        default=[],
        type=_limit,
        metavar="[ARTIFACT.]NAME=VALUE",
        help=f"a limit that artifacts must keep: {', '.join(LIMIT_NAMES)}",
    )
    arguments.add_argument(
        "--allow",
        dest="allowed",
        action="append",
        default=[],
        type=_waivable,
        metavar="[ARTIFACT.]NAME",
        help="a limit that an artifact may break; the manifest will say so",
    )


def _limit(argument: str) -> tuple[str, float]:
    name, _, value = argument.partition("=")
    number = float(value)
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{argument!r}: a limit is a number")
    return _limit_name(name, LIMIT_NAMES), number


def _waivable(argument: str) -> str:
    return _limit_name(argument, WAIVABLE)


def _limit_name(argument: str, names: Sequence[str]) -> str:
    form, _, name = argument.rpartition(".")
    if name not in names or form not in ("", *LIMITED):
        raise argparse.ArgumentTypeError(
            f"{argument!r}: the limits are {', '.join(names)}, alone or behind one of {', '.join(LIMITED)} and a dot"
        )
    return argument
