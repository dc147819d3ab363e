"""A few seconds of `benchmarks/fuzz.py`: damaged checkpoints are read unchanged or refused."""

import collections
import os
import shutil

import numpy as np
import pytest

from tests.torch_compat import reading
from tests.torch_compat.mutations import mutate
from tests.torch_compat.subjects import SUBJECTS, write_subjects

pytest.importorskip("torch")
pytest.importorskip("safetensors")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of torch, about saving in one process
    pytest.mark.usefixtures("limits"),
]
MUTANTS = 6  # per subject


@pytest.fixture(scope="module")
def subjects(tmp_path_factory):
    return write_subjects(tmp_path_factory.mktemp("fuzz") / "subjects")


@pytest.mark.parametrize("name", SUBJECTS)
def test_mutant_is_read_or_refused(subjects, tmp_path, name):
    original = reading.outcome(subjects[name])["checkpoint"]
    assert original
    kinds = collections.Counter()
    for number in range(MUTANTS):
        mutant = tmp_path / "mutant"
        shutil.copytree(subjects[name], mutant, symlinks=True)
        what = mutate(np.random.default_rng([3, number]), mutant)
        kind, message = reading.judge(reading.outcome(mutant), original, what)
        assert not kind.isupper(), (number, what, kind, message)
        kinds[kind] += 1
        shutil.rmtree(mutant)
    # The mutated file depends on file names, which tensorstore generates for jaxforge checkpoints.
    # Servers ignore damaged messages, and an unfinished corpus is finished from its inputs.
    assert kinds["refused"] or name in ("jaxforge", "ports", "partial")


def test_pipe_among_arrays_is_refused(subjects, tmp_path):
    """Tensorstore would block on it; found by the fuzzer."""
    run = shutil.copytree(subjects["jaxforge"], tmp_path / "run")
    data = next(p for p in run.glob("checkpoints/*/state/ocdbt*/d/*") if p.is_file())
    data.unlink()
    os.mkfifo(data)
    answer = reading.outcome(run)
    assert (answer["kind"], "not a regular file" in answer["message"]) == ("refused", True)


@pytest.mark.parametrize("name", ["manifest.ocdbt", "_METADATA", "metadata"])
def test_oversized_array_metadata_are_refused(subjects, tmp_path, name):
    """Tensorstore would abort because it cannot allocate the memory; found by the fuzzer."""
    run = shutil.copytree(subjects["jaxforge"], tmp_path / "run")
    os.truncate(next(run.glob(f"checkpoints/*/*/{name}")), 1 << 39)
    answer = reading.outcome(run)
    assert (answer["kind"], "more than such a file can" in answer["message"]) == ("refused", True)


def test_judge_classifies_outcomes():
    answer = {
        "kind": "read",
        "message": "",
        "checkpoint": {"w": "1"},
        "says so": False,
        "memory": 0,
    }
    assert reading.judge(answer, {"w": "1"})[0] == "read as it was"
    assert reading.judge(answer, {"w": "2"})[0] == "DIFFERENT"
    assert reading.judge(answer | {"says so": True}, {"w": "2"})[0] == "read as it says"
    assert reading.judge(answer, {"w": "2"}, "a.pt: of_archive: 1@2")[0] == "read as it says"
    assert reading.judge(answer | {"memory": 1 << 30}, {"w": "1"})[0] == "MEMORY"
    assert reading.judge(answer | {"kind": "refused", "message": "a\x1b[2J"}, {})[0] == "MESSAGE"
    assert reading.judge(answer | {"kind": "refused", "message": "a file"}, {})[0] == "refused"
    for kind in ("traceback", "hang", "crash"):
        assert reading.judge(answer | {"kind": kind}, {"w": "1"})[0] == kind.upper()
