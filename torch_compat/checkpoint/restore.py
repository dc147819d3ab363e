"""Restoring PyTorch and Hugging Face checkpoints directly into a sharded training state.

Each process reads only the shards of its own devices from the files.
"""

import dataclasses
import logging
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import PyTree

from jaxforge.checkpoint import layout, paths
from jaxforge.checkpoint.layout import check_adapters
from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError
from jaxforge.parallel.host_memory import in_own_memory
from jaxforge.state.progress import Progress
from jaxforge.state.train_state import GuardState, TrainState, with_counts
from jaxforge.storage import urls
from torch_compat.checkpoint import adapters, checkpoints, hf_state, originals, train_state
from torch_compat.checkpoint.dcp_state import ReadOptions
from torch_compat.checkpoint.eight_bit import check_moment_dtype
from torch_compat.checkpoint.hf_config import CONFIG
from torch_compat.checkpoint.stacking import Stacking
from torch_compat.checkpoint.state import CheckpointState, Tensors
from torch_compat.formats.lazy import LazyTensor

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ForeignCheckpoint:
    """Checkpoint of another code base, opened for a run.

    Attributes:
        name: description for the log.
        checkpoint: contents.
        stacking: stacking of layers and experts in the run.
    """

    name: str
    checkpoint: CheckpointState
    stacking: Stacking

    @property
    def has_optimizer(self) -> bool:
        """True if a run can resume from the checkpoint; otherwise only its weights can be used."""
        return self.checkpoint.moments is not None

    @property
    def groups(self) -> int:
        """Number of groups that trained apart; PyTorch jobs have none."""
        return 0

    def progress(self) -> Progress:
        """Progress of the checkpoint's run; the beginning if it holds weights only."""
        return self.checkpoint.progress or Progress()

    def restore(self, like: TrainState) -> tuple[TrainState, Progress]:
        """Restore state and progress.

        Args:
            like: requested shapes, dtypes and shardings (`state.train_state.abstract_state`).
        """
        progress, moments = self.checkpoint.progress, self.checkpoint.moments
        assert progress is not None
        assert moments is not None
        tree = layout.to_tree(like)
        fields = {name: self._arrays(moments[name], tree["optimizer"][name]) for name in moments}
        scalars = {
            name: _scalar(value, tree["optimizer"][name])
            for name, value in self.checkpoint.scalars.items()
        }
        scales_loss = like.guard.loss_scale is not None
        # No other framework stores the guard's statistics. The count of skipped steps is in the
        # progress.
        fresh = GuardState.fresh(progress.skipped, scales_loss=scales_loss)
        guard = jax.tree.map(_scalar, fresh, like.guard)
        tree = {
            "step": _scalar(progress.step, like.step),
            **self.restore_model(layout.model_tree(like.params, like.model_state)),
            "optimizer": {**fields, **scalars},
            "guard": guard.arrays(),
        }
        return with_counts(layout.from_tree(tree, like), progress), progress

    def restore_model(self, like: PyTree) -> PyTree:
        """Restore the model's part of the state (`layout.model_tree`)."""
        parts: dict[str, Tensors] = {
            "params": self.checkpoint.params,
            "model_state": self.checkpoint.model_state,
        }
        joined = {name: self.stacking.join(part) for name, part in parts.items()}
        saved = {name: unflatten_dict(part, sep=".") for name, part in joined.items()}
        expected = layout.drop_unsaved(like, saved)
        if adapters.adapters_of(self.checkpoint.params):
            check_adapters(expected["params"], saved["params"], self.name)
        return {name: self._arrays(part, expected[name]) for name, part in parts.items() if part}

    def _arrays(self, entries: Tensors, like: PyTree) -> PyTree:
        leaves = self.stacking.join(entries)
        expected = flatten_dict(like, sep=".")
        return unflatten_dict(
            {name: _array(leaves[name], leaf) for name, leaf in expected.items()}, sep="."
        )


