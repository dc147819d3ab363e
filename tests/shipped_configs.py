"""Configs in the repository."""

from pathlib import Path

_DIRECTORY = Path(__file__).parents[1] / "configs"
CONFIGS = sorted(
    path for name in ("llama", "nemotron_h") for path in (_DIRECTORY / name).glob("*.toml")
)
