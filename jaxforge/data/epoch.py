"""Length of an epoch of the training data, where epochs exist."""

from jaxforge.config.job import JobConfig
from jaxforge.data.dataset import Dataset, Mixture, Streaming
from jaxforge.data.sources import open_training_data


def sequences_per_epoch(
    config: JobConfig, rows: int, dataset: Dataset | Mixture | Streaming | None = None
) -> int | None:
    """Sequences that are read before any is read again; None if that is not known.

    Random tokens and streams have no known length, and the sources of a mixture end at different
    times.

    Args:
        config: what to train on; its schedule is not looked at.
        rows: sequences of a microbatch over all ranks.
        dataset: the training set; opened here if None.

    Raises:
        UserError: the data are missing, damaged or do not fit the model.
    """
    data = config.data
    has_length = data.dataset_path or (data.hf_dataset_name and not data.hf_streaming)
    if data.dataset_type in ("auto", "synthetic") and (data.datasets or not has_length):
        return None
    dataset = open_training_data(config) if dataset is None else dataset
    if not isinstance(dataset, Dataset):  # a stream of one's own
        return None
    # torch's sampler leaves out what does not fill a batch.
    return len(dataset) // rows * rows if data.order == "torch" else len(dataset)
