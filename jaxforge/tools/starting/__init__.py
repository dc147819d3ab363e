"""Starter configs as commented TOML: sized for data and machine, or from a preset."""
