"""The table of exit codes: unique, explained, and the same in the errors and the documentation."""

import re
import signal
from pathlib import Path

import pytest

from jaxforge.errors import StorageError, UserError
from jaxforge.exit_codes import AGREED, Exit, again, exit_code, meaning

LAUNCHING = Path(__file__).parents[1] / "docs" / "launching.md"


def test_errors_have_their_codes():
    assert UserError.exit_code == Exit.USER_ERROR.code == 2
    assert StorageError.exit_code == Exit.STORAGE.code == 74
    assert exit_code(-signal.SIGABRT) == Exit.ABORTED.code
    assert exit_code(75) == 75


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (1, True), (16, True), (69, True), (70, True), (134, True),
        (0, False), (2, False), (65, False), (74, False), (75, False), (130, False),
        (137, True), (139, True),  # SIGKILL, SIGSEGV
        (143, False), (138, False), (129, False),  # SIGTERM, SIGUSR1, SIGHUP
        (3, False), (127, False), (200, False),
    ],
)  # fmt: skip
def test_restarted_exit_codes(code, expected):
    assert again(code) is expected


def test_ends_that_all_processes_share_ask_for_no_restart():
    assert not any(again(item.code) for item in AGREED)


def test_every_code_is_explained():
    assert meaning(70) == Exit.HUNG.meaning
    assert meaning(137) == "killed by SIGKILL"
    assert meaning(3) == meaning(200) == "not a code of jaxforge's"


def test_documentation_has_the_same_table():
    rows = re.findall(r"^\| (\d+) \| (.+) \| (yes|no) \|$", LAUNCHING.read_text(), re.MULTILINE)
    assert rows == [(str(x.code), x.meaning, "yes" if x.again else "no") for x in Exit]
