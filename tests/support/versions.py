"""Versions of one model whose answers tell them apart, and clients that check every answer for it.

Each version has another graph and another tokenizer: its answer to a text is the sum of the text's token ids and the
version's own number, and two words have one another's ids in every second version. So a text that one version reads
and another computes is seen, as is a request of which each has answered a part.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import onnx
import onnx.parser
from onnx import TensorProto
from tokenizers import Tokenizer

from tests.support.asking import asking, failures, wait_for_more
from tests.support.clients import get, metric, post_json
from tests.support.models import NAME
from tests.support.poison import edit_manifest, sign, tiny_bundle
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from tests.support.clients import Answer, HttpReply, Refused, Transport
    from tests.support.server import Server

SWAPPED = ("server", "request")
CONTROLLED = ("--model-control", "true")
BODY = b'{"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["x"]}]}'
_SCALE = 1e-4
_SWAP_LIMIT_S = 60.0
_REST_S = 0.004


def graph(number: float) -> onnx.ModelProto:
    """A model that answers (sum of the ids x 0.0001, a number, 1, 0) for each text, padded or not."""
    model = onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 17]>
        version (int32[B, S] input_ids, int32[B, S] attention_mask, int32[B, S] token_type_ids)
            => (float[B, 4] pooled)
        <int64[1] axes = {{1}}, float scale = {{{_SCALE}}}, float nothing = {{0}}, float number = {{{number}}},
            float unit = {{1}}> {{
            kept = Mul (input_ids, attention_mask)
            ids = Add (kept, token_type_ids)
            numbers = Cast <to = {TensorProto.FLOAT}> (ids)
            sum = ReduceSum <keepdims = 1> (numbers, axes)
            scaled = Mul (sum, scale)
            zero = Mul (sum, nothing)
            version = Add (zero, number)
            one = Add (zero, unit)
            pooled = Concat <axis = 1> (scaled, version, one, zero)
        }}""")
    onnx.checker.check_model(model)
    return model


class Shelf:
    def __init__(self, models: Path, root: Path) -> None:
        self.root = root / "models"
        self._models = models
        self._making = root / "making"
        self._numbers = itertools.count(1)
        self._tokenizers: dict[int, Tokenizer] = {}
        self.add()

    def make(self, spoil: Callable[[Path], object] | None = None, number: float | None = None) -> tuple[int, Path]:
        """Makes the next version aside, perhaps spoilt or with another answer; returns its number and its place."""
        version = next(self._numbers)
        place = tiny_bundle(self._models, self._making / str(version), graph(version if number is None else number))
        edit_manifest(place, lambda manifest: manifest.update(version=version))
        if version % 2 == 0:
            _swap_words(place / "tokenizer.json")
        sign(place)
        self._tokenizers[version] = Tokenizer.from_file(str(place / "tokenizer.json"))
        if spoil is not None:
            spoil(place)
        return version, place

    def add(self, spoil: Callable[[Path], object] | None = None, number: float | None = None) -> int:
        """Puts the next version into the repository, in one step, made as `make` does it; returns its number."""
        version, place = self.make(spoil, number)
        target = self.path(version)
        target.parent.mkdir(parents=True, exist_ok=True)
        place.rename(target)
        return version

    def path(self, version: int) -> Path:
        return self.root / NAME / str(version)

    def token(self, word: str) -> int:
        identity: int = self._tokenizers[1].token_to_id(word)
        return identity

    def version_of(self, texts: Sequence[str], vectors: NDArray[np.float32]) -> int:
        """The version that gave all of these answers, which are right."""
        found = {round(float(vector[1] / vector[2])) for vector in vectors}
        assert len(found) == 1, f"one request was answered by the versions {found}"
        (version,) = found
        for text, vector in zip(texts, vectors, strict=True):
            total = sum(self._tokenizers[version].encode(text).ids)
            assert abs(vector[0] / vector[2] / _SCALE - total) < 2, f"not version {version}'s answer to {text!r}"
        return version


