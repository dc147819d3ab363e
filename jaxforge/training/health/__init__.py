"""Health checks: hangs, slow hosts, wrong sums, flipped bits, exhausted memory."""
