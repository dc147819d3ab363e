"""Paths on disk and in buckets, locks, atomic directories, JSON from untrusted files."""

COMMITTED = "commit_success.txt"
"""Name of the file written last of a checkpoint in a bucket, where nothing can be renamed."""
