"""Command-line parsing with one-line errors."""

from __future__ import annotations

import argparse
import difflib
from typing import TYPE_CHECKING, Any, NoReturn

from bertserve.serving.host import command

if TYPE_CHECKING:
    from collections.abc import Collection


_BATCH_SETTINGS = ("dir", "disk-mb", "file-mb", "keep-days", "max-files", "max-jobs", "max-lines")

LEFT: dict[str, str] = {
    "accept-bare-ids": "send token IDs with the model's special tokens, or strings",
    **dict.fromkeys([f"batch-{name}" for name in _BATCH_SETTINGS], "use `bertserve batch`, which needs no server"),
    "agent-port": "balance by `leastconn`, as deploy/haproxy/haproxy.cfg does",
    "body-timeout-s": "it is 10 s; leave it out",
    "build-engine": "run `bertserve build` before the server starts, with the same --cache-dir",
    "bulk-share": "it is 5%; leave it out",
    "bulk-slice-ms": "it is 8 ms; leave it out",
    "engine-crash-limit": "an engine is given up after 3 crashes within 60 s; leave it out",
    "engine-crash-window-s": "an engine is given up after 3 crashes within 60 s; leave it out",
    "engine-nice": "it is 10; leave it out",
    "fairness": "it is 6; leave it out",
    "header-limit-bytes": "it is 16,384; leave it out",
    "header-limit-count": "it is 100; leave it out",
    "header-timeout-s": "it is 5 s; leave it out",
    "keep-version-s": "the previous version ends with its last request; load it again by a request",
    "load-reports": "balance by `leastconn` or least requests, which need nothing of the server",
    "max-bulk-tokens": "it is 524,288; leave it out",
    "max-connections-per-peer": "limit connections per address at the proxy",
    "max-openai-batch-size": "set `--max-client-batch-size`, the limit of all routes",
    "max-queue-delay-ms": "a batch starts as soon as the engine is free; leave it out",
    "max-v2-batch-size": "set `--max-client-batch-size`, the limit of all routes",
    "min-batch-gain": "it is 5%; leave it out",
    "scheduling": "the policy is earliest deadline first with aging; leave it out",
    "size": "use `load --find-capacity` on the machine at hand, or `simulate --find-capacity --rate R`",
    "split": "models are not cut into parts; use a device with more memory",
    "split-by": "models are not cut into parts; use a device with more memory",
    "stages": "models are not cut into parts; use a device with more memory",
    "transfer-us": "models are not cut into parts; use a device with more memory",
    "triton": "the bundle's `model.*.onnx` is what Triton's ONNX Runtime backend loads",
    "unknown-fields": "unknown fields are ignored and named in `X-Ignored-Fields`; leave it out",
    "watch-models-s": "load the version by a request (--model-control), or roll out the pods",
}
"""What to do instead of a verb or setting that left, by its name on the command line. CHANGELOG.md has the same."""


def unknown(kind: str, word: str, known: Collection[str]) -> str:
    """The error about an unknown verb, option or setting, as spelled in its source.

    It says what to do instead if the word left, or names the known word that was probably meant.
    """
    instead = left(word.removeprefix("--").removeprefix("BERTSERVE_"))
    return f"{word} left: {instead}" if instead else f"unknown {kind} {word}{nearest(word, known)}"


def left(name: str) -> str | None:
    """What to do instead of a verb, option or setting that left, in any spelling; None for others."""
    return LEFT.get(name.lower().replace("_", "-"))


def nearest(word: str, known: Collection[str]) -> str:
    """A suffix for errors about an unknown word: the known word that was probably meant, if any."""
    close = difflib.get_close_matches(word, known, 1)
    return f" (did you mean {close[0]}?)" if close else ""


def positive(argument: str) -> int:
    """An argument that must be at least 1.

    Raises:
        ArgumentTypeError: It is less than 1.
    """
    number = int(argument)
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


class OptionParser(argparse.ArgumentParser):
    """An argparse parser that reports an error in one line, without the list of options."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401  argparse's own
        super().__init__(**options, add_help=False)
        self.add_argument("-h", "--help", action="help", help="Show this help and exit.")

    def error(self, message: str) -> NoReturn:
        _, unrecognized, rest = message.partition("unrecognized arguments: ")
        if unrecognized:
            options = [word.partition("=")[0] for word in rest.split() if word.startswith("-")]
            message = f"unexpected argument {rest!r}"
            if options:
                message = unknown("option", options[0], self._option_string_actions)
        program, verb, *_ = self.prog.split()
        usage = command(verb) if program == "bertserve" else self.prog
        self.exit(2, f"{self.prog}: {' '.join(message.split())}; `{usage} --help` lists the options\n")
