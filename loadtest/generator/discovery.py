"""Discovers a server's models and their tasks, as far as the server reports them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.generator.closed_loop import Lane, connect
from bertserve.loadtest.generator.frames import prefixed
from bertserve.loadtest.generator.grpc_messages import METHOD, fields_in, string_message
from bertserve.loadtest.generator.http1 import get_bytes, post_bytes
from bertserve.loadtest.generator.routes import OUTPUTS

if TYPE_CHECKING:
    from bertserve.loadtest.generator.messages import Target
    from bertserve.loadtest.generator.wire import Reply

_SERVICE = METHOD.rpartition("/")[0]
_UNKNOWN = ("400 ", "404 ", "405 ", "422 ", "501 ", "UNIMPLEMENTED", "NOT_FOUND")
"""How faults start if the server lacks a route or model. Any other fault ends the command."""

_TEI_TASKS = {"embedding": "embed", "classifier": "classify", "reranker": "rerank"}
_TASKS = {frozenset(outputs): task for task, outputs in OUTPUTS.items()}
_EMBEDDINGS = frozenset(name for task in ("embed", "embed_sparse", "embed_tokens") for name in OUTPUTS[task])


class Model(NamedTuple):
    """A model of a server."""

    name: str
    task: str


def models_of(target: Target, name: str = "") -> list[Model]:
    """The models that a server reports, or only `name`; empty if it reports nothing.

    Raises:
        BenchError: The server is unreachable or refuses to answer.
    """
    asking = _Asking(target)
    found = [
        Model(one, task) for one in ([name] if name else asking.names()) if (task := _task_of(*asking.tensors(one)))
    ]
    if not found and target.transport == "http" and (info := asking.get(_info(target))) is not None:
        kinds: dict[str, Any] = info.get("model_type") or {}
        tasks = [_TEI_TASKS[kind] for kind in kinds if kind in _TEI_TASKS]
        if kinds.get("embedding", {}).get("pooling") == "splade":
            tasks = ["embed_sparse"]
        return [Model(name or str(info.get("served_model_name") or info.get("model_id")), task) for task in tasks]
    return found


def precision_of(target: Target) -> str:
    """Data type of the target's model over HTTP (`float32`, `float16`, `int8`); empty if not reported.

    Raises:
        BenchError: The server is unreachable or refuses to answer.
    """
    info = _Asking(target).get(f"/models/{target.model}/info")
    return str(info.get("model_dtype", "")) if isinstance(info, dict) else ""


def engine_of(target: Target) -> str:
    """Engine and precision of the target's model over HTTP; empty if not reported."""
    if target.transport != "http":
        return ""
    try:
        config = _Asking(target).get(f"/v2/models/{target.model}/config")
        engine = str(config["parameters"]["engine"]["string_value"])
        return f"{engine}, {precision}" if (precision := precision_of(target)) else engine
    except (BenchError, LookupError, TypeError):
        return ""


def cached_of(target: Target) -> int | None:
    """Requests to the target's model for which the server consulted its response cache.

    The count comes from the statistics extension of the Open Inference Protocol; None if not reported.

    Raises:
        BenchError: The server is unreachable or refuses to answer.
    """
    try:
        [model] = _Asking(target).get(f"/v2/models/{target.model}/stats")["model_stats"]
        stats = model["inference_stats"]
        return sum(int(stats[key]["count"]) for key in ("cache_hit", "cache_miss"))
    except (LookupError, TypeError, ValueError):
        return None


def _info(target: Target) -> str:
    return f"/models/{target.model}/info" if target.in_path else "/info"


def _task_of(inputs: list[str], outputs: list[str]) -> str | None:
    """The task of a model that takes texts; `embed` if it has sparse vectors and those of tokens beside."""
    if "text" not in inputs:
        return None
    found = frozenset(outputs)
    return _TASKS.get(found) or ("embed" if {*OUTPUTS["embed"]} < found <= _EMBEDDINGS else None)


class _Asking:
    """Sends one request at a time, each on its own connection."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._headers = f"Authorization: {target.credentials}\r\n" if target.credentials else ""

    def names(self) -> list[str]:
        """Names of the models that accept requests."""
        if self._target.transport == "http":
            body = {"ready": True}
            message = post_bytes(self._target.authority, "/v2/repository/index", body, headers=self._headers)
            return [str(one["name"]) for one in self._json(message) or ()]
        reply = self._exchange(prefixed(b"\x10\x01"), f"{_SERVICE}/RepositoryIndex")  # `ready`, field 2, is true
        return [_names_in(model)[0] for model in _under(reply, 1)]

    def tensors(self, name: str) -> tuple[list[str], list[str]]:
        """Names of a model's inputs and outputs; empty if the model does not exist."""
        if self._target.transport == "http":
            found = self.get(f"/v2/models/{name}") or {}
            inputs, outputs = ([str(one["name"]) for one in found.get(key, ())] for key in ("inputs", "outputs"))
            return inputs, outputs
        reply = self._exchange(prefixed(string_message(f1=name)), f"{_SERVICE}/ModelMetadata")
        inputs, outputs = ([_names_in(one)[0] for one in _under(reply, number)] for number in (4, 5))
        return inputs, outputs

    def get(self, path: str) -> Any:  # noqa: ANN401  any JSON value
        """The JSON at a path; None if there is none."""
        return self._json(get_bytes(self._target.authority, path, self._headers))

    def _json(self, message: bytes) -> Any:  # noqa: ANN401  any JSON value
        reply = self._exchange(message)
        try:
            return json.loads(reply.body) if reply else None
        except ValueError:
            return None  # the server speaks none of our protocols

    def _exchange(self, message: bytes, method: str = METHOD) -> Reply | None:
        def check(reply: Reply) -> None:
            if reply.fault and not reply.fault.startswith(_UNKNOWN):
                words = reply.body[:300].decode("utf-8", "replace").replace("\n", " ")
                raise BenchError(f"{self._target.authority} returned {reply.fault}: {words}")

        with connect(*self._target.address()) as connection:
            reply = Lane(connection, self._target.wire(method), check).exchange(message)
        return None if reply.fault else reply


def _under(reply: Reply | None, number: int) -> list[bytes]:
    """The messages in one field of a reply."""
    if reply is None:
        return []
    return [value for key, value in fields_in(reply.body) if key == number and isinstance(value, bytes)]


def _names_in(message: bytes) -> list[str]:
    return [value.decode() for key, value in fields_in(message) if key == 1 and isinstance(value, bytes)]
