"""Imports and exports: each plans a conversion, then runs a share of it.

A destination may be planned in a bucket; `upload` runs such a conversion.
"""

import dataclasses
import functools
import gc
import importlib
import json
import math
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from jaxforge.checkpoint.paths import PREFIX, SUBDIRECTORY, check_path
from jaxforge.cli.redaction import redacted_message
from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError
from jaxforge.state.progress import Progress
from jaxforge.storage import urls
from jaxforge.storage.run_lock import RunLock
from torch_compat.checkpoint import hf_config, hf_state, mup, orbax_store, stages
from torch_compat.checkpoint.checkpoints import CheckpointRef
from torch_compat.checkpoint.compare import check_written
from torch_compat.checkpoint.dcp_export import DcpExport, point_latest
from torch_compat.checkpoint.dcp_state import Options
from torch_compat.checkpoint.fits import check_fits, unseen
from torch_compat.checkpoint.name_maps import name_map
from torch_compat.checkpoint.state import AbstractTarget, CheckpointState, abstract_target
from torch_compat.checkpoint.untrained import check_present
from torch_compat.convert import model_card
from torch_compat.convert.identity import check_unchanged, files_of, identity
from torch_compat.families import FAMILIES
from torch_compat.formats import safetensors
from torch_compat.formats.files import Directory
from torch_compat.formats.lazy import DTYPES, LazyTensor
from torch_compat.formats.staging import Staging, Unit, naming_failure
from torch_compat.formats.workers import Share, Workers

Advance = Callable[[int], None]

_FRACTION = 24  # of the memory allowed, for one block: three are under way, each read and copied


