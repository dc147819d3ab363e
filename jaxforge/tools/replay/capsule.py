"""Capsules: zip files with the configs, the ingredients and the loss curve of a run.

    capsule.json        the ingredients: data, machine, mesh, environment, code, packages
    config.toml         the resolved config of the run's latest start
    configs/            the configs of all starts, named by the step from which each start resumed
    curve.jsonl         step, loss and gradient norm of each logged step

Replayed losses must be bit-identical if all ingredients are the same. If machine, mesh, flags or
JAX differ, sums are in another order, and losses differ by rounding.
"""

import argparse
import dataclasses
import io
import json
import os
import platform
import re
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import jax
from rich.table import Table

from jaxforge import __version__
from jaxforge.checkpoint.paths import SUBDIRECTORY, durable_steps, find
from jaxforge.cli.redaction import redacted, redacted_value
from jaxforge.cli.running import STDOUT, wide_console, write_json
from jaxforge.config import axes
from jaxforge.config.job import JobConfig
from jaxforge.data.dataset import Mixture
from jaxforge.data.fingerprint import fingerprint_of
from jaxforge.errors import UserError
from jaxforge.runs import run_directory
from jaxforge.runs.starts import ENVIRONMENT, code_folders, git_state, source_files, source_hash
from jaxforge.step.executable import ARCHIVE_ERRORS
from jaxforge.storage import safe_files, urls
from jaxforge.storage.untrusted_json import excerpt, is_step, load_object, parse_line, problem_of
from jaxforge.telemetry.console import begin_command
from jaxforge.tools.replay.past import PastRun, open_past
from jaxforge.tools.replay.steps import (
    LOGGED,
    RepeatedStep,
    logged_steps,
    logged_values,
    replayed,
)

FORMAT = 2
CURVE = "curve.jsonl"
_CONFIG, _ABOUT = "config.toml", "capsule.json"
_ENTRY = re.compile(r"config\.toml|configs/from_step_[0-9]{1,10}\.toml|curve\.jsonl")
_SIZE = 1 << 28  # maximum bytes of a file
_UNPACKED = 4 << 20  # maximum bytes of all unpacked entries, plus ...
_UNPACKED_PER_BYTE = 50  # ... this per byte of the file; curves and configs shrink about tenfold

INGREDIENTS = ("data", "mesh", "machine", "environment", "code", "packages")
_UNITS = ("avx2", "avx512f", "amx_bf16")  # which select kernels of XLA and its libraries
_STEPS = 3  # replayed by default
_SHOWN = 8  # printed differences of an ingredient


@dataclasses.dataclass(frozen=True)
class Capsule:
    """Contents of a capsule file.

    Attributes:
        about: ingredients by name, as plain values.
        files: texts of the other entries by name.
    """

    about: dict[str, Any]
    files: dict[str, str]


def make(args: argparse.Namespace) -> int:
    """Write a run's capsule; return the exit code."""
    begin_command()
    urls.local(args.capsule, "--capsule", "copy it there afterwards")
    capsule = capsule_of(urls.path(args.run))
    if jax.process_index() == 0:
        write(args.capsule, capsule)
        print(f"{args.capsule}: {args.capsule.stat().st_size:,} bytes")
    return 0


def capsule_of(run: Path) -> Capsule:
    """Return the capsule of a run; must be called on the devices of the run.

    Args:
        run: the run directory.

    Raises:
        UserError: the run does not exist, has logged nothing, or had other devices.
    """
    config = run_directory.read_config(run)
    if not (steps := logged_steps(run)):
        raise UserError(f"{run / 'metrics.jsonl'} has no steps: a capsule needs the run's curve")
    # The mesh must be that of the run: the order of sums depends on it.
    with open_past(run, max(steps), _mesh_settings(config)) as past:
        if config.distributed != past.config.distributed:
            raise UserError(
                f"the run's mesh was {config.distributed}, which does not fit "
                f"{jax.device_count()} devices: make the capsule where the run was trained"
            )
        about = ingredients_of(past)
    curve = [{name: values[name] for name in LOGGED} for values in logged_values(run)]
    files = {_CONFIG: (run / _CONFIG).read_text()}
    for start in sorted((run / "configs").glob("from_step_*.toml")):
        files[f"configs/{start.name}"] = start.read_text()
    files[CURVE] = "".join(json.dumps(line) + "\n" for line in curve)
    origin = {"made": datetime.now(UTC).isoformat(timespec="seconds"), "jaxforge": __version__}
    # Names of packages such as google-auth look like keys of secrets, but versions are not secret.
    about = redacted_value(origin | about) | {"packages": about["packages"]}
    return Capsule(about, {name: redacted(text) for name, text in files.items()})


