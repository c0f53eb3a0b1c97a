"""`bertserve build`: builds a bundle's TensorRT engine for this node, without PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bertserve.export.cli.command import add_bundle, add_threads, open_named, run
from bertserve.export.engines.tensorrt import TARGETS
from bertserve.serving.host import available_cpus
from bertserve.serving.models.manifest import ENGINE_GRAPHS
from bertserve.serving.options import OptionParser

if TYPE_CHECKING:
    import argparse

    from bertserve.export.progress import Progress


def main(argv: list[str]) -> int:
    """Builds an engine and puts it into the cache; exit codes as in `command.run`."""
    modules = frozenset({"onnxruntime", "safetensors"})
    return run(parser(), argv, _build, modules=modules, extras="gpu,verify")


def _build(options: argparse.Namespace, progress: Progress) -> int:
    with progress.stage("checking files, digests and operators"):
        bundle = open_named(options.bundle)
    # Imports engine libraries, which takes a second; file errors are reported first.
    from bertserve.export.engines.native import build  # noqa: PLC0415

    threads = options.threads or available_cpus()
    outcome = build(bundle, options.cache_dir, options.target, options.precision, threads, progress)
    print(f"{outcome.artifact.file} {outcome.sentence}; saved in {options.cache_dir}; in {progress.elapsed_s:.0f} s")
    return 0


def parser() -> argparse.ArgumentParser:
    arguments = OptionParser(
        prog="bertserve build",
        description="Build a TensorRT engine of a bundle for this node, and verify it. The bundle must come from an"
        " export with `--tensorrt graph`. The engine is compared with PyTorch's answers in the bundle, and kept for"
        " `bertserve serve --cache-dir DIR`. Needs no PyTorch.",
    )
    add_bundle(arguments)
    arguments.add_argument(
        "--cache-dir", type=Path, required=True, metavar="DIR", help="Cache directory to keep it in."
    )
    arguments.add_argument(
        "--target",
        choices=TARGETS,
        help="Target of the engine (default: this machine's GPU and TensorRT version).",
    )
    arguments.add_argument(
        "--precision",
        choices=ENGINE_GRAPHS,
        help="Precision of the engine. The bundle must have a graph for it (default: fp16 if there is one).",
    )
    add_threads(arguments)
    return arguments
