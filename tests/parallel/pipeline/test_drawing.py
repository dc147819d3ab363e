"""`jaxforge plan --schedule`: text, SVG, error messages, and the drawings in docs/."""

import bisect
import functools
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from jaxforge.cli.running import run_main
from jaxforge.commands.plan import main
from jaxforge.parallel.pipeline.drawing import as_svg, as_text
from jaxforge.parallel.pipeline.schedule import SCHEDULES, gpipe, one_f_one_b

ROOT = Path(__file__).parents[3]
HEAVY = {"jax", "jaxlib", "numpy", "flax", "pydantic", "rich"}
DIRECTIONS = ("forward", "backward")
SVG = "{http://www.w3.org/2000/svg}"
SIZES = [
    ("1f1b", 1, 1, 1), ("1f1b", 4, 8, 1), ("1f1b", 11, 4, 1), ("1f1b", 2, 120, 1),
    ("gpipe", 3, 5, 1), ("interleaved_1f1b", 3, 12, 3), ("interleaved_1f1b", 2, 2, 30),
]  # fmt: skip


@pytest.fixture(params=SIZES, ids=lambda sizes: "-".join(map(str, sizes)))
def schedule(request):
    name, *sizes = request.param
    return SCHEDULES[name](*sizes)


def test_1f1b_text():
    assert (
        as_text(one_f_one_b(2, 3))
        == """\
1f1b: 2 stages, 3 microbatches

tick       0 | 1 2 3 | 4
stage 0 F  0 | 1 2 . | .
        B  . | . 0 1 | 2
stage 1 F  . | 0 1 2 | .
        B  . | 0 1 2 | .

ticks   5: 1 forward only, 3 both ways, 1 backward only
slots   3 per stage: 3 forwards held at most
bubble  25.0 %, (N - 1) / (v M + N - 1) = 1 / 4
"""
    )


def test_gpipe_text():
    assert (
        as_text(gpipe(3, 1))
        == """\
gpipe: 3 stages, 1 microbatch

tick       0 1 2 | 3 4 5
stage 0 F  0 . . | . . .
        B  . . . | . . 0
stage 1 F  . 0 . | . . .
        B  . . . | . 0 .
stage 2 F  . . 0 | . . .
        B  . . . | 0 . .

ticks   6: 3 forward only, 3 backward only
slots   2 per stage: 1 forward held at most, 1 spare
bubble  66.7 %, (N - 1) / (v M + N - 1) = 2 / 3
"""
    )


def test_interleaved_text():
    assert (
        as_text(one_f_one_b(2, 2, 2))
        == """\
interleaved_1f1b: 2 stages, 2 microbatches, 2 chunks (a, b)

tick        0  1  2 |  3  4 |  5  6  7
stage 0 F  0a 1a 0b | 1b  . |  .  .  .
        B   .  .  . |  . 0b | 1b 0a 1a
stage 1 F   . 0a 1a | 0b 1b |  .  .  .
        B   .  .  . | 0b 1b | 0a 1a  .

ticks   8: 3 forward only, 2 both ways, 3 backward only
slots   5 per stage: 4 forwards held at most, 1 spare
bubble  20.0 %, (N - 1) / (v M + N - 1) = 1 / 5
"""
    )


@pytest.mark.parametrize(
    ("sizes", "slots"),
    [
        (("1f1b", 4, 8, 1), "7 per stage: 7 forwards held at most"),
        (("gpipe", 4, 8, 1), "9 per stage: 8 forwards held at most, 1 spare"),
        (("interleaved_1f1b", 4, 8, 2), "11 per stage: 11 forwards held at most"),
    ],
)
def test_text_reports_slots(sizes, slots):
    name, *sizes = sizes
    assert f"\nslots   {slots}\n" in as_text(SCHEDULES[name](*sizes))


def letters(schedule):
    """Return the letters of the chunks from the title."""
    listed = re.search(r"\((.*)\)", as_text(schedule).splitlines()[0])
    return listed[1].split(", ") if listed else [""]


def cells_of(actions, schedule):
    names = letters(schedule)
    return ["." if w is None else f"{w.microbatch}{names[w.chunk]}" for w in actions]