def _mesh_settings(config: JobConfig) -> list[str]:
    """Return settings that use all devices if the run's number of devices is unknown."""
    left = [axis for axis in axes.AXES if getattr(config.distributed, axis) == -1]
    if not left or not (config.train.global_batch_size or config.train.batch_ramp):
        return []
    return [f"--distributed.{left[0]}=-1"]


def ingredients_of(past: PastRun) -> dict[str, Any]:
    """Return the ingredients of a run's steps in this process, as plain values by name.

    Raises:
        UserError: the data are missing or damaged.
    """
    device = jax.devices()[0]
    machine = {"platform": device.platform, "kind": device.device_kind,
               "devices": jax.device_count(), "processes": jax.process_count()}  # fmt: skip
    if device.platform == "cpu":  # kernels and threads of a CPU affect the last digits
        machine |= {"processor": _processor(), "cores": os.cpu_count()}
    installed = {package.name: package.version for package in distributions() if package.name}
    folders = code_folders(past.config)
    datasets = past.dataset.datasets if isinstance(past.dataset, Mixture) else {"": past.dataset}
    return {
        # Without paths, which may differ on the machine that verifies the capsule.
        "data": {name: fingerprint_of(dataset) for name, dataset in datasets.items()},
        "mesh": dict(past.mesh.shape),
        "machine": machine,
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        "code": {name: code_state(folder) for name, folder in folders.items()},
        # Names and versions only: the URL of an installation may contain a password.
        "packages": dict(sorted(installed.items(), key=lambda package: package[0].lower())),
    }


def _processor() -> str:
    """Return the architecture of the processor and its widest units."""
    try:
        about = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        return platform.machine()
    return " ".join([platform.machine(), *(unit for unit in _UNITS if f" {unit} " in about)])


def code_state(path: Path) -> dict[str, Any]:
    """Return the hash of a module's sources, and their state in git if they are in a repository."""
    return {"sha256": source_hash(path), **git_state(source_files(path)[0])}


@dataclasses.dataclass(frozen=True)
class Verification:
    """Result of replaying the steps of a capsule.

    Attributes:
        differences: by ingredient, what differs in words; an ingredient that is the same has [].
        steps: replayed steps that the run has logged; empty if the data differ.
    """

    differences: dict[str, list[str]]
    steps: list[RepeatedStep]

    @property
    def is_exact(self) -> bool:
        """True if steps were replayed, and each matches the log bit for bit."""
        return bool(self.steps) and all(step.difference == 0 for step in self.steps)

    @property
    def verdict(self) -> str:
        """The result in a sentence."""
        if self.differences["data"]:
            return ("the data have changed since the capsule was made: nothing was replayed. Name "
                    "the run's data (--data.dataset_path=DIR)")  # fmt: skip
        if self.is_exact:
            return f"{len(self.steps)} steps match the log, bit for bit"
        names = ", ".join(name for name, lines in self.differences.items() if lines)
        why = f"different: {names}" if names else "although all ingredients are the same"
        return f"not every step matches the log bit for bit; {why}"


