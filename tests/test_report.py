"""The page of a run: what stands on it, what a browser makes of it."""

import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest

from jaxforge.errors import UserError
from jaxforge.report.__main__ import main
from jaxforge.report.reading import read_runs
from jaxforge.report.scale import Scale, duration, exact, scale_of
from jaxforge.report.thinning import moving_median, thin
from tests.conftest import tiny_config
from tests.machine import PATIENCE
from tests.processes.conftest import Run

VOID = {"meta", "input", "link", "img", "br"}


class Page(HTMLParser):
    """The elements of a page as dicts of attributes, with "tag", "text" and "inside"."""

    def __init__(self, text):
        super().__init__()
        self.source, self.elements, self.open = text, [], []
        self.feed(text)
        assert not self.open, "an element is not closed"

    def handle_starttag(self, tag, attrs):
        element = {"tag": tag, "text": "", "inside": list(self.open), **dict(attrs)}
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag, attrs):
        self.elements.append({"tag": tag, "text": "", "inside": list(self.open), **dict(attrs)})

    def handle_endtag(self, tag):
        assert self.open.pop()["tag"] == tag

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def all(self, tag, inside=None, **attributes):
        """Elements of a tag; `class_` needs to be one of several."""
        name = attributes.pop("class_", None)
        return [
            e for e in self.elements
            if e["tag"] == tag
            and (inside is None or any(outer is inside for outer in e["inside"]))
            and (name is None or name in (e.get("class") or "").split())
            and all(e.get(k) == v for k, v in attributes.items())
        ]  # fmt: skip

    def figure(self, title):
        (found,) = (h["inside"] for h in self.all("h2") if h["text"].startswith(title + " "))
        return next(e for e in found if e["tag"] == "figure")

    def titles(self):
        return [h["text"].strip() for h in self.all("h2")]

    def data(self, title):
        return json.loads(self.all("script", self.figure(title))[0]["text"])

    def facts(self):
        names, values = (self.all(tag) for tag in ("dt", "dd"))
        return {n["text"]: v["text"] for n, v in zip(names, values, strict=True)}

    def rows(self):
        return [[c["text"] for c in self.elements if c["tag"] in ("td", "th") and r in c["inside"]]
                for r in self.all("tr")]  # fmt: skip


def line(step, **more):
    return {
        "step": step, "time": 1e9 + 2 * step, "train/loss": 6 - step / 100,
        "train/grad_norm": 1 + step / 7, "train/lr": 3e-4, "train/tokens": 1024.0 * step,
        "train/tokens_per_sec": 2048.0, "train/step_time_sec": 0.5, "train/skipped_steps": 0.0,
        **more,
    }  # fmt: skip


def write_run(path, lines, log="", tail="", **config):
    (path / "logs").mkdir(parents=True)
    config = {"train": {"max_steps": 50}, **config}
    (path / "config.toml").write_text(tiny_config(**config).to_toml())
    (path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines) + tail)
    (path / "logs" / "process_0.log").write_text(log)
    return path


def page_of(*runs, options=()):
    output = runs[0] / "report.html"
    assert main([*map(str, runs), "--output", str(output), *options]) == 0
    return Page(output.read_text())


EVALUATIONS = [
    {"step": step, "time": 1e9 + 2 * step, "eval/loss": loss, "eval/perplexity": math.exp(loss),
     "eval/bits_per_byte": loss / 2}
    for step, loss in ((10, 5.5), (20, 5.25), (30, 5.375))
]  # fmt: skip


