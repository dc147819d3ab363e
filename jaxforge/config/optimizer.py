"""`[optimizer]`: the update rule."""

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from jaxforge.config.duration import Steps
from jaxforge.config.facts import Needs
from jaxforge.config.problems import Problem, single_change
from jaxforge.config.section import Options, OptionTable, Section, Weights, WeightTable
from jaxforge.errors import UserError
from jaxforge.registry import Registry

OPTIMIZERS = Registry(
    "optimizer.name", "adamw", "lion", "schedule_free_adamw", "muon", "soap", family="optax."
)
"""Registered update rules (`optim.optimizer`), and those of optax by their names."""

UPDATED_BY_ROWS = ("adamw", "lion", "schedule_free_adamw", "muon")
"""Update rules whose moments are updated part by part, so that they can be packed or offloaded."""

EXPERT_FIELD = "expert_"
"""Prefix of optimizer-state fields with a count per expert, such as `expert_updates`."""

UNUSUAL_LR, LARGEST_LR = 1.0, 10.0
"""Learning rates of built-in optimizers above which a start warns, and above which it is refused.

Updates of built-in optimizers have size 1 per weight (AdamW, Lion) or per direction of a matrix
(Muon), and initial weights are about 0.02. Published rates are at most 0.05. Registered optimizers
may define the rate differently.
"""

Beta = Annotated[float, Field(ge=0, lt=1)]
"""Decay rate of a running mean."""


_CAUTIOUS = ("adamw", "lion", "muon", "soap")
_PATTERNS = ("decay_patterns", "no_decay_patterns", "freeze_patterns", "lr_patterns")


