"""From text to batches: tokenizers, token shards, orders, packing, and the loader."""
