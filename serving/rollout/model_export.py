"""`bertserve serve --model-id`: exports a model into the cache by `bertserve export`, unless it is there.

The export runs in a process of its own, so that the server never holds PyTorch. Its `--if-changed` finds an existing
export, and lets one of several concurrent starts do the work.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bertserve.serving import host
from bertserve.serving.engine.children import module_command
from bertserve.serving.engine.kinds import AUTO, ENGINES
from bertserve.serving.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bertserve.serving.settings import Settings

log = logging.getLogger("bertserve.export")

_EXPORTS = "exports"
_END_S = 20.0
"""Grace period for a terminated export to remove its files."""

_SHOWN_DIGITS = 12


class Home(NamedTuple):
    """Directories in the cache for an exported model and for what belongs to it."""

    models: Path
    cache_dir: Path


def home_of(settings: Settings) -> Home:
    """The directories for the settings' model. Each combination of artifacts, task and revision has its own."""
    root, name = settings.cache_dir or Path(), settings.model_id
    # The same folder may be named by several paths. A name that is no folder is an id.
    asked = os.path.abspath(name) if Path(name).is_dir() else name  # noqa: PTH100  `resolve` would follow links
    key = hashlib.sha256(json.dumps([asked, *_options(settings)]).encode()).hexdigest()[:_SHOWN_DIGITS]
    folder = root / _EXPORTS / f"{Path(asked).name}-{key}"
    return Home(folder / "models", folder / "node")


def export_model(settings: Settings, environment: Mapping[str, str]) -> Settings:
    """Settings that serve the export of `model_id`, which is made now unless the cache holds it.

    Args:
        settings: With `model_id` and `cache_dir`.
        environment: Environment of the export.

    Raises:
        StartupError: The export was killed.
        SystemExit: The export failed with this code, and wrote its own message to standard error.
    """
    home, started = home_of(settings), time.monotonic()
    options = ["--out", str(home.models), "--if-changed", *_options(settings), "--", settings.model_id]
    log.info("model %s: checking for an export in %s", settings.model_id, home.models)
    # In a session of its own, which a terminal's Ctrl-C does not reach. What it starts, such as TensorRT's builder,
    # belongs to that session too.
    process = subprocess.Popen(
        module_command("bertserve.serving.engine.children", str(os.getpid()), "bertserve", "export", *options),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if settings.log_format == "json" else None,
        text=True,
        errors="replace",
        env={**environment, **({"HF_TOKEN": settings.token} if settings.token else {})},
        start_new_session=True,
    )
    try:
        for line in filter(str.strip, process.stdout or ()):
            log.info("%s", " ".join(line.split()))
        status = process.wait()
    finally:
        # Not in a `with` block: leaving that on an exception, such as an interrupt, would wait for the end, too.
        _end(process)
    if status < 0:
        killed = f"its export was killed by {signal.Signals(-status).name}"
        advice = "; give it more memory" if status == -signal.SIGKILL else ""
        raise StartupError(f"--model-id {settings.model_id}: {killed}{advice}")
    if status:
        sys.exit(status)
    log.info("model %s: exported and ready to load after %.1f s", settings.model_id, time.monotonic() - started)
    return settings.model_copy(update=home._asdict())


def _end(process: subprocess.Popen[str]) -> None:
    """Ends an export that still runs: it may remove its files, and what is left of its session is killed."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _options(settings: Settings) -> list[str]:
    """Options for `bertserve export` beside the model: the task, the revision, and what the engine runs."""
    asked = {"--revision": settings.revision, "--task": settings.task}
    words = [word for name, value in asked.items() if value for word in (name, value)]
    return [*words, *(word for form in _forms(settings) for word in ("--precision", form))]


def _forms(settings: Settings) -> Sequence[str]:
    precision = settings.precision
    if settings.engine != "auto":
        return ENGINES[settings.engine].exports(precision)
    has_gpu = precision == "auto" and bool(host.gpu())
    usable = [kind for kind in reversed(AUTO) if (has_gpu if kind.on_gpu else kind.installed)]
    return list(dict.fromkeys(form for kind in usable for form in kind.exports(precision)))
