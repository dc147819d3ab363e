"""What the commands do: plan a conversion, run a share of it, compare two checkpoints."""

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxforge import run_directory
from jaxforge.config.job import JobConfig
from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from jaxforge.training.progress import Progress
from torch_compat import (
    dcp_reader,
    dcp_state,
    dcp_writer,
    hf_config,
    hf_state,
    orbax_store,
    place,
    stages,
    torch_zip,
)
from torch_compat.checkpoints import Found
from torch_compat.compare import Difference, compare
from torch_compat.dcp_state import Options
from torch_compat.dcp_writer import Entry
from torch_compat.lazy import DTYPES, Lazy
from torch_compat.names import DIALECTS
from torch_compat.names.huggingface import FAMILIES
from torch_compat.names.kempnerforge import LACKS
from torch_compat.staging import Share, Staging
from torch_compat.state import Held, Wanted, wanted

Advance = Callable[[int], None]
Check = Callable[[], None]

_SIZE = re.compile(r"([\d.]+) *([kmgt]?)(i?)b?", re.IGNORECASE)
_FRACTION = 24  # of the memory allowed, for one block: three are under way, each read and copied


class Size:
    """A number of bytes such as 5GB or 256MiB.

    Raises:
        ValueError: the text is none.
    """

    def __init__(self, text: str) -> None:
        match = _SIZE.fullmatch(text.strip())
        if not match:
            raise ValueError(f"{text}: no size such as 256MiB")
        base = 1024 if match[3] else 1000
        self.bytes = int(float(match[1]) * base ** " kmgt".index(match[2].lower() or " "))


@dataclasses.dataclass(frozen=True)
class Plan:
    """A conversion that can be run.

    Attributes:
        summary: what it does, in a line.
        notes: what the user should know.
        nbytes: bytes that it writes.
        held: what it writes.
        wanted: what the config declares.
    """

    summary: str
    notes: tuple[str, ...]
    nbytes: int
    held: Held
    wanted: Wanted


@dataclasses.dataclass(frozen=True)
class Import:
    """A PyTorch checkpoint becomes a run of jaxforge.

    Attributes:
        source: the checkpoint.
        destination: the run directory to make.
        config: the config file of the run; Hugging Face's checkpoints need none.
        overrides: settings over it.
        options: what the user allows.
        dtype: dtype of the weights; None keeps theirs.
        max_memory: bytes for tensors on their way.
    """

    source: Found
    destination: Path
    config: Path | None
    overrides: Sequence[str]
    options: Options
    dtype: str | None
    max_memory: int

    def plan(self) -> Plan:
        """Opens the source and checks everything that can be checked without reading tensors.

        Raises:
            UserError: it is not of that config, or damaged, or jaxforge's own.
        """
        if self.source.format == "jaxforge":
            raise UserError(f"{self.source.directory} is a run of jaxforge already")
        config = self.source.config(self.config, self.overrides)
        if config is None:
            raise UserError(
                f"{self.source.directory}: a DCP checkpoint does not say which model it is of: "
                "give the run's config, --config FILE"
            )
        held = self.source.read(config, self.options)
        held = dataclasses.replace(held, params=cast(held.params, self.dtype))
        if held.progress is None:
            held = dataclasses.replace(held, progress=Progress())
        nbytes = sum(tensor.nbytes for _, tensor in held.tensors())
        progress = held.progress
        assert progress is not None
        what = f"step {progress.step}" if held.moments else "weights alone, step 0"
        return Plan(
            f"{self.source.directory} ({held.dialect}, {what}, {nbytes / 1e9:.3g} GB) -> "
            f"{self.destination}",
            held.notes,
            nbytes,
            held,
            wanted(config),
        )

    def run(
        self, plan: Plan, share: Share, advance: Advance, check: Check = lambda: None
    ) -> Path | None:
        """Writes a share of it; process 0 waits for the others, calling `check`, and commits.

        Returns:
            The checkpoint, from process 0.
        """
        fingerprint = {"import": _identity(self.source), "options": _plain(self)}
        block = self.max_memory // _FRACTION
        writer = orbax_store.stage(
            plan.held, plan.wanted, self.destination, fingerprint, share, block
        )
        writer.staging.write(writer.units, advance)
        if share.process:
            return None
        writer.staging.results(writer.units, check)
        run_directory.prepare(self.destination, _of_run(plan.wanted.config, self.destination))
        if self.source.format == "hf":
            hf_state.copy_tokenizer(self.source.directory, self.destination / "tokenizer")
        writer.commit()
        return writer.staging.destination