def test_charts_facts_and_values(tmp_path):
    lines = [line(step) for step in range(1, 41)] + EVALUATIONS
    page = page_of(write_run(tmp_path / "run", lines))
    assert page.titles() == [
        "Loss nats per token", "Evaluation loss nats per token", "Evaluation bits per byte",
        "Learning rate of the next update", "Gradient norm before clipping",
        "Throughput tokens per second", "Time of a step seconds",
    ]  # fmt: skip
    train, evaluation = page.data("Loss")
    assert train == {"x": list(range(1, 41)), "y": [round(6 - i / 100, 4) for i in range(1, 41)]}
    assert evaluation == {"x": [10, 20, 30], "y": [5.5, 5.25, 5.375]}
    legend = [li["text"] for li in page.all("li", page.figure("Loss"))]
    assert legend == ["train 5.6000", "evaluation 5.3750"]
    assert page.facts() == {
        "model": "2 layers, dim 64, 4/2 heads of 16, ffn 256, vocabulary 256",
        "parameters": "156K",
        "steps": "40 of 50",
        "tokens": "40,960",
        "wall time": "1 min 18 s, 20 s of it in steps",
        "last loss": "5.6000",
        "best evaluation loss": "5.2500 at step 20",
        "skipped steps": "none",
        "resumed": "never",
    }
    assert ["evaluation", "5.3750", "215.94", "2.6875", "5.2500", "20"] in page.rows()
    (config,) = page.all("details")
    assert "open" not in config
    assert "max_steps = 50" in config["text"]


def test_several_evaluation_sets(tmp_path):
    sets = {"eval/code.py/loss": 5.0, "eval/loss": 5.5, "eval/web/loss": 6.0}
    lines = [line(1), {"step": 1, "time": 1e9, **sets}]
    page = page_of(write_run(tmp_path / "run", lines))
    legend = [li["text"] for li in page.all("li", page.figure("Evaluation loss"))]
    assert legend == ["all sets 5.5000", "code.py 5", "web 6"]
    assert [curve["y"] for curve in page.data("Loss")] == [[5.99], [5.5]]
    assert page.facts()["best evaluation loss"] == "5.5000 at step 1"
    assert [row[0] for row in page.rows()] == ["set", "all sets", "code.py", "web"]


def test_curves_lie_where_their_values_are(tmp_path):
    """Step 0 is the left edge, step 40 the right one; the rate's axis goes from 0 to 1.04 times."""
    page = page_of(write_run(tmp_path / "run", [line(s) for s in (1, 10, 20, 40)]))
    (path,) = page.all("path", page.figure("Learning rate"), class_="line")
    y = round(1000 * (1 - 1 / 1.1))
    assert path["d"] == f"M50 {y}L500 {y} 1000 {y} 2000 {y}"


def test_the_page_asks_nobody_for_anything(tmp_path):
    page = page_of(write_run(tmp_path / "run", [line(1)]))
    for element in page.elements:
        for name in ("src", "href", "data", "action", "poster", "srcset"):
            assert (element.get(name) or "#").startswith("#"), element
    assert not page.all("link")
    assert not re.search(r"https?:|url\(|@import|\bfetch\b|XMLHttpRequest", page.source)
    (policy,) = page.all("meta", **{"http-equiv": "Content-Security-Policy"})
    assert policy["content"].startswith("default-src 'none';")


def test_names_are_escaped(tmp_path):
    name, dataset = 'a <b> & "c"', "</script><i>"
    lines = [line(s, **{f"data/{dataset}/tokens": s, f"loss/{dataset}": 1.0}) for s in (1, 2)]
    log = "INFO: resuming from step 1 of x\n"
    page = page_of(write_run(tmp_path / name, lines, log))
    assert page.all("h1")[0]["text"] == name
    assert page.all("title")[0]["text"] == name
    assert page.all("li", page.figure("Mixture"))[0]["text"] == f"{dataset} 2"
    assert page.all("line", class_="resume")
    assert not page.all("b", page.all("h1")[0])
    assert not page.all("i", page.all("title")[0])


