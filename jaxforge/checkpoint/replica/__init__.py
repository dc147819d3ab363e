"""Replicas: copies of the state in the memory of this host and of another host."""
