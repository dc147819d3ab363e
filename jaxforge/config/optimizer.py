"""`[optimizer]`, `[scheduler]` and `[early_stop]`: update rule, its rate, and the early end."""

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from jaxforge.config.duration import PositiveSteps, Steps
from jaxforge.config.eval import Mode
from jaxforge.config.section import (
    Interval,
    Needs,
    Options,
    OptionTable,
    Section,
    Weights,
    WeightTable,
)
from jaxforge.errors import UserError
from jaxforge.registry import Registry


class Traits(NamedTuple):
    """Facts about an optimizer on which rules between keys depend.

    Attributes:
        updates_by_rows: whether moments are updated part by part, so that they can be packed or
            offloaded.
        decays_cautiously: whether `cautious_weight_decay` has an effect.
        skips_experts: whether it can skip experts without tokens.
    """

    updates_by_rows: bool = True
    decays_cautiously: bool = True
    skips_experts: bool = True


BUILT_IN = {
    "adamw": Traits(),
    "lion": Traits(),
    "schedule_free_adamw": Traits(decays_cautiously=False),
    "muon": Traits(),
    "soap": Traits(updates_by_rows=False, skips_experts=False),
}
"""Built-in optimizers. Each has a file of its name in `jaxforge/optim`, and settings in a table of
its name, if it has some of its own.

The table is declared here, because a config is read without JAX.
"""

_NOT_BUILT_IN = Traits(updates_by_rows=False, decays_cautiously=False)

OPTIMIZERS = Registry("optimizer.name", *BUILT_IN, family="optax.")
"""Registered update rules, and those of optax by their names."""

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

_PATTERNS = ("decay_patterns", "no_decay_patterns", "freeze_patterns", "lr_patterns")


class MuonConfig(Section):
    """`[optimizer.muon]`: Muon."""

    momentum: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Factor on the momentum in each update."""
    ns_steps: PositiveInt = 5
    """Newton-Schulz iterations."""
    nesterov: bool = False
    """Look ahead: orthogonalize gradient + momentum * buffer."""
    variant: Literal["muon", "normuon"] = "muon"
    """Muon, or NorMuon, which also brings the rows of a step to similar lengths."""
    beta2: Annotated[Beta, Needs("variant", "normuon")] = 0.95
    """Decay rate of NorMuon's mean square of each row."""
    scale: Literal["spectral", "rms"] = "spectral"
    """Factor on steps: sqrt(max(1, rows / columns)), or 0.2 sqrt(max(rows, columns))."""
    adam_lr: PositiveFloat | None = None
    """Learning rate of the parameters that Muon leaves to AdamW; if not set, optimizer.lr."""


class SoapConfig(Section):
    """`[optimizer.soap]`: SOAP."""

    precondition_frequency: PositiveInt = 10
    """Updates from one change of the eigenbases to the next."""
    max_precond_dim: PositiveInt = 10_000
    """Rows or columns of a matrix beyond which that side stays in its own basis."""
    shampoo_beta: Beta | None = None
    """Decay rate of the means of G G^T and G^T G; if not set, the second of optimizer.betas."""


class ScheduleFreeAdamWConfig(Section):
    """`[optimizer.schedule_free_adamw]`: schedule-free AdamW."""

    warmup_steps: Steps = 0
    """Warm-up updates."""


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
    skip_idle_experts: Annotated[bool | None, Needs("model.num_experts")] = None
    """Do not update experts without tokens; if not set, as the loaded run does, else false."""

    muon: Annotated[MuonConfig, Needs("name", "muon")] = Field(default_factory=MuonConfig)
    """Settings of Muon."""
    soap: Annotated[SoapConfig, Needs("name", "soap")] = Field(default_factory=SoapConfig)
    """Settings of SOAP."""
    schedule_free_adamw: Annotated[
        ScheduleFreeAdamWConfig, Needs("name", "schedule_free_adamw")
    ] = Field(default_factory=ScheduleFreeAdamWConfig)
    """Settings of schedule-free AdamW."""

    @property
    def traits(self) -> Traits:
        """Facts about the optimizer."""
        return BUILT_IN.get(self.name, _NOT_BUILT_IN)

    def check_patterns(self, names: Iterable[str]) -> None:
        """Check that each pattern matches the name of a parameter, and that some are trained.

        Raises:
            UserError: a pattern matches no parameter, or all parameters are frozen.
        """
        names = sorted(names)
        # Names are known only once the model is built, so this is not a rule of the section.
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

    def _problems(self) -> Iterator[str]:
        if self.lr_scale_rule != "none" and self.lr_base_batch is None:
            yield (
                f'lr_scale_rule = "{self.lr_scale_rule}" requires lr_base_batch, the sequences per '
                "update for which lr was chosen"
            )
        if self.options and not self.name.startswith(OPTIMIZERS.family):
            yield (
                f'options are arguments of optimizers of optax, and name = "{self.name}" is not '
                "one of them: remove options, or name one, such as optax.adan"
            )
        if self.skip_idle_experts and not self.traits.skips_experts:
            yield (
                f'skip_idle_experts = true does not support name = "{self.name}", which changes '
                "all experts at once: set it to false"
            )
        if self.cautious_weight_decay and not self.traits.decays_cautiously:
            names = ", ".join(n for n, traits in BUILT_IN.items() if traits.decays_cautiously)
            yield f'cautious_weight_decay does not support name = "{self.name}", only {names}'
        yield from self.large_rates(LARGEST_LR)
        for key in _PATTERNS:
            for pattern in getattr(self, key):
                try:
                    re.compile(pattern)
                except re.error as error:
                    yield f'{key}: "{pattern}" is not a regular expression: {error}'

    def large_rates(self, bound: float) -> Iterator[str]:
        """Yield a sentence for each learning rate of a built-in optimizer above a bound."""
        for key, rate in (("lr", self.lr), ("muon.adam_lr", self.muon.adam_lr)):
            if self.name in OPTIMIZERS.built_in and rate is not None and rate > bound:
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
        # no_decay wins over decay: it is the safer of two matching patterns.
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


