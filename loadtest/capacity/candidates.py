"""Candidate devices for a sizing: published figures, and example prices that the user can replace."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Literal

import msgspec

from loadtest.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

PRICES_FROM = "2026-11"
"""Date of the example prices. They are not offers; set your own with `--price`."""

HERE = "here"
"""Name of the local machine."""


class Candidate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A device.

    Attributes:
        title: Display name.
        kind: A GPU computes in parallel with the server; a CPU shares its cores with the server.
        memory_gb: Memory for weights and batches, in 10^9 bytes.
        bandwidth_gb_s: Memory bandwidth, in 10^9 bytes per second.
        tera_per_s: 10^12 operations per second, by precision; unsupported precisions are left out.
        watts: Maximum power.
        price_per_hour: Price of one device, in USD.
        source: Origin of the figures.
        cores: Number of CPU cores.
    """

    title: str
    kind: Literal["gpu", "cpu"]
    memory_gb: float
    bandwidth_gb_s: float
    tera_per_s: dict[Literal["fp32", "fp16", "int8"], float]
    watts: float | None = None
    price_per_hour: float | None = None
    source: str = "yours"
    cores: int = 0


def read_candidates(file: Path | None, prices: Sequence[str] = ()) -> dict[str, Candidate]:
    """The candidates by name.

    Args:
        file: A table in the format of `loadtest/capacity/data/devices.json` that replaces it; None for that one.
        prices: Prices per hour, each as `t4=0.35`.

    Raises:
        BenchError: The table or a price is invalid.
    """
    try:
        content = (files("loadtest.capacity") / "data" / "devices.json" if file is None else file).read_bytes()
        table = msgspec.json.decode(content, type=dict[str, Candidate])
    except OSError as error:
        raise BenchError(f"--candidates {file}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BenchError(f"--candidates {file}: {error}") from error
    for name, one in table.items():
        _check(file, name, one)
    for name, price in _priced(prices).items():
        if name == HERE:
            continue
        if name not in table:
            raise BenchError(f"--price: unknown candidate {name!r}. Available: {', '.join([*table, HERE])}")
        table[name] = msgspec.structs.replace(table[name], price_per_hour=price)
    return table


def price_here(prices: Sequence[str]) -> float | None:
    """The user's hourly price of the local machine; None if not given."""
    return _priced(prices).get(HERE)


def _priced(prices: Sequence[str]) -> Mapping[str, float]:
    found = {}
    for given in prices:
        name, _, price = given.partition("=")
        try:
            found[name] = float(price)
        except ValueError:
            raise BenchError(f"--price {given}: must look like t4=0.35, in USD per hour") from None
        if not 0 <= found[name] < float("inf"):
            raise BenchError(f"--price {given}: the price must be 0 or more")
    return found


def _check(file: Path | None, name: str, one: Candidate) -> None:
    numbers = {"memory_gb": one.memory_gb, "bandwidth_gb_s": one.bandwidth_gb_s}
    numbers |= {f"tera_per_s.{precision}": rate for precision, rate in one.tera_per_s.items()}
    for key, value in numbers.items():
        if not 0 < value < float("inf"):
            raise BenchError(f"--candidates {file}: {name}.{key} must be above 0, not {value:g}")
    if not one.tera_per_s:
        raise BenchError(f"--candidates {file}: {name}.tera_per_s must list a precision")
    if one.kind == "cpu" and one.cores < 1:
        raise BenchError(f"--candidates {file}: {name}.cores is missing; set the number of cores")


def chosen(table: Mapping[str, Candidate], names: str | None) -> dict[str, Candidate]:
    """The candidates in `--on t4,l4`; all if it is None.

    Raises:
        BenchError: A name is not in the table.
    """
    if names is None:
        return dict(table)
    words = [word.strip() for word in names.split(",") if word.strip()]
    for word in words:
        if word not in table and word != HERE:
            raise BenchError(f"--on: unknown candidate {word!r}. Available: {', '.join([*table, HERE])}")
    return {word: table[word] for word in words if word in table}
