"""`report` of damaged runs shows intact lines and names damaged lines by file and number."""

import itertools
import json
import os

import numpy as np
import pytest

from jaxforge.commands.report import main
from jaxforge.errors import UserError
from jaxforge.runs.reading import read_metrics, read_runs
from jaxforge.tools.report.run_page import page as render
from tests.tools.report.pages import line, page_of, start, write_run

SAMPLE = {"step": 1, "prompt": "once", "text": "upon", "time": 1.0}
MOE = {"moe/load/layers.0": [0.5, 1.5], "moe/load/layers.1": [1.0, 1.0]}

DEEP = "[" * 3000 + "]" * 3000
STRANGE = [
    "null", "true", '"x"', '"1"', "[]", "{}", "[1, [2]]", '{"a": {"b": 1}}', DEEP, "-1", "1.5",
    "1e300", "1e400", "NaN", "Infinity", "-Infinity", "9" * 400, "9" * 5000, "9223372036854775808",
    "253402300800", '"\\ud800"', '"\\u0000"', '"<script>"', "[null]", '["a"]', "[[]]", '[1, "x"]',
]  # fmt: skip
"""Unexpected JSON values."""

NAMES = ["", "\ud800", "\0", "x" * 100_000, "a/layers.x", "moe/load/layers.x", "eval//"]
WHOLE_LINES = [
    "", " ", "{}", "[]", "null", "7", '"x"', "{", "}", DEEP, "\0", '{"step": 1}', "[" * 3000,
    '{"step": 2, "ti', "\N{BYTE ORDER MARK}{}", '{"step": 3, "time": 1.0, "step": "x"}',
]  # fmt: skip


def damaged_lines(sound):
    """Yield copies of an intact line, each with a different damage, as bytes."""
    for name in sound:
        marked = json.dumps({**sound, name: "@"})
        for strange in STRANGE:
            yield marked.replace('"@"', strange).encode()
        yield json.dumps({key: value for key, value in sound.items() if key != name}).encode()
        for other in NAMES:
            yield json.dumps({other if key == name else key: sound[key] for key in sound}).encode()
    text = json.dumps(sound).encode()
    random = np.random.default_rng(0)
    for at in random.integers(0, len(text), 20):
        flipped = bytes([text[at] ^ 1 << random.integers(8)])
        yield from (text[:at], text[:at] + flipped + text[at + 1 :])
        yield text[:at] + b"\xff" + text[at:]
    yield from (item.encode("utf-8", "surrogatepass") for item in WHOLE_LINES)


def cases():
    whole = {**line(3), **MOE, "eval/web/loss": 3.0, "train/grad_norm/layers.0": 1.0}
    for file, sound in (("metrics", whole), ("starts", start(3)), ("samples", SAMPLE)):
        for damaged in damaged_lines(sound):
            yield f"{file}.jsonl", damaged


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_page_survives_every_damaged_line(tmp_path, capsys, step):
    """Intact lines are shown; damaged lines are named on the page and in the terminal."""
    run = write_run(tmp_path / "run", [{**line(step), **MOE} for step in (1, 2)])
    (run / "config.toml").write_text("[model]\ndim = 64\n")  # a complete config takes long to read
    (run / "samples.jsonl").write_text(json.dumps(SAMPLE) + "\n")
    count = 0
    for count, (file, damaged) in enumerate(itertools.islice(cases(), 0, None, step), 1):
        sound = (run / file).read_bytes()
        (run / file).write_bytes(sound + damaged.replace(b"\n", b" ") + b"\n")
        shown = render(read_runs([run]), "steps")
        assert "once" in shown, damaged[:200]
        if count % 25 == 0:
            assert main([str(run)]) == 0
            warned, written = capsys.readouterr().err, (run / "report.html").read_text()
            assert all(
                ("left out" in said) == ("left out</p>" in shown) for said in (warned, written)
            )
        (run / file).write_bytes(sound)
    assert count > 900 // step


