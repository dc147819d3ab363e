"""Keys that may name a location in a bucket; other keys refuse URLs."""

from collections.abc import Iterator

from jaxforge.config.job import JobConfig, short_toml
from jaxforge.storage import urls

_BUCKETS = {
    "checkpoint.branch_from",
    "checkpoint.dir",
    "data.dataset_path",
    "data.datasets.path",
    "data.tokenizer_path",
    "eval.datasets.dataset_path",
    "train.executable",
}
_LOCAL = {
    "checkpoint.non_persistent_dir": "a fast disk of the node",
    "checkpoint.replica_dir": "a directory in the memory of the host",
    "data.cache_dir": "a fast disk of the node",
    "profiling.trace_dir": "a directory in the run, which is copied to its bucket",
}
_OTHERS = {"checkpoint.load_path", "train.compilation_cache_dir"}
"""Keys that accept other URLs: PyTorch checkpoints to load, and the cache that JAX opens."""


def location_problems(config: JobConfig) -> Iterator[str]:
    """Yield a message for each URL that is malformed or not allowed for its key.

    A URL is never interpreted as a local file name.

    Args:
        config: A loaded configuration.
    """
    for key, line, value in _strings(config):
        fault = urls.fault(value)
        if key in _BUCKETS and fault:
            yield f"{line} = {fault}"
        elif key in _LOCAL and urls.in_bucket(value):
            yield f"{line} = {short_toml(value)} is not local: name {_LOCAL[key]}"
        elif key in _OTHERS and fault and "://" not in value:
            yield f"{line} = {fault}"
    yield from _needs_files(config)


def _needs_files(config: JobConfig) -> Iterator[str]:
    """Yield a message for each setting that requires a run on a file system."""
    if not urls.in_bucket(config.checkpoint.dir):
        return
    dir_ = f"checkpoint.dir = {short_toml(config.checkpoint.dir)}"
    if config.data.hf_streaming:
        yield f"data.hf_streaming = true stores its position in local files: not with {dir_}"
    if config.checkpoint.export_interval or config.checkpoint.export_last:
        yield (
            f"checkpoint.export_interval and export_last write local files: not with {dir_}; "
            "convert its checkpoints with `jaxforge convert`"
        )


def _strings(config: JobConfig) -> Iterator[tuple[str, str, str]]:
    """Yield (key, key with index, value) of every string, including strings in lists of tables."""
    for key, value in config.settings.items():
        if isinstance(value, str):
            yield key, key, value
        for i, table in enumerate(value if isinstance(value, tuple) else ()):
            for inner, text in table if hasattr(table, "model_fields_set") else ():
                if isinstance(text, str):
                    yield f"{key}.{inner}", f"{key}[{i}].{inner}", text
