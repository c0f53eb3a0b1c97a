"""The first steps of an engine process, before anything that takes time is imported.

It asks the kernel to end it with the server, and says so. From then on the server may pause it: a process that is
stopped by a signal would not see that the server's sockets have closed, and would hold its memory for ever.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

STARTED = bytes((0, 0, 0, 0, 9, *bytes(11)))
"""The frame STARTED of `wire`, which imports too much to be asked for it."""

PR_SET_PDEATHSIG = 1
"""Of `prctl`: which signal this process gets when its parent ends (linux/prctl.h)."""


def main(descriptors: list[int]) -> None:
    """Becomes the worker; does not return.

    Args:
        descriptors: As `worker.main` has them.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        os.write(descriptors[0], STARTED)
    except OSError:  # the server has ended meanwhile
        os._exit(0)
    from serving.engine.process import worker  # noqa: PLC0415  see the module

    worker.main(descriptors)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
