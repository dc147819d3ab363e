"""The decoder: modules declare parameters once; `Model` turns them into pure functions."""
