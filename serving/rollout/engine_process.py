"""The entry point of the engine process: its first steps, before slow imports.

It asks the kernel to end it with the server, and then sends STARTED. From then on the server may pause it. Otherwise a
process that is stopped by a signal would not see that the server's sockets have closed, and would hold its memory
forever.

This file assembles the process. It is the only file of the engine side that knows bundles.
"""

from __future__ import annotations

import os
import sys

from bertserve.serving.engine.children import end_with_parent

STARTED = bytes((0, 0, 0, 0, 7, *bytes(11)))
"""The frame STARTED of `wire`, written out because importing `wire` takes too long here."""


def main(descriptors: list[int]) -> None:
    """Becomes the worker; does not return. `descriptors` are those of `worker.main`."""
    end_with_parent()
    try:
        os.write(descriptors[0], STARTED)
    except OSError:  # the server has ended meanwhile
        os._exit(0)
    from bertserve.serving.engine.process import worker  # noqa: PLC0415  see the module

    worker.main(descriptors, _verify)


def _verify(bundles: list[tuple[str, str]]) -> None:
    """Verifies bundles that the server has not verified itself. Their manifests must not have changed since."""
    from pathlib import Path  # noqa: PLC0415  see the module

    from bertserve.serving.errors import BundleError  # noqa: PLC0415
    from bertserve.serving.models.bundle import open_bundle  # noqa: PLC0415

    for path, sha256 in bundles:
        if open_bundle(Path(path)).sha256 != sha256:
            raise BundleError(f"bundle {path}: its manifest changed while loading")


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
