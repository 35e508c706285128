"""The picture of lateness: how many of the messages, in percent, are later than so many milliseconds. An SVG by hand.

The scale of the percents is logarithmic, so that the one in a thousand can be seen.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from html import escape
from math import log10
from typing import Final

WIDTH: Final = 640
HEIGHT: Final = 320
LEFT: Final = 60
BOTTOM: Final = 40
SHARES: Final = (100.0, 10.0, 1.0, 0.1, 0.01)
STEPS: Final = 8


def draw(late_ms: Sequence[float], what: str) -> str:
    """The whole file; `late_ms` is not empty."""
    ordered = sorted(late_ms)
    most = max(10.0, ordered[-1] * 1.05)
    points = " ".join(f"{_x(ms, most):.1f},{_y(share):.1f}" for ms, share in _curve(ordered))
    ticks = [round(most * step / STEPS) for step in range(STEPS + 1)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="16">Late by more than so many milliseconds: {escape(what)}</text>',
        *(_share_line(share) for share in SHARES),
        *(f'<text x="{_x(ms, most):.0f}" y="{HEIGHT - 22}" text-anchor="middle">{ms}</text>' for ms in ticks),
        f'<text x="{WIDTH - 10}" y="{HEIGHT - 6}" text-anchor="end">ms</text>',
        f'<polyline points="{points}" fill="none" stroke="#0b62a4" stroke-width="2"/>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _curve(ordered: list[float]) -> list[tuple[float, float]]:
    """(ms, percent of messages that are later), at each value that there is."""
    count = len(ordered)
    values = sorted(set(ordered))
    found = [(max(0.0, values[0] - 1), 100.0)]
    for ms in values:
        later = count - bisect_right(ordered, ms)
        found.append((ms, max(100.0 * later / count, SHARES[-1])))
    return found


def _x(ms: float, most: float) -> float:
    return LEFT + (WIDTH - LEFT - 20) * ms / most


def _y(share: float) -> float:
    """100 % on top, the smallest share at the bottom."""
    depth = (2 - log10(max(share, SHARES[-1]))) / (2 - log10(SHARES[-1]))
    return 30 + (HEIGHT - BOTTOM - 30) * depth


def _share_line(share: float) -> str:
    y = _y(share)
    return (
        f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y:.0f}" y2="{y:.0f}" stroke="#ddd"/>'
        f'<text x="{LEFT - 6}" y="{y + 4:.0f}" text-anchor="end">{share:g} %</text>'
    )
