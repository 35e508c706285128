"""The picture of the peers: for each row and peer, how many times tfmq is ahead (or behind), on a logarithmic scale."""

from __future__ import annotations

from html import escape
from math import log10
from typing import Any, Final

AHEAD: Final = "tfmq ahead of "
LEFT: Final = 250
WIDTH: Final = 860
STEP: Final = 18
TICKS: Final = (0.1, 1.0, 10.0, 100.0, 1000.0)


def draw(figures: list[dict[str, Any]]) -> str:
    """Return an SVG of the figures that are ratios to peers, grouped by row. There is at least one."""
    groups: dict[str, list[tuple[str, float]]] = {}
    for figure in figures:
        if figure["who"].startswith(AHEAD):
            groups.setdefault(figure["row"], []).append((figure["who"].removeprefix(AHEAD), figure["value"]))
    parts, y = [], 46
    for row, bars in groups.items():
        parts.append(f'<text x="8" y="{y}" font-weight="bold">{escape(row)}</text>')
        for who, ratio in bars:
            y += STEP
            begin, end = sorted((_x(1.0), _x(ratio)))
            color = "#0b62a4" if ratio >= 1 else "#b3261e"
            parts += [
                f'<text x="{LEFT - 8}" y="{y}" text-anchor="end">{escape(who)}</text>',
                f'<rect x="{begin:.1f}" y="{y - 10}" width="{end - begin:.1f}" height="12" fill="{color}"/>',
                f'<text x="{end + 4:.1f}" y="{y}">{ratio:,.3g}</text>',
            ]
        y += 2 * STEP
    lines = [
        f'<line x1="{_x(tick):.1f}" y1="30" x2="{_x(tick):.1f}" y2="{y - STEP}" stroke="#cccccc"/>'
        f'<text x="{_x(tick):.1f}" y="26" text-anchor="middle">{tick:g} times</text>'
        for tick in TICKS
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" font-size="12" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{y}" fill="white"/>', *lines, *parts, "</svg>"]) + "\n"


def _x(ratio: float) -> float:
    low, high = log10(TICKS[0]), log10(TICKS[-1])
    place = (min(max(log10(ratio), low), high) - low) / (high - low)
    return LEFT + (WIDTH - LEFT - 60) * place
