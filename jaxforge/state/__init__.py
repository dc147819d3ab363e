"""State of training: arrays that a step changes and a checkpoint holds."""
