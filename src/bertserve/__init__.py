"""The front door of the `bertserve` command: picks a verb and imports only that verb's package."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys

VERBS = {
    "serve": (
        "bertserve.serving.cli",
        "Serve a model repository, or export a checkpoint and serve it, over HTTP and gRPC.",
    ),
    "export": ("bertserve.export.cli.export", "Export a BERT checkpoint as a verified model bundle."),
    "verify": ("bertserve.export.cli.verify", "Verify a bundle's artifacts on this machine, without PyTorch."),
    "build": ("bertserve.export.cli.build", "Build a TensorRT engine of a bundle for this node, and verify it."),
    "inspect": ("bertserve.export.cli.inspect", "Show what a bundle contains and how each artifact was verified."),
    "doctor": (
        "bertserve.serving.operations.doctor",
        "Check what this machine can run, and whether the server would start.",
    ),
    "load": ("bertserve.loadtest.cli", "Run an open-loop load test and check it against an SLO."),
    "simulate": ("bertserve.loadtest.capacity.simulate_cli", "Simulate a server under load from measured batch costs."),
    "batch": (
        "bertserve.serving.bulk.cli",
        "Run a model over every row of text files, on this machine or a Ray cluster.",
    ),
}

FIRST_STEPS = {
    "doctor": "Check this machine.",
    "serve --model-id demo": "Serve the demo model. A checkpoint folder or a Hugging Face ID works too.",
    "export demo --out models": "Export the model once, for servers without PyTorch.",
    "serve --models models": "Serve the exported models.",
}
"""What a new user types, in this order."""

OFFERED = {"BatchPredictor": "bertserve.serving.bulk.predictor"}
"""What other programs import from here: `from bertserve import BatchPredictor`."""


def __getattr__(name: str) -> object:
    if name in OFFERED:
        return getattr(importlib.import_module(OFFERED[name]), name)
    raise AttributeError(f"module 'bertserve' has no attribute {name!r}")


def usage() -> str:
    """The text that says what to do first, and names every verb."""
    steps = "\n".join(f"  bertserve {step:<24} {why}" for step, why in FIRST_STEPS.items())
    verbs = "\n".join(f"  {name:<8} {purpose}" for name, (_, purpose) in VERBS.items())
    hints = "`bertserve VERB --help` lists a verb's options. `bertserve --version` prints the version."
    return f"usage: bertserve VERB [options]\n\nFirst steps:\n{steps}\n\nVerbs:\n{verbs}\n\n{hints}"


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
        from bertserve.serving.host import command  # noqa: PLC0415  a verb that is known needs none of it
        from bertserve.serving.options import unknown  # noqa: PLC0415  likewise

        wrong = f"bertserve: {unknown('verb', words[0], VERBS)}; `{command('help')}` lists the verbs"
        print(wrong, file=sys.stderr)  # noqa: T201  the command's own output
        return 2
    module, _ = VERBS[words[0]]
    return int(importlib.import_module(module).main(words[1:]))
