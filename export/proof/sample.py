"""What `serving/rollout/processor_check.py` starts: compares proven artifacts with PyTorch on a few texts.

`python -m export.proof.sample BUNDLE THREADS FILE...` answers with a line of JSON: an object that has for each file
whether it may be served, and what was found.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

from export.errors import ExportError
from export.progress import Progress
from export.proof.verify import State, repeat_sample
from serving.errors import BundleError
from serving.models.bundle import open_bundle


def main(path: str, threads: str, *files: str) -> int:
    """Answers on standard output and returns 0; 1 after a line on standard error where nothing could be compared."""
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
