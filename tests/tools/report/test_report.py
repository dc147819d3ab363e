"""The report page of runs: its content, and its rendering in a browser."""

import json
import math
import re

import numpy as np
import pytest

from jaxforge.commands.report import main
from jaxforge.errors import UserError
from jaxforge.runs import reading
from jaxforge.runs.reading import read_metrics, read_runs
from jaxforge.telemetry.numbers import duration, exact
from jaxforge.tools.report.charts import bucket_medians, metric_name, thin
from tests.helpers import devices_here
from tests.processes.conftest import Run
from tests.tools.report.pages import in_a_browser, line, numbers, page_of, start, write_run

FILE = "metrics.jsonl"

EVALUATIONS = [
    {"step": step, "time": 1e9 + 2 * step, "eval/loss": loss, "eval/perplexity": math.exp(loss),
     "eval/bits_per_byte": loss / 2}
    for step, loss in ((10, 5.5), (20, 5.25), (30, 5.375))
]  # fmt: skip


def test_charts_facts_and_values(tmp_path):
    lines = [line(step) for step in range(1, 41)] + EVALUATIONS
    page = page_of(write_run(tmp_path / "run", lines))
    assert page.titles() == ["Loss", "train/grad_norm", "eval/bits_per_byte"]
    train, evaluation = page.points("Loss")
    assert train == {s: round(6 - s / 100, 4) for s in range(1, 41)}
    assert evaluation == {10: 5.5, 20: 5.25, 30: 5.375}
    assert page.facts() == {
        "smoothed loss": "5.6000",
        "best evaluation loss": "5.2500 at step 20",
        "last loss": "5.6000",
        "steps": "40 of 50",
        "tokens": "40,960",
        "wall time": "1 min 18 s",
        "time in steps": "20 s",
        "skipped steps": "none",
        "resumed": "never",
        "model": "2 layers, dim 64, 4/2 heads of 16, ffn 256, vocabulary 256",
        "parameters": "155K",
        "devices": "",
        "code": "0123456789ab, changed",
        "versions": "jax 0.10.2",
        "command": "jaxforge train",
    }
    assert ["all", "5.3750", "215.94", "2.6875", "5.2500", "20"] in page.rows()
    (config,) = page.all("details")
    assert "open" not in config
    assert "max_steps = 50" in config["text"]


def test_constant_metrics_are_in_a_table(tmp_path):
    lines = [line(s, **{f"moe/router_bias/layers.{i}": 0.0 for i in range(5)}) for s in (1, 2, 3)]
    item = write_run(tmp_path / "one", lines)
    two = write_run(tmp_path / "two", [line(s, **{"train/lr": 1e-4}) for s in (1, 2, 3)])
    rows = page_of(item, two).rows()
    assert ["train/lr", "one: 3e-4, two: 1e-4"] in rows
    assert ["train/tokens_per_sec", "2,048"] in rows
    assert ["moe/router_bias: layer 0 to layer 4", "0"] in rows
    assert not {"train/lr", "train/tokens_per_sec"} & set(page_of(item, two).titles())


def test_several_evaluation_sets_have_labels(tmp_path):
    sets = [{"eval/code.py/loss": x, "eval/loss": x + 0.5, "eval/web/loss": x + 1} for x in (5, 4)]
    lines = [line(1), *({"step": s, "time": 1e9, **item} for s, item in enumerate(sets, 1))]
    page = page_of(write_run(tmp_path / "run", lines))
    assert [c["label"] for c in page.curves("Loss")] == ["training", "evaluation"]
    labels = [c["label"] for c in page.curves("eval/loss")]
    assert labels == ["code.py", "all", "web"]
    assert page.points("eval/loss")[2] == {1: 6, 2: 5}
    assert page.facts()["best evaluation loss"] == "4.5000 at step 2"
    assert [row[0] for row in page.rows()][:4] == ["set", "code.py", "all", "web"]


