"""`[eval]`: evaluation during training."""

import re
from collections import Counter
from collections.abc import Iterator

from pydantic import NonNegativeFloat, PositiveInt

from jaxforge.config.duration import PositiveSteps, Steps
from jaxforge.config.section import Section

METRICS = ("loss", "perplexity", "bits_per_byte")
"""What is logged of each evaluation set."""


class EvalSource(Section):
    """Where the text of an evaluation set comes from."""

    dataset_path: str = ""
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
        """Whether any source is named."""
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

    def problems(self) -> Iterator[str]:
        """Yields the broken rules between the keys of this section."""
        if self.datasets and self.has_data:
            key = "dataset_path" if self.dataset_path else "hf_dataset_name"
            yield f"datasets and {key} exclude each other: give the set of {key} a table, too"
        if self.sample_interval and not self.sample_prompts:
            yield 'sample_prompts = [] leaves nothing to continue: give texts, or [""]'
        names = Counter(dataset.name for dataset in self.datasets)
        for name in (name for name, count in names.items() if count > 1):
            yield f'two evaluation sets have the name "{name}": rename one'

    def is_due(self, step: int) -> bool:
        """Whether to evaluate after `step` updates."""
        return step >= self.start_step and step % self.interval == 0

    def is_sample_due(self, step: int) -> bool:
        """Whether the model is to write samples after `step` updates."""
        return self.sample_interval > 0 and step % self.sample_interval == 0

    def sources(self) -> dict[str, EvalSource]:
        """The evaluation sets by name; "" is the name of a single one."""
        if self.datasets:
            return {dataset.name: dataset for dataset in self.datasets}
        return {"": self} if self.has_data else {}

    def metric_names(self) -> tuple[str, ...]:
        """What an evaluation logs: metrics over all sets together, then those of each named one."""
        sets = ["", *(f"{dataset.name}/" for dataset in self.datasets)]
        return tuple(f"eval/{name}{metric}" for name in sets for metric in METRICS)