def test_the_last_samples_stand_under_the_charts(tmp_path):
    run = write_run(tmp_path / "run", [line(1), line(2)])

    def page():
        page_of(run)
        return (run / "report.html").read_text()

    assert "samples of" not in page()
    lines = [{"step": step, "prompt": "<a>", "text": f"\n b{step}"} for step in range(1, 31)]
    text = "".join(json.dumps(one) + "\n" for one in lines) + '{"step": 31, "pro'
    (run / "samples.jsonl").write_text(text)
    shown = page().partition("<summary>samples of run</summary>")[2].partition("</pre>")[0]
    assert shown.startswith("<pre>step 30\n&lt;a&gt;\n b30\n")
    assert shown.count("&lt;a&gt;") == 20


def test_what_is_not_finite_is_marked_and_breaks_the_curve(tmp_path):
    lines = [line(s, **({"train/loss": None} if s in (7, 9, 30) else {})) for s in range(1, 41)]
    figure = (page := page_of(write_run(tmp_path / "run", lines))).figure("Loss")
    linear = page.all("div", figure, class_="linear")[0]
    marks = page.all("use", linear, class_="bad")
    assert [m["text"] for m in marks] == [f"train: not finite at {s}" for s in (7, 9, 30)]
    assert [m["x"] for m in marks] == ["17.5%", "22.5%", "75%"]
    path = page.all("path", linear, class_="line")[0]["d"]
    assert path.count("M") == 4
    assert re.search(r"M400 \d+h0M", path)  # step 8, alone
    assert page.data("Loss")[0]["y"][6:9] == [None, 5.92, None]
    assert "3 not finite" in page.all("p", figure)[0]["text"]
    assert not page.all("use", page.figure("Learning rate"), class_="bad")


def test_a_loss_of_many_magnitudes_is_first_shown_on_a_log_scale(tmp_path):
    lines = [line(s, **{"train/loss": 1e3 if s == 5 else 3.0}) for s in range(1, 11)]
    page = page_of(write_run(tmp_path / "run", lines))
    (chosen,) = (choice for choice in page.all("input") if "checked" in choice)
    assert chosen["value"] == "log"


def test_steps_of_another_run_do_not_count_as_time(tmp_path):
    """A run that began at step 5000 of a checkpoint."""
    page = page_of(write_run(tmp_path / "run", [line(s) for s in range(5001, 5005)]))
    assert page.facts()["wall time"] == "6.5 s, 2 s of it in steps"
    assert page.all("text", page.figure("Loss"), class_="x")[0]["text"] == "5,001"


def test_a_run_that_is_nowhere_finite_has_a_page(tmp_path):
    page = page_of(write_run(tmp_path / "run", [line(1, **{"train/loss": None})]))
    assert page.facts()["last loss"] == "not finite"


def test_skipped_steps_are_marked(tmp_path):
    lines = [line(s, **{"train/skipped_steps": float(s >= 4) + (s >= 8)}) for s in range(1, 11)]
    page = page_of(write_run(tmp_path / "run", lines))
    marks = page.all("use", page.figure("Gradient norm"), class_="skip")
    assert [m["text"] for m in marks] == ["run: skipped at 4", "run: skipped at 8"]
    assert page.facts()["skipped steps"] == "2 (20.00%)"
    assert page.data("Skipped steps")[0]["y"][-1] == 2


START, RESUME = (
    "INFO jaxforge.train: train step compiled in 4.2 s\n",
    "resuming from step {} of d\n",
)


def starts(*steps):
    """The log of starts; None resumes from nothing."""
    return "".join((RESUME.format(s) if s is not None else "") + START for s in steps)


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (starts(None), []),
        (starts(None, 10, 20), [10, 20]),
        (starts(None, 10, 10), [10, 10]),
        (starts(None, 10, 20, 15), [10, 15]),  # the curve after 15 is that of the last start
        (starts(None, 10, None, 20), [20]),  # the checkpoints were removed: it began anew
        (starts(None, 10) + RESUME.format(40), [10]),  # nothing was left to do
    ],
)
def test_resumes_are_those_of_the_present_curve(tmp_path, log, expected):
    path = write_run(tmp_path / "run", [line(s) for s in range(1, 41)], log)
    (run,) = read_runs([path])
    assert run.resumes == expected
    page = page_of(path)
    for plot in page.all("div", class_="plot"):
        lines = page.all("line", plot, class_="resume")
        assert [e["x1"] for e in lines] == [f"{100 * s / 40:.5g}%" for s in expected]


