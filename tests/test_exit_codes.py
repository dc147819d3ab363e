"""The table of exit codes: unique, explained, and the same in the errors and the documentation."""

import errno
import pickle
import re
import signal
from pathlib import Path

import pytest

from jaxforge.cli.running import run_main
from jaxforge.data.corpus.workers import answer
from jaxforge.errors import PeerLostError, StorageError, UserError
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


def wrapped(error, cause):
    error.__cause__ = cause
    return error


FULL = OSError(errno.ENOSPC, "No space left on device", "/data/x")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (FULL, 74, "error: [Errno 28] No space left on device: '/data/x'\n"),
        (wrapped(UserError("cannot write x: No space"), FULL), 74, "error: cannot write x: No sp"),
        (wrapped(UserError("no x"), FileNotFoundError(2, "no such file")), 2, "error: no x\n"),
        (StorageError("lost"), 74, "error: lost\n"),
        (PeerLostError("gone"), 134, "error: gone\n"),
    ],
)
def test_full_disk_has_its_code_whatever_the_error_became(capsys, error, code, message):
    def fails():
        raise error

    assert run_main(fails) == code
    assert capsys.readouterr().err.startswith(message)


def test_error_without_a_code_keeps_its_traceback():
    def fails():
        raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.raises(PermissionError):
        run_main(fails)


def test_worker_answers_with_failure_of_storage():
    def fails(_):
        raise FULL

    error = pickle.loads(pickle.dumps(answer(fails, None)))
    assert isinstance(error, StorageError)
    assert error.filename == "/data/x"


def test_ends_that_all_processes_share_ask_for_no_restart():
    assert not any(again(item.code) for item in AGREED)


def test_every_code_is_explained():
    assert meaning(70) == Exit.HUNG.meaning
    assert meaning(137) == "killed by SIGKILL"
    assert meaning(3) == meaning(200) == "not a code of jaxforge's"


def test_documentation_has_the_same_table():
    rows = re.findall(r"^\| (\d+) \| (.+) \| (yes|no) \|$", LAUNCHING.read_text(), re.MULTILINE)
    assert rows == [(str(x.code), x.meaning, "yes" if x.again else "no") for x in Exit]