@dataclasses.dataclass(frozen=True)
class Export:
    """A run of jaxforge becomes a PyTorch checkpoint.

    Attributes:
        source: the run, or one of its checkpoints.
        destination: for "hf" the directory to make, for "dcp" the one in which `step_<n>` appears.
        to: the format.
        config: a config file instead of the config in the checkpoint.
        overrides: settings over it.
        dialect: whose names to use; None takes KempnerForge's, and the family that the model is of.
        layout: of optimizer state; None takes the dialect's.
        ranks: data-parallel ranks that will go on with it.
        stages: pipeline stages that will; with several, each gets a checkpoint of its own.
        weights_only: leave the optimizer out.
        dtype: dtype of the weights; None keeps theirs.
        largest_file: bytes of a safetensors file.
        max_memory: bytes for tensors on their way.
    """

    source: Found
    destination: Path
    to: Literal["dcp", "hf"]
    config: Path | None = None
    overrides: Sequence[str] = ()
    dialect: str | None = None
    layout: str | None = None
    ranks: int = 1
    stages: int = 1
    weights_only: bool = False
    dtype: str | None = None
    largest_file: int = 5_000_000_000
    max_memory: int = 256 << 20

    def plan(self) -> Plan:
        """Opens the source and checks everything that can be checked without reading tensors.

        Raises:
            UserError: the model has no counterpart in the dialect.
        """
        if self.source.format != "jaxforge":
            raise UserError(f"{self.source.directory}: export takes a run of jaxforge; import it")
        config = self.source.config(self.config, self.overrides)
        assert config is not None
        alone = self.to == "hf" or self.weights_only
        held = self.source.read(config, Options(weights_only=alone))
        held = dataclasses.replace(held, params=cast(held.params, self.dtype))
        declared = wanted(config)
        dialect = self._dialect(config)
        stages.check(self.stages, DIALECTS[dialect], config.model)
        DIALECTS[dialect].to_theirs(held.params, config.model)  # refuses what has no counterpart
        nbytes = sum(tensor.nbytes for _, tensor in held.tensors())
        what = dialect if self.stages == 1 else f"{dialect}, {self.stages} stages"
        summary = f"{self.source.directory} -> {self._target(held)} ({what}, {nbytes / 1e9:.3g} GB)"
        if self.to == "hf":
            notes = list(hf_state.notes(dialect, _tokenizer(self.source)))
        else:
            notes = _unknown_to_kempnerforge(config.model) if dialect == "kempnerforge" else []
            if self._has_place(held):
                self._train_state(held, config)  # refuses a place between these ranks' batches
        return Plan(summary, tuple(notes), nbytes, held, declared)

    def run(
        self, plan: Plan, share: Share, advance: Advance, check: Check = lambda: None
    ) -> Path | None:
        """Writes a share of it; process 0 waits for the others, calling `check`, and commits.

        Returns:
            What was made, from process 0.
        """
        fingerprint = {"export": _identity(self.source), "options": _plain(self)}
        staging = Staging(self._target(plan.held), fingerprint, share)
        if self.to == "hf":
            return self._write_hf(plan, staging, advance, check)
        return self._write_dcp(plan, staging, advance, check)

    def _write_hf(
        self, plan: Plan, staging: Staging, advance: Advance, check: Check
    ) -> Path | None:
        units = hf_state.units(
            plan.held, plan.wanted.config, staging.path,
            dialect=self.dialect, largest=self.largest_file,
            block=self.max_memory // _FRACTION, tokenizer=_tokenizer(self.source),
        )  # fmt: skip
        staging.write(units, advance)
        if staging.share.process:
            return None
        staging.results(units, check)
        staging.commit()
        return staging.destination

    def _write_dcp(
        self, plan: Plan, staging: Staging, advance: Advance, check: Check
    ) -> Path | None:
        held, parts = plan.held, self._parts(plan)
        block = self.max_memory // _FRACTION
        units = {
            stage: dcp_writer.units(entries, staging.path / stage, block, prefix=stage)
            for stage, entries in parts.items()
        }
        every = list(itertools.chain.from_iterable(units.values()))
        staging.write(every, advance)
        if staging.share.process:
            return None
        done = staging.results(every, check)
        if self._has_place(held):
            self._write_place(held, plan.wanted.config, staging.path)
        for stage, entries in parts.items():
            places = {unit.name: done[unit.name] for unit in units[stage]}
            dcp_writer.write_metadata(entries, places, staging.path / stage, block)
        staging.commit()
        _point_latest(staging.destination)
        return staging.destination

    def _parts(self, plan: Plan) -> dict[str, dict[str, Entry]]:
        """What each pipeline stage writes, by the name of its directory."""
        config = plan.wanted.config
        flat = self.layout == "flat" if self.layout else self._is_titan
        entries = functools.partial(
            dcp_state.entries, wanted=plan.wanted, dialect=DIALECTS[self._dialect(config)],
            flat=flat, prefix="" if self._is_titan else "model.", weights_only=self.weights_only,
        )  # fmt: skip
        held = stages.split(plan.held, config.model.n_layers, self.stages)
        parts = {stage: entries(part) for stage, part in held.items()}
        if self._is_titan and plan.held.moments is not None:
            parts[""] |= dcp_state.place_within(plan.held)
        return parts

    @property
    def _is_titan(self) -> bool:
        return (self.dialect or "").startswith("torchtitan")

    def _has_place(self, held: Held) -> bool:
        return held.moments is not None and not self._is_titan

    def _train_state(self, held: Held, config: JobConfig) -> dict[str, Any]:
        assert held.progress is not None
        return place.train_state(held.progress, int(held.scalars["updates"]), config, self.ranks)

    def _write_place(self, held: Held, config: JobConfig, directory: Path) -> None:
        assert held.progress is not None
        with (directory / place.TRAIN_STATE).open("wb") as file:
            for piece in torch_zip.archive(self._train_state(held, config)):
                file.write(piece)
        about = {"step": held.progress.step, "tokens_seen": held.progress.tokens}
        (directory / "metadata.json").write_text(json.dumps(about, indent=2))

    def _dialect(self, config: JobConfig) -> str:
        if self.to == "hf":
            return FAMILIES[hf_config.family_of(config.model, self.dialect)].name
        return self.dialect or "kempnerforge"

    def _target(self, held: Held) -> Path:
        if self.to == "hf":
            return self.destination.absolute()
        assert held.progress is not None
        separator = "-" if self._is_titan else "_"
        return self.destination.absolute() / f"step{separator}{held.progress.step}"


