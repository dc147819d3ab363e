"""Drawings of pipeline schedules: a table in plain text, and an SVG timeline."""

import string
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from jaxforge.parallel.pipeline.schedule import COSTS, Action, Schedule

_FORWARD, _BACKWARD = "#6cabf5", "#f59e52"
_INK, _FAINT_INK, _LINE = "#1f2328", "#59636e", "#8c959f"
_PAPER, _IDLE = "#ffffff", "#eaeef2"
_MARGIN, _LABEL, _ROW, _CELL, _SWATCH = 16, 60, 28, 24, 16
_TOP = 62
"""Top of the first row, below the title and the axis of ticks. All sizes are in pixels."""
_LETTER = 6
"""Average width of a letter."""


def as_text(schedule: Schedule) -> str:
    """Return a schedule as a text table with a column per tick, followed by its costs.

    A stage has a row of forwards and a row of backwards. A cell shows the microbatch, and the
    letter of the chunk if stages have several. Bars separate phases. Lines are not wrapped.

    Args:
        schedule: pipeline schedule.
    """
    return "\n".join([_title(schedule), "", *_table(schedule), "", *_facts(schedule), ""])


def as_svg(schedule: Schedule) -> str:
    """Return a schedule as a self-contained SVG, readable on light and dark pages.

    A stage is a row. Each tick shows the forward before the backward, with widths in proportion to
    their costs. Empty space is the bubble.

    Args:
        schedule: pipeline schedule.
    """
    unit = 8 + 8 * len(str(schedule.microbatches - 1))
    spans = list(_spans(schedule, unit))
    bottom = _TOP + _ROW * schedule.stages
    legend, legend_end = _legend(schedule, bottom + 22)
    width = max(spans[-1].end, legend_end) + _MARGIN
    height = bottom + 22 + _SWATCH + _MARGIN
    return "\n".join([
        *_frame(_title(schedule), width, height),
        *_rows(schedule, spans),
        *_cells(schedule, spans, unit),
        *_axis(schedule, spans, bottom),
        *legend,
        "</svg>",
        "",
    ])  # fmt: skip


def _title(schedule: Schedule) -> str:
    counts = [_count(schedule.stages, "stage"), _count(schedule.microbatches, "microbatch", "es")]
    if schedule.chunks > 1:
        letters = ", ".join(map(_letters, range(schedule.chunks)))
        counts.append(f"{schedule.chunks} chunks ({letters})")
    return f"{schedule.name}: {', '.join(counts)}"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural if number > 1 else ''}"


def _table(schedule: Schedule) -> Iterator[str]:
    width = max(len(str(len(schedule.ticks) - 1)), len(_cell(schedule, _widest(schedule))))
    label = len(f"stage {schedule.stages - 1}")

    def line(name: str, direction: str, cells: Iterable[str]) -> str:
        cells = iter(cells)
        phases = (
            " ".join(f"{next(cells):>{width}}" for _ in phase.ticks) for phase in schedule.phases()
        )
        return f"{name:<{label}} {direction}  {' | '.join(phases)}"

    yield line("tick", " ", map(str, range(len(schedule.ticks))))
    for stage in range(schedule.stages):
        for direction in COSTS:
            actions = (getattr(tick, direction)[stage] for tick in schedule.ticks)
            name = f"stage {stage}" if direction == "forward" else ""
            yield line(name, direction[0].upper(), (_cell(schedule, action) for action in actions))


def _widest(schedule: Schedule) -> Action:
    return Action(schedule.microbatches - 1, schedule.chunks - 1, 0)


def _cell(schedule: Schedule, action: Action | None) -> str:
    if action is None:
        return "."
    return f"{action.microbatch}{_letters(action.chunk) if schedule.chunks > 1 else ''}"


def _letters(number: int) -> str:
    """Return the letters of a number from 0: a, b, ... z, aa, ab, ..."""
    prefix, last = divmod(number, 26)
    return (_letters(prefix - 1) if prefix else "") + string.ascii_lowercase[last]


def _facts(schedule: Schedule) -> Iterator[str]:
    names = {
        (True, False): "forward only",
        (True, True): "both ways",
        (False, True): "backward only",
    }
    phases = [f"{len(p.ticks)} {names[p.forward, p.backward]}" for p in schedule.phases()]
    yield f"ticks   {len(schedule.ticks)}: {', '.join(phases)}"
    held = _most_held(schedule)
    spare = f", {schedule.slots - held} spare" if schedule.slots > held else ""
    yield f"slots   {schedule.slots} per stage: {_count(held, 'forward')} held at most{spare}"
    idle, useful = schedule.stages - 1, schedule.chunks * schedule.microbatches
    yield f"bubble  {_percent(schedule)}, (N - 1) / (v M + N - 1) = {idle} / {useful + idle}"


def _percent(schedule: Schedule) -> str:
    return f"{100 * schedule.bubble():.1f} %"


