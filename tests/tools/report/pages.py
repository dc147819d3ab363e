"""Run directories for reports, and parsed pages."""

import base64
import json
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest

from jaxforge.commands.report import main
from tests.conftest import tiny_config
from tests.machine import PATIENCE

VOID = {"meta", "input", "link", "img", "br"}


def numbers(text):
    kind, data = text.split(":")
    return np.frombuffer(base64.b64decode(data), f"<{kind}").astype(float).round(5).tolist()


class Page(HTMLParser):
    """Elements of a page as dicts of attributes, with "tag", "text" and "inside"."""

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
        """Return elements by tag and attributes; `class_` may be one of several classes."""
        name = attributes.pop("class_", None)
        return [
            e for e in self.elements
            if e["tag"] == tag
            and (inside is None or any(outer is inside for outer in e["inside"]))
            and (name is None or name in (e.get("class") or "").split())
            and all(e.get(k) == v for k, v in attributes.items())
        ]  # fmt: skip

    def json(self):
        return json.loads(self.all("script", id="data")[0]["text"])

    def titles(self):
        return [chart["title"] for chart in self.json()["charts"]]

    def curves(self, title):
        """Return the curves of a chart with columns as lists."""
        data = self.json()
        (chart,) = (chart for chart in data["charts"] if chart["title"] == title)
        columns = [numbers(text) for text in data["columns"]]
        return [
            {**curve, "x": columns[curve["x"]], "y": numbers(curve["y"])}
            for curve in chart["curves"]
        ]

    def points(self, title):
        return [dict(zip(c["x"], c["y"], strict=True)) for c in self.curves(title)]

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


def start(step, **more):
    versions, git = {"jax": "0.10.2"}, {"commit": "0123456789abcdef", "changed": True}
    return {"step": step, "time": 1e9, "command": "jaxforge train", "versions": versions,
            "git": git, "parameters": 155_000, **more}  # fmt: skip


def write_run(path, lines, starts=(0,), tail="", **config):
    path.mkdir(parents=True)
    config = {"train": {"max_steps": 50}, **config}
    (path / "config.toml").write_text(tiny_config(**config).to_toml())
    (path / "metrics.jsonl").write_text("".join(json.dumps(item) + "\n" for item in lines) + tail)
    begun = [json.dumps(start(step)) + "\n" for step in starts]
    (path / "starts.jsonl").write_text("".join(begun))
    return path


def page_of(*runs, options=()):
    output = runs[0] / "report.html"
    assert main([*map(str, runs), "--output", str(output), *options]) == 0
    return Page(output.read_text())


LISTEN = """<script>
const seen = document.documentElement.dataset;
seen.errors = "";
addEventListener("error", (event) => { seen.errors += event.message; }, true);
addEventListener("securitypolicyviolation", (event) => { seen.errors += event.blockedURI; }, true);
</script>"""


def in_a_browser(tmp_path, source, script):
    """Run a page with a script in a browser, and return its root element."""
    browser = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no chromium on PATH")
    probed = tmp_path / "probed.html"
    probed.write_text(
        source.replace("<style>", f"{LISTEN}<style>").replace("</body>", f"{script}</body>")
    )
    done = subprocess.run(
        [browser, "--headless=new", "--no-sandbox", "--disable-gpu",
         f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,2400",
         "--virtual-time-budget=5000", "--dump-dom", probed.as_uri()],
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    (html,) = Page(done.stdout).all("html")
    return html
