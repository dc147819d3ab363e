"""The notebooks of examples/ run in order."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.machine import PATIENCE
from tests.processes.conftest import environment

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))
RUN = """
import json, sys
for path in sys.argv[1:]:
    names = {"__name__": "__main__"}
    for cell in json.load(open(path))["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), path, "exec"), names)
    match path.rpartition("/")[2]:
        case "1_train.ipynb":
            losses = names["trained"].metrics["train/loss"].dropna()
            assert len(losses) == 60 and losses[60] < 0.7 * losses[1]
        case "2_look_inside.ipynb":
            assert [step.difference for step in names["steps"]] == [0, 0, 0, 0]
        case "3_take_over.ipynb":
            apart = (names["before"] - names["after"]).loc[41:60]
            assert len(apart) == 20 and (apart == 0).all()
        case "4_export_and_generate.ipynb":
            ours = names["run"].generate("def", max_tokens=20, temperature=0)
            assert names.get("theirs") in (None, ours)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_notebooks_run(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", RUN, *map(str, NOTEBOOKS)],
        cwd=tmp_path, env=environment(), text=True, capture_output=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(NOTEBOOKS) == 4


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_without_outputs(path):
    notebook = json.loads(path.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
