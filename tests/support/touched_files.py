"""`bertserve`, which says at each SIGUSR1 in which files of `serving/` functions ran since the last one.

A program to be run, in place of `bertserve.py`.
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import CodeType, FrameType

ROOT = Path(__file__).parents[2]
ANNOUNCED = "files of serving/: "

_ran: set[CodeType] = set()


def _note(frame: FrameType, event: str, _: Any) -> None:
    if event == "call":
        _ran.add(frame.f_code)


def _tell(*_: object) -> None:
    paths = {code.co_filename for code in _ran.copy()}
    _ran.clear()
    below = f"{ROOT / 'serving'}/"
    names = sorted(path.removeprefix(below) for path in paths if path.startswith(below))
    sys.stdout.write(f"{ANNOUNCED}{' '.join(names)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _tell)
    threading.setprofile(_note)
    sys.setprofile(_note)
    sys.path.insert(0, str(ROOT))
    import bertserve

    sys.exit(bertserve.main())