def run_verify(args: argparse.Namespace, steps: int | None, overrides: Sequence[str]) -> int:
    """Replay steps of a capsule and print the result; return 1 if they differ."""
    begin_command()
    run = urls.local(args.start, "--from", "copy the checkpoint here") if args.start else None
    result = verify(read(Path(args.run)), steps or _STEPS, run, overrides)
    if jax.process_index() == 0:
        if args.json:
            report = {
                "is_exact": result.is_exact,
                "verdict": result.verdict,
                "ingredients": result.differences,
                "steps": [step.as_json() for step in result.steps],
            }
            write_json(args.json, report, indent=2)
        if args.json != STDOUT:
            _print(result)
    return 0 if result.is_exact else 1


def verify(
    capsule: Capsule, steps: int, run: Path | None = None, overrides: Sequence[str] = ()
) -> Verification:
    """Replay the first steps of a run, or the steps after a checkpoint.

    Args:
        capsule: capsule of the run.
        steps: number of steps; fewer if the run has logged fewer.
        run: run directory or checkpoint to start from; None: start from the beginning.
        overrides: settings over the config, such as "--data.dataset_path=…".

    Raises:
        UserError: the data do not exist, or no state to start from does.
    """
    first, last = step_range(capsule, steps, run)
    with _unpacked(capsule, run) as directory, open_past(directory, last, overrides) as past:
        now = ingredients_of(past)
        compared = {name: differences(capsule.about[name], now[name]) for name in INGREDIENTS}
        result = Verification({**compared, "config": list(overrides)}, [])
        # Other data give other losses: a replay would only seem to fail.
        if compared["data"]:
            return result
        repeated = [step for step in replayed(directory, first, last, overrides) if step.logged]
    return dataclasses.replace(result, steps=repeated)


def step_range(capsule: Capsule, steps: int, run: Path | None) -> tuple[int, int]:
    """Return the first and the last step to replay, after a checkpoint of `run` if it is given."""
    # Lines were checked by `read`.
    logged = sorted(json.loads(line)["step"] for line in capsule.files[CURVE].splitlines())
    newest = 0
    if run is not None:
        directory, newest = find(run)
        if directory == run.absolute():  # a run: its newest checkpoint with logged steps after it
            before = [step for step in durable_steps(directory) if step < logged[-1]]
            newest = max(before, default=newest)
    if run is not None and newest >= logged[-1]:
        raise UserError(
            f"{run}: the capsule's curve ends at step {logged[-1]}, not after step {newest}"
        )
    return newest + 1, [step for step in logged if step > newest][:steps][-1]


@contextmanager
def _unpacked(capsule: Capsule, run: Path | None) -> Iterator[Path]:
    """Create a run directory from the capsule's configs and curve and the checkpoints of `run`."""
    with tempfile.TemporaryDirectory(prefix="jaxforge-capsule-") as name:
        directory = Path(name)
        for entry, text in capsule.files.items():
            path = directory / {CURVE: "metrics.jsonl"}.get(entry, entry)
            path.parent.mkdir(exist_ok=True)
            # A config may leave the size of an axis to the devices, which may be others here.
            for axis, size in capsule.about["mesh"].items():
                text = text.replace(f"\n{axis} = -1\n", f"\n{axis} = {size}\n")
            path.write_text(text)
        if run is not None:
            # A link: checkpoints are large, and a replay only reads them.
            (directory / SUBDIRECTORY).symlink_to(find(run)[0] / SUBDIRECTORY)
        yield directory


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences of two values of an ingredient, in words."""
    return [
        f"{name or 'value'}: {_short(then.get(name))} -> {_short(now.get(name))}"
        for name in dict.fromkeys([*then, *now])
        if then.get(name) != now.get(name)
    ]


def _short(value: object) -> str:
    """Format a value for a line; hashes are shortened."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} {_short(item)}" for key, item in value.items()) + "}"
    text = "none" if value is None else str(value)
    return text[:12] if len(text) == 64 and text.isalnum() else text


