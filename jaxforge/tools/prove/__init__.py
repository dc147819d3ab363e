"""Proof that a config computes the same on its mesh as on one device (`jaxforge prove`)."""
