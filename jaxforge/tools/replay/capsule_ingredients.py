"""Ingredients of a step in this process: code, packages, machine, mesh, program and data."""

import hashlib
import os
import platform
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import jax

from jaxforge.config.job import JobConfig
from jaxforge.data import sources
from jaxforge.data.corpus.manifest import FILE_NAME, LENGTHS
from jaxforge.data.dataset import Dataset, Mixture
from jaxforge.data.tokens import TokenFiles
from jaxforge.runs.starts import ENVIRONMENT, code_folders, git_state, source_files, source_hash
from jaxforge.step.executable import fingerprint
from jaxforge.storage import urls
from jaxforge.tools.replay.past import PastRun

_UNITS = ("avx2", "avx512f", "amx_bf16")  # which select kernels of XLA and its libraries


def ingredients_of(past: PastRun) -> dict[str, Any]:
    """Return the ingredients of a run's steps on this machine, as plain values by name.

    Raises:
        UserError: the data are missing or damaged.
    """
    installed = {package.name: package.version for package in distributions() if package.name}
    return {
        "mesh": dict(past.mesh.shape),
        "code": _code(past.config),
        "data": _data(past.config),
        "machine": _machine(),
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        # Names and versions only: the URL of an installation may contain a password.
        "packages": dict(sorted(installed.items(), key=lambda package: package[0].lower())),
        "program": _program(past),
    }


def _machine() -> dict[str, Any]:
    """Return a description of the devices; on a CPU, kernels and threads affect the last digits."""
    device = jax.devices()[0]
    facts = {"platform": device.platform, "kind": device.device_kind,
             "devices": jax.device_count(), "processes": jax.process_count()}  # fmt: skip
    if device.platform == "cpu":
        facts |= {"processor": _processor(), "cores": os.cpu_count()}
    return facts


def _processor() -> str:
    """Return the architecture of the processor and its widest units."""
    try:
        about = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        return platform.machine()
    return " ".join([platform.machine(), *(unit for unit in _UNITS if f" {unit} " in about)])


def _code(config: JobConfig) -> dict[str, dict[str, Any]]:
    """Return hashes and state in git of jaxforge and of the modules that `[plugins]` names."""
    return {name: code_state(folder) for name, folder in code_folders(config).items()}


def code_state(path: Path) -> dict[str, Any]:
    """Return the hash of a module's sources, and their state in git if they are in a repository."""
    return {"sha256": source_hash(path), **git_state(source_files(path)[0])}


def _program(past: PastRun) -> dict[str, str]:
    """Return the hash of the step's StableHLO, for each number of microbatches of an update."""
    lowered = past.lower_sizes()
    return {str(n): fingerprint(program) for n, program in sorted(lowered.items())}


def _data(config: JobConfig) -> dict[str, dict[str, Any]]:
    """Return the training data by the name of each source: files with bytes and hashes."""
    dataset = sources.open_training_data(config)
    named = dataset.datasets if isinstance(dataset, Mixture) else {"": dataset}
    return {name: _of_source(config, dataset) for name, dataset in named.items()}


def _of_source(config: JobConfig, dataset: Any) -> dict[str, Any]:  # noqa: ANN401
    source = dataset.source if isinstance(dataset, Dataset) else None
    if isinstance(source, TokenFiles):
        return {"files": dict(_files(source))}
    # Without files: random tokens, a stream, or a plugin's dataset.
    kind = {"kind": type(dataset if source is None else source).__name__}
    streamed = config.data.hf_dataset_name if config.data.hf_streaming else None
    return kind | ({"dataset": streamed} if streamed else {})


def _files(source: TokenFiles) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield shards and the files next to them; in a bucket, the sizes of shards only."""
    if urls.in_bucket(source.directory):
        for file in source.files:
            yield file.path.name, {"bytes": file.offset + file.tokens * file.dtype.itemsize}
        return
    metadata = [source.directory / name for name in (FILE_NAME, LENGTHS)]
    paths = [*(file.path for file in source.files), *filter(Path.is_file, metadata)]
    with ThreadPoolExecutor() as pool:
        for path, digest in zip(paths, pool.map(_hash_of, paths), strict=True):
            yield path.name, {"bytes": path.stat().st_size, "sha256": digest}


def _hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences of two values of an ingredient, in words."""
    names = dict.fromkeys([*then, *now])
    return [
        f"{name or 'value'}: {_short(then.get(name))} -> {_short(now.get(name))}"
        for name in names
        if then.get(name) != now.get(name)
    ]


def _short(value: object) -> str:
    """Format a value for a line; hashes are shortened."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} {_short(item)}" for key, item in value.items()) + "}"
    text = "none" if value is None else str(value)
    return text[:12] if len(text) == 64 and text.isalnum() else text