def test_average_of_parameters_has_curves_and_rows(tmp_path):
    names = ("eval/loss", "eval/ema_loss", "eval/web/ema_loss", "eval/ema_perplexity")
    lines = [line(1)]
    lines += [{"step": s, "time": 1e9, **dict(zip(names, values, strict=True))}
              for s, values in ((1, (5, 4, 4.25, 54)), (2, (4.5, 3.5, 3.75, 33)))]  # fmt: skip
    page = page_of(write_run(tmp_path / "run", lines))
    labels = [curve["label"] for curve in page.curves("Loss")]
    assert labels == ["training", "evaluation", "evaluation of the average"]
    assert page.points("Loss")[2] == {1: 4, 2: 3.5}
    curves = {curve["label"] for curve in page.curves("eval/ema_loss")}
    assert curves == {"all", "web"}
    assert page.facts()["best loss of the average"] == "3.5000 at step 2"
    rows = {row[0]: row[1:] for row in page.rows()}
    assert rows["all, average"] == ["3.5000", exact(33), "", "3.5000", "2"]


def test_tasks_have_charts_by_metric_and_rows_with_errors(tmp_path):
    names = ("piqa/acc", "piqa/acc_stderr", "copa/acc", "x/perplexity", "core", "core_stderr")
    lines = [line(1)]
    lines += [
        {"step": s, "time": 1e9, "eval/loss": 5.0 - s,
         **{f"eval/tasks/{name}": value for name, value in zip(names, values, strict=True)}}
        for s, values in ((1, (0.5, 0.02, 0.6, 7, 0.1, 0.01)), (2, (0.7, 0.03, 0.4, 9, 0.2, 0.01)))
    ]  # fmt: skip
    page = page_of(write_run(tmp_path / "run", lines))
    assert [curve["label"] for curve in page.curves("eval/tasks/acc")] == ["piqa", "copa"]
    assert page.points("eval/tasks/acc")[0] == pytest.approx({1: 0.5, 2: 0.7})
    assert page.points("eval/tasks/core")[0] == pytest.approx({1: 0.1, 2: 0.2})
    assert page.points("eval/tasks/perplexity")[0] == {1: 7, 2: 9}
    assert not [title for title in page.titles() if "stderr" in title]
    assert "eval/loss" not in page.titles()  # in the first chart: there is one set
    rows = page.rows()
    assert ["piqa", "acc", exact(0.7), exact(0.03), "2", exact(0.5), exact(0.7), "2"] in rows
    assert ["copa", "acc", exact(0.4), "", "2", exact(0.6), exact(0.6), "1"] in rows
    assert ["x", "perplexity", exact(9), "", "2", exact(7), exact(7), "1"] in rows
    assert ["all", "core", exact(0.2), exact(0.01), "2", exact(0.1), exact(0.2), "2"] in rows


@pytest.mark.parametrize(("mode", "best"), [("auto", "0.60000 at step 1"),
                                            ("min", "0.40000 at step 2")])  # fmt: skip
def test_facts_have_best_value_of_metric_that_ranks_checkpoints(tmp_path, mode, best):
    name = "eval/tasks/piqa/acc"
    lines = [line(s, **{name: value}) for s, value in ((1, 0.6), (2, 0.4), (3, 0.5))]
    keys = {"checkpoint": {"best_metric": name, "best_mode": mode}}
    page = page_of(write_run(tmp_path / "run", lines, **keys))
    assert page.facts()[f"best {name}"] == best


def test_report_page_is_self_contained(tmp_path):
    page = page_of(write_run(tmp_path / "run", [line(1)]))
    for element in page.elements:
        for name in ("src", "href", "data", "action", "poster", "srcset"):
            assert name not in element, element
    assert not page.all("link")
    source = page.source.replace("/*! https://github.com/leeoniya/uPlot (v1.6.32) */", "")
    assert not re.search(r"https?:|url\(|@import|XMLHttpRequest", source)
    (policy,) = page.all("meta", **{"http-equiv": "Content-Security-Policy"})
    assert policy["content"].startswith("default-src 'none'; connect-src 'none';")


