"""Configs in the repository."""

from pathlib import Path

_DIRECTORY = Path(__file__).parents[1] / "configs"
FAMILIES = ("llama", "nemotron_h", "gpt_oss", "lfm2", "falcon_h1", "gemma_4")
CONFIGS = sorted(path for name in FAMILIES for path in (_DIRECTORY / name).glob("*.toml"))
