"""`[optimizer]`: the update rule."""

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from jaxforge.config.duration import Steps
from jaxforge.config.problems import Problem, single_change
from jaxforge.config.section import Section
from jaxforge.errors import UserError
from jaxforge.registry import Registry

OPTIMIZERS = Registry("optimizer.name", "adamw", "lion", "schedule_free_adamw", "muon")
"""Update rules: `optim.optimizer`."""

EXPERT_FIELD = "expert_"
"""Prefix of what an optimizer's state counts for each expert on its own: `expert_updates`."""

UNUSUAL_LR, LARGEST_LR = 1.0, 10.0
"""Learning rates of the built-in optimizers: a start warns above the first, and is refused above
the second.

Their updates are of size 1 for each weight (AdamW, Lion) or direction of a matrix (Muon), and
weights begin at some 0.02. Published rates end at 0.05. Registered optimizers may mean something
else by it.
"""

Beta = Annotated[float, Field(ge=0, lt=1)]
"""Decay of a running mean."""


class OptimizerConfig(Section):
    """Update rule and its constants."""

    name: Annotated[str, OPTIMIZERS] = "adamw"
    """Update rule."""
    lr: PositiveFloat = 3e-4
    """Peak learning rate; the schedule multiplies it."""
    lr_scale_rule: Literal["none", "linear", "sqrt"] = "none"
    """Multiply lr by the batch over lr_base_batch, or by the root of that; none once it is done."""
    lr_base_batch: PositiveInt | None = None
    """Sequences per update that lr is meant for."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled decay of every parameter with more than one dimension."""
    decay_patterns: tuple[str, ...] = ()
    """Regular expressions; parameters in whose name one is found decay, vectors too."""
    no_decay_patterns: tuple[str, ...] = ()
    """Regular expressions; parameters in whose name one is found do not decay."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decays of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    fused: bool = True
    """Without effect: XLA fuses the update."""
    muon_momentum: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Momentum of Muon."""
    muon_ns_steps: PositiveInt = 5
    """Newton-Schulz iterations of Muon."""
    muon_adam_lr: PositiveFloat | None = None
    """Learning rate of the parameters that Muon leaves to AdamW; not set means lr."""
    schedule_free_warmup_steps: Steps = 0
    """Updates over which schedule-free AdamW warms up."""
    skip_idle_experts: bool | None = None
    """Skip experts without tokens in an update; not set means no, or as the loaded run does."""

    def for_names(self, names: Iterable[str]) -> Self:
        """Return the section with the decay patterns that are found in some names."""
        names = tuple(names)
        settings = {
            key: tuple(p for p in getattr(self, key) if any(re.search(p, name) for name in names))
            for key in ("decay_patterns", "no_decay_patterns")
        }
        return self.model_copy(update=settings)

    def check_patterns(self, names: Iterable[str]) -> None:
        """Looks whether each pattern is found in the name of a parameter.

        Raises:
            UserError: one is in none.
        """
        names = sorted(names)
        for key in ("decay_patterns", "no_decay_patterns"):
            for pattern in getattr(self, key):
                if not any(re.search(pattern, name) for name in names):
                    raise UserError(
                        f'optimizer.{key}: "{pattern}" is in the name of no parameter; they are '
                        + ", ".join(names)
                    )

    def problems(self) -> Iterator[str | Problem]:
        """Yields the broken rules between the keys of this section."""
        if self.lr_scale_rule != "none" and self.lr_base_batch is None:
            yield Problem(
                f'lr_scale_rule = "{self.lr_scale_rule}" needs lr_base_batch, the sequences per '
                "update that lr is meant for",
                (single_change("lr_scale_rule", "none"),),
            )
        yield from self.large_rates(LARGEST_LR)
        for key in ("decay_patterns", "no_decay_patterns"):
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
                    f"{key} = {rate:g} moves every weight by about {rate:g} in an update, where "
                    f"weights begin at some 0.02{_slip(rate)}"
                )

    def decays(self, name: str, *, is_matrix: bool) -> bool:
        """Return whether a parameter decays.

        Args:
            name: such as "layers.attention.q_proj.weight": layers are not told apart.
            is_matrix: whether it has more than one dimension, layers not counted.
        """
        if any(re.search(pattern, name) for pattern in self.no_decay_patterns):
            return False
        return is_matrix or any(re.search(pattern, name) for pattern in self.decay_patterns)


def _slip(rate: float) -> str:
    """Return a question where only the sign of an exponent may be missing."""
    digits, exponent = f"{rate:e}".split("e")
    return f"; did you mean {float(f'{digits}e-{int(exponent)}'):g}?" if int(exponent) else ""