@pytest.mark.parametrize(
    ("file", "damaged", "problem"),
    [
        ("metrics", '{"step": 2, "ti', "not a JSON object"),
        ("metrics", "[1]", "not a JSON object"),
        ("metrics", DEEP, "not a JSON object"),
        ("metrics", json.dumps({**line(3), "step": [3]}), "step is not the number of a step"),
        ("metrics", json.dumps({**line(3), "time": None}), "time is not a time in seconds"),
        ("metrics", json.dumps({**line(3), "time": 1e300}), "time is not a time in seconds"),
        ("metrics", json.dumps({**line(3), "train/loss": "x"}), "train/loss is not the value"),
        ("metrics", json.dumps({**line(3), "train/loss": 10**400}), "train/loss is not the value"),
        ("starts", json.dumps({**start(1), "git": None}), "git is not a table"),
        ("starts", json.dumps({"step": 1, "time": 1.0}), "no command"),
        ("starts", json.dumps(start(1, parameters="many")), "parameters is not a number"),
        ("samples", json.dumps({**SAMPLE, "step": None}), "step is not the number of a step"),
        ("samples", '{"step": 1, "text": "x"}', "no prompt"),
    ],
)
def test_damaged_line_is_named_and_sound_lines_are_shown(tmp_path, capsys, file, damaged, problem):
    path = write_run(tmp_path / "run", [line(1), line(2)])
    (path / "samples.jsonl").write_text(json.dumps(SAMPLE) + "\n")
    sound = {"metrics": line(4), "starts": start(4), "samples": {**SAMPLE, "text": "beneath"}}[file]
    number = len((path / f"{file}.jsonl").read_text().splitlines()) + 1
    with (path / f"{file}.jsonl").open("a") as opened:
        opened.write(f"{damaged}\n{json.dumps(sound)}\n")
    page, message = page_of(path), f"{path / file}.jsonl:{number}: {problem}"
    assert message in capsys.readouterr().err
    assert message in page.source
    assert list(page.points("Loss")[0]) == ([1, 2, 4] if file == "metrics" else [1, 2])
    assert ("beneath" in page.source) == (file == "samples")
    starts = [row for row in page.rows() if row[0].startswith("2001")]
    assert [row[1] for row in starts] == (["4", "0"] if file == "starts" else [])  # none of one


def test_many_damaged_lines_are_summarized(tmp_path, capsys):
    path = write_run(tmp_path / "run", [line(1)], tail="x\n" * 1000)
    page_of(path)
    messages = capsys.readouterr().err.splitlines()
    assert [m.split("metrics.jsonl")[1] for m in messages] == [
        ":2: not a JSON object; the line is left out",
        ":3: not a JSON object; the line is left out",
        ":4: not a JSON object; the line is left out",
        ": 997 more damaged lines are left out",
    ]


def test_metric_with_mixed_types_keeps_numbers(tmp_path):
    lines = [line(1, **{"a/b": 1.0}), line(2, **{"a/b": [1.0]}), line(3, **{"a/b": 4.0})]
    series = read_metrics(write_run(tmp_path / "run", lines))["a/b"]
    assert (series.step.tolist(), series.value.tolist()) == ([1, 3], [1.0, 4.0])


def test_read_metrics_warns_about_damaged_lines(tmp_path):
    path = write_run(tmp_path / "run", [line(1)], tail="x\n" + json.dumps(line(3)) + "\n")
    with pytest.warns(UserWarning, match=r"metrics.jsonl:2: not a JSON object"):
        assert read_metrics(path)["train/loss"].step.tolist() == [1, 3]


def test_counts_use_last_finite_values(tmp_path):
    lines = [line(1), line(2), line(3, **{"train/tokens": None, "train/skipped_steps": None})]
    facts = page_of(write_run(tmp_path / "run", lines)).facts()
    assert (facts["tokens"], facts["skipped steps"]) == ("2,048", "none")


def test_excess_metrics_are_dropped(tmp_path, capsys):
    """The number of metrics on a page is limited."""
    many = {f"m/{i}": float(i) for i in range(5000)}
    path = write_run(tmp_path / "run", [line(1, **many), line(2, **many)])
    (run,) = read_runs([path])
    assert len(run.series) == 4000
    assert "more than 4,000 metrics; the others are left out" in run.omissions[0]


@pytest.mark.parametrize("text", ["[model", "x = " + "[" * 3000, "a" + ".a" * 3000 + " = 1"])
def test_damaged_config_raises_single_message(tmp_path, text):
    path = write_run(tmp_path / "run", [line(1)])
    (path / "config.toml").write_text(text + "\n")
    with pytest.raises(UserError, match=r"config.toml:1:"):
        main([str(path)])


def test_huge_files_are_not_read_completely(tmp_path, capsys):
    """Sparse files of a terabyte: lines without an end, a config, a pipe."""
    path = write_run(tmp_path / "run", [line(1)])
    for name in ("metrics", "starts", "samples"):
        with (path / f"{name}.jsonl").open("a") as file:
            file.truncate(1 << 40)
    page = page_of(path)
    assert list(page.points("Loss")[0]) == [1]
    warned = capsys.readouterr().err
    assert "metrics.jsonl: a line of more than 16,777,216 bytes and all after it are left" in warned
    for name, number in (("starts", 2), ("samples", 1)):
        assert f"{name}.jsonl:{number}: more than 16,777,216 bytes, and so is all after" in warned
    os.truncate(path / "config.toml", 1 << 40)
    with pytest.raises(UserError, match="a config has at most 1,048,576"):
        main([str(path)])
    (path / "config.toml").unlink()
    os.mkfifo(path / "config.toml")
    with pytest.raises(UserError, match=r"config.toml is not a file"):
        main([str(path)])


def test_link_to_itself_is_no_run(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError, match=r"no run directory at .*/loop; name the"):
        main([str(tmp_path / "loop")])