def _swap_words(file: Path) -> None:
    content = json.loads(file.read_bytes())
    vocabulary, (one, other) = content["model"]["vocab"], SWAPPED
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    file.write_text(json.dumps(content), encoding="utf-8")


@dataclass
class Asked:
    """A request that was answered: when by `time.monotonic`, and by which version."""

    started: float
    ended: float
    version: int


def _reading(client: Transport, shelf: Shelf) -> Callable[[], Asked]:
    """Asks with one to four texts, and checks the answer."""
    numbers = itertools.count()

    def ask() -> Asked:
        number = next(numbers)
        texts = [" ".join([SWAPPED[0]] * (1 + (number + place) % 7)) for place in range(1 + number % 4)]
        started = time.monotonic()
        answer = client.embed(texts)
        version = shelf.version_of(texts, answer.vectors)
        assert _said(answer) in {None, str(version)}, f"{version} answered and {_said(answer)} is said"
        return Asked(started, time.monotonic(), version)

    return ask


def _said(answer: Answer) -> str | None:
    """The version that a reply names; None where its protocol has no place for it."""
    message = answer.message
    if isinstance(message, dict):
        return message.get("model_version")
    return getattr(message, "model_version", None)


class Readers:
    """Clients that ask one request after another for the length of a `with` block, and check each answer.

    Between them they rest for about as long as one takes: some are always under way, and engines have cores as well.
    """

    def __init__(self, server: Server, shelf: Shelf, *transports: type[Transport]) -> None:
        self._stack = contextlib.ExitStack()
        self._asks = [_reading(self._stack.enter_context(transport(server)), shelf) for transport in transports]

    def __enter__(self) -> Self:
        self._askers = self._stack.enter_context(asking(*self._asks, rest_s=_REST_S))
        self.wait_for_more()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def wait_for_more(self) -> None:
        """Waits until each of them has some more answers; one that has ended has said why."""
        wait_for_more(self._askers, 3, _SWAP_LIMIT_S)

    @property
    def asked(self) -> list[Asked]:
        """What was answered, of all of them, in the order in which it was sent."""
        return sorted((one for asker in self._askers for one in asker.answers), key=lambda one: one.started)

    @property
    def refused(self) -> list[Refused]:
        return [error for asker in self._askers for error in asker.refused]

    def assert_each_answer_was_right(self) -> None:
        assert failures(self._askers) == []
        assert all(asker.answers for asker in self._askers)

    def assert_nothing_was_lost(self) -> None:
        self.assert_each_answer_was_right()
        assert self.refused == []


def engines(server: Server) -> set[int]:
    return set(server.engine_pids())


def candidate(server: Server, before: set[int]) -> int:
    return wait_for(lambda: next(iter(engines(server) - before), None), "another engine process")


def outcome(server: Server, name: str) -> float:
    return metric(server, "bertserve_swaps_total", outcome=name)


def load(server: Server, version: int | str | None = None) -> HttpReply:
    parameters: dict[str, Any] = {} if version is None else {"version": version}
    return post_json(server.http, f"/v2/repository/models/{NAME}/load", {"parameters": parameters})


def unload(server: Server) -> HttpReply:
    return post_json(server.http, f"/v2/repository/models/{NAME}/unload", b"")


def served(server: Server) -> int:
    (version,) = get(server.http, f"/v2/models/{NAME}").json()["versions"]
    return int(version)


def wait_served(server: Server, version: int) -> None:
    wait_for(lambda: served(server) == version, f"version {version}", _SWAP_LIMIT_S)


def assert_reason(reason: str, pattern: str) -> None:
    assert re.search(pattern, reason), reason


def index(server: Server) -> dict[int, tuple[str, str]]:
    states = post_json(server.http, "/v2/repository/index", b"{}").json()
    return {int(one["version"]): (one["state"], one["reason"]) for one in states if one["name"] == NAME}