def _most_held(schedule: Schedule) -> int:
    """Return the largest number of forwards that wait for their backwards on any stage."""
    most = 0
    for stage in range(schedule.stages):
        held = 0
        for tick in schedule.ticks:
            held += tick.forward[stage] is not None
            most = max(most, held)
            held -= tick.backward[stage] is not None
    return most


class _Span(NamedTuple):
    """Horizontal extent of a tick in pixels."""

    start: int
    end: int


def _spans(schedule: Schedule, unit: int) -> Iterator[_Span]:
    x = _MARGIN + _LABEL
    for tick in schedule.ticks:
        yield _Span(x, x := x + unit * tick.cost())


def _frame(title: str, width: int, height: int) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" font-family="sans-serif" font-size="12" '
        f'fill="{_INK}">'
    )
    yield f"<title>{title}</title>"
    yield (
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="6" fill="{_PAPER}" '
        f'stroke="{_LINE}"/>'
    )
    yield _text(_MARGIN, 22, title, ' font-size="13" font-weight="bold"')


def _rows(schedule: Schedule, spans: Sequence[_Span]) -> Iterator[str]:
    left, right = spans[0].start, spans[-1].end
    for stage in range(schedule.stages):
        y = _TOP + _ROW * stage
        yield _text(_MARGIN, y + _CELL // 2, f"stage {stage}")
        yield f'<rect x="{left}" y="{y}" width="{right - left}" height="{_CELL}" fill="{_IDLE}"/>'


def _axis(schedule: Schedule, spans: Sequence[_Span], bottom: int) -> Iterator[str]:
    """Yield the numbers of the ticks, lines between them, and stronger lines between phases."""
    yield f'<g fill="{_FAINT_INK}" font-size="10" text-anchor="middle">'
    yield _text(_MARGIN, _TOP - 12, "tick", ' text-anchor="start"')
    for t, span in enumerate(spans):
        yield _text((span.start + span.end) / 2, _TOP - 12, t)
    yield "</g>"
    phase_ends, end = set(), 0
    for phase in schedule.phases():
        phase_ends.add(end := end + len(phase.ticks))
    for t, span in enumerate(spans[:-1], start=1):
        up, colour = (20, _LINE) if t in phase_ends else (4, _PAPER)
        yield f'<path d="M{span.end} {_TOP - up}V{bottom}" stroke="{colour}" stroke-width="2"/>'


def _cells(schedule: Schedule, spans: Sequence[_Span], unit: int) -> Iterator[str]:
    yield '<g text-anchor="middle">'
    for tick, span in zip(schedule.ticks, spans, strict=True):
        x = span.start
        for direction, cost in COSTS.items():
            actions: tuple[Action | None, ...] = getattr(tick, direction)
            for stage, action in enumerate(actions):
                if action is not None:
                    corner, width = (x, _TOP + _ROW * stage), unit * cost
                    shade = _shade(schedule, direction, action.chunk)
                    yield _box(corner, width, _CELL, shade, action.microbatch, direction)
            x += unit * cost * any(actions)
    yield "</g>"


def _legend(schedule: Schedule, y: int) -> tuple[list[str], int]:
    """Return the legend of colours and its right edge."""
    drawn, x = ['<g text-anchor="middle">'], _MARGIN
    notes = {"forward": "forward", "backward": "backward, twice as long"}
    for direction, note in notes.items():
        for chunk in range(schedule.chunks):
            letter = _letters(chunk) if schedule.chunks > 1 else ""
            shade = _shade(schedule, direction, chunk)
            drawn.append(_box((x, y), _SWATCH, _SWATCH, shade, letter))
            x += _SWATCH + 2
        drawn.append(_text(x + 4, y + _SWATCH // 2, note, ' text-anchor="start"'))
        x += 4 + _LETTER * len(note) + 18
    note = f"idle, {_percent(schedule)}"
    drawn.append(_box((x, y), _SWATCH, _SWATCH, _IDLE))
    x += _SWATCH + 6
    drawn.append(_text(x, y + _SWATCH // 2, note, ' text-anchor="start"'))
    return [*drawn, "</g>"], x + _LETTER * len(note)


def _shade(schedule: Schedule, direction: str, chunk: int) -> str:
    """Return the colour of a direction, which is lighter for later chunks."""
    colour = _FORWARD if direction == "forward" else _BACKWARD
    light = 0.75 * chunk / schedule.chunks
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + light * (255 - part)):02x}" for part in parts)


def _box(
    corner: tuple[int, int], width: int, height: int, colour: str, text: object = "", name: str = ""
) -> str:
    """Return a rectangle with centred text, in a group of class `name` if given."""
    x, y = corner
    rect = f'<rect x="{x + 0.5}" y="{y}" width="{width - 1}" height="{height}" fill="{colour}"/>'
    inner = rect + (_text(x + width / 2, y + height // 2, text) if text != "" else "")
    return f'<g class="{name}">{inner}</g>' if name else inner


def _text(x: float, y: float, text: object, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" dy="0.35em"{more}>{text}</text>'
