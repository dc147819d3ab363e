"""Writer of a complete directory of shards, for tests of readers."""

import zlib

from jaxforge.data.corpus import writer
from jaxforge.data.corpus.manifest import CONVERSATIONS, LENGTHS, VERSION, Manifest


class ShardWriter(writer.ShardWriter):
    """`writer.ShardWriter` that also writes the manifest."""

    def __init__(self, directory, *, vocab_size, **options):
        super().__init__(directory, **options)
        self._vocab_size = vocab_size

    def finish(self, **fields):
        """Complete the last shard, and write and return the manifest."""
        shards, version, crc32 = self.complete(), VERSION, None
        if self.conversations:
            version = CONVERSATIONS
            crc32 = zlib.crc32((self._directory / LENGTHS).read_bytes())
        facts = {"version": version, "documents": self.documents, "lengths_crc32": crc32} | fields
        manifest = Manifest.of_shards(
            shards, dtype=self.dtype, vocab_size=self._vocab_size, **facts
        )
        manifest.write(self._directory)
        return manifest
