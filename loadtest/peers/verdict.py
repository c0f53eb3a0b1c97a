"""What the comparison shall show, and whether it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadtest.peers.subjects import GRPC_NAME, HTTP, MANY, ONE, OPENVINO, ORT, RAW, TORCH, find
from loadtest.report import Target

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loadtest.peers.store import Store
    from loadtest.sample import Spread

_LENGTHS = (8, 32, 128)
_ALL = (HTTP, GRPC_NAME)


@dataclass(slots=True, frozen=True)
class Aim:
    """A ratio of ours to a peer's that is asked for, at each length.

    Attributes:
        what: The comparison in words.
        ours: Engine of ours.
        theirs: System and engine of the peer.
        limits: At 8, 32 and 128 tokens.
        protocols: Over which it is looked at.
        throughput: Whether it is about texts a second, of which there shall be more; else about p50.
    """

    what: str
    ours: str
    theirs: tuple[str, str]
    limits: tuple[float, float, float]
    protocols: tuple[str, ...] = _ALL
    throughput: bool = False


_AIMS = (
    Aim("the same engine and file in both, ORT", ORT, ("Triton", ORT), (0.90, 0.90, 0.90)),
    Aim("the same engine and file in both, OpenVINO", OPENVINO, ("Triton", OPENVINO), (0.90, 0.90, 0.90)),
    Aim("the same engine and file in both, ORT", ORT, ("Triton", ORT), (1.15, 1.15, 1.10), throughput=True),
    Aim(
        "the same engine and file in both, OpenVINO",
        OPENVINO,
        ("Triton", OPENVINO),
        (1.15, 1.15, 1.10),
        throughput=True,
    ),
    Aim("ours with ORT, Triton with ORT", ORT, ("Triton", ORT), (0.90, 0.95, 0.75)),
    Aim("ours with ORT, Triton with ORT", ORT, ("Triton", ORT), (1.10, 1.15, 1.15), throughput=True),
    Aim("ours with OpenVINO, Triton with ORT", OPENVINO, ("Triton", ORT), (0.85, 0.90, 0.65)),
    Aim("ours with OpenVINO, Triton with ORT", OPENVINO, ("Triton", ORT), (1.3, 1.5, 1.8), throughput=True),
    Aim("ours with ORT, infinity with PyTorch", ORT, ("infinity", TORCH), (0.20, 0.20, 0.25), (HTTP,)),
    Aim("ours with ORT, infinity with ONNX INT8", ORT, ("infinity", ORT), (0.20, 0.20, 0.25), (HTTP,)),
)

_OVER_RAW_MS = {HTTP: 0.30, GRPC_NAME: 0.50}
_OVER_RAW_TOKENS = 8
_LEAST_PERCENT_OF_RAW = {8: 65, 32: 80, 128: 88}


def targets(found: Store, model: str) -> list[Target]:
    """Everything that is asked for, in the order of the specification."""
    return [*_ratios(found, model), *_over_raw(found, model)]


def _ratios(found: Store, model: str) -> Iterator[Target]:
    for aim in _AIMS:
        connections, name = (MANY, "per_s") if aim.throughput else (ONE, "p50_ms")
        for tokens, limit in zip(_LENGTHS, aim.limits, strict=True):
            for protocol in aim.protocols:
                what = f"{aim.what}, {protocol}, {tokens} tokens: {_figure(connections)}"
                asked = f"{'at least' if aim.throughput else 'at most'} {limit:.2f}"
                if tokens not in found.lengths:
                    yield Target(what, asked, "not measured", None)
                    continue
                ours, theirs = find(model, "bertserve", aim.ours, protocol), find(model, *aim.theirs, protocol)
                ratio = found.ratio(tokens, ours, theirs, connections, name)
                met = ratio.median >= limit if aim.throughput else ratio.median <= limit
                yield Target(what, asked, _words(ratio, 2), met)


def _over_raw(found: Store, model: str) -> Iterator[Target]:
    for protocol, limit in _OVER_RAW_MS.items():
        what = f"above the raw engine, {protocol}, {_OVER_RAW_TOKENS} tokens: {_figure(ONE)}"
        if _OVER_RAW_TOKENS not in found.lengths:
            yield Target(what, f"at most {limit:.2f} ms", "not measured", None)
            continue
        above = found.above(_OVER_RAW_TOKENS, find(model, "bertserve", ORT, protocol), RAW, ONE, "p50_ms")
        yield Target(what, f"at most {limit:.2f} ms", f"{_words(above, 2)} ms", above.median <= limit)
    for tokens, least in _LEAST_PERCENT_OF_RAW.items():
        for protocol in _ALL:
            what = f"of the raw engine, {protocol}, {tokens} tokens: {_figure(MANY)}"
            if tokens not in found.lengths:
                yield Target(what, f"at least {least}%", "not measured", None)
                continue
            share = found.ratio(tokens, find(model, "bertserve", ORT, protocol), RAW, MANY, "per_s")
            yield Target(what, f"at least {least}%", f"{100 * share.median:.0f}%", 100 * share.median >= least)


def _figure(connections: int) -> str:
    return "p50 at 1 connection" if connections == ONE else f"texts a second at {connections}"


def _words(spread: Spread, decimals: int) -> str:
    return f"{spread.median:.{decimals}f} ({spread.low:.{decimals}f} to {spread.high:.{decimals}f})"
