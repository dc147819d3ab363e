"""Experts on the page of a run: heat maps of their load, and charts of the rest of moe/*."""

import base64
import json
import struct
import zlib

import numpy as np
import pytest

from jaxforge.report.heat_map import EDGES, palette
from jaxforge.report.loads import LoadReader
from jaxforge.report.png import png
from jaxforge.telemetry.sinks import JsonlSink
from tests.test_report import in_a_browser, line, page_of, write_run

EVEN = len(EDGES) // 2
NONE = len(EDGES) + 1
DARK = "--heat: invert(1) hue-rotate(180deg);"
LOADS = [[0.0, 1.0, 2.5, 0.5], [1.0, 1.0, 1.0, 1.0]]


def moe_line(step, loads=LOADS, layers=(1, 3), **more):
    """A line of a run whose layers 1 and 3 have experts."""
    metrics = {f"moe/load/layers.{i}": one for i, one in zip(layers, loads, strict=True)}
    return line(step, **metrics, **more)


def pixels_of(source):
    """[height, width] The palette's indices of a PNG, and [16, 4] its colours; checks its sums."""
    data = base64.b64decode(source.removeprefix("data:image/png;base64,"))
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    chunks, at = {}, 8
    while at < len(data):
        (size,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        body, end = data[at + 8 : at + 8 + size], at + 8 + size
        assert struct.unpack(">I", data[end : end + 4]) == (zlib.crc32(kind + body),)
        chunks[kind], at = body, end + 4
    width, height, depth, kind, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert [depth, kind, *rest] == [4, 3, 0, 0, 0]
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, -1)
    assert not rows[:, 0].any()
    pixels = np.stack([rows[:, 1:] >> 4, rows[:, 1:] & 15], axis=-1).reshape(height, -1)
    colours = np.frombuffer(chunks[b"PLTE"], np.uint8).reshape(-1, 3)
    return pixels[:, :width], np.column_stack([colours, list(chunks[b"tRNS"])])


def pictures(page, title="Load of experts"):
    return page.all("img", page.figure(title))


def test_a_picture_has_a_row_for_each_expert_and_the_colours_of_its_loads(tmp_path):
    page = page_of(write_run(tmp_path / "run", [moe_line(1), moe_line(2, [[4.0, 0, 0, 0]] * 2)]))
    first, second = (pixels_of(picture["src"]) for picture in pictures(page))
    assert first[0].shape == second[0].shape == (4, 300)
    assert first[0][:, 0].tolist() == [0, EVEN, 12, 4]
    assert first[0][:, -1].tolist() == [14, 0, 0, 0]
    assert (second[0][:, 0] == EVEN).all()
    assert first[1].tolist() == [[*colour, 255] for colour in palette()] + [[0, 0, 0, 0]]
    assert [h["text"] for h in page.all("h3")] == ["layer 1", "layer 3"]


@pytest.mark.parametrize(
    ("axis", "edges"),
    [
        ("steps", [3 / 14, 9 / 14]),
        ("tokens", [3 / 14, 9 / 14]),
        ("hours", [22 / 252, 142 / 252]),
    ],
)
def test_columns_reach_half_way_to_their_neighbours(tmp_path, axis, edges):
    """Steps 2, 4, 6 and 16, after 0, 12, 32 and 252 seconds; in the third an expert is even."""
    lines = [
        moe_line(s, [[float(s == 6), 2, 2, 2], [1, 1, 1, 1]], time=1e9 + s * s)
        for s in (2, 4, 6, 16)
    ]
    page = page_of(write_run(tmp_path / "run", lines), options=["--x", axis])
    picture = pictures(page)[0]
    assert picture["style"] == "left:0%;width:100%"
    row = pixels_of(picture["src"])[0][0]
    even = np.flatnonzero(row == EVEN)
    assert [even[0], even[-1] + 1] == pytest.approx([edge * len(row) for edge in edges], abs=1)


