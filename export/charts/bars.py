"""Bars for several subjects in panels side by side, one block of panels for each figure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from export.charts.plot import label, line, rect, svg_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_NAMES_WIDTH, _PANEL_WIDTH, _GAP = 232, 240, 24
_FIGURE_WIDTH = 62
_ROW, _BAR = 19, 12
_HEAD, _TITLE = 26, 26
_MARGIN = 16


@dataclass(slots=True, frozen=True)
class Bar:
    """A median between the least and the greatest value."""

    median: float
    low: float
    high: float


@dataclass(slots=True, frozen=True)
class Block:
    """One figure of all subjects.

    Attributes:
        title: What it is.
        decimals: Of the numbers beside the bars.
        panels: Bars by the title of their panel, as many as there are subjects.
    """

    title: str
    decimals: int
    panels: Mapping[str, Sequence[Bar]]


def bars_file(title: str, subjects: Sequence[tuple[str, str]], blocks: Sequence[Block]) -> str:
    """The blocks below one another, as a file of its own.

    Args:
        title: For those who do not see it.
        subjects: Name and colour of each.
        blocks: Each with the same panels.
    """
    each = _HEAD + _TITLE + _ROW * len(subjects)
    width = 2 * _MARGIN + _NAMES_WIDTH + len(blocks[0].panels) * (_PANEL_WIDTH + _GAP)
    drawn = [part for number, block in enumerate(blocks) for part in _block(block, subjects, _MARGIN + number * each)]
    return svg_file(title, width, 2 * _MARGIN + len(blocks) * each, drawn)


def _block(block: Block, subjects: Sequence[tuple[str, str]], top: int) -> Iterator[str]:
    yield label(_MARGIN, top + 14, block.title, kind="title")
    baselines = [top + _HEAD + _TITLE + _ROW * row + 4 for row in range(len(subjects))]
    for (name, _), baseline in zip(subjects, baselines, strict=True):
        yield label(_MARGIN, baseline, name, kind="name")
    for column, (panel, bars) in enumerate(block.panels.items()):
        left = _MARGIN + _NAMES_WIDTH + column * (_PANEL_WIDTH + _GAP)
        yield label(left, top + _HEAD + 10, panel)
        scale = (_PANEL_WIDTH - _FIGURE_WIDTH) / max(bar.high for bar in bars)
        for (_, colour), baseline, bar in zip(subjects, baselines, bars, strict=True):
            middle, end = baseline - 4, left + max(bar.median, bar.high) * scale
            yield rect(colour, left, middle - _BAR / 2, bar.median * scale, _BAR)
            yield line("spread", left + bar.low * scale, middle, left + bar.high * scale, middle)
            yield label(end + 5, baseline, f"{bar.median:.{block.decimals}f}", kind="name")
