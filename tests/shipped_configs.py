"""Configs in the repository."""

from pathlib import Path

CONFIGS = sorted((Path(__file__).parents[1] / "configs" / "llama").glob("*.toml"))
