"""Manifests of saved logits that are damaged, or from a stranger."""

import json
import os

import numpy as np
import pytest

from jaxforge.data.corpus import manifest as corpus
from jaxforge.data.teacher_logits import FILE_NAME, Manifest, SavedLogits, file_name
from jaxforge.errors import UserError

SOUND = {
    "teacher": "t", "arrays": {"w": ["float32", 7]}, "vocab_size": 16, "top_k": 4,
    "dtype": "float32",
    "settings": {"train.seq_len": 4, "data.pack_sequences": True, "data.eos_token_id": None,
                 "data.overlong": "cut"},
    "sequences_per_file": 4, "datasets": [{"name": "d", "sequences": 4, "contents": "x"}],
    "version": 1,
}  # fmt: skip


def read(tmp_path, **changes):
    (tmp_path / FILE_NAME).write_text(json.dumps(SOUND | changes))
    return Manifest.read(tmp_path)


def test_sound_manifest_is_read(tmp_path):
    assert read(tmp_path).record.itemsize == 4 + 4 * 4 * (2 + 4)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"top_k": -1}, "top_k: Input should be greater than 0"),
        ({"top_k": 17}, "top_k exceeds vocab_size = 16"),
        ({"vocab_size": 0}, "vocab_size: Input should be greater than 0"),
        ({"top_k": 2**40, "vocab_size": 2**40}, "logits is too large"),
        ({"top_k": 10**300, "vocab_size": 10**300}, "logits is too large"),
        ({"settings": {}}, "settings has no train.seq_len"),
        ({"settings": {"train.seq_len": 4}}, "settings has no data.pack_sequences"),
        ({"settings": SOUND["settings"] | {"train.seq_len": 0}}, "train.seq_len is not an integer"),
        ({"settings": SOUND["settings"] | {"train.seq_len": "4"}}, "train.seq_len is not an int"),
        ({"settings": SOUND["settings"] | {"train.seq_len": True}}, "train.seq_len is not an int"),
        ({"settings": SOUND["settings"] | {"train.seq_len": 2**40}}, "is too large"),
        ({"datasets": []}, "datasets: List should have at least 1 item"),
        ({"datasets": [{"name": "d", "sequences": -4, "contents": "x"}]}, "datasets.0.sequences"),
        ({"sequences_per_file": 1e999}, "sequences_per_file: "),
        ({"arrays": {"w": ["float32"]}}, "arrays.w"),
        ({"dtype": "O"}, "dtype: Input should be 'float32' or 'float16'"),
    ],
    ids=str,
)
def test_damaged_manifest_is_refused(tmp_path, changes, problem):
    with pytest.raises(UserError, match="is damaged, or no manifest of logits: ") as error:
        read(tmp_path, **changes)
    assert problem in str(error.value)


def test_file_with_fewer_records_than_its_manifest_says_is_refused(tmp_path):
    """Its header makes it as long as the missing record."""
    datasets = [{"name": "d", "sequences": 5, "contents": "x"}]
    manifest = read(tmp_path, sequences_per_file=5, datasets=datasets)
    np.save(tmp_path / file_name(0, 0), np.zeros(4, manifest.record))
    logits = SavedLogits(tmp_path, manifest, 0, 4)
    logits.check_files()
    tokens = np.zeros((1, 4), np.int32)
    with pytest.raises(UserError, match=r"0_00000.npy has 4 records, and .* names 5"):
        logits.read([4], {"input_ids": tokens})


@pytest.mark.parametrize(
    "manifest", [Manifest, corpus.Manifest], ids=["teacher logits", "token shards"]
)
@pytest.mark.parametrize("kind", ["pipe", "vast", "directory"])
def test_manifest_that_is_no_file_of_text_is_refused(tmp_path, manifest, kind):
    path = tmp_path / (FILE_NAME if manifest is Manifest else corpus.FILE_NAME)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.touch()
        os.truncate(path, 1 << 40)
    with pytest.raises(UserError, match=f"cannot read {path}: "):
        manifest.read(tmp_path)
