"""What the comparison shall show, and whether it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadtest.benchmarks.peers.subjects import (
    BEST,
    DYNAMIC,
    GRPC_NAME,
    HTTP,
    MANY,
    ONE,
    OPENVINO,
    ORT,
    RAW,
    TORCH,
    TRITON,
    TRITON_PLAIN,
    V2,
    Subject,
    find,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from loadtest.benchmarks.turns import Samples
    from loadtest.report.sample import Spread

    Compare = Callable[[Samples, int, Subject, Subject], Spread]

LENGTHS = (8, 32, 128)
_TRITON_PROTOCOLS = ((HTTP, V2), (V2, V2), (GRPC_NAME, GRPC_NAME))
"""Of ours, and of Triton, whose only way over HTTP it is."""


@dataclass(slots=True, frozen=True)
class Figure:
    """What is compared.

    Attributes:
        name: In words.
        compare: Ours and the other's, over the rounds of a length.
        more: Whether ours shall be at least what is asked; else at most.
    """

    name: str
    compare: Compare
    more: bool


def _p50_ratio(samples: Samples, tokens: int, ours: Subject, theirs: Subject) -> Spread:
    return samples.ratio(tokens, ours.key(ONE), theirs.key(ONE), "p50_ms")


def _per_s_ratio(samples: Samples, tokens: int, ours: Subject, theirs: Subject) -> Spread:
    return samples.ratio(tokens, ours.key(MANY), theirs.key(MANY), "per_s")


def _p50_above(samples: Samples, tokens: int, ours: Subject, theirs: Subject) -> Spread:
    return samples.above(tokens, ours.key(ONE), theirs.key(ONE), "p50_ms")


_P50 = Figure("p50 at 1 connection, ratio", _p50_ratio, more=False)
_PER_S = Figure(f"texts/s at {MANY}, ratio", _per_s_ratio, more=True)
_OVER = Figure("p50 at 1 connection, ms above", _p50_above, more=False)


@dataclass(slots=True, frozen=True)
class Aim:
    """What is asked of ours beside another.

    Attributes:
        what: The comparison in words.
        figure: What is compared.
        ours: Engine of ours.
        theirs: System, engine and protocol of the other.
        asked: By the number of tokens.
        protocol: Over which ours is asked.
    """

    what: str
    figure: Figure
    ours: str
    theirs: tuple[str, str, str]
    asked: Mapping[int, float]
    protocol: str


@dataclass(slots=True, frozen=True)
class Verdict:
    """What was found.

    Attributes:
        asked: As the aim has it.
        found: Over the rounds; None where it was not measured.
        more: Whether it shall be at least what is asked.
    """

    asked: float
    found: Spread | None
    more: bool

    @property
    def met(self) -> bool | None:
        """Whether the median is what was asked for; None where it was not measured."""
        if self.found is None:
            return None
        return self.found.median >= self.asked if self.more else self.found.median <= self.asked


def _at(*asked: float) -> Mapping[int, float]:
    return dict(zip(LENGTHS, asked, strict=True))


def _beside_triton(what: str, figure: Figure, ours: str, theirs: str, asked: Mapping[int, float]) -> tuple[Aim, ...]:
    return tuple(Aim(what, figure, ours, (TRITON, theirs, its), asked, protocol) for protocol, its in _TRITON_PROTOCOLS)


def _beside_plain_triton(what: str, engine: str, asked: Mapping[int, float]) -> tuple[Aim, ...]:
    return tuple(Aim(what, _PER_S, engine, (TRITON_PLAIN, engine, V2), asked, protocol) for protocol in (HTTP, V2))


def _over_raw(figure: Figure, protocol: str, asked: Mapping[int, float]) -> Aim:
    return Aim("ORT over the raw engine", figure, ORT, (RAW.system, RAW.engine, RAW.protocol), asked, protocol)


_SAME = "same engine and file as Triton"
_OWN = "beside Triton with ORT's own INT8"
AIMS = (
    *_beside_triton(f"{_SAME}, ORT", _P50, ORT, ORT, _at(0.90, 0.90, 0.90)),
    *_beside_triton(f"{_SAME}, OpenVINO", _P50, OPENVINO, OPENVINO, _at(0.90, 0.90, 0.90)),
    *_beside_triton(f"{_SAME}, ORT", _PER_S, ORT, ORT, _at(1.15, 1.15, 1.10)),
    *_beside_triton(f"{_SAME}, OpenVINO", _PER_S, OPENVINO, OPENVINO, _at(1.15, 1.15, 1.10)),
    *_beside_plain_triton(f"{_SAME} without its batcher, ORT", ORT, _at(1.15, 1.15, 1.10)),
    *_beside_plain_triton(f"{_SAME} without its batcher, OpenVINO", OPENVINO, _at(1.15, 1.15, 1.10)),
    *_beside_triton(f"ORT {_OWN}", _P50, ORT, DYNAMIC, _at(0.90, 0.95, 0.75)),
    *_beside_triton(f"ORT {_OWN}", _PER_S, ORT, DYNAMIC, _at(1.10, 1.15, 1.15)),
    *_beside_triton(f"OpenVINO {_OWN}", _P50, OPENVINO, DYNAMIC, _at(0.85, 0.90, 0.65)),
    *_beside_triton(f"OpenVINO {_OWN}", _PER_S, OPENVINO, DYNAMIC, _at(1.3, 1.5, 1.8)),
    *_beside_triton(f"best of both {_OWN}", _P50, BEST, DYNAMIC, _at(0.85, 0.85, 0.75)),
    *_beside_triton(f"best of both {_OWN}", _PER_S, BEST, DYNAMIC, _at(1.4, 1.5, 1.4)),
    Aim("ORT beside infinity, PyTorch", _P50, ORT, ("infinity", TORCH, HTTP), _at(0.20, 0.20, 0.25), HTTP),
    Aim("ORT beside infinity, ONNX INT8", _P50, ORT, ("infinity", ORT, HTTP), _at(0.20, 0.20, 0.25), HTTP),
    _over_raw(_OVER, HTTP, {8: 0.30}),
    _over_raw(_OVER, GRPC_NAME, {8: 0.50}),
    _over_raw(_PER_S, HTTP, _at(0.65, 0.80, 0.88)),
    _over_raw(_PER_S, GRPC_NAME, _at(0.65, 0.80, 0.88)),
)


def judge(samples: Samples, model: str, aim: Aim) -> dict[int, Verdict]:
    """An aim's verdicts by the number of tokens."""
    ours = find(model, "bertserve", aim.ours, aim.protocol)
    theirs = find(model, *aim.theirs)
    figure = aim.figure
    return {
        tokens: Verdict(
            asked, figure.compare(samples, tokens, ours, theirs) if tokens in samples.rounds else None, figure.more
        )
        for tokens, asked in aim.asked.items()
    }