SCHEDULERS = Registry("scheduler.name", "cosine", "linear", "wsd", "constant", "rex", "none")
"""Registered schedules (`optim.schedule`)."""


class SchedulerConfig(Section):
    """Factor of each update on optimizer.lr."""

    name: Annotated[str, SCHEDULERS] = "cosine"
    """Shape after the warm-up; none is a constant 1 without warm-up."""
    warmup_steps: Steps = 2000
    """Updates in which the factor rises from 0 to 1; by default at most a tenth of the run."""
    warmup_offset: Annotated[int, Field(ge=0, le=1)] = 0
    """1 gives the first update the factor 1/warmup_steps instead of 0."""
    decay_steps: Steps | None = None
    """Updates of the decay to min_lr_ratio; if 0 or not set, all remaining updates."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Factor at the end of the decay."""
    stable_steps: Annotated[Steps | None, Needs("name", "wsd")] = None
    """Updates at factor 1 between warm-up and decay."""
    wsd_decay_type: Annotated[Literal["cosine", "linear", "sqrt"], Needs("name", "wsd")] = "cosine"
    """Shape of the decay."""
    rex_alpha: Annotated[PositiveFloat, Needs("name", "rex")] = 1.0
    """Exponent of the decay."""
    unit: Literal["updates", "samples"] = "updates"
    """Unit in which the factor progresses; it matters only with train.batch_ramp."""

    def boundaries(self, max_steps: int) -> tuple[int, int, int]:
        """Return the updates at the end of the warm-up, at the start of the decay and at its end.

        Returns:
            Three step counts. The last is not the largest if the run is too short for a decay.
        """
        stable = (self.stable_steps or 0) if self.name == "wsd" else 0
        begin = self.warmup_steps + stable
        end = begin + self.decay_steps if self.decay_steps else max_steps
        if self.name == "rex":
            end = max(end, begin + 1)
        return self.warmup_steps, begin, end


CONDITIONS = ("patience_steps", "target", "max_steps", "max_loss")
"""Keys that are conditions."""


class EarlyStopConfig(Section):
    """Conditions that end a run before train.max_steps, checked in the order of the keys.

    Without a condition, a run does not end early.
    """

    metric: str = "eval/loss"
    """Metric that must improve, such as eval/loss, train/loss or eval/tasks/<task>/acc."""
    mode: Mode = "auto"
    """Direction of metric: lower ("min") or higher ("max") is better; by default from its name."""
    patience_steps: Annotated[PositiveSteps | None, Interval()] = None
    """End after this many updates without improvement, checked whenever the metric is logged."""
    min_delta: NonNegativeFloat = 0.0
    """Smallest change of the metric that counts as an improvement."""
    target: float | None = None
    """End once the metric is at least as good as this value: the run measures the time to it."""
    max_steps: PositiveSteps | None = None
    """End after this many updates; the schedule still follows train.max_steps."""
    max_loss: PositiveFloat | None = None
    """End when train/loss exceeds this value."""

    @property
    def uses_metric(self) -> bool:
        """True if a condition depends on `metric`."""
        return self.patience_steps is not None or self.target is not None

    @property
    def conditions(self) -> dict[str, float]:
        """The conditions that are set, by key."""
        values = {key: getattr(self, key) for key in CONDITIONS}
        return {key: value for key, value in values.items() if value is not None}
