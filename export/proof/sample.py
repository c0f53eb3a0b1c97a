"""Compares proven artifacts with PyTorch on a few texts; started by `serving/rollout/processor_check.py`.

`python -m bertserve.export.proof.sample BUNDLE THREADS FILE...` prints a line of JSON: for each file whether it may
be served, and the finding.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

from bertserve.export.errors import ExportError
from bertserve.export.progress import Progress
from bertserve.export.proof.verify import State, repeat_sample
from bertserve.serving.errors import BundleError
from bertserve.serving.models.bundle import open_bundle


def main(path: str, threads: str, *files: str) -> int:
    """Prints the result and returns 0; returns 1 after a line on standard error if nothing could be compared."""
    try:
        bundle = open_bundle(Path(path))
        artifacts = [artifact for artifact in bundle.artifacts if artifact.file in files]
        outcomes = repeat_sample(bundle, artifacts, int(threads), Progress(io.StringIO(), lambda: None))
    except (BundleError, ExportError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    answer = {each.artifact.file: (each.state is State.KEPT, each.sentence) for each in outcomes}
    sys.stdout.write(f"{json.dumps(answer)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
