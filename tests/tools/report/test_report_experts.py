"""Experts on the report page: heat maps of their load, and charts of other metrics."""

import base64
import json
import zlib

import numpy as np
import pytest

from jaxforge.runs.metrics_file import LoadReader
from jaxforge.telemetry.sinks import JsonlSink
from jaxforge.tools.report.charts import EDGES, bands, inverted, palette
from tests.tools.report.pages import in_a_browser, line, numbers, page_of, write_run

EVEN = len(EDGES) // 2
NONE = len(EDGES) + 1
LOADS = [[0.0, 1.0, 2.5, 0.5], [1.0, 1.0, 1.0, 1.0]]


def moe_line(step, loads=LOADS, layers=(1, 3), **more):
    """Return a line of metrics with loads of experts in layers 1 and 3."""
    metrics = {f"moe/load/layers.{i}": load for i, load in zip(layers, loads, strict=True)}
    return line(step, **metrics, **more)


def maps(page):
    """Return the heat maps of a page, with their levels as [experts, columns]."""
    data = page.json()
    pictures = []
    for item in data["maps"]:
        levels = np.frombuffer(zlib.decompress(base64.b64decode(item["levels"])), np.uint8)
        x = numbers(data["columns"][item["x"]])
        pictures.append({**item, "levels": levels.reshape(item["experts"], -1), "x": x})
    return pictures


def test_heat_map_shows_load_bands_per_expert(tmp_path):
    page = page_of(write_run(tmp_path / "run", [moe_line(1), moe_line(2, [[4.0, 0, 0, 0]] * 2)]))
    first, second = maps(page)
    assert first["levels"].tolist() == [[0, 14], [EVEN, 0], [12, 0], [4, 0]]
    assert (second["levels"][:, 0] == EVEN).all()
    assert first["x"] == [1, 2]
    titles = ["Load of experts, layer 1", "Load of experts, layer 3"]
    assert [item["title"] for item in (first, second)] == titles


def test_least_and_most_loaded_experts_are_listed(tmp_path):
    lines = [moe_line(1), moe_line(2, [[0.25, 0.75, 2.0, 1.0], [0.5, 1.5, 1, 1]])]
    page = page_of(write_run(tmp_path / "run", lines))
    ends = [(numbers(item["least"]), numbers(item["most"])) for item in maps(page)]
    assert ends == [([0, 0.25], [2.5, 2]), ([1, 0.5], [1, 1.5])]
    reported = "at step 2 from 0.25000, of expert 0, to 2, of expert 2"
    assert maps(page)[0]["description"] == reported
    assert ["1", "0.25000 (expert 0)", "2 (expert 2)", "0"] in page.rows()


def test_bands_have_names():
    names = [band["name"] for band in bands()]
    assert len(names) == len(palette()) == len(EDGES) + 1
    assert (names[0], names[EVEN], names[-1]) == ("0 to 0.05", "0.95 to 1.05", "4 or more")


def luminance(colours):
    linear = (np.asarray(colours) / 255) ** 2.2
    return linear @ [0.2126, 0.7152, 0.0722]


@pytest.mark.parametrize("dark", [False, True])
def test_contrast_grows_with_distance_from_even_load(dark):
    """Lightness encodes the distance; blue and orange distinguish low and high loads."""
    colours = np.asarray(palette(), float)
    light = luminance(inverted(palette()) if dark else colours)
    away = light if dark else -light
    assert (np.diff(away[: EVEN + 1]) < 0).all()
    assert (np.diff(away[EVEN:]) > 0).all()
    shown = np.array(inverted(palette())) if dark else colours
    assert (shown[:EVEN, 2] > shown[:EVEN, 0] + 20).all()
    assert (shown[EVEN + 1 :, 0] > shown[EVEN + 1 :, 2] + 20).all()


def test_nonfinite_loads_have_no_band(tmp_path):
    lines = [moe_line(s, [[None, 1, 2, 1], [1, 1, 1, 1]]) for s in (1, 2)]
    page = page_of(write_run(tmp_path / "run", lines))
    assert maps(page)[0]["levels"][:, 0].tolist() == [NONE, EVEN, 12, EVEN]


def test_heat_map_columns_are_means_of_consecutive_steps():
    reader, loads = LoadReader(), np.random.default_rng(0).uniform(0, 2, (1001, 1, 4))
    for step, load in enumerate(loads.tolist()):
        reader.take({"step": step, "moe/load/layers.0": load[0], "train/loss": 1.0})
    read = reader.loads()
    assert (read.each, read.most, len(read.step)) == (4, 300, 251)
    assert read.step[:2].tolist() == [1.5, 5.5]
    np.testing.assert_allclose(read.value[3, 0], loads[12:16, 0].mean(axis=0))
    np.testing.assert_allclose(read.value[-1], loads[-1])  # a column of one step
    assert (read.last_step, read.last.tolist()) == (1000, loads[-1].tolist())


def test_page_of_many_experts_stays_small(tmp_path):
    """Random loads do not compress."""
    random = np.random.default_rng(0)
    scalars = [f"moe/{name}/layers.{i}" for i in range(48)
               for name in ("balance", "router_entropy", "router_bias")]  # fmt: skip
    lines = [
        moe_line(step, random.uniform(0, 3, (48, 128)).round(3).tolist(), range(48))
        | dict(zip(scalars, random.uniform(0, 1, len(scalars)).tolist(), strict=True))
        for step in range(1, 193)
    ]
    page = page_of(write_run(tmp_path / "run", lines))
    result = maps(page)
    assert len(result) == 48
    assert len(result[0]["x"]) == 96
    assert result[0]["unit"] == "mean of 2 logged steps each"
    assert len(page.source) < 1_300_000


