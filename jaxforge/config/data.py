"""`[data]`: sources of the training data and their order."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from jaxforge.config.duration import Steps, TokenCount
from jaxforge.config.section import BucketPath, DiskPath, Flag, Needs, Section, Weights, WeightTable
from jaxforge.registry import Registry

DATASETS = Registry("data.dataset_type", "auto", "synthetic")
"""Kinds of training sets: `data.sources`."""

Overlong = Literal["truncate", "drop"]
"""Treatment of a conversation that is longer than a sequence."""

Verify = Literal["read", "start"]
"""Time at which token files are compared with the hashes in their manifest."""


class DatasetSource(Section):
    """`[[data.datasets]]`: one source of a mixture."""

    path: BucketPath = ""
    """Directory of token shards, or the prefix of .bin and .idx files of Megatron-LM."""
    weight: PositiveFloat = 1.0
    """Sampling weight relative to the other sources."""
    name: str = ""
    """Name in metrics and phases; if empty, path or hf_name."""
    hf_name: str = ""
    """Hugging Face dataset, as an alternative to path."""
    hf_config: str = ""
    """Configuration of the Hugging Face dataset."""
    max_epochs: PositiveFloat | None = None
    """Passes over the source, after which its weight goes to the others; if not set, no limit."""
    max_tokens: Annotated[TokenCount | None, Flag.HOST_INTEGER] = None
    """Tokens of the source, after which its weight goes to the others; a number, or "2B tok"."""

    @property
    def label(self) -> str:
        """Name of the source in metrics and phases."""
        return self.name or self.path or self.hf_name

    def _problems(self) -> Iterator[str]:
        if not self.path and not self.hf_name:
            yield "a source requires path or hf_name"

    @property
    def has_limit(self) -> bool:
        """True if a run draws at most a part of the source."""
        return self.max_epochs is not None or self.max_tokens is not None


class TrainingPhase(Section):
    """`[[data.phases]]`: a change of mixture and learning rate at a step."""

    start_step: Steps = 0
    """First update of the phase."""
    dataset_weights: WeightTable = Field(default_factory=Weights)
    """Sampling weights by source name; other sources have their weight in data.datasets."""
    lr_scale: PositiveFloat = 1.0
    """Factor on the learning rate during the phase."""


class DataConfig(Section):
    """Training data; datasets overrides dataset_path, which overrides hf_dataset_name."""

    dataset_type: Annotated[str, DATASETS] = "auto"
    """auto reads the sources below; synthetic generates random tokens if no source is set."""
    dataset_path: BucketPath = ""
    """Directory of token shards, or the prefix of .bin and .idx files of Megatron-LM."""
    file_pattern: str = "*.npy"
    """Glob of the shards in dataset_path, such as *.npy or tokenized_*.bin."""
    token_dtype: Literal["uint8", "uint16", "uint32", "int32"] | None = None
    """Dtype of the tokens in .bin shards; if not set, the manifest's, else KempnerForge's guess."""
    verify: Verify = "read"
    """Compare shards with the hashes in their manifest as they are read, or all at startup."""
    on_change: Literal["refuse", "continue"] = "refuse"
    """Refuse to resume, or continue, if the data differ from those of the checkpoint."""
    tokenizer_path: BucketPath = ""
    """A tokenizer.json, its directory, a Hub model, or "byte"; if empty, the data's tokenizer."""
    eos_token_id: NonNegativeInt | None = None
    """Id of the token that ends a document; if not set, the tokenizer's."""
    shuffle: bool = True
    """Shuffle the sequences in each epoch; false keeps the file order."""
    order: Literal["grain", "torch"] = "grain"
    """Algorithm for shuffling and mixing; torch gives the same batches as KempnerForge."""
    torch_ranks: PositiveInt | None = None
    """Data-parallel ranks of the run to reproduce with order = "torch"; if not set, this run's."""
    num_workers: NonNegativeInt = 4
    """Data-loading workers per host; 0 loads in the training process."""
    prefetch_factor: PositiveInt = 2
    """Batches that each worker loads in advance."""
    cache_dir: Annotated[DiskPath, Flag.SIDE_EFFECT] = ""
    """Directory on a fast local disk that caches tokens of buckets; if empty, there is no cache."""
    cache_gb: Annotated[PositiveFloat, Needs("cache_dir")] = 50.0
    """Size of the cache in GB, shared by all processes and runs of a host that name cache_dir."""
    hf_dataset_name: str | None = None
    """Hugging Face dataset to tokenize and train on."""
    hf_dataset_config: str | None = None
    """Configuration of the Hugging Face dataset."""
    hf_dataset_split: str = "train"
    """Split of the Hugging Face dataset."""
    hf_dataset_text_field: str = "text"
    """Column of the Hugging Face dataset that holds the text."""
    hf_dataset_conversations: bool = False
    """Rows of Hugging Face datasets are conversations, or prompts with completions, not text."""
    hf_streaming: bool = False
    """Stream the Hugging Face dataset instead of loading it completely."""
    pack_sequences: bool = False
    """Restrict attention and labels to each document; conversations are always separate."""
    overlong: Overlong = "truncate"
    """Truncate or drop a conversation that is longer than a sequence."""
    datasets: tuple[DatasetSource, ...] = ()
    """Sources of a mixture, as an alternative to a single source."""
    mix_temperature: PositiveFloat = 1.0
    """Temperature T: sources are sampled in proportion to weight^(1/T), so larger is more even."""
    phases: tuple[TrainingPhase, ...] = ()
    """Changes of mixture and learning rate, by step."""
    phase_lr_lag: Annotated[bool, Needs("phases")] = False
    """Apply lr_scale from the second update of a phase, as KempnerForge does."""

    def _problems(self) -> Iterator[str]:
        starts = [phase.start_step for phase in self.phases]
        if any(later <= earlier for earlier, later in pairwise(starts)):
            yield f"start_step of phases must increase: {starts}"
        for name, count in Counter(source.label for source in self.datasets).items():
            if count > 1:
                yield f'{count} sources of datasets have the name "{name}": give each its own name'
        if self.datasets and self.dataset_type not in ("auto", "synthetic"):
            yield f'dataset_type = "{self.dataset_type}" does not mix: leave datasets out'
        if self.datasets and self.order == "torch" and not self.shuffle:
            yield 'a mixture with order = "torch" requires shuffle = true'
        limited = [source.label for source in self.datasets if source.has_limit]
        if limited and self.order == "torch":
            yield (
                f"max_epochs and max_tokens of {limited[0]} do not exist in KempnerForge, which "
                'repeats small datasets in each epoch: remove them, or set order = "grain"'
            )

    @property
    def has_source(self) -> bool:
        """True if a key names data to read."""
        return bool(self.datasets or self.dataset_path or self.hf_dataset_name)

    def weights(self, phase: TrainingPhase | None = None) -> dict[str, float]:
        """Return the sampling weight of each source by name, in a phase or before the first."""
        over = phase.dataset_weights if phase else {}
        return {source.label: over.get(source.label, source.weight) for source in self.datasets}
