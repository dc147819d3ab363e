"""From text to token shards: what `prepare` reads, tokenizers, conversations."""