def test_the_legends_tell_the_least_and_the_most_loaded(tmp_path):
    lines = [moe_line(1), moe_line(2, [[0.25, 0.75, 2.0, 1.0], [0.5, 1.5, 1, 1]])]
    page = page_of(write_run(tmp_path / "run", lines))
    figure = page.figure("Load of experts")
    legends = [b["data-last"] for b in page.all("b", figure)]
    assert legends == ["0.25000", "2", "0.50000", "1.5000"]
    assert page.data("Load of experts") == [
        {"x": [1, 2], "y": [0, 0.25]}, {"y": [2.5, 2]}, {"y": [1, 0.5]}, {"y": [1, 1.5]}
    ]  # fmt: skip
    alts = [picture["alt"] for picture in pictures(page)]
    assert alts[0] == (
        "Heat map: load of 4 experts of layer 1 by step. At step 2 from 0.25000, of expert 0, "
        "to 2, of expert 2."
    )
    assert ["1", "0.25000 (expert 0)", "2 (expert 2)", "0"] in page.rows()


def test_the_scale_says_what_its_colours_mean(tmp_path):
    page = page_of(write_run(tmp_path / "run", [moe_line(1)]))
    bands = [li["title"] for li in page.all("li", page.figure("Load of experts")) if "title" in li]
    assert len(bands) == len(palette()) == len(EDGES) + 1
    assert (bands[0], bands[EVEN], bands[-1]) == ("0 to 0.05", "0.95 to 1.05", "4 or more")
    swatches = [i["style"] for i in page.all("i", page.figure("Load of experts"))]
    assert swatches == [f"background:rgb{colour}" for colour in palette()]
    assert DARK in page.all("style")[0]["text"]
    note = page.all("p", page.figure("Load of experts"), class_="note")[0]["text"]
    assert "from 4 on all look alike" in note
    assert "mean of" not in note


def luminance(colours):
    linear = (np.asarray(colours) / 255) ** 2.2
    return linear @ [0.2126, 0.7152, 0.0722]


def inverted(colours):
    """What CSS makes of colours by the filter of dark pages, `DARK`."""
    weights = np.array([0.213, 0.715, 0.072])
    turned = 2 * np.outer(np.ones(3), weights) - np.eye(3)  # a half turn: cos -1, sin 0
    return np.clip((255 - np.asarray(colours, float)) @ turned.T, 0, 255)


@pytest.mark.parametrize("dark", [False, True])
def test_the_further_from_even_the_further_from_the_page(dark):
    """By lightness, which every reader sees; blue and orange tell the sides apart."""
    colours = np.asarray(palette(), float)
    light = luminance(inverted(colours) if dark else colours)
    away = light if dark else -light
    assert (np.diff(away[: EVEN + 1]) < 0).all()
    assert (np.diff(away[EVEN:]) > 0).all()
    shown = inverted(colours) if dark else colours
    assert (shown[:EVEN, 2] > shown[:EVEN, 0] + 20).all()
    assert (shown[EVEN + 1 :, 0] > shown[EVEN + 1 :, 2] + 20).all()


def test_what_is_not_finite_is_transparent(tmp_path):
    lines = [moe_line(s, [[None, 1, 2, 1], [1, 1, 1, 1]]) for s in (1, 2)]
    page = page_of(write_run(tmp_path / "run", lines))
    assert pixels_of(pictures(page)[0]["src"])[0][:, 0].tolist() == [NONE, EVEN, 12, EVEN]


def test_odd_widths():
    pixels = np.arange(15).reshape(3, 5)
    source = "data:image/png;base64," + base64.b64encode(png(pixels, palette())).decode()
    assert (pixels_of(source)[0] == pixels).all()


def test_columns_of_a_long_run_are_means_of_consecutive_steps():
    reader, loads = LoadReader(), np.random.default_rng(0).uniform(0, 2, (1001, 1, 4))
    for step, one in enumerate(loads.tolist()):
        reader.take({"step": step, "moe/load/layers.0": one[0], "train/loss": 1.0})
    read = reader.loads()
    assert (read.each, read.most, len(read.step)) == (4, 300, 251)
    assert read.step[:2].tolist() == [1.5, 5.5]
    np.testing.assert_allclose(read.value[3, 0], loads[12:16, 0].mean(axis=0))
    np.testing.assert_allclose(read.value[-1], loads[-1])  # a column of one step
    assert (read.last_step, read.last.tolist()) == (1000, loads[-1].tolist())