def test_text_of_runs_is_escaped(tmp_path):
    name, dataset, said = 'a <b> & "c"', "</script><i>", "<script>alert(1)</script>"
    lines = [line(s, **{f"data/{dataset}/tokens": s, f"loss/{dataset}": 1.0}) for s in (1, 2)]
    path = write_run(tmp_path / name, lines)
    sample = {"step": 1, "prompt": said, "text": f"{said} & more", "time": 1e9}
    (path / "samples.jsonl").write_text(json.dumps(sample) + "\n" + '{"step": 2, "pro')
    (path / "starts.jsonl").write_text(json.dumps(start(0, command=said)) + "\n")
    page = page_of(path)
    assert page.all("h1")[0]["text"] == name
    assert page.all("title")[0]["text"] == name
    assert page.json()["runs"][0]["name"] == name
    assert [c["label"] for c in page.curves("data/tokens")] == [dataset]
    assert page.facts()["command"] == said
    assert page.all("p", class_="sample")[0]["text"] == f"step 1{said}{said} & more"
    assert len(page.all("script")) == 2
    assert not page.all("b", page.all("h1")[0])


def test_samples_are_listed_newest_first(tmp_path):
    path = write_run(tmp_path / "run", [line(1)])
    said = [{"step": s, "prompt": "So", "text": f" {s}", "time": 1e9} for s in range(200)]
    (path / "samples.jsonl").write_text("".join(json.dumps(item) + "\n" for item in said))
    samples = [p["text"] for p in page_of(path).all("p", class_="sample")]
    assert samples[:2] == ["step 199So 199", "step 198So 198"]
    assert len(samples) == 120


def test_nonfinite_values_break_the_curve_and_are_marked(tmp_path):
    lines = [line(s, **({"train/loss": None} if s in (7, 9, 30) else {})) for s in range(1, 41)]
    (train,) = page_of(write_run(tmp_path / "run", lines)).curves("Loss")
    assert (train["bad"], train["bad_count"]) == ([7, 9, 30], 3)
    assert [s for s, y in zip(train["x"], train["y"], strict=True) if math.isnan(y)] == [7, 9, 30]


def test_steps_before_the_run_do_not_count_as_time(tmp_path):
    """A run that began from a checkpoint of step 5000."""
    page = page_of(write_run(tmp_path / "run", [line(s) for s in range(5001, 5005)], (5000,)))
    facts = page.facts()
    assert (facts["wall time"], facts["time in steps"]) == ("6.5 s", "2 s")
    assert facts["resumed"] == "never"


def test_run_without_finite_loss_has_a_page(tmp_path):
    page = page_of(write_run(tmp_path / "run", [line(1, **{"train/loss": None})]))
    assert page.facts()["smoothed loss"] == page.facts()["last loss"] == "not finite"
    assert page.curves("Loss")[0]["last"] is None


def test_skipped_steps_are_marked(tmp_path):
    lines = [line(s, **{"train/skipped_steps": float(s >= 4) + (s >= 8)}) for s in range(1, 11)]
    page = page_of(write_run(tmp_path / "run", lines))
    assert page.json()["runs"][0]["skips"] == [4, 8]
    assert page.curves("train/grad_norm")[0]["skips"]
    assert page.facts()["skipped steps"] == "2 (20.00%)"
    assert page.points("train/skipped_steps")[0][10] == 2


@pytest.mark.parametrize(
    ("begun", "expected"),
    [
        ((0,), []),
        ((0, 10, 20), [10, 20]),
        ((0, 10, 10), [10, 10]),
        ((0, 10, 20, 15), [10, 15]),  # the last start replaced the curve after 15
        ((0, 10, 0, 20), [20]),  # checkpoints were removed, and the run began again
        ((0, 10, 40), [10]),  # the last start had no steps to run
    ],
)
def test_resumes_belong_to_the_current_curve(tmp_path, begun, expected):
    path = write_run(tmp_path / "run", [line(s) for s in range(1, 41)], begun)
    (run,) = read_runs([path])
    assert run.resumes == page_of(path).json()["runs"][0]["resumes"] == expected


def test_run_without_starts_file_has_a_page(tmp_path):
    path = write_run(tmp_path / "run", [line(1)])
    (path / "starts.jsonl").unlink()
    facts = page_of(path).facts()
    assert facts["resumed"] == "unknown: no starts.jsonl"
    assert facts["parameters"] == "156K"  # of the model
    assert "command" not in facts


