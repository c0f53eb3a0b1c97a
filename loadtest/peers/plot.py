"""The plot: bars for every server, lengths side by side, latency above throughput."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from loadtest.peers.subjects import MANY, ONE, subjects

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from loadtest.peers.store import Store
    from loadtest.peers.subjects import Subject
    from loadtest.sample import Spread

_NAMES_WIDTH, _PANEL_WIDTH, _GAP = 232, 240, 24
_FIGURE_WIDTH = 62
_ROW, _BAR = 19, 12
_HEAD, _TITLE = 26, 26
_MARGIN = 16

_STYLE = """\
text{font:12px system-ui,sans-serif;fill:#1f2328}
.title{font-weight:600;font-size:13px}.quiet{fill:#59636e}
.ours{fill:#0969da}.peer{fill:#a5adb8}.raw{fill:#59636e}.spread{stroke:#1f2328;stroke-width:1}
.ground{fill:#fff}
@media(prefers-color-scheme:dark){
text{fill:#e6edf3}.quiet{fill:#9198a1}.ours{fill:#4493f8}.peer{fill:#59636e}.raw{fill:#9198a1}
.spread{stroke:#e6edf3}.ground{fill:#0d1117}}"""


def svg(found: Store) -> str:
    """The plot as a file of its own, which follows the reader's light or dark scheme."""
    lengths = sorted(found.lengths)
    shown = subjects(found.facts.model["model"])
    block = _HEAD + _TITLE + _ROW * len(shown)
    width = 2 * _MARGIN + _NAMES_WIDTH + len(lengths) * (_PANEL_WIDTH + _GAP)
    height = 2 * _MARGIN + 2 * block
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<style>{_STYLE}</style>",
        f'<rect class="ground" width="{width}" height="{height}"/>',
        *_block(found, lengths, shown, _MARGIN, "p50 at 1 connection, ms (shorter is better)", (ONE, "p50_ms", 2)),
        *_block(
            found,
            lengths,
            shown,
            _MARGIN + block,
            f"texts a second at {MANY} connections (longer is better)",
            (MANY, "per_s", 0),
        ),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _block(
    found: Store, lengths: Sequence[int], shown: Sequence[Subject], top: int, title: str, what: tuple[int, str, int]
) -> Iterator[str]:
    """One figure of every subject, at all lengths."""
    connections, name, decimals = what
    yield _text(_MARGIN, top + 14, title, "title")
    for place, subject in enumerate(shown):
        yield _text(_MARGIN, _baseline(top, place), subject.name)
    for column, tokens in enumerate(lengths):
        left = _MARGIN + _NAMES_WIDTH + column * (_PANEL_WIDTH + _GAP)
        yield _text(left, top + _HEAD + 10, f"{tokens} tokens", "quiet")
        spreads = [found.figure(tokens, subject, connections, name) for subject in shown]
        scale = (_PANEL_WIDTH - _FIGURE_WIDTH) / max(spread.high for spread in spreads)
        for place, (subject, spread) in enumerate(zip(shown, spreads, strict=True)):
            yield from _bar(left, _baseline(top, place), spread, scale, _kind(subject), decimals)


def _bar(left: float, baseline: float, spread: Spread, scale: float, kind: str, decimals: int) -> Iterator[str]:
    width, middle = spread.median * scale, baseline - 4
    low, high = left + spread.low * scale, left + spread.high * scale
    yield f'<rect class="{kind}" x="{left}" y="{middle - _BAR / 2}" width="{width:.1f}" height="{_BAR}" rx="2"/>'
    yield f'<line class="spread" x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}"/>'
    yield _text(max(left + width, high) + 5, baseline, f"{spread.median:.{decimals}f}")


def _kind(subject: Subject) -> str:
    return {"bertserve": "ours", "raw engine": "raw"}.get(subject.system, "peer")


def _baseline(top: int, place: int) -> int:
    return top + _HEAD + _TITLE + _ROW * place + 4


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(words)}</text>'