@dataclasses.dataclass(frozen=True)
class Verified:
    """What a comparison found.

    Attributes:
        compared: tensors that were looked at.
        differences: those that are not the same.
        notes: what was not compared.
    """

    compared: int
    differences: list[Difference]
    notes: list[str]

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.differences


def verify(
    a: Found,
    b: Found,
    config: Path | None,
    overrides: Sequence[str],
    options: Options,
    max_memory: int,
) -> Verified:
    """Compares two checkpoints of any formats.

    Args:
        a: one.
        b: the other.
        config: the config that they are of; without one, that of either, or their own keys.
        overrides: settings over it.
        options: how to read them.
        max_memory: bytes for tensors on their way.

    Raises:
        UserError: one of them is damaged, or not of that config.
    """
    declared = next(
        (c for found in (a, b) if (c := found.config(config, overrides)) is not None), None
    )
    block = max_memory // _FRACTION
    if declared is None:  # two DCP checkpoints
        ours, theirs = a.raw(), b.raw()
        notes = ["compared by their own keys; --config FILE compares by parameter"]
        return Verified(len(ours.keys() | theirs.keys()), compare(ours, theirs, block), notes)
    one, other = a.read(declared, options), b.read(declared, options)
    notes = []
    if (one.moments is None) != (other.moments is None):
        notes.append("only one has optimizer state: weights were compared, nothing else")
        one, other = (dataclasses.replace(h, moments=None, scalars={}) for h in (one, other))
    ours, theirs = dict(one.tensors()), dict(other.tensors())
    differences = compare(ours, theirs, block) + _scalar_differences(one, other)
    count = len(ours.keys() | theirs.keys()) + len(one.scalars.keys() | other.scalars.keys())
    return Verified(count, differences, notes)


