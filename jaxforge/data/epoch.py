"""Length of an epoch of the training data, where epochs exist."""

from jaxforge.config.job import JobConfig
from jaxforge.data.dataset import Dataset, Mixture, Streaming
from jaxforge.data.sources import open_training_data


def sequences_per_epoch(
    config: JobConfig, rows: int, dataset: Dataset | Mixture | Streaming | None = None
) -> int | None:
    """Return the sequences of an epoch; None if there is no such number.

    Random tokens and streams have no known length. The datasets of a mixture have different epochs.

    Args:
        config: the config; its schedule is not used.
        rows: sequences of a microbatch, all ranks together.
        dataset: the training set; opened here if None.

    Raises:
        UserError: the data are missing, damaged or do not fit the model.
    """
    data = config.data
    has_length = data.dataset_path or (data.hf_dataset_name and not data.hf_streaming)
    if data.dataset_type in ("auto", "synthetic") and (data.datasets or not has_length):
        return None
    dataset = open_training_data(config) if dataset is None else dataset
    if not isinstance(dataset, Dataset):  # a registered dataset that streams
        return None
    # torch's sampler drops the last partial batch.
    return len(dataset) // rows * rows if data.order == "torch" else len(dataset)