def test_a_missing_log_is_said(tmp_path):
    path = write_run(tmp_path / "run", [line(1)])
    (path / "logs" / "process_0.log").unlink()
    assert page_of(path).facts()["resumed"] == "unknown: no logs/process_0.log"


@pytest.mark.processes
def test_a_real_run_that_was_resumed(tmp_path):
    run = Run(tmp_path, "real")
    for steps in (4, 8):
        run.finish_here(f"--train.max_steps={steps}", "--checkpoint.interval=2")
    page = page_of(run.directory)
    assert page.facts()["resumed"] == "from step 4"
    assert page.facts()["steps"] == "8 of 8"
    assert page.facts()["tokens"] == f"{8 * 8 * 32:,}"
    (train,) = page.data("Loss")
    assert train["x"] == list(range(1, 9))
    assert train["y"] == [float(f"{loss:.7g}") for loss in run.losses().values()]


def test_a_line_that_is_being_written_is_left_for_the_next_time(tmp_path):
    lines = [line(1), line(2)]
    page = page_of(write_run(tmp_path / "run", lines, tail=json.dumps(line(3))[:40]))
    assert page.data("Loss")[0]["x"] == [1, 2]


def test_a_damaged_line_is_named(tmp_path):
    path = write_run(tmp_path / "run", [line(1)], tail='{"step": 2, "ti\n' + json.dumps(line(3)))
    with pytest.raises(UserError, match=r"metrics.jsonl:2: not a JSON object; remove this line"):
        main([str(path)])


def test_mistakes_in_the_name_of_a_run(tmp_path):
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
    with pytest.raises(UserError, match=r"several runs share one page: .* --output FILE"):
        main([str(path), str(path)])


def test_a_page_that_cannot_be_written(tmp_path):
    path = write_run(tmp_path / "run", [line(1)])
    with pytest.raises(UserError, match=r"cannot write .*no/page.html: No such file"):
        main([str(path), "--output", str(tmp_path / "no" / "page.html")])


def test_runs_are_laid_over_each_other(tmp_path):
    lines = [line(s) for s in range(1, 11)]
    one = write_run(tmp_path / "one" / "run", lines + EVALUATIONS)
    two = write_run(tmp_path / "two" / "run", lines[:4], starts(None, 2), optimizer={"lr": 1e-4})
    page = page_of(one, two)
    assert [li["text"] for li in page.all("li", page.figure("Loss: train"))] == [
        f"{one} 5.9000", f"{two} 5.9600"
    ]  # fmt: skip
    assert [path["class"] for path in page.all("path", page.figure("Throughput"))] == [
        "line c0", "line c1"
    ]  # fmt: skip
    assert len(page.data("Loss: evaluation")) == 1
    assert "Evaluation loss nats per token" not in page.titles()  # it is there already
    assert page.rows()[-2:] == [["key", str(one), str(two)], ["optimizer.lr", "0.003", "0.0001"]]
    assert {e["class"] for e in page.all("line", class_="resume")} == {"resume c1"}


@pytest.mark.parametrize(("axis", "last"), [("steps", 4), ("tokens", 4096), ("hours", 6 / 3600)])
def test_horizontal_axes(tmp_path, axis, last):
    path = write_run(tmp_path / "run", [line(s) for s in range(1, 5)])
    page = page_of(path, options=["--x", axis])
    assert page.data("Loss")[0]["x"][-1] == pytest.approx(last, rel=1e-6)
    assert float(page.all("main")[0]["data-high"]) == pytest.approx(last)


