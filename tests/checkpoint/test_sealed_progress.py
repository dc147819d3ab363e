"""Checksums of a checkpoint's JSON files."""

import json
import shutil

import pytest

from jaxforge.errors import UserError
from jaxforge.state.progress import Progress, Validation, seal_progress, unseal_progress
from jaxforge.storage.seals import crc32
from tests.conftest import tiny_config
from tests.helpers import open_checkpoints, setup
from torch_compat.checkpoint.orbax_store import open_orbax

PROGRESS = Progress(step=7, samples=56, tokens=1792, best_metric=2.5, best_step=4, run_id="abc",
                    validation=Validation(["a"], {"a": {"loss": 1.25}}))  # fmt: skip


def test_bit_flip_raises_or_changes_nothing():
    text = json.dumps(seal_progress(PROGRESS, 123)).encode()
    raised = 0
    for location in range(len(text)):
        for bit in range(8):
            damaged = bytearray(text)
            damaged[location] ^= 1 << bit
            try:
                assert unseal_progress(json.loads(damaged), 7) == PROGRESS
            except ValueError:
                raised += 1
    assert raised > 7.5 * len(text)


def test_seal_ignores_json_formatting():
    values = json.loads(json.dumps(seal_progress(PROGRESS, 123), indent=2, sort_keys=True))
    assert unseal_progress(values, 7) == PROGRESS
    assert crc32({"b": (1, float("inf")), "a": None}) == crc32({"a": None, "b": [1, float("inf")]})


def test_progress_of_another_step_raises():
    with pytest.raises(ValueError, match="is of step 7, not of step 8"):
        unseal_progress(seal_progress(PROGRESS, 123), 8)


def test_progress_without_seal_is_read():
    assert unseal_progress(PROGRESS.to_json(), 7) == PROGRESS


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A program, and a run directory with its checkpoint of step 0."""
    program, run = setup(tiny_config()), tmp_path_factory.mktemp("run")
    checkpoints = open_checkpoints(run, program)
    checkpoints.save(Progress(samples=8, run_id="abc"), program.state())
    checkpoints.close()
    return program, run


def change(path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("progress", '"samples": 8', '"samples": 9', "progress/metadata is not what was saved"),
        ("progress", '"run_id": "abc"', '"run_id": "abb"', "progress/metadata is not what was"),
        ("checksums", '"step"', '"stdp"', "not what was saved: step"),
    ],
)
def test_damaged_json_raises_on_restore(saved, tmp_path, file, old, new, message):
    program, run = saved
    shutil.copytree(run, tmp_path / "run")
    change(tmp_path / "run" / "checkpoints" / "step_0" / file / "metadata", old, new)
    damaged = open_checkpoints(tmp_path / "run", program)
    like = program.abstract_state()
    with pytest.raises(UserError, match=f"step_0 is damaged .*{message}"):
        damaged.restore(like, 0)
    if file == "progress":
        with pytest.raises(UserError, match=f"step_0 is damaged .*{message}"):
            damaged.progress(0)
        with pytest.raises(UserError, match=f"step_0 is damaged .*{message}"):
            open_orbax(tmp_path / "run")
    damaged.close()


def test_renamed_checkpoint_raises(saved, tmp_path):
    program, run = saved
    shutil.copytree(run, tmp_path / "run")
    steps = tmp_path / "run" / "checkpoints"
    (steps / "step_0").rename(steps / "step_30")
    with pytest.raises(UserError, match=r"step_30 is damaged .*is of step 0, not of step 30"):
        open_checkpoints(tmp_path / "run", program).progress(30)


def test_damaged_config_raises_on_conversion(saved, tmp_path):
    run = saved[1]
    shutil.copytree(run, tmp_path / "run")
    open_orbax(tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / "step_0" / "config" / "metadata"
    change(path, '"rope_theta": 1', '"rope_theta": 3')
    with pytest.raises(UserError, match=r"step_0 is damaged .*config/metadata is not what was"):
        open_orbax(tmp_path / "run")


def test_amend_keeps_checksum_of_stored_config(saved, tmp_path):
    run = saved[1]
    shutil.copytree(run, tmp_path / "run")
    other = setup(tiny_config(train={"max_steps": 99}))
    amending = open_checkpoints(tmp_path / "run", other)
    amending.amend(Progress(samples=8, run_id="abc", best_metric=1.5))
    assert amending.progress(0).best_metric == 1.5
    amending.close()
    assert open_orbax(tmp_path / "run")[0].progress.best_metric == 1.5
