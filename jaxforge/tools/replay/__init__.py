"""A step of a run made again from its nearest checkpoint, and what happened in it."""
