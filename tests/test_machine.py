"""No test depends on how busy the machine is: a wait for a process has one limit, which is none.

Nor on where its file is.
"""

import re
from collections import Counter
from pathlib import Path

LIMIT = re.compile(r"(?<![\w-])timeout=\d|\.wait\(\d|monotonic\(\) \+ \d")


def test_time_that_a_process_has_stands_in_one_place():
    here = Path(__file__).parent
    others = [path for path in here.rglob("*.py") if path != Path(__file__)]
    limits = [
        f"{path.relative_to(here)}:{number}"
        for path in others
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if LIMIT.search(line)
    ]
    assert not limits, "tests.machine.PATIENCE, or wait_until"


def test_no_two_files_have_one_name():
    """pytest would take one for the other, and skip it."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
