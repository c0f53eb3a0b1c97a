"""The front door of the `bertserve` command: picks a verb and imports only that verb's package."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys

VERBS = {
    "export": ("export.cli.export", "turn a PyTorch BERT into a verified model bundle"),
    "verify": ("export.cli.verify", "prove a bundle's artifacts again, on this machine and without PyTorch"),
    "build": ("export.cli.build", "build this node's own TensorRT engine of a bundle, and prove it"),
    "inspect": ("export.cli.inspect", "print what a bundle is and how far it was proven"),
    "load": ("loadtest.cli", "send a load that does not wait, and judge the latency by an objective"),
    "simulate": ("loadtest.capacity.simulate_cli", "tell from what batches cost how a server would bear a load"),
    "size": ("loadtest.capacity.size_cli", "say how many of which card or CPU a load needs, and what that costs"),
    "doctor": ("serving.operations.doctor", "say what this machine can run, and what to install for more"),
    "batch": ("serving.bulk.cli", "answer every row of files of texts, on this machine or a Ray cluster"),
    "serve": ("serving.cli", "serve a model repository, or a checkpoint that it exports first, over HTTP and gRPC"),
}

OFFERED = {"BatchPredictor": "serving.bulk.predictor"}
"""What other programs import from here: `from bertserve import BatchPredictor`."""


def __getattr__(name: str) -> object:
    if name in OFFERED:
        return getattr(importlib.import_module(OFFERED[name]), name)
    raise AttributeError(f"module 'bertserve' has no attribute {name!r}")


def usage() -> str:
    """The text that names every verb."""
    verbs = "\n".join(f"  {name:<8} {purpose}" for name, (_, purpose) in VERBS.items())
    hints = "`bertserve VERB --help` lists a verb's options, `bertserve --version` says which version this is."
    return f"usage: bertserve VERB [options]\n\n{verbs}\n\n{hints}"


def main(argv: list[str] | None = None) -> int:
    """Runs one verb and returns the process's exit code: 0 done, 1 failed, 2 not understood."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["help"] and len(words) > 1:
        words = [words[1], "--help"]
    if words and words[0] in {"-h", "--help", "help"}:
        print(usage())  # noqa: T201  the command's own output
        return 0
    if words and words[0] == "--version":
        print(f"bertserve {importlib.metadata.version('bertserve')}")  # noqa: T201  the command's own output
        return 0
    if not words:
        print(f"bertserve: no verb given\n\n{usage()}", file=sys.stderr)  # noqa: T201  the command's own output
        return 2
    if words[0] not in VERBS:
        from serving.host import command  # noqa: PLC0415  a verb that is known needs none of it
        from serving.options import nearest  # noqa: PLC0415  likewise

        wrong = f"bertserve: unknown verb {words[0]!r}{nearest(words[0], VERBS)}; `{command('help')}` lists the verbs"
        print(wrong, file=sys.stderr)  # noqa: T201  the command's own output
        return 2
    module, _ = VERBS[words[0]]
    return int(importlib.import_module(module).main(words[1:]))


if __name__ == "__main__":
    sys.exit(main())
