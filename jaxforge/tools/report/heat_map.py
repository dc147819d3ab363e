"""Heat maps of the load of experts, one per layer: experts downwards, steps to the right.

The colour of a cell shows the band of its load: blue below an even load, orange above. Colour-blind
readers can distinguish both. The contrast with the page grows with the distance from an even load.
"""

import base64
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxforge.runs.loads import Loads
from jaxforge.runs.reading import Run
from jaxforge.telemetry.numbers import exact, short
from jaxforge.tools.pages.parts import Pool, encode_column

EDGES = (0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95, 1.05, 1.25, 1.5, 1.75, 2.0, 3.0, 4.0)
"""Edges between bands of loads. The middle band is an even load, the last is open-ended."""
_EVEN = len(EDGES) // 2
_NONE = len(EDGES) + 1  # band of values that are not finite, drawn transparent
_MIDDLE = (244, 243, 238)
_IDLE, _BUSY = ((0, 42, 82), (0, 114, 178)), ((92, 36, 0), (213, 94, 0))  # darkest, half-way


def heat_maps(runs: Sequence[Run], pool: Pool) -> list[dict[str, Any]]:
    """Return a heat map per layer of each run with experts, in the format of `drawing.js`."""
    return [
        heat_map
        for i, run in enumerate(runs)
        if run.loads is not None
        for heat_map in _maps(i, run.name if len(runs) > 1 else "", run.loads, pool)
    ]


def bands() -> list[dict[str, Any]]:
    """Return each band's name and its colours on light and dark pages."""
    lower = (0.0, *EDGES)
    names = [f"{short(a)} to {short(b)}" for a, b in zip(lower, EDGES, strict=False)]
    names.append(f"{short(EDGES[-1])} or more")
    return [
        {"name": name, "light": light, "dark": dark}
        for name, light, dark in zip(names, palette(), inverted(palette()), strict=True)
    ]


def palette() -> list[tuple[int, int, int]]:
    """Return red, green and blue of each band, from idle to overloaded."""
    arms = [
        [_between(dark, half, _MIDDLE, i / _EVEN) for i in range(_EVEN)]
        for dark, half in (_IDLE, _BUSY)
    ]
    return [*arms[0], _MIDDLE, *arms[1][::-1]]


def inverted(colours: Sequence[tuple[int, int, int]]) -> list[list[int]]:
    """Invert the lightness of colours but not their hue (CSS: `invert(1) hue-rotate(180deg)`)."""
    rotation = 2 * np.outer(np.ones(3), [0.213, 0.715, 0.072]) - np.eye(3)
    inverse = (255 - np.array(colours, float)) @ rotation.T
    return np.clip(inverse, 0, 255).round().astype(int).tolist()


def _between(
    dark: tuple[int, int, int], half: tuple[int, int, int], light: tuple[int, int, int], at: float
) -> tuple[int, int, int]:
    red, green, blue = (
        round(float(np.interp(at, (0, 0.5, 1), channels)))
        for channels in zip(dark, half, light, strict=True)
    )
    return red, green, blue


def _maps(number: int, name: str, loads: Loads, pool: Pool) -> Iterator[dict[str, Any]]:
    for i, layer in enumerate(loads.layers):
        values, last = loads.value[:, i], loads.last[i]
        levels = np.where(np.isfinite(values), np.digitize(values, EDGES), _NONE).astype(np.uint8)
        least, most = (encode_column(end(axis=-1), "f4") for end in (values.min, values.max))
        yield {
            "title": f"Load of experts, layer {layer}{f': {name}' if name else ''}",
            "unit": f"mean of {loads.each} logged steps each" if loads.each > 1 else "",
            "run": number,
            "x": pool.add(loads.step, "f8"),
            "experts": values.shape[-1],
            "levels": base64.b64encode(zlib.compress(levels.T.tobytes(), 9)).decode(),
            "least": least,
            "most": most,
            "description": f"at step {loads.last_step:,} from {exact(float(last.min()))}, of "
            f"expert {int(last.argmin())}, to {exact(float(last.max()))}, of expert "
            f"{int(last.argmax())}",
        }
