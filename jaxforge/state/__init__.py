"""Training state: arrays that a step updates and a checkpoint stores."""
