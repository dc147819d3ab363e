"""Token files of other programs in buckets are read like those on a disk."""

from pathlib import Path

import numpy as np
import pytest

from jaxforge.data import sources
from jaxforge.data.tokens import TokenShards
from jaxforge.errors import UserError
from jaxforge.storage import files, urls
from tests.conftest import tiny_config

GOLDEN = Path(__file__).parents[1] / "golden" / "megatron" / "documents"


@pytest.mark.parametrize("size", [1, 2, 1000, 65_536, 65_537, 1_000_003])
def test_length_of_object_is_exact(bucket, size):
    path = urls.path(f"{bucket}/a")
    files.write(path, bytes(size))
    assert files.stat(path).size == size


def test_megatron_prefix_in_bucket(bucket):
    for path in GOLDEN.glob("int32*.[bi]*"):
        (urls.path(bucket) / path.name).write_bytes(path.read_bytes())
    batches = []
    for location in (GOLDEN, bucket):
        data = {"dataset_path": f"{location}/int32_text_document", "pack_sequences": True}
        config = tiny_config(data=data, train={"seq_len": 8}, model={"vocab_size": 100_000})
        dataset = sources.open_training_data(config)
        batches.append(dataset.batch(range(len(dataset))))
    assert batches[0].keys() == batches[1].keys()
    assert all((batches[0][name] == batches[1][name]).all() for name in batches[0])


def test_nanogpt_directory_in_bucket(bucket):
    for name, first in (("train", 0), ("val", 500)):
        tokens = np.arange(first, first + 90, dtype="<u2").tobytes()
        (urls.path(bucket) / f"{name}.bin").write_bytes(tokens)
    for split, first in (("train", 0), ("val", 500)):
        source = TokenShards(bucket, "*.npy", 8, vocab_size=1000, split=split)
        expected = np.arange(first, first + 90).reshape(10, 9)
        np.testing.assert_array_equal(source.batch(range(10)), expected)


def test_bare_file_in_bucket_needs_type(bucket):
    tokens = np.arange(90, dtype="<u4")
    (urls.path(bucket) / "a.bin").write_bytes(tokens.tobytes())
    with pytest.raises(UserError, match=r"a\.bin: a \.bin file in a bucket needs its type"):
        TokenShards(bucket, "*.bin", 8, vocab_size=1000)
    source = TokenShards(bucket, "*.bin", 8, vocab_size=1000, token_dtype="uint32")
    np.testing.assert_array_equal(source[9], tokens[81:])
    (urls.path(bucket) / "a.bin").write_bytes(tokens.tobytes()[:-1])
    with pytest.raises(UserError, match=r"a\.bin has 359 bytes, which is not a multiple"):
        TokenShards(bucket, "*.bin", 8, vocab_size=1000, token_dtype="uint32")
