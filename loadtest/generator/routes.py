"""The routes of each task in each protocol."""

from __future__ import annotations

from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.generator.grpc_messages import METHOD
from bertserve.serving.tasks import TASKS

_V2 = "/v2/models/{model}/infer"

OUTPUTS = {name: tuple(output.name for output in task.outputs) for name, task in TASKS.items()}
"""The output tensors of each task in the Open Inference Protocol."""

ROUTES = {
    "http": {name: task.path for name, task in TASKS.items()},
    "tei": {
        "embed": "/embed",
        "embed_tokens": "/embed_all",
        "embed_sparse": "/embed_sparse",
        "classify": "/predict",
        "rerank": "/rerank",
    },
    "openai": {"embed": "/v1/embeddings"},
    "cohere-v1": {"rerank": "/v1/rerank"},
    "cohere-v2": {"rerank": "/v2/rerank"},
    "v2": dict.fromkeys(TASKS, _V2),
    "grpc": dict.fromkeys(TASKS, METHOD),
}
PROTOCOLS = tuple(ROUTES)
PLAIN = ("http", "tei")
"""Protocols whose requests name no model: the task's only model answers, or the one named in the path."""


def route(protocol: str, task: str) -> str:
    """The HTTP path or gRPC method of a task; `{model}` is a placeholder for the model's name.

    Raises:
        BenchError: The protocol does not support the task.
    """
    if task not in ROUTES[protocol]:
        others = ", ".join(name for name, routes in ROUTES.items() if task in routes)
        raise BenchError(f"protocol {protocol} does not support the task {task}; use {others}")
    return ROUTES[protocol][task]
