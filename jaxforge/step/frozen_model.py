"""The frozen model of `train.objective`: reference of DPO, or teacher of a distillation."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float

from jaxforge.config.fine_tuning import LoraConfig
from jaxforge.config.job import JobConfig
from jaxforge.config.model import MODELS, ModelConfig
from jaxforge.data.packing import IGNORE
from jaxforge.data.teacher_logits import TEACHER_IDS, TEACHER_LOGITS
from jaxforge.errors import UserError
from jaxforge.kernels.context_parallel import context_size, to_sequence_order
from jaxforge.model.linear import is_matrix
from jaxforge.model.transformer import Model, Params, build_model
from jaxforge.parallel.device_memory import bytes_per_device
from jaxforge.parallel.sharding import TOKENS, batch_shardings, constrain, param_shardings
from jaxforge.parallel.stages import Stack
from jaxforge.step.context import spread_sequences
from jaxforge.step.distillation import top_logits
from jaxforge.step.dpo import PAIR_SCALE, REFERENCE_NLL, pair_scale
from jaxforge.step.token_nll import label_nll
from jaxforge.step.update_loss import Batch


def frozen_config(config: JobConfig, model: ModelConfig | None = None) -> JobConfig:
    """Return the config that a frozen model is built and loaded with.

    It has neither adapters nor products in 8 bits, and does not recompute activations.

    Args:
        config: the config of the run.
        model: the `[model]` section of a teacher; by default that of the run.
    """
    values = {
        "model": model or config.model,
        "lora": LoraConfig(),
        "train.activation_checkpointing": "none",
        "train.offload": (),
        "train.objective": "next_token",
        "checkpoint.exclude_from_loading": ("optimizer", "progress"),
    }
    if config.train.mixed_precision == "fp8":
        values["train.mixed_precision"] = "bf16"
    return config.with_values(values)


def frozen_bytes(
    config: JobConfig, model: Model, mesh: Mesh | AbstractMesh, teacher: ModelConfig | None = None
) -> int:
    """Return the bytes of the frozen model's parameters on a device; 0 if none is loaded.

    Args:
        config: the config of the run.
        model: the trained model.
        mesh: mesh of the run.
        teacher: the `[model]` section of the teacher; None: there is none, or it is not known.
    """
    is_base = config.lora.rank and config.dpo.reference is None
    has_reference = config.train.objective == "dpo" and not is_base
    if not has_reference and (config.train.objective != "distillation" or teacher is None):
        return 0
    section, pipeline = teacher or config.model, config.distributed
    stack = Stack(section.n_layers, pipeline.pp, pipeline.chunks)
    frozen = MODELS[section.model_type](section, dtype=model.dtype, stack=stack)
    return bytes_per_device(_stored_params(frozen, mesh))


def _stored_params(model: Model, mesh: Mesh | AbstractMesh) -> Params:
    """Return shape, dtype and sharding of the parameters: matrices in the compute dtype."""

    def like(leaf: jax.ShapeDtypeStruct, axes: Any, sharding: Any) -> jax.ShapeDtypeStruct:  # noqa: ANN401
        dtype = model.dtype if is_matrix(axes) else jnp.dtype(jnp.float32)
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding)

    shardings = param_shardings(model.abstract, model.axes, mesh)
    return jax.tree.map(like, model.abstract, model.axes, shardings)


class FrozenModel:
    """Model that is not trained, and the fields that it adds to batches.

    Its parameters are split over the mesh by the rules of its own sizes. Matrices are stored in the
    compute dtype, other arrays in float32, so that it computes what the trained model would.

    Args:
        config: result of `frozen_config`.
        objective: the config of the run.
        mesh: mesh of the run.
        platform: platform of its devices, and their compute capability.

    Attributes:
        config: see above.
        model: the model.
        like: shape, dtype and sharding of its parameters.
        like_state: those of its non-trainable state.

    Raises:
        UserError: the mesh does not fit the model, or the vocabularies differ.
    """

    def __init__(
        self,
        config: JobConfig,
        objective: JobConfig,
        mesh: Mesh,
        platform: tuple[str, str | None],
    ) -> None:
        student_size, teacher_size = objective.model.vocab_size, config.model.vocab_size
        if student_size != teacher_size:
            raise UserError(
                f"model.vocab_size = {student_size} differs from the {teacher_size} of "
                "distillation.teacher: their logits cannot be compared. Train on data of the "
                "teacher's tokenizer, with its vocab_size"
            )
        self.config, self.model, self._mesh = config, build_model(config, *platform), mesh
        self._objective = objective
        model = self.model
        self.like = _stored_params(model, mesh)
        self.like_state = jax.tree.map(
            lambda leaf, sharding: leaf.update(sharding=sharding),
            model.state.abstract,
            param_shardings(*model.state, mesh),
        )

    def add_fields(self, params: Params, batch: Batch) -> Batch:
        """Return a batch [microbatches, rows, tokens] with the fields of the objective.

        Args:
            params: parameters, joined with non-trainable state.
            batch: the batch, without padding microbatches.
        """
        fields = jax.lax.map(
            lambda microbatch: self._microbatch_fields(params, microbatch),
            spread_sequences(self.model, batch),
        )
        fields = {name: self._in_order(x) for name, x in fields.items()}
        if self._objective.train.objective == "dpo":
            fields[PAIR_SCALE] = pair_scale(batch)
        split = batch_shardings(self._mesh, {**batch, **fields})
        return {
            **batch,
            **{n: jax.lax.with_sharding_constraint(x, split[n]) for n, x in fields.items()},
        }

    def _microbatch_fields(self, params: Params, batch: Batch) -> dict[str, Array]:
        hidden, _ = self.model.forward(params, batch)
        if self._objective.train.objective == "dpo":
            nll = label_nll(self.config.train, self.model, params, hidden, batch["labels"])
            return {REFERENCE_NLL: jnp.where(batch["labels"] != IGNORE, nll, 0.0)}
        ids, logits = top_logits(self.model, params, hidden, self._objective.distillation.top_k)
        return {TEACHER_IDS: ids, TEACHER_LOGITS: logits}

    def _in_order(self, x: Float[Array, "m b s *k"]) -> Float[Array, "m b s *k"]:
        """Return a field with tokens in the order of the sequence, as batches are read."""
        devices = context_size()
        if devices == 1:
            return x
        ordered = to_sequence_order(x, self.model.runtime.context, devices, axis=2)
        return constrain(ordered, *TOKENS, *(None,) * (x.ndim - len(TOKENS)))
