"""A client of text-embeddings-inference, written from the description of its API; it knows no server of ours."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any

HEADERS = (
    *("x-compute-type", "x-compute-time", "x-compute-characters", "x-compute-tokens"),
    *("x-total-time", "x-tokenization-time", "x-queue-time", "x-inference-time"),
)


@dataclass
class TeiError(Exception):
    status: int
    error: str
    error_type: str


class TeiClient:
    """Asks one server, and checks that each reply has the shape that the API promises.

    Attributes:
        headers: Of the last reply.
    """

    def __init__(self, address: str, prefix: str = "") -> None:
        self._address = address
        self._prefix = prefix
        self.headers: dict[str, str] = {}

    def embed(self, inputs: Any, **options: Any) -> list[list[float]]:
        """Vectors, two-dimensional even for one input."""
        return _rows(self._infer("/embed", inputs=inputs, **options), float)

    def predict(self, inputs: Any, **options: Any) -> Any:
        """Classes with scores, best first; for a batch a list of such."""
        found = self._infer("/predict", inputs=inputs, **options)
        for classes in found if found and isinstance(found[0], list) else [found]:
            assert all(entry.keys() == {"label", "score"} for entry in classes)
            assert [entry["score"] for entry in classes] == sorted((e["score"] for e in classes), reverse=True)
        return found

    def rerank(self, query: str, texts: list[str], **options: Any) -> list[dict[str, Any]]:
        """Texts by score, best first."""
        found = self._infer("/rerank", query=query, texts=texts, **options)
        assert [entry["score"] for entry in found] == sorted((entry["score"] for entry in found), reverse=True)
        assert {entry["index"] for entry in found} == set(range(len(texts)))
        return list(found)

    def similarity(self, source: str, sentences: list[str], **parameters: Any) -> list[float]:
        message: dict[str, Any] = {"inputs": {"source_sentence": source, "sentences": sentences}}
        found = self._infer("/similarity", **message, **({"parameters": parameters} if parameters else {}))
        return _rows([found], float)[0]

    def tokenize(self, inputs: Any, **options: Any) -> list[list[dict[str, Any]]]:
        """The tokens of each text; special ones stand nowhere in it."""
        found = self._post("/tokenize", inputs=inputs, **options)
        for token in (token for tokens in found for token in tokens):
            assert token.keys() == {"id", "text", "special", "start", "stop"}
            assert (token["start"] is None) == (token["stop"] is None) == token["special"]
        return list(found)

    def decode(self, ids: Any, **options: Any) -> list[str]:
        return _rows([self._post("/decode", ids=ids, **options)], str)[0]

    def info(self) -> dict[str, Any]:
        return dict(self._call("GET", "/info"))

    def healthy(self) -> bool:
        """Whether it answers; the reply has no body."""
        return self._call("GET", "/health") is None

    def post(self, path: str, **message: Any) -> Any:
        return self._post(path, **message)

    def _infer(self, path: str, **message: Any) -> Any:
        found = self._post(path, **message)
        assert all(self.headers[name].isdigit() for name in HEADERS if name != "x-compute-type")
        assert self.headers["x-compute-type"] == "cpu"
        return found

    def _post(self, path: str, **message: Any) -> Any:
        return self._call("POST", path, json.dumps(message).encode())

    def _call(self, method: str, path: str, body: bytes | None = None) -> Any:
        connection = http.client.HTTPConnection(self._address, timeout=60)
        connection.request(method, self._prefix + path, body, {"Content-Type": "application/json"})
        with connection.getresponse() as reply:
            self.headers = {name.lower(): value for name, value in reply.getheaders()}
            data = reply.read()
        connection.close()
        if reply.status != 200:
            fault = json.loads(data)
            assert fault.keys() == {"error", "error_type"}
            raise TeiError(reply.status, fault["error"], fault["error_type"])
        return json.loads(data) if data else None


def _rows(found: Any, kind: type) -> list[list[Any]]:
    assert all(isinstance(value, kind) for row in found for value in row)
    return [list(row) for row in found]
