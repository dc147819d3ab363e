"""`[data]`: what to train on and in which order."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from jaxforge.config.duration import Steps
from jaxforge.config.section import PathText, Section, Weights, WeightTable
from jaxforge.registry import Registry

DATASETS = Registry("data.dataset_type", "auto", "synthetic")
"""Kinds of training sets: `data.sources`."""

Overlong = Literal["truncate", "drop"]
"""What becomes of a conversation that is longer than a sequence."""

Verify = Literal["read", "start"]
"""When token files are compared with the hashes in their manifest."""


class DatasetSource(Section):
    """`[[data.datasets]]`: one source of a mixture."""

    path: PathText = ""
    """Directory of token shards."""
    weight: PositiveFloat = 1.0
    """Sampling weight relative to the other sources."""
    name: str = ""
    """Name in metrics and phases; empty means path, then hf_name."""
    hf_name: str = ""
    """Hugging Face dataset, instead of path."""
    hf_config: str = ""
    """Configuration of the Hugging Face dataset."""

    @property
    def label(self) -> str:
        """Name of the source in metrics and phases."""
        return self.name or self.path or self.hf_name

    def problems(self) -> Iterator[str]:
        """Yields the broken rules between the keys of this table."""
        if not self.path and not self.hf_name:
            yield "a source needs path or hf_name"


class TrainingPhase(Section):
    """`[[data.phases]]`: another mixture and learning rate from some step on."""

    start_step: Steps = 0
    """First update of the phase."""
    dataset_weights: WeightTable = Field(default_factory=Weights)
    """Sampling weights by source name; sources left out have those of data.datasets."""
    lr_scale: PositiveFloat = 1.0
    """Factor on the learning rate during the phase."""


class DataConfig(Section):
    """Sources, order and reading; datasets wins over dataset_path, that over hf_dataset_name."""

    dataset_type: Annotated[str, DATASETS] = "auto"
    """auto reads what the keys here name, synthetic makes random tokens where they name nothing."""
    dataset_path: PathText = ""
    """Directory of token shards."""
    file_pattern: str = "*.npy"
    """Glob of the shards in dataset_path, such as *.npy or tokenized_*.bin."""
    token_dtype: Literal["uint8", "uint16", "uint32", "int32"] | None = None
    """Type of the tokens in .bin shards; not set: by the manifest, or KempnerForge's guess."""
    verify: Verify = "read"
    """Compare shards with the hashes in their manifest as they are read, or all at the start."""
    on_change: Literal["refuse", "continue"] = "refuse"
    """Resume or not where the data of a run are not those of its checkpoint."""
    tokenizer_path: PathText = ""
    """A tokenizer.json, its directory, a model of the Hub, or "byte"; not set: that of the data."""
    eos_token_id: NonNegativeInt | None = None
    """Token that ends a document; not set means the tokenizer's."""
    shuffle: bool = True
    """Shuffle sequences each epoch; otherwise they come in file order."""
    order: Literal["grain", "torch"] = "grain"
    """Who shuffles and mixes; torch as KempnerForge on PyTorch: the same samples in each batch."""
    torch_ranks: PositiveInt | None = None
    """Data-parallel ranks of the run whose mixture order = "torch" follows; not set: this one's."""
    num_workers: NonNegativeInt = 4
    """Reading workers per host; 0 reads in the training process."""
    pin_memory: bool = True
    """Without effect: batches go to the devices through jax.device_put."""
    prefetch_factor: PositiveInt = 2
    """Batches that each worker reads ahead."""
    hf_dataset_name: str | None = None
    """Hugging Face dataset to tokenize and train on."""
    hf_dataset_config: str | None = None
    """Configuration of the Hugging Face dataset."""
    hf_dataset_split: str = "train"
    """Split of the Hugging Face dataset."""
    hf_dataset_text_field: str = "text"
    """Column of the Hugging Face dataset that holds the text."""
    hf_dataset_conversations: bool = False
    """Rows of Hugging Face datasets are conversations, or prompts with completions, and no text."""
    hf_dataset_image_field: str = "image"
    """Without effect: models are text models."""
    hf_dataset_prompt_field: str = ""
    """Without effect: models are text models."""
    hf_image_size: int = 224
    """Without effect: models are text models."""
    hf_streaming: bool = False
    """Stream the Hugging Face dataset rather than load it whole."""
    pack_sequences: bool = False
    """Attention and labels stop at document boundaries; conversations always keep to theirs."""
    overlong: Overlong = "truncate"
    """True if a conversation longer than a sequence is cut at its end or dropped."""
    datasets: tuple[DatasetSource, ...] = ()
    """Sources of a mixture, instead of a single one."""
    mix_temperature: PositiveFloat = 1.0
    """Sampling in proportion to weight^(1/T): larger is more even."""
    phases: tuple[TrainingPhase, ...] = ()
    """Changes of mixture and learning rate, by step."""
    phase_lr_lag: bool = False
    """lr_scale acts from a phase's second update on, as in KempnerForge, not from its first."""
    anneal_start_step: Steps = 0
    """Update at which anneal_weights take over, a shorthand for one phase; 0 never."""
    anneal_weights: WeightTable = Field(default_factory=Weights)
    """Sampling weights by source name from anneal_start_step on."""

    def problems(self) -> Iterator[str]:
        """Yields the broken rules between the keys of this section."""
        starts = [phase.start_step for phase in self.phases]
        if any(later <= earlier for earlier, later in pairwise(starts)):
            yield f"the start_step of phases must increase, not go {starts}"
        if self.phases and self.anneal_start_step:
            yield "phases and anneal_start_step exclude each other: write the annealing as a phase"
        for name, count in Counter(source.label for source in self.datasets).items():
            if count > 1:
                yield f'{count} sources of datasets are called "{name}": give each its own name'
        if self.datasets and self.dataset_type not in ("auto", "synthetic"):
            yield f'dataset_type = "{self.dataset_type}" does not mix: leave datasets out'
        if self.datasets and self.order == "torch" and not self.shuffle:
            yield 'a mixture with order = "torch" is always shuffled: set shuffle to true'

    @property
    def has_source(self) -> bool:
        """True if a key names data to read."""
        return bool(self.datasets or self.dataset_path or self.hf_dataset_name)

    @property
    def all_phases(self) -> tuple[TrainingPhase, ...]:
        """The phases; annealing is one."""
        if not self.anneal_start_step:
            return self.phases
        start, weights = self.anneal_start_step, self.anneal_weights
        return (TrainingPhase(start_step=start, dataset_weights=weights),)

    def weights(self, phase: TrainingPhase | None = None) -> dict[str, float]:
        """Sampling weight of each source by its name, in a phase or before the first."""
        over = phase.dataset_weights if phase else {}
        return {source.label: over.get(source.label, source.weight) for source in self.datasets}
