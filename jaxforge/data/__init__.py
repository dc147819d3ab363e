"""From token shards to batches: orders, mixtures, packing, and the loader."""
