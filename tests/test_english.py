"""The check of plain English (.ci/english.py) reports planted offences, passes good text."""

import runpy
from pathlib import Path

import pytest

ENGLISH = runpy.run_path(str(Path(__file__).parents[1] / ".ci" / "english.py"))

GOOD = '''"""Schedules of the learning rate."""


def cosine(step: int, total: int) -> float:
    """Return the factor of a step on the peak rate."""
    remaining = total - step  # steps
    return remaining / total
'''


def check(directory, text):
    path = directory / "module.py"
    path.write_text(text)
    return ENGLISH["main"]([str(path)])


def test_plain_code_passes(tmp_path, capsys):
    assert check(tmp_path, GOOD) == 0
    assert "no offence" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("good", "bad", "line", "quoted"),
    [
        ("Return the factor", "What the factor is", 5, "'What'"),
        ("Return the factor", "Whether it is the factor", 5, "'Whether'"),
        ("Schedules of", "Those of", 1, "'Those'"),
        ("on the peak rate", "beside the peak rate", 5, "'beside'"),
        ("# steps", "# so many steps", 6, "'so many'"),
        ("remaining", "rest", 6, "'rest'"),
        ("total", "one", 4, "'one'"),
        ("def cosine", "def test_the_factor", 4, "'test_the_factor'"),
    ],
)
def test_offence_is_reported_with_its_line(tmp_path, capsys, good, bad, line, quoted):
    assert check(tmp_path, GOOD.replace(good, bad)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(f"module.py:{line}: " in text and quoted in text for text in lines)


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="does not exist"):
        ENGLISH["main"]([str(tmp_path / "missing.py")])


PAGE = """# Schedules

The rate falls to zero.

```
echo the run goes on
```
<!-- figures: runs -->
| killed | goes on |
<!-- end of figures -->
The run resumes.
"""


def check_page(directory, text):
    path = directory / "page.md"
    path.write_text(text)
    return ENGLISH["main"]([str(path)])


def test_code_and_results_in_pages_are_not_checked(tmp_path):
    assert check_page(tmp_path, PAGE) == 0


def test_dialect_in_pages_is_reported_with_its_line(tmp_path, capsys):
    assert check_page(tmp_path, PAGE.replace("resumes", "goes on")) == 1
    assert "page.md:11: 'goes on'" in capsys.readouterr().out
