"""Eight virtual CPU devices for every test; small models; golden runs where they lie beside us."""

import atexit
import os
import shutil
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # workers and commands have it from who began
    COMPILED = tempfile.mkdtemp(prefix="jaxforge-tests-compiled-")
    atexit.register(shutil.rmtree, COMPILED, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = COMPILED
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

from pathlib import Path

import pytest

from jaxforge.config.job import JobConfig
from jaxforge.config.schema import REGISTRIES

GOLDEN = Path(__file__).parents[2] / "shared" / "golden"

TINY = {
    "model": {
        "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 256,
        "max_seq_len": 64,
    },
    "train": {
        "batch_size": 8, "seq_len": 32, "max_steps": 20, "mixed_precision": "fp32",
    },
    "optimizer": {"lr": 3e-3},
    "scheduler": {"warmup_steps": 4},
    "distributed": {"dp_shard": 1},
    "metrics": {"log_interval": 1},
}  # fmt: skip


@pytest.fixture
def golden() -> Path:
    """The directory of reference runs; the test is skipped where there is none."""
    if not GOLDEN.is_dir():
        pytest.skip("no reference runs beside this checkout")
    return GOLDEN


@pytest.fixture
def own_names(monkeypatch):
    """What a test registers is gone after it."""
    for registry in REGISTRIES:
        monkeypatch.setattr(registry, "_builders", dict(registry._builders))


def tiny_config(**sections: dict) -> JobConfig:
    """A config of seconds, with keys of each section replaced."""
    merged = {name: {**TINY.get(name, {}), **sections.get(name, {})} for name in {*TINY, *sections}}
    return JobConfig.model_validate(merged)
