"""`bertserve verify`: the proof of a bundle once more, on the machine at hand and without PyTorch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from export.cli.bundles import open_at
from export.cli.command import positive, run
from export.errors import ExportError
from export.report import terminal
from serving.host import available_cpus
from serving.models.node_cache import with_engines

if TYPE_CHECKING:
    from export.progress import Progress

_EXTRAS = frozenset({"onnxruntime", "safetensors"})
"""Modules that the extras `cpu` and `verify` bring."""


def main(argv: list[str]) -> int:
    """Verifies a bundle: 0 all that could be checked is right, 1 something is not, 2 not understood, 130 or 143."""
    try:
        given = _parser().parse_args(argv)
    except SystemExit as end:
        return int(end.code or 0)
    return run(
        "verify",
        lambda progress: _verify(given, progress),
        path=given.bundle,
        modules=_EXTRAS,
        extras="cpu,verify",
    )


def _verify(given: argparse.Namespace, progress: Progress) -> int:
    threads = given.threads or available_cpus()
    with progress.stage("checking files, digests and operators"):
        bundle = open_at(given.bundle)
        if given.cache_dir is not None:
            bundle = with_engines(given.cache_dir, bundle)
    # Brings the engine's library, which takes a second to import; what is wrong with the files is said before.
    from export.proof.verify import State, keep, verify  # noqa: PLC0415

    outcomes = verify(bundle, given.reference, threads, progress)
    ran = [outcome.artifact for outcome in outcomes if outcome.state is not State.UNCHECKED]
    table = f"{terminal.table(ran)}\n\n" if ran else ""
    print(f"\n{bundle.path}: {terminal.answer(bundle.manifest)}; here, on {threads} threads:\n\n{table}", end="")
    for outcome in outcomes:
        print(f"  {outcome.artifact.file} {terminal.printable(outcome.sentence)}")
    if given.cache_dir is not None and ran:
        print(f"\nkept in {keep(given.cache_dir, bundle, outcomes)}")
    if broken := [outcome.artifact.file for outcome in outcomes if outcome.state is State.BROKEN]:
        raise ExportError(f"bundle {bundle.path}: {', '.join(broken)} must not be served")
    if not ran:
        raise ExportError(f"bundle {bundle.path}: this machine can run nothing of it, so nothing is proven here")
    print(f"\nin {progress.elapsed_s:.0f} s")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bertserve verify",
        description="Checks a bundle's files, and compares every artifact that this machine can run with the answers"
        " of PyTorch that the bundle carries. Needs no PyTorch.",
    )
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="models/MODEL/VERSION, or models/MODEL's newest")
    parser.add_argument(
        "--reference",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="labelled text that the export was given too, to repeat the task's metric; may be given more than once",
    )
    parser.add_argument(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help="the node's cache: keep the proof there, for `bertserve serve --cache-dir DIR` on this node",
    )
    parser.add_argument("--threads", type=positive, metavar="N", help="cores to use (default: all)")
    return parser
