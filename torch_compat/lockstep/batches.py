"""The batch that both models get: from a file, from the config's data, or random tokens."""

from collections.abc import Collection
from pathlib import Path

import jax
import numpy as np

from jaxforge.config.job import JobConfig
from jaxforge.data import loader, sources
from jaxforge.errors import UserError
from jaxforge.parallel.mesh import make_mesh

_SEED = 0
_IGNORED = -100

Arrays = dict[str, np.ndarray]


def batch(
    config: JobConfig, path: Path | None, size: tuple[int, int], avoided: Collection[int] = ()
) -> tuple[Arrays, str]:
    """`input_ids` and `labels` [b, s], and where they are from.

    Args:
        config: the run's.
        path: an .npz file.
        size: rows and tokens of what is drawn.
        avoided: tokens that are not drawn at random.

    Raises:
        UserError: the file is none, or does not fit the model.
    """
    rows, tokens = size
    tokens = min(tokens, config.train.seq_len, config.model.max_seq_len)
    has_data = config.data.datasets or config.data.dataset_path or config.data.hf_dataset_name
    if path is not None:
        arrays, where = _of_file(path), str(path)
    elif has_data or config.data.dataset_type != "auto":
        arrays, where = _of_data(config, rows, tokens), "the first of the config's data"
    else:
        arrays, where = (
            _random(config.model.vocab_size, rows, tokens, avoided),
            f"random, seed {_SEED}",
        )
    _check(arrays, config, where)
    b, s = arrays["labels"].shape
    return arrays, f"batch: {b} x {s} tokens, {where}"


def _of_file(path: Path) -> Arrays:
    try:
        with np.load(path) as archive:
            return {name: archive[name] for name in ("input_ids", "labels")}
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"--batch {path}: {error}; it must be an .npz of input_ids and labels, both [b, s], as "
            "numpy.savez writes it"
        ) from error


def _of_data(config: JobConfig, rows: int, tokens: int) -> Arrays:
    """The beginnings of the first sequences, in one batch; documents are not kept apart."""
    train = config.train.model_copy(update={"batch_size": rows})
    config = config.model_copy(update={"train": train})
    mesh = make_mesh(config, jax.devices()[:1])
    dataset = sources.open_training_data(config)
    drawn = next(loader.training_batches(config, mesh, dataset, 0, 1))
    return {name: np.asarray(drawn[name])[0, :, :tokens] for name in ("input_ids", "labels")}


def _random(vocab: int, rows: int, tokens: int, avoided: Collection[int]) -> Arrays:
    """The last labels do not count, as of padded sequences."""
    drawn_from = np.setdiff1d(np.arange(vocab), list(avoided))
    drawn = np.random.default_rng(_SEED).choice(drawn_from, (rows, tokens + 1))
    labels = drawn[:, 1:].copy()
    labels[:, tokens - tokens // 4 :] = _IGNORED
    return {"input_ids": drawn[:, :-1], "labels": labels}


def _check(arrays: Arrays, config: JobConfig, where: str) -> None:
    shapes = {name: x.shape for name, x in arrays.items()}
    if len(set(shapes.values())) > 1 or arrays["labels"].ndim != 2 or not arrays["labels"].size:
        raise UserError(f"{where}: input_ids and labels must be [b, s] alike, not {shapes}")
    vocab, length = config.model.vocab_size, arrays["labels"].shape[1]
    least, most = int(arrays["input_ids"].min()), int(arrays["input_ids"].max())
    if least < 0 or max(most, int(arrays["labels"].max())) >= vocab:
        raise UserError(f"{where}: tokens must be from 0 to {vocab - 1} (model.vocab_size)")
    if length > config.model.max_seq_len:
        raise UserError(
            f"{where}: {length} tokens, and model.max_seq_len is {config.model.max_seq_len}"
        )
    if not np.any(arrays["labels"] >= 0):
        raise UserError(f"{where}: no label counts: all are negative")
