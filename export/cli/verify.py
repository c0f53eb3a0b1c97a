"""`bertserve verify`: repeats the proof of a bundle on this machine, without PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bertserve.export.cli.command import add_bundle, add_threads, open_named, run
from bertserve.export.errors import ExportError
from bertserve.export.pages.tables import printable, show
from bertserve.export.report import terminal
from bertserve.serving.host import available_cpus
from bertserve.serving.models.node_cache import with_engines
from bertserve.serving.options import OptionParser

if TYPE_CHECKING:
    import argparse

    from bertserve.export.progress import Progress


def main(argv: list[str]) -> int:
    """Verifies a bundle: 0 if everything that could be checked keeps its limits; otherwise as in `command.run`."""
    modules = frozenset({"onnxruntime", "safetensors"})
    return run(parser(), argv, _verify, modules=modules, extras="cpu,verify")


def _verify(options: argparse.Namespace, progress: Progress) -> int:
    threads = options.threads or available_cpus()
    with progress.stage("checking files, digests and operators"):
        bundle = open_named(options.bundle)
        if options.cache_dir is not None:
            bundle = with_engines(options.cache_dir, bundle)
    # Imports the engine's library, which takes a second; file errors are reported first.
    from bertserve.export.proof.verify import State, keep, verify  # noqa: PLC0415

    outcomes = verify(bundle, options.reference, threads, progress)
    checked = [outcome.artifact for outcome in outcomes if outcome.state is not State.UNCHECKED]
    show(f"\n{bundle.path}: {terminal.answer(bundle.manifest)}; on this machine, {threads} threads:\n")
    if checked:
        show(*terminal.tables(checked), "")
    show(*(f"  {outcome.artifact.file} {printable(outcome.sentence)}" for outcome in outcomes))
    if options.cache_dir is not None and checked:
        print(f"\nsaved in {keep(options.cache_dir, bundle, outcomes)}")
    if broken := [outcome.artifact.file for outcome in outcomes if outcome.state is State.BROKEN]:
        raise ExportError(f"bundle {bundle.path}: {', '.join(broken)} failed and must not be served")
    if not checked:
        raise ExportError(f"bundle {bundle.path}: this machine can run none of its artifacts, so nothing was verified")
    print(f"\nin {progress.elapsed_s:.0f} s")
    return 0


def parser() -> argparse.ArgumentParser:
    arguments = OptionParser(
        prog="bertserve verify",
        description="Verify a bundle's artifacts on this machine, without PyTorch. Checks the bundle's files, and"
        " compares every artifact that this machine can run with PyTorch's answers in the bundle.",
    )
    add_bundle(arguments)
    arguments.add_argument(
        "--reference",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="File of labeled texts that the export used too, to repeat the task's metric. Can be repeated.",
    )
    arguments.add_argument(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help="Cache directory of this node, to keep the proof for `bertserve serve --cache-dir DIR`.",
    )
    add_threads(arguments)
    return arguments
