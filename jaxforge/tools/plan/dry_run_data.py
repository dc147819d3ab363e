"""Data of a dry run, opened as a start opens them but without writing."""

from bisect import bisect_left

from jaxforge.config.job import JobConfig
from jaxforge.data import sources
from jaxforge.data.dataset import Dataset, Mixture, Streaming
from jaxforge.data.order import data_seed
from jaxforge.data.segments import draws
from jaxforge.data.sources import sequences_per_epoch
from jaxforge.errors import UserError
from jaxforge.tasks.opening import describe_tasks
from jaxforge.training.training_data import check_not_exhausted, phases_of

Data = Dataset | Mixture | Streaming | None
"""An opened training set; None if it was not opened."""


def epoch_length(config: JobConfig, rows: int) -> int | None:
    """Return the epoch length that a start would use, without tokenizing a dataset."""
    if name := _from_hugging_face(config):
        raise UserError(
            f"--dry-run: the length of an epoch is unknown before a start tokenizes {name}. "
            "Give lengths in updates or tokens"
        )
    return sequences_per_epoch(config, rows)


def open_data(config: JobConfig, *, opens: bool, is_elsewhere: bool) -> tuple[Data, list[str]]:
    """Open the training set if that needs no writing, and describe all datasets.

    Args:
        config: the config.
        opens: open the data at all.
        is_elsewhere: the run is planned for another machine.

    Raises:
        UserError: data are missing, damaged or do not fit the model.
    """
    if not opens:
        return None, ["not on this machine: not checked"]
    if name := _from_hugging_face(config):
        how = "streams it" if config.data.hf_streaming else "tokenizes it once"
        return None, [f"Hugging Face dataset {name}: not checked; a start {how}"]
    if is_elsewhere and not config.data.has_source and config.data.dataset_type == "auto":
        return None, ["no data are named: a start would be refused"]
    data = sources.open_training_data(config)
    rows = [f"training: {_set(data)}"]
    source = config.eval.sources().values() if config.eval.reads_data else ()
    if any(not dataset.dataset_path for dataset in source):
        rows.append("evaluation: a Hugging Face dataset is not checked; a start tokenizes it")
    elif config.eval.reads_data:
        for name, dataset in sources.open_eval_data(config).items():
            rows.append(f"evaluation{f' {name}' if name else ''}: {_set(dataset)}")
    if config.eval.enabled and not is_elsewhere:
        rows += describe_tasks(config.eval)
    return data, rows


def mixture_rows(config: JobConfig, dp: int, data: Data) -> list[str]:
    """Describe the tokens that a new run draws per phase, and the epochs of each dataset.

    With `data.order = "torch"` these are the proportions of whole epochs, not counts.

    Args:
        config: the config.
        dp: number of data-parallel ranks.
        data: the training set; without a mixture there are no rows.

    Raises:
        UserError: the datasets reach their limits before the end of the run.
    """
    if not isinstance(data, Mixture):
        return []
    ramp, seq_len = config.train.ramp(dp), config.train.seq_len
    phases, last = phases_of(config, data), config.train.max_steps
    segments = phases.segments([], 0, 0, ramp.samples)
    check_not_exhausted(config, data, segments, ramp, (0, 0))
    about = " (about)" if config.data.order == "torch" else ""
    rows, total = [], dict.fromkeys(data.sizes, 0)
    for start, counts in draws(segments, ramp.samples(last), data_seed(config)):
        step = bisect_left(range(last), start, key=ramp.samples)
        shares = ", ".join(
            f"{name} {counts[name] * seq_len:,} ({counts[name] / max(1, sum(counts.values())):.2%})"
            for name in counts
        )
        rows.append(f"from step {step:,}, tokens drawn{about}: {shares}")
        total |= {name: total.get(name, 0) + count for name, count in counts.items()}
    for name, count in total.items():
        most = phases.limits.get(name)
        limit = f", of at most {most / data.sizes[name]:.4g}" if most else ""
        rows.append(
            f"{name}: {count / data.sizes[name]:.4g} epochs{limit} ({count:,} sequences drawn, "
            f"{data.sizes[name]:,} there)"
        )
    return rows


def _from_hugging_face(config: JobConfig) -> str:
    """Return the name of the Hub dataset that a start would load, or "" if it reads shards only."""
    data = config.data
    if data.datasets:
        return next(
            (dataset.hf_name for dataset in data.datasets if dataset.hf_name and not dataset.path),
            "",
        )
    return "" if data.dataset_path else data.hf_dataset_name or ""


def _set(data: Data) -> str:
    if isinstance(data, Mixture):
        sizes = (f"{name} {size:,}" for name, size in data.sizes.items())
        return f"a mixture, sequences of each: {', '.join(sizes)}"
    if not isinstance(data, Dataset):
        return "a stream"
    source = data.source
    directory = getattr(source, "directory", None)
    if directory is None:
        return "random tokens (no data)" if len(data) > 2**30 else f"{len(data):,} sequences"
    tokens, files = getattr(source, "tokens", 0), len(getattr(source, "files", ()))
    return f"{directory}: {tokens:,} tokens in {files} file(s), {len(data):,} sequences"
