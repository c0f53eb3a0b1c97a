"""`bertserve` that can trace its allocations: the first SIGUSR2 begins, each further one tells what grew since then.

The first word of the command line is the file that it tells it in. It is written whole or not at all.
"""

from __future__ import annotations

import gc
import signal
import sys
import tracemalloc
from pathlib import Path

_FRAMES = 6
_LINES, _TRACES = 15, 3

sys.path.insert(0, str(Path(__file__).parents[2]))


def main() -> int:
    file = Path(sys.argv.pop(1))
    first: list[tracemalloc.Snapshot] = []

    def tell(*_: object) -> None:
        if not first:
            gc.collect()
            tracemalloc.start(_FRAMES)
            first.append(tracemalloc.take_snapshot())
            words = ["tracing"]
        else:
            now = tracemalloc.take_snapshot()
            traces = now.compare_to(first[0], "traceback")[:_TRACES]
            words = [
                f"{gc.collect()} objects were held by circles alone",
                *map(str, now.compare_to(first[0], "lineno")[:_LINES]),
                *("\n".join([str(trace), *trace.traceback.format()]) for trace in traces),
            ]
        staged = file.with_suffix(".new")
        staged.write_text("\n".join(words), encoding="utf-8")
        staged.replace(file)

    signal.signal(signal.SIGUSR2, tell)
    from bertserve import main as serve  # noqa: PLC0415  found only now

    return serve()


if __name__ == "__main__":
    sys.exit(main())