def _print(result: Verification) -> None:
    console = wide_console()
    table = Table("ingredient", "difference", title="ingredients", title_justify="left")
    for name, lines in result.differences.items():
        more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        shown = "\n".join([*lines[:_SHOWN], *more]).replace("[", "\\[")  # no markup
        table.add_row(name, shown or "the same")
    console.print(table)
    for step in result.steps:
        line = f"step {step.step:6}  loss {step.loss:.9g}  {step.comparison}"
        console.print(line, highlight=False)
    console.print(result.verdict, soft_wrap=True, markup=False)


def write(path: Path, capsule: Capsule) -> None:
    """Write a new capsule file atomically.

    Raises:
        UserError: the file exists, or it cannot be written.
    """
    if path.exists():
        raise UserError(f"--capsule {path} exists: name a new file, or remove it first")
    about = json.dumps({"format": FORMAT, **capsule.about}, indent=2, ensure_ascii=False)
    try:
        with (
            safe_files.replacing(path) as file,
            zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive,
        ):
            for name, text in {_ABOUT: about, **capsule.files}.items():
                archive.writestr(name, text)
    except OSError as error:
        raise UserError(f"--capsule {path}: {error.strerror}") from error


def read(path: Path) -> Capsule:
    """Read a file that `write` has written.

    Raises:
        UserError: the file is missing, damaged, or has another format version.
    """
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"cannot read the capsule {path}: not a file")
        if path.stat().st_size > _SIZE:
            raise UserError(f"{path} is not a capsule: {path.stat().st_size:,} bytes are too many")
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read the capsule {path}: {error.strerror or error}") from error
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            # Checked before anything is unpacked; `_entry` checks that the declared sizes are true.
            unpacked = sum(entry.file_size for entry in archive.infolist())
            if unpacked > _UNPACKED + _UNPACKED_PER_BYTE * len(content):
                raise ValueError(f"{len(content):,} bytes would become {unpacked:,}")
            about = load_object(_entry(archive, _ABOUT), _ABOUT)
            names = [name for name in archive.namelist() if name != _ABOUT]
            if unknown := [name for name in names if not _ENTRY.fullmatch(name)]:
                raise ValueError(f"unknown entry {excerpt(repr(unknown[0]))}")
            files = {name: _entry(archive, name).decode() for name in names}
    except ARCHIVE_ERRORS as error:
        raise UserError(
            f"{path} is not a capsule, or is damaged ({excerpt(error)}). Fetch it again"
        ) from error
    # After the checks of the archive: a damaged file has no format.
    if about.get("format") != FORMAT:
        shown = excerpt(about.get("format"))
        raise UserError(f"{path} has format {shown}; this jaxforge reads {FORMAT}")
    if problem := _problem_of(about, files):
        raise UserError(f"{path} is not a valid capsule: {problem}. Make it again from the run")
    return Capsule(about, files)


def _entry(archive: zipfile.ZipFile, name: str) -> bytes:
    """Read an entry up to a byte more than its declared size, so that longer entries fail."""
    with archive.open(name) as entry:
        return entry.read(archive.getinfo(name).file_size + 1)


def _problem_of(about: Mapping[str, Any], files: Mapping[str, str]) -> str:
    """Return the first problem of a capsule's content; empty if there is none."""
    if missing := [name for name in (_CONFIG, CURVE) if name not in files]:
        return f"it has no {missing[0]}"
    for name in INGREDIENTS:
        if not isinstance(about.get(name), dict):
            return f"{_ABOUT} has no table {name}"
    sizes = about["mesh"]
    if not all(axis in axes.AXES and is_step(size) and size > 0 for axis, size in sizes.items()):
        return f"the mesh of {_ABOUT} is not a size for each axis"
    for number, line in enumerate(files[CURVE].encode().split(b"\n")[:-1], 1):
        value, problem = parse_line(line)
        problem = problem or problem_of(value, LOGGED)
        if problem or LOGGED.keys() - value.keys():
            return f"{CURVE}:{number}: {problem or 'no loss or gradient norm'}"
    return "" if files[CURVE].strip() else f"{CURVE} has no step"
