"""The account of a run's time: the bar of the page, and the table of `report --goodput`."""

import json

import pytest

from jaxforge.commands.report import main
from jaxforge.errors import UserError
from jaxforge.runs import attempts
from tests.tools.report.pages import line, page_of, write_run

FIRST = {"began": 1000.0, "seen": 1060.0, "step": 30, "seconds": {"start": 20.0, "step": 40.0},
         "code": None}  # fmt: skip
SECOND = {"began": 1070.0, "seen": 1100.0, "step": 50, "code": 0,
          "seconds": {"start": 9.95, "rework": 5.0, "step": 15.0, "data_wait": 0.05}}  # fmt: skip


def write_account(run, *processes):
    for process, of_process in enumerate(processes):
        path = run / attempts.file_name(process)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(attempt) + "\n" for attempt in of_process))
    return run


def test_bar_has_a_part_for_each_category(tmp_path):
    run = write_account(write_run(tmp_path / "run", [line(1), line(2)]), [FIRST, SECOND])
    page = page_of(run)
    (figure,) = page.all("figure")
    assert figure["text"] == "Goodput 55.0% of 1 min 40 s"
    parts = page.all("i", figure)
    assert [part["title"] for part in parts] == [
        "step: 55 s (55.0%)", "rework: 5 s (5.0%)", "data wait: 0.05 s (0.1%)",
        "start: 29.9 s (29.9%)", "down: 10 s (10.0%)",
    ]  # fmt: skip
    shares = [float(part["style"].partition("width: ")[2].removesuffix("%")) for part in parts]
    assert sum(shares) == pytest.approx(100)
    legend = [item["text"] for item in page.all("li")]
    assert legend == ["step", "rework", "data wait", "start", "down"]
    assert ["rework", "5.0", "5.0%", "steps that were repeated after a fault or a rollback"] in (
        page.rows()
    )


def test_several_runs_have_named_bars_and_seconds_have_no_charts(tmp_path):
    lines = [line(s, **{"goodput/ratio": s / 10, "goodput/step_sec": 5.0 * s}) for s in (1, 2)]
    first = write_account(write_run(tmp_path / "one", lines), [FIRST])
    other = write_run(tmp_path / "other", lines)
    page = page_of(first, other)
    assert [item["text"] for item in page.all("figure")] == ["Goodput 66.7% of 1 min: one"]
    assert page.titles().count("goodput/ratio") == 1
    assert not any("_sec" in title for title in page.titles())
    assert not page_of(other).all("figure")


def test_table_has_the_whole_account(tmp_path, capsys):
    run = write_account(tmp_path / "run", [FIRST, SECOND], [FIRST, {**SECOND, "began": 1080.0}])
    assert main(["--goodput", str(run)]) == 0
    output = capsys.readouterr().out.splitlines()
    assert output[0] == f"{run}: goodput 55.00%, 2 attempts, 1 of them without an exit code"
    rows = [text.split() for text in output[2:]]
    assert rows[0] == ["category", "seconds", "share", "mean", "most", "meaning"]
    assert rows[1][:7] == ["step", "55.0", "55.0%", "55.0", "55.0", "(process", "0)"]
    assert ["down", "10.0", "10.0%", "15.0", "20.0", "(process", "1)"] in [r[:7] for r in rows]
    assert rows[-2][:3] == ["total", "100.0", "100.0%"]
    assert rows[-1][:4] == ["wall", "time", "100.0", "100.0%"]


def test_problems_of_the_table_are_explained(tmp_path, capsys):
    with pytest.raises(UserError, match=r"has no logs/goodput_0.jsonl: no run directory, or"):
        main(["--goodput", str(tmp_path)])
    with pytest.raises(UserError, match=r"--goodput prints a table: remove --output"):
        main(["--goodput", str(tmp_path), "--output", "x.html"])
    write_account(tmp_path, [{**FIRST, "step": -1}, FIRST])
    main(["--goodput", str(tmp_path)])
    assert "warning: " in capsys.readouterr().err
