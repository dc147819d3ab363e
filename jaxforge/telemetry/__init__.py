"""User-facing output of a run: banner, progress, metrics."""