def test_many_experts_get_few_columns_and_a_small_page(tmp_path):
    """48 layers of 128 experts at random, which no compression shortens; and twice the steps."""
    random = np.random.default_rng(0)
    scalars = [f"moe/{name}/layers.{i}" for i in range(48)
               for name in ("balance", "router_entropy", "router_bias")]  # fmt: skip
    lines = [
        moe_line(step, random.uniform(0, 3, (48, 128)).round(3).tolist(), range(48))
        | dict(zip(scalars, random.uniform(0, 1, len(scalars)).tolist(), strict=True))
        for step in range(1, 193)
    ]
    page = page_of(write_run(tmp_path / "run", lines))
    assert len(page.data("Load of experts")[0]["x"]) == 96
    note = page.all("p", page.figure("Load of experts"), class_="note")[0]["text"]
    assert "A column is the mean of 2 logged steps." in note
    assert len(pictures(page)) == 48
    assert len(page.source) < 1_200_000


def test_many_curves_share_their_points(tmp_path):
    random = np.random.default_rng(0).uniform(0, 1, (3000, 48)).tolist()
    lines = [line(s, **{f"moe/balance/layers.{i}": x for i, x in enumerate(values)})
             for s, values in enumerate(random, 1)]  # fmt: skip
    page = page_of(write_run(tmp_path / "run", lines))
    curves = page.data("Balance by layer")
    assert len(curves) == 48
    assert sum(len(curve["x"]) for curve in curves) < 5200
    assert len(page.data("Loss")[0]["x"]) > 1500


def test_the_rest_is_told_by_families(tmp_path):
    more = {
        "moe/expert_balance": 0.5, "moe/aux_loss": 2.0, "moe/router_z_loss": 8.0,
        "moe/dropped": 0.25, "model/width/layers.10": 3.0, "model/width/layers.9": 2.0,
    }  # fmt: skip
    layers = {f"moe/{name}/layers.{i}": i / 10 for i in (3, 1, 10)
              for name in ("balance", "router_entropy", "router_bias")}  # fmt: skip
    lines = [moe_line(step, **more, **layers) for step in (1, 2)]
    capacity = {"model": {"num_experts": 4, "moe_capacity_factor": 1.0}}
    page = page_of(write_run(tmp_path / "run", lines, **capacity))
    assert page.titles()[-9:] == [
        "Balance of experts least loaded over most loaded",
        "Load-balancing loss sum over layers, before its weight; even: 1 each",
        "Router z-loss sum over layers, before its weight",
        "Dropped assignments % of all",
        "model/width by layer",
        "Balance by layer least loaded expert over most loaded",
        "Router entropy by layer nats",
        "Largest router bias by layer",
        "Load of experts assignments, relative to an even load",
    ]
    assert page.data("Dropped assignments")[0]["y"] == [25, 25]
    legend = [li["text"] for li in page.all("li", page.figure("Balance by layer"))]
    assert legend == ["layer 1 0.10000", "layer 3 0.30000", "layer 10 1"]
    legend = [li["text"] for li in page.all("li", page.figure("model/width by layer"))]
    assert legend == ["layer 9 2", "layer 10 3"]


def test_where_none_can_be_dropped_none_is_told(tmp_path):
    page = page_of(write_run(tmp_path / "run", [moe_line(1, **{"moe/dropped": 0.0})]))
    assert not any("ropped" in title for title in page.titles())


def test_each_run_has_its_maps_and_dense_ones_have_none(tmp_path):
    more = [{"moe/aux_loss": 1.0, "moe/balance/layers.1": x, "moe/balance/layers.3": x}
            for x in (0.25, 0.5)]  # fmt: skip
    one = write_run(tmp_path / "one", [moe_line(s, **more[0]) for s in (1, 2, 3, 4)])
    two = write_run(tmp_path / "two", [moe_line(s, **more[1]) for s in (1, 2)])
    dense = write_run(tmp_path / "dense", [line(s) for s in (1, 2, 3)])
    page = page_of(one, two, dense)
    titles = [title for title in page.titles() if title.startswith(("Load of", "Balance", "Load-"))]
    assert titles == [
        "Load-balancing loss sum over layers, before its weight; even: 1 each",
        "Balance by layer: one least loaded expert over most loaded",
        "Balance by layer: two least loaded expert over most loaded",
        "Load of experts in one assignments, relative to an even load",
        "Load of experts in two assignments, relative to an even load",
    ]
    assert len(page.data("Load-balancing loss")) == 2
    assert page.data("Balance by layer: two")[0]["y"] == [0.5, 0.5]
    widths = [float(pictures(page, f"Load of experts in {name}")[0]["style"].split(":")[-1][:-1])
              for name in ("one", "two")]  # fmt: skip
    assert widths[1] < widths[0]
    assert not page_of(dense).all("img")


