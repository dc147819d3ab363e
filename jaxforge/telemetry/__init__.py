"""What the user sees of a run: banner, progress, metrics."""
