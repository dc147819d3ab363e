"""Configs to start with: of a size that suits data and machine, or a preset, as commented TOML."""
