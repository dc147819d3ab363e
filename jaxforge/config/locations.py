"""Check of the locations that path keys name (`facts.Location`)."""

from collections.abc import Iterator

from jaxforge.config.facts import Location, facts
from jaxforge.config.job import JobConfig, short_toml
from jaxforge.storage import urls


def location_problems(config: JobConfig) -> Iterator[str]:
    """Yield a message for each URL that is malformed or not allowed for its key.

    A URL is never interpreted as a local file name.

    Args:
        config: A loaded configuration.
    """
    locations = dict(facts(JobConfig, Location))
    for key, line, value in _strings(config):
        location, fault = locations.get(key), urls.fault(value)
        if location is None or not urls.in_bucket(value):
            continue
        if location.urls == "none":
            yield f"{line} = {short_toml(value)} is not local: name {location.instead}"
        elif fault and (location.urls == "bucket" or "://" not in value):
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
            "export its checkpoints with `python -m torch_compat export`"
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