def test_a_mixture_is_stacked(tmp_path):
    tokens = [{"data/web/tokens": 300.0 * s, "data/code/tokens": 100.0 * s} for s in range(1, 5)]
    path = write_run(tmp_path / "run", [line(i, **t) for i, t in enumerate(tokens, 1)])
    page = page_of(path)
    web, code = page.all("path", page.figure("Mixture"), class_="area")
    tokens = [curve["y"] for curve in page.data("Mixture")]
    assert tokens == [[300, 600, 900, 1200], [100, 200, 300, 400]]
    top, bottom = corners(code)
    assert bottom == corners(web)[0]
    assert top[-1] == (2000, round(1000 * (1 - 1600 / (1600 + 0.04 * 1600))))


def corners(area):
    numbers = list(map(int, re.findall(r"\d+", area["d"])))
    points = list(zip(numbers[::2], numbers[1::2], strict=True))
    return points[: len(points) // 2], points[: len(points) // 2 - 1 : -1]


def test_every_metric_gets_a_chart(tmp_path):
    more = {"mine/entropy": 0.25, "smoothed/loss": 1.0, "train/mfu": 0.4}
    lines = [line(s, **{name: s * value for name, value in more.items()}) for s in (1, 2)]
    page = page_of(write_run(tmp_path / "run", lines))
    assert page.data("mine/entropy") == [{"x": [1, 2], "y": [0.25, 0.5]}]
    assert page.data("Model FLOPs utilization") == [{"x": [1, 2], "y": [40, 80]}]
    assert "smoothed" not in page.source


def test_a_long_run_keeps_its_spikes_and_gaps_in_a_small_page(tmp_path):
    loss = np.random.default_rng(0).normal(3, 0.1, 50_000)
    loss[12_345], loss[45_678] = 77.0, -5.0
    lines = [line(i, **{"train/loss": x}) for i, x in enumerate(loss.tolist(), 1)]
    for one in lines[20_000:21_000]:
        one["train/loss"] = None
    page = page_of(write_run(tmp_path / "run", lines))
    (train,) = page.data("Loss")
    drawn = dict(zip(train["x"], train["y"], strict=True))
    assert drawn[12_346] == 77
    assert drawn[45_679] == -5
    assert len(drawn) <= 1602
    assert all(y is None for x, y in drawn.items() if 20_063 < x <= 20_938)
    assert None in drawn.values()
    assert page.all("use", page.figure("Loss"), class_="bad")
    assert len(page.source) < 400_000


def test_thinning():
    x, y = np.arange(10_000), np.sin(np.arange(10_000) / 7)
    kept = thin(x, y, buckets=50)
    assert {0, 9_999, int(np.argmax(y)), int(np.argmin(y))} <= set(kept.tolist())
    assert len(kept) <= 102
    assert (thin(x[:100], y[:100], buckets=50) == np.arange(100)).all()


def test_the_median_ignores_spikes_and_starts_with_the_curve():
    y = 10 - np.arange(1000) / 100
    spiky = np.where(np.arange(1000) % 9 == 4, np.nan, y)
    spiky[500] = 1e6
    x, median, width = moving_median(np.arange(1000), spiky)
    assert width == 21
    assert median[0] == y[0]
    np.testing.assert_allclose(median[x < 980], y[x[x < 980]], atol=0.02)


@pytest.mark.parametrize(
    ("scale", "labels"),
    [
        (Scale(0, 200_000), ["0", "50,000", "100,000", "150,000", "200,000"]),
        (Scale(0, 8.4e11), ["0", "200B", "400B", "600B", "800B"]),
        (Scale(3.1, 5.7), ["3.5", "4.0", "4.5", "5.0", "5.5"]),
        (Scale(0, 4e-4), ["0", "1e-4", "2e-4", "3e-4", "4e-4"]),
        (Scale(0.08, 600, log=True), ["0.1", "1", "10", "100"]),
        (Scale(0.01, 0.4, log=True), ["0.01", "0.02", "0.05", "0.1", "0.2"]),
        (Scale(1e-7, 40, log=True), ["1e-6", "1e-4", "0.01", "1"]),
        (Scale(0.88, 0.9, log=True), ["0.880", "0.885", "0.890", "0.895", "0.900"]),
    ],
)
def test_ticks_are_round(scale, labels):
    ticks = scale.ticks(7)
    assert [label for _, label in ticks] == labels
    assert all(0 <= scale.place(value) <= 1 for value, _ in ticks)


def test_scales_hold_what_is_finite():
    values = np.array([np.nan, -1.0, 0.0, 10.0, 1000.0])
    linear, log = scale_of(values), scale_of(values, log=True)
    assert linear.low < -1 < 1000 < linear.high
    assert 8 < log.low < 10
    assert log.place(np.array([0.0, 100.0])) == pytest.approx([0, 0.5])
    assert scale_of(np.array([3.0])).place(3.0) == pytest.approx(0.5)


def test_numbers_in_words():
    values = [1234567.0, 12345.6, 2.5, 0.0003, 1.5e-7, math.nan, 0.0]
    assert [*map(exact, values)] == [
        "1,234,567", "12,346", "2.5000", "3e-4", "1.5e-7", "not finite", "0"
    ]  # fmt: skip
    times = [*map(duration, (7.25, 78, 3725, 280_000))]
    assert times == ["7.25 s", "1 min 18 s", "1 h 2 min", "3 d 5 h"]


LISTEN = """<script>
const seen = document.documentElement.dataset;
seen.errors = "";
addEventListener("error", (event) => { seen.errors += event.message; }, true);
addEventListener("securitypolicyviolation", (event) => { seen.errors += event.blockedURI; }, true);
</script>"""
POINT = """<script>
addEventListener("load", () => {
  seen.resources = performance.getEntriesByType("resource").length;
  const plot = document.querySelector(".plot"), box = plot.getBoundingClientRect();
  const at = { clientX: box.left + box.width * 10.2 / 40, clientY: box.top + 1 };
  const figure = document.querySelector("figure");
  const read = () => [...figure.querySelectorAll("b, .linear .name")]
    .map((found) => found.textContent).join("|");
  plot.dispatchEvent(new PointerEvent("pointermove", at));
  seen.pointed = read();
  plot.dispatchEvent(new PointerEvent("pointerleave", at));
  seen.rest = read();
  const shown = () => [...figure.querySelectorAll(".plot")]
    .map((found) => found.offsetWidth > 0).join("|");
  seen.linear = shown();
  document.querySelector("input[value=log]").click();
  seen.log = shown();
});
</script>"""


def in_a_browser(tmp_path, source, script):
    """What a page and a script in it have made of its first element."""
    browser = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no chromium on PATH")
    probed = tmp_path / "probed.html"
    probed.write_text(
        source.replace("<style>", f"{LISTEN}<style>").replace("</body>", f"{script}</body>")
    )
    done = subprocess.run(
        [browser, "--headless=new", "--no-sandbox", "--disable-gpu",
         f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", probed.as_uri()],
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    (html,) = Page(done.stdout).all("html")
    return html


@pytest.mark.processes
def test_a_browser_runs_it_without_errors_or_requests(tmp_path):
    path = write_run(tmp_path / "run", [line(s) for s in range(1, 41)] + EVALUATIONS)
    html = in_a_browser(tmp_path, page_of(path).source, POINT)
    assert html["data-errors"] == ""
    assert html["data-resources"] == "0"
    assert html["data-pointed"] == "5.9000|5.5000|step 10"
    assert html["data-rest"] == "5.6000|5.3750|step"
    assert html["data-linear"] == "true|false|false"
    assert html["data-log"] == "false|true|false"
