"""`starts.jsonl` in a run directory: time, command and code versions of each start.

Process 0 writes a line per start. Environment variables are not recorded.
"""

import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jaxforge
from jaxforge.cli.redaction import redacted_command
from jaxforge.config.job import JobConfig
from jaxforge.config.reading.unresolved import UnresolvedConfig
from jaxforge.config.resolution import known_config
from jaxforge.config.section import Flag, flagged
from jaxforge.errors import UserError, file_error
from jaxforge.storage import safe_files
from jaxforge.storage.line_file import keep_sound_lines

FILE_NAME = "starts.jsonl"

PACKAGES = ("jaxforge", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")

_GIT_SEC = 60


def note(run: Path, step: int, **more: Any) -> None:  # noqa: ANN401
    """Append this start to the starts of a run. Damaged lines are moved aside with a warning.

    Args:
        run: the directory, on this machine.
        step: step at which the start begins.
        more: further JSON fields, such as `parameters`, or the `parent` of a run that starts from
            another one.

    Raises:
        UserError: the directory cannot be written.
        StorageError: the disk is full or fails.
    """
    start = {"step": step, "time": round(time.time(), 3), "command": _command(sys.argv),
             "versions": versions(), "git": git_state(Path(jaxforge.__file__)), **more}  # fmt: skip
    try:
        # A torn line, after a full disk, must not make later starts unreadable.
        if (run / FILE_NAME).is_file():
            keep_sound_lines(run / FILE_NAME)
        lines = [json.dumps(record) + "\n" for record in [*read(run), start]]
        safe_files.replace_text(run / FILE_NAME, "".join(lines))
    except OSError as error:
        raise file_error(run / FILE_NAME, error) from error


def read(run: Path) -> list[dict[str, Any]]:
    """Return the starts of a run, the latest last; [] for a run of an older version.

    Each has `step`, `time` (Unix seconds), `command`, `versions`, `git` (`commit`, `changed`; empty
    if the code is not under git) and `parameters`.

    Raises:
        UserError: the file is damaged.
    """
    path = run / FILE_NAME
    if not path.is_file():
        return []
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except ValueError:
        raise UserError(f"{path}: a line is not a JSON object; remove it") from None


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages in `PACKAGES`."""
    return {"python": platform.python_version()} | {
        name: version for name in PACKAGES if (version := _version(name))
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # jaxforge itself may not be installed
        return None


def git_state(file: Path) -> dict[str, Any]:
    """Return commit and hash of changes of a file; {} if it is not under git."""

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(file.parent), *arguments]
        try:
            ran = subprocess.run(command, capture_output=True, timeout=_GIT_SEC)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return ran.stdout.decode(errors="replace") if ran.returncode == 0 else None

    if (
        git("ls-files", "--error-unmatch", file.name) is None
    ):  # for example, a virtual environment within a clone
        return {}
    # The difference has no new files; `code_hashes` has them.
    commit, difference = git("rev-parse", "HEAD"), git("diff", "HEAD")
    if commit is None or difference is None:
        return {}
    state: dict[str, Any] = {"commit": commit.strip(), "changed": bool(difference)}
    if difference:
        # Only the hash: the difference itself may contain secrets.
        state["difference_sha256"] = hashlib.sha256(difference.encode()).hexdigest()
    return state


def _command(arguments: Sequence[str]) -> str:
    """Return the command line without secrets."""
    # `python -m` replaces the module's name in `sys.argv` by a path; the spec has the name.
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = ["python", "-m", spec.name.removesuffix(".__main__")] if spec else None
    program = module or [Path(arguments[0]).name]
    # `jaxforge` leaves the options of a command in `sys.argv`, and `train` alone starts runs.
    name = ["train"] if program[-1] == "jaxforge" else []
    return redacted_command([*program, *name, *arguments[1:]])


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
    known = known_config(config)
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
    packages = {f"version of {name}": number for name, number in versions().items()}
    code = {f"code of {name} (SHA-256)": digest[:16] for name, digest in code_hashes(known).items()}
    return {**values, **durations, **environment, **packages, **code}


def code_hashes(config: JobConfig) -> dict[str, str]:
    """Return the SHA-256 of the sources of jaxforge and of each module in `[plugins]`."""
    return {name: source_hash(folder) for name, folder in code_folders(config).items()}


def code_folders(config: JobConfig) -> dict[str, Path]:
    """Return the sources of jaxforge and of each imported module in `[plugins]`: file or directory.

    Other modules are omitted, because searching for a module may import its parent packages.
    """
    sources = {"jaxforge": Path(jaxforge.__file__).parent}
    for name in dict.fromkeys(config.plugins.names.all_modules()):
        # `importlib.util.find_spec` would import the parents of a module.
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if spec and spec.origin:
            file = Path(spec.origin)
            sources[name] = file.parent if file.name == "__init__.py" else file
    return sources


def source_hash(path: Path) -> str:
    """Return the SHA-256 of the Python files of a directory, or of one file, with their names."""
    total = hashlib.sha256()
    for file in source_files(path):
        # The name is part of the hash: moving code to another module is a change.
        total.update(f"{file.relative_to(path.parent)}\n".encode() + file.read_bytes())
    return total.hexdigest()


def source_files(path: Path) -> list[Path]:
    """Return the sorted Python files of a directory, or the file itself."""
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]
