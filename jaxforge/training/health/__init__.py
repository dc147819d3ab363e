"""Whether the machine is well: hangs, slow hosts, wrong sums, flipped bits, memory that ran out."""
