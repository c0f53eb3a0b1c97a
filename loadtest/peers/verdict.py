"""What the comparison shall show, and whether it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadtest.peers.subjects import GRPC_NAME, HTTP, MANY, ONE, OPENVINO, ORT, RAW, TORCH, Subject, find

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from loadtest.peers.store import Store
    from loadtest.sample import Spread

    Compare = Callable[[Store, int, Subject, Subject], Spread]

LENGTHS = (8, 32, 128)
_BOTH = (HTTP, GRPC_NAME)


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


_P50 = Figure("p50 at 1 connection, ratio", lambda found, *two: found.ratio(*two, ONE, "p50_ms"), more=False)
_PER_S = Figure(f"texts/s at {MANY}, ratio", lambda found, *two: found.ratio(*two, MANY, "per_s"), more=True)
_OVER = Figure("p50 at 1 connection, ms above", lambda found, *two: found.above(*two, ONE, "p50_ms"), more=False)


@dataclass(slots=True, frozen=True)
class Aim:
    """What is asked of ours beside another.

    Attributes:
        what: The comparison in words.
        figure: What is compared.
        ours: Engine of ours.
        theirs: System and engine of the other.
        asked: By the number of tokens.
        protocol: Over which both are asked; the raw engine has none.
    """

    what: str
    figure: Figure
    ours: str
    theirs: tuple[str, str]
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


def _over_both(
    what: str, figure: Figure, ours: str, theirs: tuple[str, str], asked: Mapping[int, float]
) -> tuple[Aim, ...]:
    return tuple(Aim(what, figure, ours, theirs, asked, protocol) for protocol in _BOTH)


_SAME = "same engine and file as Triton"
AIMS = (
    *_over_both(f"{_SAME}, ORT", _P50, ORT, ("Triton", ORT), _at(0.90, 0.90, 0.90)),
    *_over_both(f"{_SAME}, OpenVINO", _P50, OPENVINO, ("Triton", OPENVINO), _at(0.90, 0.90, 0.90)),
    *_over_both(f"{_SAME}, ORT", _PER_S, ORT, ("Triton", ORT), _at(1.15, 1.15, 1.10)),
    *_over_both(f"{_SAME}, OpenVINO", _PER_S, OPENVINO, ("Triton", OPENVINO), _at(1.15, 1.15, 1.10)),
    *_over_both("ORT beside Triton with ORT", _P50, ORT, ("Triton", ORT), _at(0.90, 0.95, 0.75)),
    *_over_both("ORT beside Triton with ORT", _PER_S, ORT, ("Triton", ORT), _at(1.10, 1.15, 1.15)),
    *_over_both("OpenVINO beside Triton with ORT", _P50, OPENVINO, ("Triton", ORT), _at(0.85, 0.90, 0.65)),
    *_over_both("OpenVINO beside Triton with ORT", _PER_S, OPENVINO, ("Triton", ORT), _at(1.3, 1.5, 1.8)),
    Aim("ORT beside infinity, PyTorch", _P50, ORT, ("infinity", TORCH), _at(0.20, 0.20, 0.25), HTTP),
    Aim("ORT beside infinity, ONNX INT8", _P50, ORT, ("infinity", ORT), _at(0.20, 0.20, 0.25), HTTP),
    Aim("ORT over the raw engine", _OVER, ORT, (RAW.system, ORT), {8: 0.30}, HTTP),
    Aim("ORT over the raw engine", _OVER, ORT, (RAW.system, ORT), {8: 0.50}, GRPC_NAME),
    *_over_both("ORT over the raw engine", _PER_S, ORT, (RAW.system, ORT), _at(0.65, 0.80, 0.88)),
)


def judge(found: Store, model: str, aim: Aim) -> dict[int, Verdict]:
    """An aim's verdicts by the number of tokens."""
    ours = find(model, "bertserve", aim.ours, aim.protocol)
    theirs = RAW if aim.theirs[0] == RAW.system else find(model, *aim.theirs, aim.protocol)
    figure = aim.figure
    return {
        tokens: Verdict(
            asked, figure.compare(found, tokens, ours, theirs) if tokens in found.lengths else None, figure.more
        )
        for tokens, asked in aim.asked.items()
    }
