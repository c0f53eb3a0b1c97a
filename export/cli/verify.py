"""`bertserve verify`: the proof of a bundle once more, on the machine at hand and without PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from export.cli.command import add_bundle, add_threads, open_named, run
from export.errors import ExportError
from export.pages.tables import printable, show
from export.report import terminal
from serving.host import available_cpus
from serving.models.node_cache import with_engines
from serving.options import OptionParser

if TYPE_CHECKING:
    import argparse

    from export.progress import Progress


def main(argv: list[str]) -> int:
    """Verifies a bundle: 0 all that could be checked keeps its limits; other exit codes are those of `command.run`."""
    modules = frozenset({"onnxruntime", "safetensors"})
    return run(parser(), argv, _verify, modules=modules, extras="cpu,verify")


def _verify(options: argparse.Namespace, progress: Progress) -> int:
    threads = options.threads or available_cpus()
    with progress.stage("checking files, digests and operators"):
        bundle = open_named(options.bundle)
        if options.cache_dir is not None:
            bundle = with_engines(options.cache_dir, bundle)
    # Imports the engine's library, which takes a second; faults of the files are reported before.
    from export.proof.verify import State, keep, verify  # noqa: PLC0415

    outcomes = verify(bundle, options.reference, threads, progress)
    checked = [outcome.artifact for outcome in outcomes if outcome.state is not State.UNCHECKED]
    show(f"\n{bundle.path}: {terminal.answer(bundle.manifest)}; here, on {threads} threads:\n")
    if checked:
        show(*terminal.tables(checked), "")
    show(*(f"  {outcome.artifact.file} {printable(outcome.sentence)}" for outcome in outcomes))
    if options.cache_dir is not None and checked:
        print(f"\nkept in {keep(options.cache_dir, bundle, outcomes)}")
    if broken := [outcome.artifact.file for outcome in outcomes if outcome.state is State.BROKEN]:
        raise ExportError(f"bundle {bundle.path}: {', '.join(broken)} must not be served")
    if not checked:
        raise ExportError(f"bundle {bundle.path}: this machine can run nothing of it, so nothing is proven here")
    print(f"\nin {progress.elapsed_s:.0f} s")
    return 0


def parser() -> argparse.ArgumentParser:
    arguments = OptionParser(
        prog="bertserve verify",
        description="Checks a bundle's files, and compares every artifact that this machine can run with the answers"
        " of PyTorch that the bundle carries. Needs no PyTorch.",
    )
    add_bundle(arguments)
    arguments.add_argument(
        "--reference",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="labelled text that the export was given too, to repeat the task's metric; may be given more than once",
    )
    arguments.add_argument(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help="the node's cache: keep the proof there, for `bertserve serve --cache-dir DIR` on this node",
    )
    add_threads(arguments)
    return arguments