@pytest.mark.processes
def test_resumed_run_has_a_page(tmp_path):
    run = Run(tmp_path, "real")
    with devices_here(1):
        for steps in (4, 8):
            run.finish_here(f"--train.max_steps={steps}", "--checkpoint.interval=2")
    page = page_of(run.directory)
    assert page.facts()["resumed"] == "from step 4"
    assert page.facts()["steps"] == "8 of 8"
    assert page.facts()["tokens"] == f"{8 * 8 * 32:,}"
    assert "jax " in page.facts()["versions"]
    (train,) = page.points("Loss")
    assert train == pytest.approx(dict(enumerate(run.losses().values(), 1)), abs=1e-5)


def test_incomplete_last_line_is_ignored(tmp_path):
    lines = [line(1), line(2)]
    page = page_of(write_run(tmp_path / "run", lines, tail=json.dumps(line(3))[:40]))
    assert list(page.points("Loss")[0]) == [1, 2]


def test_metrics_are_read_in_blocks_of_whole_lines(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", [line(s) for s in range(1, 41)] + EVALUATIONS, tail='{"st')
    series = read_metrics(run)
    text = (run / FILE).read_bytes()
    monkeypatch.setattr(reading, "BLOCK", 1000)
    with (run / FILE).open("rb") as file:
        parts = list(reading.blocks(file))
    assert (len(parts) > 5, b"".join(parts)) == (True, text[: -len('{"st')])
    for name, metric in read_metrics(run).items():
        for column, again in zip(series[name], metric, strict=True):
            assert column.tolist() == again.tolist()


def test_damaged_line_in_late_block_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "BLOCK", 300)
    tail = '{"time": 3}\n' + json.dumps(line(9)) + "\n"
    path = write_run(tmp_path / "run", [line(s) for s in range(1, 9)], tail=tail)
    (run,) = read_runs([path])
    assert run.omissions == [f"{path / FILE}:9: no step; the line is left out"]
    assert run.steps == 9


def test_invalid_run_paths_are_explained(tmp_path):
    with pytest.raises(UserError, match=r"no run directory at .*nowhere; name the checkpoint.dir"):
        main([str(tmp_path / "nowhere")])
    path = write_run(tmp_path / "run", [])
    with pytest.raises(UserError, match="has no train/loss: no step is logged yet"):
        main([str(path)])
    with pytest.raises(UserError, match=f"no metrics.jsonl; did you mean {path}"):
        main([str(tmp_path)])
    (path / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match=r"has no metrics.jsonl yet; wait for the first step"):
        main([str(path)])
    with pytest.raises(UserError, match="--output FILE is required for several runs"):
        main([str(path), str(path)])


def test_unwritable_page_raises(tmp_path):
    path = write_run(tmp_path / "run", [line(1)])
    with pytest.raises(UserError, match=r"cannot write .*no/page.html: No such file"):
        main([str(path), "--output", str(tmp_path / "no" / "page.html")])


def test_several_runs_are_overlaid(tmp_path):
    lines = [line(s) for s in range(1, 11)]
    item = write_run(tmp_path / "one" / "run", lines + EVALUATIONS)
    better = [line(s, **{"train/loss": 2.0}) for s in range(1, 5)]
    two = write_run(tmp_path / "two" / "run", better, (0, 2), optimizer={"lr": 1e-4})
    page = page_of(item, two)
    reported = [(c["name"], c["run"], c["colour"]) for c in page.curves("Loss")]
    assert reported == [
        (f"{item} training", 0, 0), (f"{two} training", 1, 1), (f"{item} evaluation", 0, 0)
    ]  # fmt: skip
    head, first, second = page.rows()[:3]
    assert head == [
        "run", "optimizer.lr", "smoothed loss", "best evaluation loss", "last loss", "steps",
        "tokens", "wall time", "time in steps", "resumed",
    ]  # fmt: skip
    assert first[:4] == [str(two), "0.0001", "2", "none"]
    assert second[:4] == [str(item), "0.003", "5.9000", "5.2500 at step 20"]
    assert [r.get("data-run") for r in page.all("tr")[:3]] == [None, "1", "0"]
    assert [run["resumes"] for run in page.json()["runs"]] == [[], [2]]


