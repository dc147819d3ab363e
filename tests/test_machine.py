"""No test depends on how busy the machine is: a wait for a process has one limit, which is none."""

import re
from pathlib import Path

LIMIT = re.compile(r"timeout=\d|\.wait\(\d|monotonic\(\) \+ \d")


def test_the_time_that_a_process_has_stands_in_one_place():
    here = Path(__file__).parent
    others = [path for path in here.rglob("*.py") if path != Path(__file__)]
    limits = [
        f"{path.relative_to(here)}:{number}"
        for path in others
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if LIMIT.search(line)
    ]
    assert not limits, "tests.machine.PATIENCE, or wait_until"