class OptimizerConfig(Section):
    """Update rule and its hyperparameters."""

    name: Annotated[str, OPTIMIZERS] = "adamw"
    """Update rule, or an optimizer of optax, such as optax.adan or optax.contrib.ademamix."""
    options: OptionTable = Field(default_factory=Options)
    """Arguments of an optimizer of optax, as {b1 = 0.9}; lr and weight_decay keep their keys."""
    lr: PositiveFloat = 3e-4
    """Peak learning rate, multiplied by the schedule."""
    lr_scale_rule: Literal["none", "linear", "sqrt"] = "none"
    """Scale lr by the batch size over lr_base_batch, or by its square root; none when done."""
    lr_base_batch: PositiveInt | None = None
    """Sequences per update for which lr was chosen."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay of matrices, but not of biases and norms, including those per head."""
    cautious_weight_decay: bool = False
    """Decay only the elements that the step moves towards zero."""
    qk_clip: PositiveFloat | None = None
    """Largest attention logit of a head, enforced by scaling its queries and keys; else no limit.

    After an update in which a head had a larger logit, its query and key weights are scaled down.
    """
    decay_patterns: tuple[str, ...] = ()
    """Regular expressions; parameters with a matching name decay, including vectors."""
    no_decay_patterns: tuple[str, ...] = ()
    """Regular expressions; parameters with a matching name do not decay."""
    lr_patterns: WeightTable = Field(default_factory=Weights)
    """Regular expressions with factors on lr, as {"embedding" = 0.1}; the first match applies."""
    freeze_patterns: tuple[str, ...] = ()
    """Regular expressions; parameters with a matching name do not change and have no moments."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the square root of the second moment."""
    muon_momentum: Annotated[float, Field(gt=0, lt=1), Needs("name", "muon")] = 0.95
    """Momentum of Muon."""
    muon_ns_steps: Annotated[PositiveInt, Needs("name", "muon")] = 5
    """Newton-Schulz iterations of Muon."""
    muon_nesterov: Annotated[bool, Needs("name", "muon")] = False
    """Let Muon look ahead: orthogonalize gradient + muon_momentum * momentum."""
    muon_variant: Annotated[Literal["muon", "normuon"], Needs("name", "muon")] = "muon"
    """Muon, or NorMuon, which also brings the rows of a step to similar lengths."""
    muon_beta2: Annotated[Beta, Needs("muon_variant", "normuon")] = 0.95
    """Decay rate of NorMuon's mean square of each row."""
    muon_scale: Annotated[Literal["spectral", "rms"], Needs("name", "muon")] = "spectral"
    """Factor on Muon's steps: sqrt(max(1, rows / columns)), or 0.2 sqrt(max(rows, columns))."""
    muon_adam_lr: Annotated[PositiveFloat | None, Needs("name", "muon")] = None
    """Learning rate of the parameters that Muon leaves to AdamW; if not set, lr."""
    soap_precondition_frequency: Annotated[PositiveInt, Needs("name", "soap")] = 10
    """Updates from one change of SOAP's eigenbases to the next."""
    soap_max_precond_dim: Annotated[PositiveInt, Needs("name", "soap")] = 10_000
    """Rows or columns of a matrix beyond which SOAP leaves that side in its own basis."""
    soap_shampoo_beta: Annotated[Beta | None, Needs("name", "soap")] = None
    """Decay rate of SOAP's means of G G^T and G^T G; if not set, the second of betas."""
    schedule_free_warmup_steps: Annotated[Steps, Needs("name", "schedule_free_adamw")] = 0
    """Warm-up updates of schedule-free AdamW."""
    skip_idle_experts: Annotated[bool | None, Needs("model.num_experts")] = None
    """Do not update experts without tokens; if not set, as the loaded run does, else false."""

    def for_names(self, names: Iterable[str]) -> Self:
        """Return a copy of the section with only the patterns that match one of the names."""
        names = tuple(names)
        settings = {
            key: tuple(p for p in getattr(self, key) if any(re.search(p, name) for name in names))
            for key in _PATTERNS
        }
        factors = {pattern: self.lr_patterns[pattern] for pattern in settings["lr_patterns"]}
        return self.model_copy(update={**settings, "lr_patterns": Weights(factors)})

    def check_patterns(self, names: Iterable[str]) -> None:
        """Check that each pattern matches the name of a parameter, and that some are trained.

        Raises:
            UserError: a pattern matches no parameter, or all parameters are frozen.
        """
        names = sorted(names)
        if all(map(self.freezes, names)):
            raise UserError(
                f"optimizer.freeze_patterns = {list(self.freeze_patterns)} freezes all parameters: "
                "there is nothing to train"
            )
        for key in _PATTERNS:
            for pattern in getattr(self, key):
                if not any(re.search(pattern, name) for name in names):
                    raise UserError(
                        f'optimizer.{key}: "{pattern}" matches no parameter. Parameters are '
                        + ", ".join(names)
                    )

    def problems(self) -> Iterator[str | Problem]:
        """Yield the broken rules between the keys of this section."""
        if self.lr_scale_rule != "none" and self.lr_base_batch is None:
            yield Problem(
                f'lr_scale_rule = "{self.lr_scale_rule}" requires lr_base_batch, the sequences per '
                "update for which lr was chosen",
                (single_change("lr_scale_rule", "none"),),
            )
        if self.options and not self.name.startswith(OPTIMIZERS.family):
            yield (
                f'options are arguments of optimizers of optax, and name = "{self.name}" is none: '
                "remove options, or name one, such as optax.adan"
            )
        if self.skip_idle_experts and self.name == "soap":
            yield Problem(
                'skip_idle_experts = true does not support name = "soap", whose bases are changed '
                "for all experts at once",
                (single_change("skip_idle_experts", False),),
            )
        if self.cautious_weight_decay and self.name not in _CAUTIOUS:
            yield Problem(
                f'cautious_weight_decay does not support name = "{self.name}", only '
                f"{', '.join(_CAUTIOUS)}",
                (single_change("cautious_weight_decay", False),),
            )
        yield from self.large_rates(LARGEST_LR)
        for key in _PATTERNS:
            for pattern in getattr(self, key):
                try:
                    re.compile(pattern)
                except re.error as error:
                    yield f'{key}: "{pattern}" is not a regular expression: {error}'

    def large_rates(self, bound: float) -> Iterator[str]:
        """Yield a sentence for each learning rate of a built-in optimizer above a bound."""
        for key in ("lr", "muon_adam_lr"):
            rate = getattr(self, key)
            if self.name in OPTIMIZERS.ours and rate is not None and rate > bound:
                yield (
                    f"{key} = {rate:g} moves every weight by about {rate:g} per update, but "
                    f"initial weights are about 0.02{_suggest_rate(rate)}"
                )

    def decays(self, name: str, *, is_matrix: bool) -> bool:
        """Return whether a parameter decays.

        Args:
            name: such as "layers.attention.q_proj.weight", without the layer index.
            is_matrix: whether it has more than one dimension, not counting the layer axis.
        """
        if any(re.search(pattern, name) for pattern in self.no_decay_patterns):
            return False
        return is_matrix or any(re.search(pattern, name) for pattern in self.decay_patterns)

    def freezes(self, name: str) -> bool:
        """Return whether a parameter is frozen."""
        return any(re.search(pattern, name) for pattern in self.freeze_patterns)

    def lr_factor(self, name: str) -> float:
        """Return the factor on the learning rate of a parameter."""
        matches = (
            factor for pattern, factor in self.lr_patterns.items() if re.search(pattern, name)
        )
        return next(matches, 1.0)


def _suggest_rate(rate: float) -> str:
    """Return a suggestion for a rate whose exponent may lack its sign, else ""."""
    digits, exponent = f"{rate:e}".split("e")
    return f"; did you mean {float(f'{digits}e-{int(exponent)}'):g}?" if int(exponent) else ""
