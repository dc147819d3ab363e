"""Curves of results as self-contained SVGs."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape

import numpy as np
from axes import Scale, scale_of

Curves = Mapping[str, Sequence[tuple[float, float]]]
"""Points (x, y) by name of a curve."""

COLOURS = (
    "#0b62c4",
    "#c4510b",
    "#1a8a3c",
    "#8a2fb0",
    "#555555",
    "#c4950b",
    "#0b9aa8",
    "#b0305a",
    "#111111",
)
_WIDTH, _HEIGHT, _LEFT, _TOP = 380, 250, 50, 34


def picture(panels: Mapping[str, Curves], x_label: str, *, log_y: bool, log_x: bool = True) -> str:
    """Return panels of curves on common axes as a self-contained SVG.

    Args:
        panels: curves by the title of their panel; the first panel has all names.
        x_label: label of the horizontal axis.
        log_y: whether the vertical axis is logarithmic.
        log_x: whether the horizontal axis is logarithmic. Then every x has a tick.
    """
    width, height, left, top = _WIDTH, _HEIGHT, _LEFT, _TOP
    every = [point for curves in panels.values() for points in curves.values() for point in points]
    xs, ys = (np.array(axis) for axis in zip(*every, strict=True))
    x, y = scale_of(xs, log=log_x), scale_of(ys, log=log_y)
    names = next(iter(panels.values()))
    whole = (len(panels) * (width + left) + 20 + 7 * max(13, *map(len, names)), height + top + 50)
    x_ticks = [(value, power_of_two(value)) for value in sorted(set(xs))] if log_x else x.ticks(6)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole[0]} {whole[1]}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    for i, (title, curves) in enumerate(panels.items()):
        parts.append(f'<g transform="translate({left + i * (width + left)} {top})">')
        parts.append(f'<text y="-12" font-weight="bold">{escape(title)}</text>')
        parts += _axes(x, y, x_ticks, x_label)
        for j, points in enumerate(curves.values()):
            finite = [point for point in points if np.isfinite(point[1])]
            at = [(x.positions(a) * width, (1 - y.positions(b)) * height) for a, b in finite]
            line = " ".join(f"{a:.1f},{b:.1f}" for a, b in at)
            stroke = f'fill="none" stroke="{COLOURS[j]}" stroke-width="2"'
            parts.append(f'<polyline points="{line}" {stroke}/>')
        parts.append("</g>")
    for j, name in enumerate(names):
        at = len(panels) * (width + left) + 5, top + 12 + 18 * j
        parts.append(f'<text x="{at[0]}" y="{at[1]}" fill="{COLOURS[j]}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _axes(x: Scale, y: Scale, x_ticks: Sequence[tuple[float, str]], x_label: str) -> Iterator[str]:
    yield f'<path d="M0 0V{_HEIGHT}H{_WIDTH}" fill="none" stroke="#888"/>'
    for value, label in y.ticks(6):
        at = float(1 - y.positions(value)) * _HEIGHT
        yield f'<path d="M0 {at:.1f}H{_WIDTH}" stroke="#ddd"/>'
        yield f'<text x="-6" y="{at + 4:.1f}" text-anchor="end">{label}</text>'
    for value, label in x_ticks:
        at = float(x.positions(value)) * _WIDTH
        yield f'<text x="{at:.1f}" y="{_HEIGHT + 18}" text-anchor="middle">{label}</text>'
    yield f'<text x="{_WIDTH}" y="{_HEIGHT + 36}" text-anchor="end">{escape(x_label)}</text>'


def power_of_two(value: float) -> str:
    """Return a label: the nearest power of two for values below 1."""
    return f"{value:g}" if value >= 1 else f"2^{round(np.log2(value))}"