def test_text_columns_match_schedule(schedule):
    title, table, facts = as_text(schedule).split("\n\n")
    label = len(f"stage {schedule.stages - 1} F")
    lines = table.splitlines()
    rows = [
        {m.end(): m[0] for m in re.finditer(r"\S+", line) if m.start() >= label} for line in lines
    ]
    assert all(row.keys() == rows[0].keys() for row in rows), "cells are aligned"
    header, *cells = ([cell for cell in row.values() if cell != "|"] for row in rows)
    assert header == [str(t) for t in range(len(schedule.ticks))]
    expected = [
        cells_of([getattr(tick, direction)[stage] for tick in schedule.ticks], schedule)
        for stage in range(schedule.stages)
        for direction in DIRECTIONS
    ]
    assert cells == expected
    assert all(line == line.rstrip() for line in [title, *lines, *facts.splitlines()])
    assert len(set(letters(schedule))) == schedule.chunks


class Cell(NamedTuple):
    direction: str
    microbatch: int
    x: float
    y: float
    width: float
    colour: str


def parsed(schedule):
    return ElementTree.fromstring(as_svg(schedule))


def cells_in(drawing):
    for group in drawing.iter(f"{SVG}g"):
        if group.get("class") in DIRECTIONS:
            rect, text = group
            x, y, width = (float(rect.get(name)) for name in ("x", "y", "width"))
            yield Cell(group.get("class"), int(text.text), x, y, width, rect.get("fill"))


def test_svg_rows_are_stages_in_time_order(schedule):
    cells = list(cells_in(parsed(schedule)))
    rows = [
        sorted((cell for cell in cells if cell.y == y), key=lambda cell: cell.x)
        for y in sorted({cell.y for cell in cells})
    ]
    expected = [
        [
            (direction, action.microbatch)
            for tick in schedule.ticks
            for direction in DIRECTIONS
            if (action := getattr(tick, direction)[stage])
        ]
        for stage in range(schedule.stages)
    ]
    assert [[(cell.direction, cell.microbatch) for cell in row] for row in rows] == expected
    for row in rows:
        ends = [cell.x + cell.width for cell in row]
        assert all(end < after.x for end, after in zip(ends[:-1], row[1:], strict=True))


def test_svg_actions_are_within_their_tick(schedule):
    drawing = parsed(schedule)
    lines = [float(re.match(r"M([\d.]+) ", e.get("d"))[1]) for e in drawing.iter(f"{SVG}path")]
    (axis,) = (group for group in drawing.iter(f"{SVG}g") if group[0].text == "tick")
    numbers = [(bisect.bisect(lines, float(e.get("x"))), e.text) for e in axis[1:]]
    assert numbers == [(t, str(t)) for t in range(len(schedule.ticks))]
    drawn = Counter(
        (bisect.bisect(lines, cell.x + cell.width / 2), cell.direction, cell.microbatch)
        for cell in cells_in(drawing)
    )
    assert drawn == Counter(
        (t, direction, action.microbatch)
        for t, tick in enumerate(schedule.ticks)
        for direction in DIRECTIONS
        for action in getattr(tick, direction)
        if action
    )


def test_svg_empty_area_equals_bubble(schedule):
    drawing = parsed(schedule)
    cells = list(cells_in(drawing))
    left = min(cell.x for cell in cells)
    right = max(cell.x + cell.width for cell in cells)
    for y in {cell.y for cell in cells}:
        filled = sum(cell.width + 1 for cell in cells if cell.y == y)
        assert 1 - filled / (right - left + 1) == pytest.approx(schedule.bubble())


def test_svg_colours_match_legend(schedule):
    drawing = parsed(schedule)
    colours = {
        direction: {c.colour for c in cells_in(drawing) if c.direction == direction}
        for direction in DIRECTIONS
    }
    assert [len(colours[direction]) for direction in DIRECTIONS] == [schedule.chunks] * 2
    assert not colours["forward"] & colours["backward"]
    legend = drawing.findall(f"{SVG}g")[-1]
    swatches = [e.get("fill") for e in legend.iter(f"{SVG}rect")]
    assert {*swatches[: schedule.chunks]} == colours["forward"]
    assert {*swatches[schedule.chunks : -1]} == colours["backward"]
    names = [e.text for e in legend.iter(f"{SVG}text")]
    assert [n for n in names if n in letters(schedule)] == [n for n in letters(schedule) if n] * 2


