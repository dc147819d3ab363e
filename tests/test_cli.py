"""Commands end, with their code, whatever their threads do."""

import subprocess
import sys

import pytest

PROGRAM = """
import concurrent.futures, time
from jaxforge.cli import leave

pool = concurrent.futures.ThreadPoolExecutor(1, "reader")
pool.submit(time.sleep, {seconds})
leave(75, patience={patience})
"""


@pytest.mark.parametrize(
    ("seconds", "patience", "said"),
    [
        (600, 0.1, "exiting with 75, although threads go on: reader_0\n"),
        (0.1, 600, ""),
    ],
)
def test_a_thread_that_hangs_is_left_behind(seconds, patience, said):
    program = PROGRAM.format(seconds=seconds, patience=patience)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (75, said)
