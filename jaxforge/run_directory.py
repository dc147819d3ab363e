"""The run directory, `checkpoint.dir`: everything that belongs to one run.

config.toml       the resolved config of the latest start
metrics.jsonl     an object per logged step (`telemetry.sinks.JsonlSink`)
logs/             a log per process
tokenizer/        a copy of the data's tokenizer, where there is one
checkpoints/      `checkpoint.manager`
tb_logs/          TensorBoard's files, with `metrics.enable_tensorboard`
wandb/            W&B's files, with `metrics.enable_wandb`
profiler_traces/  with `profiling.enable`
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxforge.config.job import JobConfig
from jaxforge.config.load import load_config
from jaxforge.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_of
from jaxforge.errors import UserError

log = logging.getLogger(__name__)

_CONFIG = "config.toml"
_TOKENIZER = "tokenizer"


def prepare(run: Path, config: JobConfig) -> None:
    """Makes the directory with its `config.toml` and `tokenizer/`; says what a restart changed.

    Raises:
        UserError: the directory cannot be written.
    """
    if jax.process_index() != 0:
        return
    try:
        run.mkdir(parents=True, exist_ok=True)
        _write_config(run, config)
        source = tokenizer_of(config.data)
        if source is not None and not (run / _TOKENIZER).exists():
            load_tokenizer(source).save(run / _TOKENIZER)
    except OSError as error:
        raise UserError(f"checkpoint.dir = {run}: {error.strerror}") from error


def read_config(run: Path, overrides: Sequence[str] = ()) -> JobConfig:
    """The config of a run, with settings such as "--distributed.tp=2" over it."""
    return load_config(run / _CONFIG, overrides)


def find_tokenizer(run: Path) -> Tokenizer | None:
    """The tokenizer of a run's data, where they had one."""
    return load_tokenizer(run / _TOKENIZER) if (run / _TOKENIZER).is_dir() else None


def read_tokenizer(run: Path) -> Tokenizer:
    """The tokenizer of a run's data.

    Raises:
        UserError: the run's data had none.
    """
    tokenizer = find_tokenizer(run)
    if tokenizer is None:
        raise UserError(
            f"{run} has no {_TOKENIZER}/: its data named none; set data.tokenizer_path in "
            f"{run / _CONFIG} and copy the tokenizer there"
        )
    return tokenizer


def _write_config(run: Path, config: JobConfig) -> None:
    path = run / _CONFIG
    if path.exists():
        for change in _changes(load_config(path), config):
            log.warning("changed since this run last started: %s", change)
    partial = path.with_suffix(".partial")
    partial.write_text(config.to_toml())
    os.replace(partial, path)


def _changes(old: JobConfig, new: JobConfig) -> list[str]:
    return [
        f"{section}.{key} {getattr(getattr(old, section), key)!r} -> {value!r}"
        for section in JobConfig.model_fields
        for key, value in getattr(new, section)
        if value != getattr(getattr(old, section), key)
    ]
