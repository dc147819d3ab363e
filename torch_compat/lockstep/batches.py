"""Batch for both models: from a file, from the config's data, or random tokens."""

from collections.abc import Collection
from pathlib import Path

import jax
import numpy as np

from jaxforge.config.job import JobConfig
from jaxforge.data import loader, sources
from jaxforge.errors import UserError
from jaxforge.parallel.mesh import make_mesh

_SEED = 0
_IGNORED = -100  # label of tokens without a loss

Arrays = dict[str, np.ndarray]
"""Arrays in host memory by name."""


def batch(
    config: JobConfig, path: Path | None, size: tuple[int, int], avoided: Collection[int] = ()
) -> tuple[Arrays, str]:
    """Return a batch with `input_ids` and `labels` [b, s], and a description of its origin.

    Args:
        config: the config of the run.
        path: an .npz file; None: the config's data, or random tokens without data.
        size: number of sequences and tokens of a batch that is not from a file.
        avoided: tokens that a random batch must not contain.

    Raises:
        UserError: the file cannot be read or does not match the model.
    """
    rows, tokens = size
    tokens = min(tokens, config.train.seq_len, config.model.max_seq_len)
    has_data = config.data.datasets or config.data.dataset_path or config.data.hf_dataset_name
    if path is not None:
        arrays, where = _load_file(path), str(path)
    elif has_data or config.data.dataset_type != "auto":
        arrays, where = _from_data(config, rows, tokens), "the first sequences of the config's data"
    else:
        arrays = _random(config.model.vocab_size, rows, tokens, avoided)
        where = f"random, seed {_SEED}"
    _check(arrays, config, where)
    b, s = arrays["labels"].shape
    return arrays, f"batch: {b} x {s} tokens, {where}"


def _load_file(path: Path) -> Arrays:
    try:
        with np.load(path) as archive:
            return {name: archive[name] for name in ("input_ids", "labels")}
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"--batch {path}: {error}. The file must be an .npz of input_ids and labels, both [b, "
            "s], as written by numpy.savez"
        ) from error


def _from_data(config: JobConfig, rows: int, tokens: int) -> Arrays:
    """Return the beginnings of the first sequences, without document masks."""
    config = config.with_values({"train.batch_size": rows})
    mesh = make_mesh(config, jax.devices()[:1])
    dataset = sources.open_training_data(config)
    batch = next(loader.training_batches(config, mesh, dataset, 0, 1))
    return {name: np.asarray(batch[name])[0, :, :tokens] for name in ("input_ids", "labels")}


def _random(vocab: int, rows: int, tokens: int, avoided: Collection[int]) -> Arrays:
    """Return random tokens; the last quarter of the labels is ignored, as in padded sequences."""
    choices = np.setdiff1d(np.arange(vocab), list(avoided))
    sample = np.random.default_rng(_SEED).choice(choices, (rows, tokens + 1))
    labels = sample[:, 1:].copy()
    labels[:, tokens - tokens // 4 :] = _IGNORED
    return {"input_ids": sample[:, :-1], "labels": labels}


def _check(arrays: Arrays, config: JobConfig, where: str) -> None:
    shapes = {name: x.shape for name, x in arrays.items()}
    if len(set(shapes.values())) > 1 or arrays["labels"].ndim != 2 or not arrays["labels"].size:
        raise UserError(f"{where}: input_ids and labels must both be [b, s], not {shapes}")
    vocab, length = config.model.vocab_size, arrays["labels"].shape[1]
    least, most = int(arrays["input_ids"].min()), int(arrays["input_ids"].max())
    if least < 0 or max(most, int(arrays["labels"].max())) >= vocab:
        raise UserError(f"{where}: tokens must be from 0 to {vocab - 1} (model.vocab_size)")
    if length > config.model.max_seq_len:
        raise UserError(
            f"{where}: sequences have {length} tokens, but model.max_seq_len is "
            f"{config.model.max_seq_len}"
        )
    if not np.any(arrays["labels"] >= 0):
        raise UserError(f"{where}: all labels are negative, so that there is no loss")
