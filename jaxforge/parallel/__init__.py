"""Devices: the mesh, the sharding of every array on it, and the processes that make it up."""