def test_svg_is_self_contained_and_within_bounds(schedule):
    drawing = parsed(schedule)
    width, height = (float(drawing.get(name)) for name in ("width", "height"))
    paper = drawing.find(f"{SVG}rect")
    assert (paper.get("width"), paper.get("height")) == (f"{width - 1:g}", f"{height - 1:g}")
    for e in drawing.iter():
        assert e.tag.removeprefix(SVG) in {"svg", "title", "g", "rect", "path", "text"}
        assert not [name for name in e.attrib if "href" in name or name.startswith("on")]
        assert 0 <= float(e.get("x", 0)) + float(e.get("width", 0)) <= width
        assert 0 <= float(e.get("y", 0)) + float(e.get("height", 0)) <= height


def options(schedule="1f1b", stages=4, microbatches=8, **more):
    given = {"schedule": schedule, "stages": stages, "microbatches": microbatches, **more}
    return [f"--{name}={value}" for name, value in given.items()]


def run(argv):
    return run_main(functools.partial(main, argv))


def test_command_prints_text_and_writes_svg(tmp_path, capsys):
    file = tmp_path / "schedule.svg"
    assert run(options("interleaved_1f1b", chunks=3, svg=file)) == 0
    assert capsys.readouterr().out == as_text(one_f_one_b(4, 8, 3))
    assert file.read_text() == as_svg(one_f_one_b(4, 8, 3))


def test_interleaving_has_two_chunks_by_default(capsys):
    assert run(options("interleaved_1f1b")) == 0
    assert capsys.readouterr().out == as_text(one_f_one_b(4, 8, 2))


def test_1f1b_accepts_any_number_of_microbatches(capsys):
    assert run(options(microbatches=9)) == 0
    assert capsys.readouterr().out == as_text(one_f_one_b(4, 9))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (options("zigzag"), "--schedule zigzag: choose one of 1f1b, gpipe, interleaved_1f1b"),
        (
            options(stages=0),
            "argument --stages: '0' must be an integer of at least 1",
        ),
        (
            options(microbatches=-3),
            "argument --microbatches: '-3' must be an integer of at least 1",
        ),
        (
            options("interleaved_1f1b", microbatches=9),
            "--microbatches 9 must be a multiple of --stages 4 with interleaved_1f1b: "
            "change it to 12",
        ),
        (options(chunks=2), "--chunks requires --schedule interleaved_1f1b, not 1f1b"),
        (options("gpipe", chunks=1), "--chunks requires --schedule interleaved_1f1b, not gpipe"),
        (
            options("interleaved_1f1b", chunks=1),
            "--chunks 1: must be at least 2; use 1f1b for a single chunk",
        ),
        (
            options("interleaved_1f1b", chunks=0),
            "argument --chunks: '0' must be an integer of at least 1",
        ),
        (
            options(svg="/nowhere/a.svg"),
            "--svg /nowhere/a.svg: No such file or directory",
        ),
        (options(svg="/"), "--svg /: Is a directory"),
    ],
)
def test_invalid_options_print_one_line(argv, message, capsys):
    assert run(argv) == 2
    assert capsys.readouterr() == ("", f"error: {message}\n")


@pytest.mark.parametrize("argv", [[], options(stages="four"), options(speed=3)])
def test_invalid_arguments_exit_with_code_2(argv, capsys):
    assert run(argv) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_command_does_not_import_jax():
    command = [sys.executable, "-X", "importtime", "-m", "jaxforge.plan"]
    done = subprocess.run([*command, *options()], cwd=ROOT, capture_output=True, text=True)
    imported = {line.split("|")[-1].split(".")[0].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 0
    assert done.stdout == as_text(one_f_one_b(4, 8))
    assert "argparse" in imported
    assert not imported & HEAVY


def test_process_exits_with_code_of_error():
    command = [sys.executable, "-m", "jaxforge.plan", *options(stages=0)]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 2


@pytest.mark.parametrize(
    ("file", "argv"),
    [
        ("pipeline-1f1b.svg", options()),
        ("pipeline-gpipe.svg", options("gpipe")),
        ("pipeline-interleaved.svg", options("interleaved_1f1b", chunks=2)),
    ],
)
def test_docs_show_drawings_of_command(file, argv, tmp_path):
    assert run([*argv, f"--svg={tmp_path / file}"]) == 0
    assert (ROOT / "docs" / file).read_bytes() == (tmp_path / file).read_bytes()
