"""The devices that a load may be sized for: published figures, and prices that are the user's to set."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Literal

import msgspec

from loadtest.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

PRICES_FROM = "2026-11"
"""When the example prices were written down. They are no offer of anybody: `--price` sets yours."""

HERE = "here"
"""The machine at hand."""


class Candidate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A device.

    Attributes:
        title: For people.
        kind: A GPU computes beside the server, a CPU shares its cores with it.
        memory_gb: That weights and batches may fill, in 10^9 bytes.
        bandwidth_gb_s: Of its memory, in 10^9 bytes a second.
        tera_per_s: 10^12 operations a second, by precision; what it cannot compute is left out.
        watts: At most.
        price_per_hour: Of one, in USD.
        source: Where the figures are from.
        cores: Of a CPU.
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
    """The table by name.

    Args:
        file: A table in the form of `loadtest/capacity/data/devices.json`, in the place of that one; None for that one.
        prices: Prices an hour, each as `t4=0.35`.

    Raises:
        BenchError: What is wrong with it.
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
            raise BenchError(f"--price {name}: no such candidate; there are {', '.join([*table, HERE])}")
        table[name] = msgspec.structs.replace(table[name], price_per_hour=price)
    return table


def price_here(prices: Sequence[str]) -> float | None:
    """What an hour of the machine at hand was said to cost."""
    return _priced(prices).get(HERE)


def _priced(prices: Sequence[str]) -> Mapping[str, float]:
    found = {}
    for given in prices:
        name, _, price = given.partition("=")
        try:
            found[name] = float(price)
        except ValueError:
            raise BenchError(f"--price {given}: must look like t4=0.35, in USD an hour") from None
        if not 0 <= found[name] < float("inf"):
            raise BenchError(f"--price {given}: a price is 0 or more")
    return found


def _check(file: Path | None, name: str, one: Candidate) -> None:
    numbers = {"memory_gb": one.memory_gb, "bandwidth_gb_s": one.bandwidth_gb_s}
    numbers |= {f"tera_per_s.{precision}": rate for precision, rate in one.tera_per_s.items()}
    for key, value in numbers.items():
        if not 0 < value < float("inf"):
            raise BenchError(f"--candidates {file}: {name}.{key} must be above 0, not {value:g}")
    if not one.tera_per_s:
        raise BenchError(f"--candidates {file}: {name}.tera_per_s names no precision")
    if one.kind == "cpu" and one.cores < 1:
        raise BenchError(f"--candidates {file}: {name}.cores is missing: how many cores has it?")


def chosen(table: Mapping[str, Candidate], names: str | None) -> dict[str, Candidate]:
    """The candidates that `--on t4,l4` names; all without it.

    Raises:
        BenchError: One of them is not in the table.
    """
    if names is None:
        return dict(table)
    words = [word.strip() for word in names.split(",") if word.strip()]
    for word in words:
        if word not in table and word != HERE:
            raise BenchError(f"--on {word}: no such candidate; there are {', '.join([*table, HERE])}")
    return {word: table[word] for word in words if word in table}
