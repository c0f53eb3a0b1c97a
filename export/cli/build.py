"""`bertserve build`: this node's own TensorRT engine of a bundle, without PyTorch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from export.cli.bundles import open_at
from export.cli.command import positive, run
from export.engines.tensorrt import TARGETS
from serving.host import available_cpus

if TYPE_CHECKING:
    from export.progress import Progress

_MODULES = frozenset({"onnxruntime", "safetensors"})
"""What the extras `gpu` (or `cpu`) and `verify` bring."""


def main(argv: list[str]) -> int:
    """Builds an engine: 0 it lies in the cache, 1 there is none, 75 for want of room, as `command.run` has it."""
    try:
        given = _parser().parse_args(argv)
    except SystemExit as end:
        return int(end.code or 0)
    return run(
        "build", lambda progress: _build(given, progress), path=given.bundle, modules=_MODULES, extras="gpu,verify"
    )


def _build(given: argparse.Namespace, progress: Progress) -> int:
    with progress.stage("checking files, digests and operators"):
        bundle = open_at(given.bundle)
    # Brings the engines' libraries, which take a second to import; what is wrong with the files is said before.
    from export.engines.native import build  # noqa: PLC0415

    outcome = build(bundle, given.cache_dir, given.target, given.threads or available_cpus(), progress)
    print(f"{outcome.artifact.file} {outcome.sentence}; it lies in {given.cache_dir}; in {progress.elapsed_s:.0f} s")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bertserve build",
        description="Builds a TensorRT engine of a bundle that was exported with `--tensorrt graph`, for the GPU at"
        " hand, compares it with the answers of PyTorch that the bundle carries, and keeps both for `bertserve serve"
        " --cache-dir DIR` on this node. Needs no PyTorch.",
    )
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="models/MODEL/VERSION, or models/MODEL's newest")
    parser.add_argument("--cache-dir", type=Path, required=True, metavar="DIR", help="the node's cache")
    parser.add_argument(
        "--target",
        choices=TARGETS,
        help="what to build for (default: the GPU at hand, with the TensorRT that is installed)",
    )
    parser.add_argument("--threads", type=positive, metavar="N", help="cores to use (default: all)")
    return parser
