"""One update as one program: loss, gradients, guard, optimizer."""