def open_foreign(path: str, config: JobConfig) -> ForeignCheckpoint:
    """Open a DCP or Hugging Face checkpoint for a run.

    Raises:
        UserError: the checkpoint is missing, damaged, or of another model than `[model]`.
    """
    reference = checkpoints.find(path)
    if reference.format == "peft" and path == config.lora.adapter:
        return _open_adapter(reference, config)
    left_out = set(config.checkpoint.exclude_from_loading)
    # Adapters belong to the weights of a checkpoint alone.
    excluded = bool(config.lora.rank) or not left_out.isdisjoint(("optimizer", "indexer"))
    if "indexer" in left_out:  # the checkpoint has the network without it
        latent = config.model.latent_attention.with_values({"index_heads": 0})
        config = config.with_values({"model.latent_attention": latent})
    checkpoint = reference.read(config, ReadOptions(weights_only=excluded, keep_place=excluded))
    check_moment_dtype(checkpoint, config, str(reference))
    notes = [*checkpoint.notes]
    if reference.is_torch and checkpoint.progress and checkpoint.progress.samples:
        notes += train_state.order_notes(checkpoint.dialect, config.data)
    for note in notes:
        log.warning("%s: %s", reference, note)
    step = "" if checkpoint.progress is None else f"step {checkpoint.progress.step} of "
    name = f"{step}{reference} ({checkpoint.dialect})"
    return ForeignCheckpoint(name, checkpoint, Stacking(config.model))


def _open_adapter(reference: checkpoints.CheckpointRef, config: JobConfig) -> ForeignCheckpoint:
    """Open an adapter of PEFT that a run starts from.

    Raises:
        UserError: it is damaged, or has another rank, scale or other layers than `[lora]`.
    """
    lora, base = config.lora, config.checkpoint.load_path
    tensors = reference.peft_adapter(config, checkpoints.find(base) if base else None)
    scale = adapters.read_config(reference.directory).scale
    if not math.isclose(scale, lora.scale):
        raise UserError(
            f"{reference}: its outputs are multiplied by {scale:g}, and by {lora.scale:g} with "
            "[lora]. Set lora.rank, lora.alpha and lora.use_rslora as in its adapter_config.json"
        )
    return ForeignCheckpoint(
        f"{reference} (peft)", CheckpointState(tensors), Stacking(config.model)
    )


def copy_documents(path: str, run: Path) -> None:
    """Copy the JSON files of the Hugging Face model that a run starts from, for exports of the run.

    Args:
        path: the checkpoint. A run that started from Hugging Face passes its own copies on; other
            checkpoints have none.
        run: run directory.

    Raises:
        UserError: the files cannot be written.
    """
    reference = checkpoints.find(path)
    documents: dict[str, bytes] = {}
    if reference.format == "jaxforge":  # may be in a bucket, which is read without fsspec
        copies = paths.find(urls.path(path))[0] / hf_state.IMPORTED
        names = (*hf_state.DOCUMENTS, originals.RECORD)
        files = (copies / name for name in names)
        documents = {file.name: file.read_bytes() for file in files if file.is_file()}
    elif not reference.is_torch:
        documents = hf_state.document_contents(reference.directory)
    if CONFIG in documents:
        try:
            hf_state.write_documents(documents, run)
        except OSError as error:
            raise UserError(f"checkpoint.dir = {run}: {error.strerror}") from error


def counts_experts(path: str, config: JobConfig) -> bool:
    """Return whether a run that resumes from a checkpoint skips experts without tokens.

    Raises:
        UserError: see `open_foreign`.
    """
    reference = checkpoints.find(path)
    return reference.is_torch and reference.read(config, ReadOptions()).counts_experts


def _array(tensor: LazyTensor, like: jax.Array) -> jax.Array:
    cast = tensor.cast(np.dtype(like.dtype))

    # JAX calls this once per local shard, so that no process reads the whole array.
    def read_shard(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        bounds = zip(index, cast.shape, strict=True)
        return cast.read(tuple(slice(*s.indices(n)[:2]) for s, n in bounds))

    return in_own_memory(jax.make_array_from_callback(cast.shape, like.sharding, read_shard))


def _scalar(value: float | np.ndarray, like: jax.Array) -> jax.Array:
    return jax.device_put(jnp.asarray(value, like.dtype), like.sharding)
