"""Distillation: a student learns from the logits of a teacher (arXiv:1503.02531).

    python examples/distillation.py RUN --config configs/debug.toml [--section.key=value ...]

RUN is a run directory of a model with the same vocabulary. Its weights become a part of the train
state that no gradient moves: laid out over the mesh like parameters, saved and restored with those
of the student.

The run directory is runs/distillation, unless --checkpoint.dir names another.
"""

import functools
import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxforge.aux_outputs import AuxOutputs, LossWeights
from jaxforge.cli.running import run_main
from jaxforge.commands.train import main
from jaxforge.config.model import ModelConfig
from jaxforge.config.train import TrainConfig
from jaxforge.data.packing import IGNORE
from jaxforge.errors import UserError
from jaxforge.inference import open_run
from jaxforge.model.linear import Declare, Initializer, Untrained
from jaxforge.model.network import Transformer
from jaxforge.model.transformer import Batch, Model, Params, register_model
from jaxforge.parallel.sharding import Axes
from jaxforge.runs.run_directory import read_config
from jaxforge.step.losses import LossFunction, register_loss

SHARE = 0.5
"""Of the teacher's opinion in the loss."""

TEACHER = "TEACHER_RUN"
"""The environment variable that names its run."""


class StoredDeclare(Declare):
    """Declares arrays that are not trained."""

    def __call__(self, shape: tuple[int, ...], axes: Axes, init: Initializer) -> Untrained:
        """Declare a parameter as `Declare` does."""
        return self.untrained(shape, axes, init)


def teacher_run() -> Path:
    """Return the teacher's run directory.

    Raises:
        UserError: none is named.
    """
    if not os.environ.get(TEACHER):
        raise UserError(f"the teacher is missing: name its run directory, first or in {TEACHER}")
    return Path(os.environ[TEACHER])


def teacher_config() -> ModelConfig:
    """Return the `[model]` of the teacher's run."""
    return read_config(teacher_run()).model


class StudentAndTeacher(Transformer):
    """Student decoder with a teacher decoder."""

    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        super().__init__(config, declare)
        teacher = teacher_config()
        if teacher.vocab_size != config.vocab_size:
            raise UserError(
                f"model.vocab_size = {config.vocab_size} differs from the {teacher.vocab_size} of "
                f"the teacher, {teacher_run()}: their logits cannot be compared. Train on data "
                "prepared with the teacher's tokenizer, with its vocab_size"
            )
        self.teacher = Transformer(teacher, StoredDeclare(*declare))


@register_model("distilled")
class Distilled(Model):
    """The student; its untrained state is the teacher's parameters."""

    network = StudentAndTeacher

    def __init__(self, config: ModelConfig, **options: Any) -> None:  # noqa: ANN401
        super().__init__(config, **options)
        self.teacher = Model(teacher_config(), dtype=self.dtype)
        with open_run(teacher_run(), devices=jax.devices()[:1]).in_use() as params:
            self._weights = jax.device_get(params)

    def initial_state(self) -> Params:
        """Return the teacher's parameters."""
        return {"teacher": jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), self._weights)}


@register_loss("distillation")
def distillation(config: TrainConfig, model: Distilled) -> LossFunction:
    """Per token: (1 - SHARE) · -log p(label) + SHARE · KL(teacher | student)."""

    def loss(
        params: Params, hidden_BSD: Array, batch: Batch, loss_weights: LossWeights
    ) -> AuxOutputs:
        labels_BS, theirs = batch["labels"], jax.lax.stop_gradient(params["teacher"])
        log_p_BSV = jax.nn.log_softmax(model.logits(params, hidden_BSD))
        their_hidden_BSD, _ = model.teacher.forward(theirs, batch)
        log_q_BSV = jax.nn.log_softmax(model.teacher.logits(theirs, their_hidden_BSD))
        is_valid_BS = labels_BS != IGNORE
        index_BS1 = jnp.where(is_valid_BS, labels_BS, 0)[..., None]
        nats_BS = -jnp.take_along_axis(log_p_BSV, index_BS1, axis=-1)[..., 0]
        kl_BS = jnp.sum(jnp.exp(log_q_BSV) * (log_q_BSV - log_p_BSV), axis=-1)

        def mean(value_BS: Array) -> Array:
            return loss_weights.token * jnp.sum(jnp.where(is_valid_BS, value_BS, 0.0))

        terms = {"labels": (1 - SHARE) * mean(nats_BS), "teacher": SHARE * mean(kl_BS)}
        return AuxOutputs(terms)

    return loss


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments and not arguments[0].startswith("-"):
        os.environ[TEACHER] = arguments.pop(0)
    own = ["--model.model_type=distilled", "--train.loss_fn=distillation"]
    directory = "--checkpoint.dir=runs/distillation"
    raise SystemExit(run_main(functools.partial(main, [directory, *arguments, *own])))