def test_lists_of_other_names_are_left_out(tmp_path):
    page = page_of(write_run(tmp_path / "run", [line(1, **{"mine/list": [1.0, 2.0]})]))
    assert "mine/list" not in page.source
    assert not page.all("img")


def test_a_torn_line_does_not_count(tmp_path):
    tail = json.dumps(moe_line(3, [[4.0, 0, 0, 0]] * 2))[:-3]
    page = page_of(write_run(tmp_path / "run", [moe_line(1), moe_line(2)], tail=tail))
    assert page.data("Load of experts")[0]["x"] == [1, 2]
    assert page.all("b", page.figure("Load of experts"))[0]["text"] == "0"


def test_a_run_that_went_back_shows_what_it_did_then(tmp_path):
    """The sink drops what came after the step that a run goes on from."""
    path = write_run(tmp_path / "run", [])
    sink = JsonlSink(path / "metrics.jsonl", 0)

    def log(step, loads):
        one = moe_line(step, loads)
        sink.write(step, {name: one[name] for name in one if name not in ("step", "time")})

    for step in (1, 2, 3):
        log(step, [[4.0, 0, 0, 0]] * 2)
    sink.rewind(1)
    sink.write(1, {"train/rollbacks": 1.0})
    for step in (2, 3):
        log(step, [[1.0, 1, 1, 1]] * 2)
    sink.close(0)
    page = page_of(path)
    assert page.data("Load of experts")[0] == {"x": [1, 2, 3], "y": [0, 1, 1]}
    row = pixels_of(pictures(page)[0]["src"])[0][0]
    assert [row[0], row[150], row[-1]] == [14, EVEN, EVEN]


def test_resumes_are_marked_on_the_maps(tmp_path):
    log = "resuming from step 2 of d\n"
    page = page_of(write_run(tmp_path / "run", [moe_line(s) for s in (1, 2, 3, 4)], log))
    (mark, _) = page.all("line", page.figure("Load of experts"), class_="resume")
    assert mark["x1"] == "33.333%"


def test_the_pictures_are_in_the_page_itself(tmp_path):
    page = page_of(write_run(tmp_path / "run", [moe_line(1)]))
    for element in page.elements:
        for name in ("src", "href", "data", "srcset"):
            assert (element.get(name) or "#").startswith(("#", "data:image/png;base64,")), element
    (policy,) = page.all("meta", **{"http-equiv": "Content-Security-Policy"})
    assert "img-src data:;" in policy["content"]


POINT = """<script>
addEventListener("load", () => {
  const map = document.querySelector(".map"), [first, plot] = [document, map].map(
    (part) => part.querySelector(".plot"));
  const read = () => [...map.querySelectorAll("b, .name")].map((b) => b.textContent).join("|");
  const point = (on, x, y) => {
    const box = on.getBoundingClientRect();
    on.dispatchEvent(new PointerEvent("pointermove",
      { clientX: box.left + box.width * x, clientY: box.top + box.height * y }));
  };
  point(plot, 0.3, 0.6);
  seen.pointed = read();
  point(plot, 0.9, 0.1);
  seen.late = read();
  plot.dispatchEvent(new PointerEvent("pointerleave"));
  seen.rest = read();
  point(first, 0.3, 0.6);
  seen.other = read();
});
</script>"""


@pytest.mark.processes
def test_a_browser_tells_the_band_under_the_pointer(tmp_path):
    lines = [moe_line(s) for s in (1, 2, 3)] + [moe_line(4, [[4.0, 0, 0, 0]] * 2)]
    source = page_of(write_run(tmp_path / "run", lines)).source
    html = in_a_browser(tmp_path, source, POINT)
    assert html["data-errors"] == ""
    assert html["data-pointed"] == "0|2.5000|step 2, expert 2: 2 to 3"
    assert html["data-late"] == "0|4|step 4, expert 0: 4 or more"
    assert html["data-rest"] == "0|4|step"
    assert html["data-other"] == "0|2.5000|step 2"