def cast(tensors: Any, dtype: str | None) -> dict[str, Lazy]:  # noqa: ANN401
    """Tensors in another dtype, by torch's name of it."""
    if dtype is None:
        return dict(tensors)
    return {name: tensor.cast(DTYPES[dtype]) for name, tensor in tensors.items()}


def start_workers(arguments: Sequence[str], processes: int) -> list[subprocess.Popen[bytes]]:
    """Starts this very command for the other shares."""
    command = [sys.executable, "-m", "torch_compat", *arguments]
    return [subprocess.Popen([*command, f"--process={i}/{processes}"]) for i in range(1, processes)]


def check_workers(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    """Looks whether all workers are well.

    Raises:
        UserError: one of them failed.
    """
    if any(worker.poll() for worker in workers):
        raise UserError("a worker process failed; its message is above")


def end_workers(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    """Stops the workers that have not ended."""
    for worker in workers:
        worker.terminate()
        worker.wait()


def _scalar_differences(one: Held, other: Held) -> list[Difference]:
    found = []
    for name in sorted(one.scalars.keys() | other.scalars.keys()):
        x, y = one.scalars.get(name), other.scalars.get(name)
        if x is None or y is None or not np.array_equal(x, y):
            largest = float(abs(x - y)) if x is not None and y is not None else float("inf")
            found.append(Difference(f"optimizer.{name}", "values", largest, f"{x} and {y}"))
    return found


def _identity(found: Found) -> dict[str, Any]:
    """What tells a source from another one at the same place."""
    names = ["config.json", "model.safetensors.index.json"]
    files = [(found.directory, name) for name in names if found.directory.has(name)]
    files += [(part, dcp_reader.METADATA) for part in dcp_reader.parts(found.directory)]
    digests = {
        f"{directory}/{name}": hashlib.sha256(directory.read(name)).hexdigest()
        for directory, name in files
    }
    return {"path": str(found.directory), **digests}


def _plain(job: Any) -> dict[str, str]:  # noqa: ANN401 (a dataclass)
    names = [field.name for field in dataclasses.fields(job) if field.name != "source"]
    return {name: str(getattr(job, name)) for name in names}  # the same in every process


def _unknown_to_kempnerforge(model: ModelConfig) -> list[str]:
    plain = ModelConfig()
    return [
        f"KempnerForge has no model.{key}: it would load these weights and compute something else"
        for key in LACKS
        if getattr(model, key) != getattr(plain, key)
    ]


def _of_run(config: JobConfig, run: Path) -> JobConfig:
    """The config that the run directory gets: the run is where it is."""
    checkpoint = config.checkpoint.model_copy(update={"dir": str(run), "load_path": None})
    return config.model_copy(update={"checkpoint": checkpoint})


def _tokenizer(found: Found) -> Path | None:
    run = orbax_store.run_of(Path(found.directory.path))
    return run / "tokenizer" if (run / "tokenizer").is_dir() else None


def _point_latest(checkpoint: Path) -> None:
    """`latest`, as KempnerForge keeps it: a relative link, replaced in one step."""
    temporary = checkpoint.parent / "latest.tmp"
    temporary.unlink(missing_ok=True)
    os.symlink(checkpoint.name, temporary)
    temporary.replace(checkpoint.parent / "latest")
