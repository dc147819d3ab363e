"""`[eval]`: evaluation during training."""

import re
from collections import Counter
from collections.abc import Iterator

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from jaxforge.config import points
from jaxforge.config.duration import PositiveSteps, Steps
from jaxforge.config.section import PathText, Section

METRICS = ("loss", "perplexity", "bits_per_byte")
"""What is logged of each evaluation set."""


class EvalSource(Section):
    """Source of the text of an evaluation set."""

    dataset_path: PathText = ""
    """Directory of token shards."""
    file_pattern: str = "*.npy"
    """Glob of the shards in dataset_path."""
    hf_dataset_name: str | None = None
    """Hugging Face dataset to tokenize and evaluate on, instead of dataset_path."""
    hf_dataset_config: str | None = None
    """Configuration of the Hugging Face dataset."""
    hf_dataset_split: str = "validation"
    """Split of the Hugging Face dataset."""

    @property
    def has_data(self) -> bool:
        """Return whether any source is named."""
        return bool(self.dataset_path or self.hf_dataset_name)


class EvalDataset(EvalSource):
    """`[[eval.datasets]]`: one of several evaluation sets."""

    name: str = ""
    """Name in metrics: letters, digits, "_", "." and "-"."""

    def problems(self) -> Iterator[str]:
        """Yields the broken rules between the keys of this table."""
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", self.name):
            yield f'a set needs a name of letters, digits, "_", "." and "-", not "{self.name}"'
        if not self.has_data:
            yield "a set needs dataset_path or hf_dataset_name"


class EvalConfig(EvalSource):
    """When and on what to evaluate; the keys of a source here mean a single, unnamed set."""

    enabled: bool = False
    """Evaluate during training."""
    interval: PositiveSteps = 1000
    """Updates between evaluations."""
    start_step: Steps = 0
    """Updates before the first evaluation, which is due at the next multiple of interval."""
    steps: PositiveInt = 50
    """Batches per evaluation and set, always the same ones."""
    datasets: tuple[EvalDataset, ...] = ()
    """Several named sets, instead of a single one."""
    sample_interval: Steps = 0
    """Updates between samples that the model writes, also without evaluation; 0 writes none."""
    sample_prompts: tuple[str, ...] = ("",)
    """Texts that are continued; an empty one begins a document."""
    sample_tokens: PositiveInt = 64
    """Tokens of each sample, at most."""
    sample_temperature: NonNegativeFloat = 0.8
    """Of the samples; 0 takes the likeliest token."""
    activations_interval: Steps = 0
    """Updates between captures of activations, also without evaluation; 0 captures none."""
    activations_points: tuple[str, ...] = ("residual",)
    """What is captured, by name or pattern: attention, mlp, residual, attention_weights, logits."""
    activations_layers: tuple[NonNegativeInt, ...] = ()
    """Numbers of the layers that are captured, from 0; [] captures all."""
    activations_sequences: PositiveInt = 8
    """Sequences that are captured: the first of the set, always the same ones."""
    activations_set: str = ""
    """Name of the evaluation set that they are of; empty: the first."""

    def problems(self) -> Iterator[str]:
        """Yields the broken rules between the keys of this section."""
        if self.datasets and self.has_data:
            key = "dataset_path" if self.dataset_path else "hf_dataset_name"
            yield f"datasets and {key} exclude each other: give the set of {key} a table, too"
        if self.sample_interval and not self.sample_prompts:
            yield 'sample_prompts = [] leaves nothing to continue: give texts, or [""]'
        if problem := points.unknown(self.activations_points):
            yield f"activations_points: {problem}"
        if self.activations_interval and not self.activations_points:
            yield 'activations_points = [] leaves nothing to capture: give names, or ["residual"]'
        names = Counter(dataset.name for dataset in self.datasets)
        for name in (name for name, count in names.items() if count > 1):
            yield f'two evaluation sets have the name "{name}": rename one'

    def is_due(self, step: int) -> bool:
        """Return whether to evaluate after `step` updates."""
        return step >= self.start_step and step % self.interval == 0

    def is_sample_due(self, step: int) -> bool:
        """Return whether to write samples after `step` updates."""
        return self.sample_interval > 0 and step % self.sample_interval == 0

    def is_capture_due(self, step: int) -> bool:
        """Return whether to capture activations after `step` updates."""
        return self.activations_interval > 0 and step % self.activations_interval == 0

    @property
    def captured_points(self) -> tuple[str, ...]:
        """Names of what is captured."""
        return points.matching(self.activations_points)

    @property
    def reads_data(self) -> bool:
        """Return whether a run reads evaluation sets, to evaluate or to capture activations."""
        return self.enabled or self.activations_interval > 0

    def captured_set(self) -> str:
        """Name of the set that activations are of, as in `sources`."""
        return self.activations_set or next(iter(self.sources()))

    def sources(self) -> dict[str, EvalSource]:
        """The evaluation sets by name; "" is the name of a single one."""
        if self.datasets:
            return {dataset.name: dataset for dataset in self.datasets}
        return {"": self} if self.has_data else {}

    def metric_names(self) -> tuple[str, ...]:
        """Return the metrics of an evaluation: over all sets, then for each named set."""
        sets = ["", *(f"{dataset.name}/" for dataset in self.datasets)]
        return tuple(f"eval/{name}{metric}" for name in sets for metric in METRICS)
