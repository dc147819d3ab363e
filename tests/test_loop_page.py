"""docs/behaviours.md answers each behaviour once. Names in it and in tables of invariants exist."""

import re
from pathlib import Path

from jaxforge.config import JobConfig
from jaxforge.config.reading.schema import all_keys
from tests.helpers import each

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "behaviours.md").read_text()
ROWS = re.findall(r"^\| ([KBTLM])-(\d\d)( !)? \| (.*) \|$", PAGE, re.MULTILINE)
INVARIANTS = sorted((ROOT / "jaxforge").glob("*/README.md"))
TABLES = "".join(path.read_text() for path in INVARIANTS)
TESTS = sorted(set(re.findall(r"([\w/]+\.py)::(\w+)", PAGE + TABLES)))
BEHAVIOURS = {"K": 53, "B": 47, "T": 33, "L": 27, "M": 46}


@each(BEHAVIOURS)
def test_each_behaviour_has_one_row(loop):
    numbers = [int(number) for item, number, *_ in ROWS if item == loop]
    assert numbers == list(range(1, BEHAVIOURS[loop] + 1))


def test_states_are_explained_by_the_page():
    for _, _, is_trap, cells in ROWS:
        _, state, _, tests = re.split(r" ?\| ", f"{cells} ", maxsplit=3)
        assert re.match(r"(done|differs|not|none)\b", state), cells
        if state.startswith(("done", "differs")) or is_trap:
            assert tests.strip() or "library.md" in cells, f"no test: {cells}"


@each(TESTS)
def test_named_tests_exist(file, name):
    text = (ROOT / "tests" / file).read_text()
    assert re.search(rf"^def {name}\(", text, re.MULTILINE)


def test_named_modules_exist():
    for path in set(re.findall(r"`((?:\w+/)*\w+\.py)`", PAGE)):
        assert (ROOT / "jaxforge" / path).is_file() or (ROOT / path).is_file(), path


@each(INVARIANTS)
def test_table_of_invariants_names_files_and_tests(page):
    rows = re.findall(
        r"^\| (?!invariant)([^-].*) \| (.*) \| (.*) \|$", page.read_text(), re.MULTILINE
    )
    assert 0 < len(rows) <= 15
    for invariant, _, test in rows:
        assert re.fullmatch(r"`[\w/]+\.py::\w+`", test), test
        files = re.findall(r"`((?:\w+/)*\w+\.py)`", invariant)
        assert files, invariant
        for path in files:
            assert (page.parent / path).is_file() or (ROOT / "jaxforge" / path).is_file(), path


def test_named_keys_exist():
    sections, keys = set(JobConfig.model_fields), set(all_keys())
    named = set(re.findall(r"`([a-z]+\.[a-z_]+)`", PAGE)) - {"metrics.jsonl"}
    asked = {key for key in named if key.split(".")[0] in sections and not key.endswith(".py")}
    assert len(asked) > 30
    tables = {key.rsplit(".", 1)[0] for key in keys}
    assert asked <= keys | tables