def test_horizontal_axis_can_be_tokens(tmp_path):
    lines = [line(s, **{"train/tokens": 2.0**s}) for s in range(1, 5)]
    page = page_of(write_run(tmp_path / "run", lines), options=["--x", "tokens"])
    assert page.json()["axis"] == "tokens"
    along = {name: numbers(text) for name, text in page.json()["runs"][0]["along"].items()}
    assert along["steps"] == [1, 2, 3, 4]
    assert along["tokens"] == [2, 4, 8, 16]
    assert along["hours"] == [round(2 * s / 3600, 5) for s in range(4)]


def test_every_metric_gets_a_chart(tmp_path):
    more = {"mine/head_entropy": 0.25, "smoothed/loss": 1.0, "train/mfu": 0.4}
    lines = [line(s, **{name: s * value for name, value in more.items()}) for s in (1, 2)]
    page = page_of(write_run(tmp_path / "run", lines))
    assert page.points("mine/head_entropy") == [{1: 0.25, 2: 0.5}]
    assert page.points("train/mfu") == [{1: 0.4, 2: 0.8}]
    assert not any("moothed" in title for title in page.titles())


def test_long_run_keeps_its_spikes_and_gaps_in_a_small_page(tmp_path):
    loss = np.random.default_rng(0).normal(3, 0.1, 50_000)
    loss[12_345], loss[45_678] = 77.0, -5.0
    lines = [line(i, **{"train/loss": x}) for i, x in enumerate(loss.tolist(), 1)]
    for item in lines[20_000:21_000]:
        item["train/loss"] = None
    page = page_of(write_run(tmp_path / "run", lines))
    (train,), (drawn,) = page.curves("Loss"), page.points("Loss")
    assert drawn[12_346] == 77
    assert drawn[45_679] == -5
    assert len(drawn) <= 2002
    assert all(math.isnan(y) for x, y in drawn.items() if 20_063 < x <= 20_938)
    assert any(math.isnan(y) for y in drawn.values())
    assert (train["bad_count"], len(train["bad"])) == (1000, 200)
    smooth = numbers(train["smooth"][1])
    assert max(abs(y - 3) for y in smooth) < 0.2
    assert len(page.source) < 400_000


def test_many_curves_share_the_point_budget(tmp_path):
    random = np.random.default_rng(0).uniform(0, 1, (3000, 48)).tolist()
    lines = [line(s, **{f"moe/balance/layers.{i}": x for i, x in enumerate(values)})
             for s, values in enumerate(random, 1)]  # fmt: skip
    page = page_of(write_run(tmp_path / "run", lines))
    curves = page.curves("moe/balance")
    assert [c["label"] for c in curves[:2]] == ["layer 0", "layer 1"]
    assert [curves[i]["shade"] for i in (0, 47)] == [0, 1]
    assert len(curves) == 48
    assert 48 * 1000 < sum(len(curve["x"]) for curve in curves) < 48 * 1300


def test_thin_keeps_extremes_and_ends():
    y = np.sin(np.arange(10_000) / 7)
    retained = thin(y, buckets=50)
    assert {0, 9_999, int(np.argmax(y)), int(np.argmin(y))} <= set(retained.tolist())
    assert len(retained) <= 102
    assert (thin(y[:100], buckets=50) == np.arange(100)).all()


def test_bucket_medians_ignore_spikes_and_nonfinite_values():
    y = 10 - np.arange(1000) / 100
    spiky = np.where(np.arange(1000) % 9 == 4, np.nan, y)
    spiky[500] = 1e6
    x, middle = bucket_medians(np.arange(1000), spiky, buckets=50)
    assert len(x) == 50
    np.testing.assert_allclose(middle, 10 - x / 100, atol=0.02)
    assert not len(bucket_medians(np.arange(9), np.full(9, np.nan), 3)[0])


