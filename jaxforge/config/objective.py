"""`[dpo]` and `[distillation]`: settings of the values of `train.objective`."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from jaxforge.config.facts import Requires
from jaxforge.config.section import AnyPath, BucketPath, Section

Objective = Literal["next_token", "dpo", "distillation"]
"""Values of `train.objective`."""

METRIC_PREFIXES = ("dpo/", "distillation/")
"""Beginnings of the names of metrics of objectives."""


class DpoConfig(Section):
    """Direct preference optimization (arXiv:2305.18290), with train.objective = "dpo"."""

    beta: PositiveFloat = 0.1
    """Factor of rewards, beta · log(p / p of the reference); a small beta allows large changes."""
    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """sigmoid: DPO; ipo: squared distance to the margin 1 / (2 beta); hinge: SLiC."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5), Requires("loss", "sigmoid")] = 0.0
    """Assumed fraction of exchanged answers (conservative DPO)."""
    length_normalized: bool = False
    """Divide the log-probability of each answer by its number of tokens."""
    rpo_alpha: NonNegativeFloat = 0.0
    """Weight of an additional term: mean -log p of the tokens of the chosen answer."""
    reference: AnyPath | None = None
    """Checkpoint of the reference model, of the same shape; if not set, checkpoint.load_path."""


class DistillationConfig(Section):
    """Distillation from the logits of a teacher (arXiv:1503.02531).

    train.objective = "distillation" trains (1 - weight) · cross-entropy + weight · T² · KL, the
    divergence of the student from the teacher, both at the temperature T.
    """

    teacher: AnyPath | None = None
    """Checkpoint of a model with the same vocabulary, of any shape; required without logits."""
    logits: BucketPath | None = None
    """Directory of saved logits (jaxforge prepare --teacher-logits), which replace the teacher."""
    top_k: PositiveInt = 64
    """Number of the teacher's largest logits per token that are used, renormalized to sum to 1."""
    temperature: PositiveFloat = 1.0
    """Temperature T: the logits of both models are divided by T."""
    weight: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Weight of the divergence; the cross-entropy has the weight 1 - weight."""
