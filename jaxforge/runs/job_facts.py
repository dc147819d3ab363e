"""Facts of a start in which all processes of a job must agree (`parallel.agreement`)."""

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import jaxforge
from jaxforge.config.facts import Flag, flagged
from jaxforge.config.job import JobConfig
from jaxforge.config.reading.unresolved import UnresolvedConfig
from jaxforge.runs import starts

ENVIRONMENT = (
    "XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS", "JAX_ENABLE_X64", "JAX_DEFAULT_DTYPE_BITS",
    "JAX_DEFAULT_MATMUL_PRECISION", "JAX_DEFAULT_PRNG_IMPL", "JAX_THREEFRY_PARTITIONABLE",
    "JAX_NUMPY_DTYPE_PROMOTION", "NVIDIA_TF32_OVERRIDE", "NPROC",
)  # fmt: skip
"""Environment variables that change the computation; others are ignored."""

_PER_HOST_ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NPROC")
"""Variables that may differ: paths of compiler dumps, and numbers of threads."""


def facts_of_start(config: JobConfig | UnresolvedConfig) -> dict[str, Any]:
    """Return the values in which all processes must agree, as name -> JSON."""
    known = config.known if isinstance(config, UnresolvedConfig) else config
    per_host = flagged(JobConfig, Flag.PER_HOST)
    values = {
        f"{section}.{key}": value
        for section, keys in known.model_dump(mode="json").items()
        for key, value in keys.items()
        if not per_host & {section, f"{section}.{key}"}
    }
    durations = config.durations if isinstance(config, UnresolvedConfig) else {}
    environment = {
        name: os.environ.get(name) for name in ENVIRONMENT if name not in _PER_HOST_ENVIRONMENT
    }
    versions = {f"version of {name}": number for name, number in starts.versions().items()}
    code = {f"code of {name} (SHA-256)": digest[:16] for name, digest in code_hashes(known).items()}
    return {**values, **durations, **environment, **versions, **code}


def code_hashes(config: JobConfig) -> dict[str, str]:
    """Return the SHA-256 of the sources of jaxforge and of each module in `[plugins]`."""
    return {name: source_hash(folder) for name, folder in code_folders(config).items()}


def code_folders(config: JobConfig) -> dict[str, Path]:
    """Return the sources of jaxforge and of each imported module in `[plugins]`: file or directory.

    Other modules are omitted, because searching for a module may import its parent packages.
    """
    sources = {"jaxforge": Path(jaxforge.__file__).parent}
    for name in dict.fromkeys(config.plugins.names.all_modules()):
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if spec and spec.origin:
            file = Path(spec.origin)
            sources[name] = file.parent if file.name == "__init__.py" else file
    return sources


def source_hash(path: Path) -> str:
    """Return the SHA-256 of the Python files of a directory, or of one file, with their names."""
    total = hashlib.sha256()
    for file in source_files(path):
        total.update(f"{file.relative_to(path.parent)}\n".encode() + file.read_bytes())
    return total.hexdigest()


def source_files(path: Path) -> list[Path]:
    """Return the sorted Python files of a directory, or the file itself."""
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]