def test_numbers_and_durations_are_formatted():
    values = [1234567.0, 12345.6, 2.5, 0.0003, 1.5e-7, math.nan, 0.0]
    assert [*map(exact, values)] == [
        "1,234,567", "12,346", "2.5000", "3e-4", "1.5e-7", "not finite", "0"
    ]  # fmt: skip
    times = [*map(duration, (7.25, 78, 3725, 280_000))]
    assert times == ["7.25 s", "1 min 18 s", "1 h 2 min", "3 d 5 h"]


@pytest.mark.parametrize(
    ("metric", "title", "label"),
    [
        ("train/grad_norm", "train/grad_norm", ""),
        ("mine/a_b/layers.12", "mine/a_b", "layer 12"),
        ("train/grad_norm/layers.3", "train/grad_norm", "layer 3"),
        ("eval/a/b/ema_loss", "eval/ema_loss", "a/b"),
        ("eval/tasks/piqa/acc", "eval/tasks/acc", "piqa"),
        ("eval/tasks/core", "eval/tasks/core", "all"),
        ("data/web/tokens", "data/tokens", "web"),
        ("loss/web", "loss", "web"),
        ("loss", "loss", ""),
    ],
)
def test_metric_has_title_and_label(metric, title, label):
    assert metric_name(metric) == (title, label)


POINT = """<script>
addEventListener("load", function point() {  // on a busy machine, charts take their time
  const figure = document.querySelector("figure"), over = figure.querySelector(".u-over");
  if (document.querySelectorAll(".u-over").length < document.querySelectorAll("figure").length)
    return setTimeout(point, 50);
  seen.resources = performance.getEntriesByType("resource").length;
  const box = over.getBoundingClientRect();
  const send = (kind, part) => over.dispatchEvent(new MouseEvent(kind,
    { clientX: box.left + box.width * part, clientY: box.top + 9, bubbles: true, view: window }));
  const values = ".where, tr:not(.unlisted) .u-value";
  const read = () => [...figure.querySelectorAll(values)].map((item) => item.textContent).join("|");
  seen.charts = document.querySelectorAll("canvas").length;
  seen.rest = read();
  send("mousemove", 9 / 39);
  setTimeout(() => {
    seen.pointed = read();
    const axis = document.querySelector("select");
    axis.value = "tokens";
    axis.dispatchEvent(new Event("input"));
    figure.querySelector("input").click();
    seen.charts += `|${document.querySelectorAll("canvas").length}`;
  });
});
</script>"""


@pytest.mark.processes
def test_browser_renders_page_without_errors_or_requests(tmp_path):
    path = write_run(tmp_path / "run", [line(s) for s in range(1, 41)] + EVALUATIONS)
    html = in_a_browser(tmp_path, page_of(path).source, POINT)
    assert html["data-errors"] == ""
    assert html["data-resources"] == "0"
    assert html["data-charts"] == "3|3"
    assert html["data-rest"] == "|5.6000|5.3750"
    assert html["data-pointed"] == "step 10|5.9000|5.5000"


PRINT = """<script>
setTimeout(() => {
  dispatchEvent(new Event("beforeprint"));
  queueMicrotask(() => {
    document.body.style.width = "300px";  // of the paper, which the charts do not learn
    const frames = [...document.querySelectorAll(".plot")];
    const canvases = frames.map((frame) => frame.querySelector("canvas"));
    seen.undrawn = canvases.filter((canvas) => !canvas).length;
    seen.cut = frames.filter((frame, i) =>
      canvases[i]?.getBoundingClientRect().right > frame.getBoundingClientRect().right + 1).length;
    seen.frames = frames.length;
  });
}, 1000);
</script>"""


@pytest.mark.processes
def test_printed_charts_are_drawn_and_fit_the_paper(tmp_path):
    path = write_run(tmp_path / "run", [line(s) for s in range(1, 41)] + EVALUATIONS)
    source = page_of(path).source.replace("@media print", "@media all")
    html = in_a_browser(tmp_path, source, PRINT)
    assert int(html["data-frames"]) > 2
    assert (html["data-undrawn"], html["data-cut"]) == ("0", "0")
