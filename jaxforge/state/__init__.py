"""What a step changes, and what a checkpoint holds."""
