"""`bertserve serve`.

What can be checked cheaply is checked first: settings, bundles, GPUs, ports. The libraries of the wire and the engine
are imported only afterwards, so that a wrong setting is answered within a second.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from typing import TYPE_CHECKING

from serving.errors import StartupError

if TYPE_CHECKING:
    from types import FrameType

    from serving.logs import LogWriter

_GC_THRESHOLDS = (20_000, 50, 100)
_INTERRUPTED = 130


def main(argv: list[str]) -> int:
    """Serves until a signal ends it; returns 0, or another code after one line on standard error."""
    # Set before the tokenizers are imported: their thread pool would compete with the engine for its cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Likewise before pydantic is: it would search every installed package for plugins.
    os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"
    # What a start makes is kept, and requests leave no cycles: collect seldom.
    gc.set_threshold(*_GC_THRESHOLDS)
    # Until the server listens to signals itself. A container's first process has no default: it would never hear it.
    signal.signal(signal.SIGTERM, _leave)
    # A shell has the commands of a script's background ignore it, and the server will listen to it in any case.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    started: list[LogWriter] = []
    try:
        return _serve(argv, started)
    except StartupError as error:
        for log in started:
            log.flush()
        with contextlib.suppress(OSError):  # nobody reads it; the exit code says it too
            print(f"bertserve serve: {' '.join(str(error).split())}", file=sys.stderr)  # one line, whatever it holds
        return error.exit_code
    except KeyboardInterrupt:
        print("bertserve serve: interrupted", file=sys.stderr)
        return _INTERRUPTED
    finally:
        for log in started:
            log.flush()


def _leave(_: int, __: FrameType | None) -> None:
    sys.exit(0)


def _serve(argv: list[str], started: list[LogWriter]) -> int:
    from serving.settings import Settings  # noqa: PLC0415  in the order of the checks

    settings = Settings.load(argv)
    from serving import logs  # noqa: PLC0415

    log = logs.start(settings.log_format, settings.log_level)
    started.append(log)
    from serving.net.ports import Ports, raise_descriptor_limit  # noqa: PLC0415

    if settings.model_id:
        from serving.rollout.model_export import exported  # noqa: PLC0415

        Ports.open(settings).close()  # the export takes minutes: what would end the start afterwards ends it now
        settings = exported(settings, os.environ)
    from serving.rollout.engine_choice import Chooser  # noqa: PLC0415

    chooser = Chooser(settings)
    choice = chooser.first()
    raise_descriptor_limit()
    ports = Ports.open(settings)
    choice.log()  # now that the start has passed its checks: one that fails them says that and nothing else
    from serving.server import run  # noqa: PLC0415

    return run(settings, choice, chooser, ports, log)
