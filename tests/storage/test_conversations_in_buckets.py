"""Conversations in buckets."""

import numpy as np

from jaxforge.data.conversation_shards import ConversationShards
from jaxforge.data.corpus.manifest import FIRST, UNLEARNED
from jaxforge.data.tokens import manifest_of
from jaxforge.storage import urls
from tests.data.manifest_writer import ShardWriter


def test_bucket_windows_equal_disk_windows(bucket, tmp_path):
    rng = np.random.default_rng(0)
    with ShardWriter(
        tmp_path / "train", vocab_size=99, dtype="uint32", shard_tokens=80, conversations=True
    ) as writer:
        for _ in range(30):
            entries = rng.integers(0, 99, rng.integers(2, 20), np.uint32)
            entries[0] |= FIRST | UNLEARNED
            writer.add(entries, documents=1)
        writer.finish(eos_id=0, tokenizer="x", tokenizer_sha256="y")
    remote = urls.path(f"{bucket}/train")
    for path in (tmp_path / "train").iterdir():
        (remote / path.name).write_bytes(path.read_bytes())
    assert manifest_of(remote, "data.dataset_path").conversations
    original, copied = (
        ConversationShards(location, "*.npy", 32, "truncate", vocab_size=99)
        for location in (tmp_path / "train", remote)
    )
    indices = range(len(original))
    np.testing.assert_array_equal(original.batch(indices), copied.batch(indices))