@dataclasses.dataclass(frozen=True)
class Plan:
    """A conversion that can be run.

    Attributes:
        summary: what it does, in a line.
        notes: what the user should know.
        nbytes: bytes that it writes.
        checkpoint: what it writes.
        target: what the config declares.
        files: of the source, as they were before it was opened.
        within: the directory in the destination that is made; "" is the destination itself.
    """

    summary: str
    notes: tuple[str, ...]
    nbytes: int
    checkpoint: CheckpointState
    target: AbstractTarget
    files: dict[str, dict[str, str]]
    within: str


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

    source: CheckpointRef
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
        check_path(self.destination)
        if self.source.format == "jaxforge":
            raise UserError(f"{self.source.directory} is a run of jaxforge already")
        config = self.source.config(self.config, self.overrides)
        if config is None:
            raise UserError(
                f"{self.source.directory}: a DCP checkpoint does not say which model it is of: "
                "give the run's config, --config FILE"
            )
        files = files_of(self.source)
        checkpoint = self.source.read(config, self.options)
        if checkpoint.counts_experts:
            config = config.skipping_idle_experts()
        checkpoint = dataclasses.replace(checkpoint, params=cast(checkpoint.params, self.dtype))
        if checkpoint.progress is None:
            checkpoint = dataclasses.replace(checkpoint, progress=Progress())
        nbytes = sum(tensor.nbytes for _, tensor in checkpoint.tensors())
        progress = checkpoint.progress
        assert progress is not None
        what = f"step {progress.step}" if checkpoint.moments else "weights alone, step 0"
        return Plan(
            f"{self.source.directory} ({checkpoint.dialect}, {what}, {nbytes / 1e9:.3g} GB) -> "
            f"{self.destination}",
            checkpoint.notes,
            nbytes,
            checkpoint,
            abstract_target(config),
            files,
            f"{SUBDIRECTORY}/{PREFIX}_{progress.step}",
        )

    def run(self, plan: Plan, share: Share, advance: Advance, workers: Workers) -> Path | None:
        """Writes a share of it; process 0 waits for the others, and commits.

        Returns:
            The checkpoint, from process 0.
        """
        name = identity(self, plan.files, plan.checkpoint, plan.target)
        block = self.max_memory // _FRACTION
        with RunLock(self.destination) as lock:
            if not share.process:
                lock.take()
            writer = orbax_store.stage(
                plan.checkpoint, plan.target, self.destination, name, share, block
            )
            with writer.staging:
                return self._write(plan, writer, advance, workers)

    def _write(
        self, plan: Plan, writer: orbax_store.Import, advance: Advance, workers: Workers
    ) -> Path | None:
        workers.start()
        with ThreadPoolExecutor(1) as beside:
            if not writer.staging.share.process:  # the disk is busy for longer than this takes
                beside.submit(_load_orbax)
            writer.staging.write(writer.units, advance)
        if writer.staging.share.process:
            return None
        writer.staging.results(writer.units, workers.check)
        check_unchanged(self.source, plan.files)
        with naming_failure(writer.staging.destination):
            self._write_beside(plan.target.config, writer.beside)
        writer.commit()
        return writer.staging.destination

    def _write_beside(self, config: JobConfig, directory: Path) -> None:
        """What the run directory gets with the checkpoint: `config.toml`, `tokenizer/`."""
        from jaxforge.runs import run_directory  # here, as it imports JAX

        try:
            run_directory.prepare(directory, of_run(config, self.destination))
        except UserError as error:
            raise error.__cause__ or error from None  # the disk's fault, and no setting's
        if self.source.format == "hf":
            hf_state.copy_tokenizer(self.source.directory, directory / "tokenizer")
            hf_state.keep_documents(self.source.directory, directory)


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

    source: CheckpointRef
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
        files = files_of(self.source)
        checkpoint = self.source.read(config, Options(weights_only=alone))
        mup.check_export(config.model, weights_only=alone)
        params = mup.folded(checkpoint.params, config.model)
        checkpoint = dataclasses.replace(checkpoint, params=cast(params, self.dtype))
        declared = abstract_target(config)
        trained = self.source.config(None) if self.config or self.overrides else config
        assert trained is not None
        check_fits(checkpoint, declared, trained.model, str(self.source.directory))
        absent = check_present(checkpoint, declared, str(self.source.directory))
        changed = unseen(trained.model, config.model)
        config = config.model_copy(update={"model": mup.as_standard(config.model)})
        declared, dialect = abstract_target(config), self._dialect(config)
        stages.check(self.stages, name_map(dialect), config.model)
        by = name_map(dialect)
        by.to_theirs(checkpoint.variables, config.model)  # refuses what has no counterpart
        nbytes = sum(tensor.nbytes for _, tensor in checkpoint.tensors())
        what = dialect if self.stages == 1 else f"{dialect}, {self.stages} stages"
        target = self._target(checkpoint, declared)
        summary = f"{self.source.directory} -> {target} ({what}, {nbytes / 1e9:.3g} GB)"
        if self.to == "hf":
            notes = hf_state.notes(dialect, _tokenizer(self.source))
        else:
            notes = iter(self._dcp(checkpoint, declared).notes())
        within = self._within(checkpoint, declared)
        said = (*changed, *absent, *notes)
        return Plan(summary, said, nbytes, checkpoint, declared, files, within)

    def run(self, plan: Plan, share: Share, advance: Advance, workers: Workers) -> Path | None:
        """Writes a share of it; process 0 waits for the others, and commits.

        Returns:
            What was made, from process 0.
        """
        name = identity(self, plan.files, plan.checkpoint, plan.target)
        with Staging(self._target(plan.checkpoint, plan.target), name, share) as staging:
            workers.start()
            units, finish = self._work(plan, staging.path)
            staging.write(units, advance)
            if share.process:
                return None
            done = staging.results(units, workers.check)
            with naming_failure(staging.destination):
                finish(done)
            check_unchanged(self.source, plan.files)
            staging.commit()
        if self.to == "dcp":
            point_latest(staging.destination)
        return staging.destination

    def _work(self, plan: Plan, directory: Path) -> tuple[list[Unit], Callable[[Any], None]]:
        """The units to write, and what makes a checkpoint of their results."""
        block = self.max_memory // _FRACTION
        if self.to == "dcp":
            return self._dcp(plan.checkpoint, plan.target).work(directory, block)
        units = hf_state.units(
            plan.checkpoint, plan.target.config, directory,
            dialect=self.dialect, largest=self.largest_file, block=block,
            tokenizer=_tokenizer(self.source), before=self._imported,
        )  # fmt: skip
        written = name_map(self._dialect(plan.target.config)).to_theirs(
            plan.checkpoint.variables, plan.target.config.model
        )

        def finish(_: Any) -> None:  # noqa: ANN401 (the units' results say nothing)
            made = safetensors.open_directory(Directory(directory))
            check_written(made, written, str(directory))
            (directory / model_card.FILE).write_text(self._card(plan, directory), "utf-8")

        return units, finish

    def _card(self, plan: Plan, directory: Path) -> str:
        """The model card, beside the `config.json` that is written."""
        run = orbax_store.run_of(urls.path(self.source.directory.path))
        step = int(self.source.directory.name.rpartition("_")[2])
        trained = self.source.config(None)
        assert trained is not None
        family = json.loads((directory / hf_config.CONFIG).read_text())["model_type"]
        parameters = sum(math.prod(tensor.shape) for tensor in plan.checkpoint.params.values())
        card = model_card.model_card(
            urls.path(trained.checkpoint.dir).name or run.name, trained,
            plan.checkpoint.progress, parameters, family, model_card.read_logged(run, step),
            has_tokenizer=(directory / "tokenizer.json").exists(),
        )  # fmt: skip
        return redacted_message(card)

    def _dcp(self, checkpoint: CheckpointState, declared: AbstractTarget) -> DcpExport:
        return DcpExport(
            checkpoint, declared, self._dialect(declared.config), self.layout, self.ranks,
            self.stages, self.weights_only,
        )  # fmt: skip

    def _dialect(self, config: JobConfig) -> str:
        if self.to == "hf":
            before = self._imported
            family = hf_config.family_of(config.model, self.dialect, before and before.config)
            return FAMILIES[family].dialect.name
        is_packed = config.model.is_moe and config.model.moe_packed_experts
        return self.dialect or ("kempnerforge-packed" if is_packed else "kempnerforge")

    @functools.cached_property
    def _imported(self) -> hf_state.Imported | None:
        return hf_state.imported(orbax_store.run_of(urls.path(self.source.directory.path)))

    def _target(self, checkpoint: CheckpointState, declared: AbstractTarget) -> Path:
        return self.destination.absolute() / self._within(checkpoint, declared)

    def _within(self, checkpoint: CheckpointState, declared: AbstractTarget) -> str:
        return "" if self.to == "hf" else self._dcp(checkpoint, declared).name


def _load_orbax() -> None:
    """Beside threads that write, which need the interpreter for a moment after each system call.

    They would wait for five milliseconds each time: 3.6 s for 4 GB, instead of 3.3.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.0002)
    try:
        importlib.import_module("torch_compat.checkpoint.orbax_commit")
    finally:
        sys.setswitchinterval(interval)
    gc.freeze()  # to look through what was loaded takes a third of a second, when Python ends too


def cast(tensors: Any, dtype: str | None) -> dict[str, LazyTensor]:  # noqa: ANN401
    """Tensors in another dtype, by torch's name of it."""
    if dtype is None:
        return dict(tensors)
    return {name: tensor.cast(DTYPES[dtype]) for name, tensor in tensors.items()}


def of_run(config: JobConfig, run: Path) -> JobConfig:
    """The config that the run directory gets: the run is where it is."""
    checkpoint = config.checkpoint.model_copy(update={"dir": str(run), "load_path": None})
    return config.model_copy(update={"checkpoint": checkpoint})


def _tokenizer(found: CheckpointRef) -> Path | None:
    run = orbax_store.run_of(urls.path(found.directory.path))
    return run / "tokenizer" if (run / "tokenizer").is_dir() else None