def test_other_expert_metrics_have_charts(tmp_path):
    more = {"moe/aux_loss": 2.0, "moe/dropped": 0.25, "model/width/layers.10": 3.0,
            "model/width/layers.9": 2.0}  # fmt: skip
    layers = {f"moe/router_entropy/layers.{i}": i / 10 for i in (3, 1, 10)}
    lines = [moe_line(s, **{k: s * v for k, v in (more | layers).items()}) for s in (1, 2)]
    page = page_of(write_run(tmp_path / "run", lines))
    titles = ["Load-balancing loss", "Dropped assignments", "Router entropy by layer",
              "Width by layer"]  # fmt: skip
    assert page.titles()[-4:] == titles
    assert page.curves("Dropped assignments")[0]["y"] == [25, 50]
    labels = [c["label"] for c in page.curves("Router entropy by layer")]
    assert labels == ["layer 1", "layer 3", "layer 10"]
    assert [c["label"] for c in page.curves("Width by layer")] == ["layer 9", "layer 10"]


def test_heat_maps_exist_for_runs_with_experts_only(tmp_path):
    more = [{"moe/aux_loss": x, "moe/balance/layers.1": x} for x in (0.25, 0.5, 0.75)]
    item = write_run(tmp_path / "one", [moe_line(s, **more[s - 1]) for s in (1, 2, 3)])
    two = write_run(tmp_path / "two", [moe_line(s, **more[s]) for s in (1, 2)])
    dense = write_run(tmp_path / "dense", [line(s) for s in (1, 2, 3)])
    page = page_of(item, two, dense)
    titles = ["Load-balancing loss", "Balance by layer: one", "Balance by layer: two"]
    assert page.titles()[-3:] == titles
    assert len(page.curves("Load-balancing loss")) == 2
    assert page.curves("Balance by layer: two")[0]["y"] == [0.5, 0.75]
    assert [(m["run"], m["title"][-5:]) for m in maps(page)] == [
        (0, ": one"), (0, ": one"), (1, ": two"), (1, ": two")
    ]  # fmt: skip
    assert not page_of(dense).json()["maps"]


def test_lists_of_other_metrics_are_dropped(tmp_path):
    page = page_of(write_run(tmp_path / "run", [line(1, **{"mine/list": [1.0, 2.0]})]))
    assert "mine/list" not in page.source
    assert not page.json()["maps"]


def test_incomplete_load_line_is_ignored(tmp_path):
    tail = json.dumps(moe_line(3, [[4.0, 0, 0, 0]] * 2))[:-3]
    page = page_of(write_run(tmp_path / "run", [moe_line(1), moe_line(2)], tail=tail))
    assert maps(page)[0]["x"] == [1, 2]


def test_heat_map_after_rollback_shows_new_steps(tmp_path):
    """The sink drops steps after the step from which a run resumes."""
    path = write_run(tmp_path / "run", [])
    sink = JsonlSink(path / "metrics.jsonl", 0)

    def log(step, loads):
        item = moe_line(step, loads)
        sink.write(step, {name: item[name] for name in item if name not in ("step", "time")})

    for step in (1, 2, 3):
        log(step, [[4.0, 0, 0, 0]] * 2)
    sink.rewind(1)
    sink.write(1, {"train/rollbacks": 1.0})
    for step in (2, 3):
        log(step, [[1.0, 1, 1, 1]] * 2)
    sink.close(0)
    result = maps(page_of(path))[0]
    assert result["x"] == [1, 2, 3]
    assert result["levels"][0].tolist() == [14, EVEN, EVEN]


POINT = """<script>
addEventListener("load", () => setTimeout(() => {
  const maps = [...document.querySelectorAll("figure")].slice(-2), map = maps[0];
  const values = ".where, tr:not(.unlisted) .u-value";
  const read = () => [...map.querySelectorAll(values)].map((item) => item.textContent).join("|");
  const point = (figure, x, y) => {
    const over = figure.querySelector(".u-over"), box = over.getBoundingClientRect();
    over.dispatchEvent(new MouseEvent("mousemove",
      { clientX: box.left + box.width * x, clientY: box.top + box.height * y, view: window }));
  };
  seen.rest = read();
  point(map, 0.3, 0.6);
  setTimeout(() => {
    seen.pointed = read();
    point(map, 0.95, 0.1);
    setTimeout(() => { seen.late = read(); }, 50);
  }, 50);
}, 800));
</script>"""


@pytest.mark.processes
def test_browser_shows_band_under_pointer(tmp_path):
    lines = [moe_line(s) for s in (1, 2, 3)] + [moe_line(4, [[4.0, 0, 0, 0]] * 2)]
    source = page_of(write_run(tmp_path / "run", lines)).source
    html = in_a_browser(tmp_path, source, POINT)
    assert html["data-errors"] == ""
    assert html["data-rest"] == "|0|4"
    assert html["data-pointed"] == "step 2, expert 2: 2 to 3|0|2.5000"
    assert html["data-late"] == "step 4, expert 0: 4 or more|0|4"
