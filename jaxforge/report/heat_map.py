"""The load of experts as pictures: one for each layer, experts downwards, the run to the right.

A load is shown by the colour of its band, blue below an even load and orange above: the two stay
apart for colour-blind readers, and the further from even, the less light. On dark pages `page.css`
inverts the lightness, so that even loads are as dark as the page. `page.js` tells the band under
the pointer.
"""

import base64
import json
from collections.abc import Sequence
from html import escape

import numpy as np

from jaxforge.report.chart import Frame, percent, resumes, rounded, x_axis
from jaxforge.report.loads import Loads
from jaxforge.report.png import png
from jaxforge.report.reading import Run
from jaxforge.report.scale import exact, short

EDGES = (0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95, 1.05, 1.25, 1.5, 1.75, 2.0, 3.0, 4.0)
"""Where the next band of loads begins. The middle band is even; from the last on all look alike."""
_EVEN = len(EDGES) // 2
_NONE = len(EDGES) + 1  # colour of what is not finite: transparent
_MIDDLE = (244, 243, 238)
_IDLE, _BUSY = ((0, 42, 82), (0, 114, 178)), ((92, 36, 0), (213, 94, 0))  # darkest, and half way
_ROW, _LOW, _HIGH = 0.5, 4.0, 9.0  # rem: of an expert, and of a picture's least and greatest height


def heat_maps(runs: Sequence[Run], axis: str, frame: Frame) -> str:
    """A figure for each run that has experts.

    Args:
        runs: one, or several.
        axis: as of `Run.position`.
        frame: of all charts.
    """
    return "".join(
        _figure(
            "Load of experts" if len(runs) == 1 else f"Load of experts in {run.name}",
            run.loads,
            run.position(run.loads.step, axis),
            frame,
        )
        for run in runs
        if run.loads is not None
    )


def palette() -> list[tuple[int, int, int]]:
    """Red, green and blue of each band, from idle over even to overloaded."""
    arms = [
        [_between(dark, half, _MIDDLE, i / _EVEN) for i in range(_EVEN)]
        for dark, half in (_IDLE, _BUSY)
    ]
    return [*arms[0], _MIDDLE, *arms[1][::-1]]


def _between(
    dark: tuple[int, int, int], half: tuple[int, int, int], light: tuple[int, int, int], at: float
) -> tuple[int, int, int]:
    red, green, blue = (
        round(float(np.interp(at, (0, 0.5, 1), channels)))
        for channels in zip(dark, half, light, strict=True)
    )
    return red, green, blue


def _figure(title: str, loads: Loads, x: np.ndarray, frame: Frame) -> str:
    pictures = "".join(_map(loads, i, x, frame) for i in range(len(loads.layers)))
    return (
        f'<figure class="chart wide"><figcaption><div class="head"><h2>{escape(title)} '
        f"<small>assignments, relative to an even load</small></h2></div>{_bands()}"
        f'<p class="note">{_note(loads)}</p></figcaption><div class="maps">{pictures}</div>'
        f'<script type="application/json">{_data(loads, x)}</script></figure>\n'
    )


def _bands() -> str:
    lower = (0.0, *EDGES)
    names = [f"{short(a)} to {short(b)}" for a, b in zip(lower, EDGES, strict=False)]
    names.append(f"{short(EDGES[-1])} or more")
    entries = "".join(
        f'<li title="{name}"><i style="background:rgb{colour}"></i>'
        f"<span{' class=odd' if i % 2 else ''}>{name.split(' ')[0]}</span></li>"
        for i, (name, colour) in enumerate(zip(names, palette(), strict=True))
    )
    return f'<ol class="bands">{entries}</ol>'


def _note(loads: Loads) -> str:
    columns = f"A column is the mean of {loads.each} logged steps." if loads.each > 1 else ""
    return (
        "Each row is an expert: 1 is its even share of the tokens, 0 an idle expert; from "
        f"{short(EDGES[-1])} on all look alike. {columns} The numbers are of the least and of the "
        "most loaded expert."
    )


def _data(loads: Loads, x: np.ndarray) -> str:
    """What the legends tell: least and most of each layer. The first has the places of all."""
    ends = [end for layer in range(len(loads.layers)) for end in _ends(loads.value[:, layer])]
    first, *rest = ({"y": rounded(end.round(3))} for end in ends)
    return json.dumps([{"x": rounded(x), **first}, *rest], separators=(",", ":"))


def _ends(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return values.min(axis=-1), values.max(axis=-1)


def _map(loads: Loads, i: int, x: np.ndarray, frame: Frame) -> str:
    layer, experts = loads.layers[i], loads.value.shape[-1]
    height = min(max(_ROW * experts, _LOW), _HIGH)
    entries = zip(("least", "most"), map(exact, map(float, _ends(loads.last[i]))), strict=True)
    legend = "".join(f'<li>{name} <b data-last="{end}">{end}</b></li>' for name, end in entries)
    return (
        f'<div class="map"><h3>layer {layer}</h3><ul class="legend">{legend}</ul>'
        f'<div class="plot" style="height:{height:g}rem">{_picture(loads, i, x, frame)}'
        f'<svg width="100%" height="100%" aria-hidden="true">{_rows(experts)}'
        f"{''.join(x_axis(frame, 4))}{''.join(resumes(frame))}"
        '<line class="cursor" y2="100%"/></svg></div></div>'
    )


def _rows(experts: int) -> str:
    """The numbers of the first and of the last expert."""
    return "".join(
        f'<text class="y" x="-8" y="{percent(np.array((row + 0.5) / experts))}" dy=".32em">'
        f"{row}</text>"
        for row in sorted({0, experts - 1})
    )


def _picture(loads: Loads, i: int, x: np.ndarray, frame: Frame) -> str:
    left, right = _extent(x, frame)
    columns = _columns(x, left, right, loads.most)
    values = loads.value[columns, i].T
    levels = np.where(np.isfinite(values), np.digitize(values, EDGES), _NONE)
    data = base64.b64encode(png(levels, palette())).decode()
    start, end = frame.x.place([left, right])
    return (
        f'<img alt="{escape(_alt(loads, i, frame))}" src="data:image/png;base64,{data}" '
        f'style="left:{percent(start)};width:{percent(end - start)}">'
    )


def _alt(loads: Loads, i: int, frame: Frame) -> str:
    last, layer = loads.last[i], loads.layers[i]
    least, most = (exact(float(end)) for end in _ends(last))
    return (
        f"Heat map: load of {len(last)} experts of layer {layer} by {frame.x_label}. At step "
        f"{loads.last_step:,} from {least}, of expert {int(last.argmin())}, "
        f"to {most}, of expert {int(last.argmax())}."
    )


def _extent(x: np.ndarray, frame: Frame) -> tuple[float, float]:
    """From half a column before the first to half a column after the last, within the frame."""
    low, high = frame.x.low, frame.x.high
    half = max((x[-1] - x[0]) / max(len(x) - 1, 1), (high - low) / 200) / 2
    return max(low, float(x[0] - half)), min(high, float(x[-1] + half))


def _columns(x: np.ndarray, left: float, right: float, pixels: int) -> np.ndarray:
    """[pixels] Which column is nearest to each pixel of a row."""
    middles = left + (right - left) * (np.arange(pixels) + 0.5) / pixels
    return np.searchsorted((x[1:] + x[:-1]) / 2, middles)
