"""Many runs of one config: a grid of keys, or a ladder of sizes."""
