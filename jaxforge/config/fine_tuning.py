"""`[lora]`, `[dpo]` and `[distillation]`: training that starts from another trained model."""

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from jaxforge.config.section import AnyPath, BucketPath, Requires, Section

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


ADAPTER = ("lora_a", "lora_b")
"""Names of an adapter's matrices, next to the `weight` of their linear layer."""


class LoraConfig(Section):
    """Low-rank adapters (LoRA, arXiv:2106.09685): y = x Wᵀ + scale · x Aᵀ Bᵀ, with W frozen."""

    rank: NonNegativeInt = 0
    """Rank of the adapters; 0 trains the whole model without adapters."""
    alpha: PositiveFloat = 16.0
    """The adapters' outputs are multiplied by alpha / rank."""
    use_rslora: bool = False
    """Multiply by alpha / √rank instead (arXiv:2312.03732), for high ranks."""
    targets: tuple[str, ...] = ()
    """Regular expressions; linear layers with a matching name are adapted. By default all are."""
    dropout: Annotated[float, Field(ge=0, lt=1), Requires("rank")] = 0.0
    """Probability that training drops an element of an adapter's input; others are scaled up."""
    adapter: Annotated[AnyPath | None, Requires("rank")] = None
    """Adapter to start from, of PEFT or of another run; by default A is random and B zero."""

    @property
    def scale(self) -> float:
        """Factor of the adapters' outputs."""
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)

    def adapts(self, layer: str) -> bool:
        """Return whether a linear layer has an adapter.

        Args:
            layer: name such as "layers.attention.q_proj", without the index of the layer.
        """
        return not self.targets or any(re.search(pattern, layer) for pattern in self.targets)

    def freezes(self, name: str) -> bool:
        """Return whether adapters are trained and a parameter does not belong to one."""
        # Everything else keeps the weights of the base model, bit for bit.
        return bool(self.rank) and not is_adapter(name)

    def _problems(self) -> Iterator[str]:
        for pattern in self.targets:
            try:
                re.compile(pattern)
            except re.error as error:
                yield f'targets: "{pattern}" is not a regular expression: {error}'


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter, given its dotted name."""
    return name.rpartition(".")[2] in ADAPTER
