"""`[eval]`: evaluation during training."""

from pydantic import PositiveInt

from jaxforge.config.section import Section


class EvalConfig(Section):
    """When and on what to evaluate."""

    enabled: bool = False
    """Evaluate during training."""
    interval: PositiveInt = 1000
    """Updates between evaluations."""
    steps: PositiveInt = 50
    """Batches per evaluation, always the same ones."""
    dataset_path: str = ""
    """Directory of token shards."""
    file_pattern: str = "*.npy"
    """Glob of the shards in dataset_path."""
    hf_dataset_name: str | None = None
    """Hugging Face dataset to tokenize and evaluate on."""
    hf_dataset_config: str | None = None
    """Configuration of the Hugging Face dataset."""
    hf_dataset_split: str = "validation"
    """Split of the Hugging Face dataset."""
