"""Writers of conversions, one for each format: units of work, then what makes them a checkpoint."""

import abc
import functools
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxforge.checkpoint.paths import PREFIX, SUBDIRECTORY
from jaxforge.cli.redaction import redacted_message
from jaxforge.config.job import JobConfig
from jaxforge.errors import StorageError, UserError
from jaxforge.storage import urls
from torch_compat.checkpoint import (
    dcp_state,
    hf_config,
    hf_state,
    orbax_store,
    stages,
    train_state,
)
from torch_compat.checkpoint.name_maps import name_map
from torch_compat.checkpoint.validation import check_written
from torch_compat.convert import model_card
from torch_compat.convert.source import Request, Source
from torch_compat.families import FAMILIES
from torch_compat.formats import dcp_writer, safetensors, torch_zip
from torch_compat.formats.dcp_reader import open_dcp
from torch_compat.formats.dcp_writer import Entry
from torch_compat.formats.files import Directory
from torch_compat.formats.lazy import LazyTensor
from torch_compat.formats.staging import Staging, Unit
from torch_compat.formats.workers import Share
from torch_compat.names import kempnerforge

_FRACTION = 24  # of the memory allowed, for one block: three are under way, each read and copied


class Writer(abc.ABC):
    """The result of a conversion; `stage` comes before all that writes.

    Args:
        request: what the user asks for.
        source: the opened source.

    Attributes:
        staging: where files gather.
        label: the result in words, such as its dialect.
        within: the directory in the destination that is made; "" is the destination itself.

    Raises:
        UserError: the source has no counterpart in the format.
    """

    staging: Staging
    label: str
    within = ""

    def __init__(self, request: Request, source: Source) -> None:
        self.request, self.source = request, source
        self.block = request.max_memory // _FRACTION

    @property
    def path(self) -> Path:
        """The directory that is made."""
        return self.request.destination.absolute() / self.within

    def notes(self) -> list[str]:
        """Return what the user should know.

        Raises:
            UserError: the source has no counterpart in the format.
        """
        return []

    def stage(self, plan: dict[str, Any], share: Share) -> Staging:
        """Begin to write, or go on with a conversion of the same plan."""
        self.staging = Staging(self.path, plan, share)
        return self.staging

    @property
    @abc.abstractmethod
    def units(self) -> Sequence[Unit]:
        """The work, in the same order in every process."""

    @abc.abstractmethod
    def complete(self, results: Mapping[str, Any]) -> None:
        """Write what goes with the units, by process 0, and check that all of it reads back.

        Args:
            results: what each unit returned, by its name.

        Raises:
            StorageError: it does not.
        """

    def commit(self) -> None:
        """Give the result its name."""
        self.staging.commit()

    def _check_names(self, dialect: str) -> None:
        """Check that the dialect has a name for everything."""
        model = self.source.target.config.model
        stages.check(self.request.stages, name_map(dialect), model)
        name_map(dialect).to_theirs(self.source.checkpoint.variables, model)


class RunWriter(Writer):
    """A run directory of jaxforge."""

    def __init__(self, request: Request, source: Source) -> None:
        super().__init__(request, source)
        step = source.progress.step
        self.label = f"step {step}" if source.checkpoint.moments else "weights alone, step 0"
        self.within = f"{SUBDIRECTORY}/{PREFIX}_{step}"

    def stage(self, plan: dict[str, Any], share: Share) -> Staging:
        """Begin a checkpoint of the run."""
        self._import = orbax_store.stage(
            self.source.checkpoint, self.source.target, self.request.destination, plan, share,
            self.block,
        )  # fmt: skip
        self.staging = self._import.staging
        return self.staging

    @property
    def units(self) -> Sequence[Unit]:
        """Files of arrays."""
        return self._import.units

    def complete(self, results: Mapping[str, Any]) -> None:
        """Write `config.toml` and `tokenizer/`, for when the checkpoint is there."""
        from jaxforge.runs import run_directory  # here, as it imports JAX

        beside, ref = self._import.beside, self.source.ref
        if ref.format == "jaxforge":
            for name in (hf_state.TOKENIZER, hf_state.IMPORTED):
                _copy_files(ref.run / name, beside / name)
        try:
            run_directory.prepare(
                beside, of_run(self.source.target.config, self.request.destination)
            )
        except UserError as error:
            raise error.__cause__ or error from None  # the disk's fault, and no setting's
        if ref.format == "hf":
            hf_state.copy_tokenizer(ref.directory, beside / hf_state.TOKENIZER)
            hf_state.keep_documents(ref.directory, beside)

    def commit(self) -> None:
        """Let Orbax make the checkpoint."""
        self._import.commit()


class DcpWriter(Writer):
    """A `step_<n>` of PyTorch's DCP, with the place of the run."""

    def __init__(self, request: Request, source: Source) -> None:
        super().__init__(request, source)
        model = source.target.config.model
        is_packed = model.is_moe and model.moe_packed_experts
        usual = "kempnerforge-packed" if is_packed else "kempnerforge"
        self._dialect = request.dialect or usual
        self._check_names(self._dialect)
        self._is_titan = self._dialect.startswith("torchtitan")
        self._has_moments = source.checkpoint.moments is not None
        self._has_place = self._has_moments and not self._is_titan
        many = f", {request.stages} stages" if request.stages > 1 else ""
        self.label = f"{self._dialect}{many}"
        self.within = f"step{'-' if self._is_titan else '_'}{source.progress.step}"

    def notes(self) -> list[str]:
        """Return notes for the user.

        Raises:
            UserError: the position in the data falls within a batch of this many ranks.
        """
        if self._has_place:
            self._train_state()
        if self._is_titan and self._has_moments:
            return dcp_state.titan_notes(self.source.target)
        is_theirs = self._dialect.startswith("kempnerforge")
        return list(kempnerforge.unknown(self.source.target.config.model)) if is_theirs else []

    @functools.cached_property
    def _units(self) -> dict[str, list[Unit]]:
        """The work for each pipeline stage."""
        return {
            stage: dcp_writer.units(entries, self.staging.path / stage, self.block, prefix=stage)
            for stage, entries in self._stages.items()
        }

    @property
    def units(self) -> Sequence[Unit]:
        """Files of tensors."""
        return list(itertools.chain.from_iterable(self._units.values()))

    def complete(self, results: Mapping[str, Any]) -> None:
        """Write the metadata, and where the run stands."""
        directory = self.staging.path
        if self._has_place:
            with (directory / train_state.TRAIN_STATE).open("wb") as file:
                file.writelines(torch_zip.archive(self._train_state()))
            progress = self.source.progress
            about = {"step": progress.step, "tokens_seen": progress.tokens}
            (directory / "metadata.json").write_text(json.dumps(about, indent=2))
        for stage, entries in self._stages.items():
            locations = {unit.name: results[unit.name] for unit in self._units[stage]}
            dcp_writer.write_metadata(entries, locations, directory / stage, self.block)
        every = itertools.chain.from_iterable(part.items() for part in self._stages.values())
        written = {key: e.value for key, e in every if isinstance(e.value, LazyTensor)}
        check_written(open_dcp(Directory(directory)).tensors, written, str(directory))

    def commit(self) -> None:
        """Give the checkpoint its name, and point `latest` to it."""
        super().commit()
        _point_latest(self.staging.destination)

    @functools.cached_property
    def _stages(self) -> dict[str, dict[str, Entry]]:
        """The entries of each pipeline stage, by the name of its directory."""
        target, layout = self.source.target, self.request.layout
        entries = functools.partial(
            dcp_state.entries, target=target, dialect=name_map(self._dialect),
            flat=layout == "flat" if layout else self._is_titan,
            prefix="" if self._is_titan else "model.", weights_only=not self._has_moments,
        )  # fmt: skip
        checkpoint, n_layers = self.source.checkpoint, target.config.model.n_layers
        split = stages.split(checkpoint, n_layers, self.request.stages)
        parts = {stage: entries(part) for stage, part in split.items()}
        if self._is_titan and self._has_moments:
            parts[""] |= dcp_state.place_within(checkpoint, target)
        return parts

    def _train_state(self) -> dict[str, Any]:
        updates = int(self.source.checkpoint.scalars["updates"])
        return train_state.to_torch(
            self.source.progress, updates, self.source.target.config, self.request.ranks
        )


class HfWriter(Writer):
    """A directory that `AutoModelForCausalLM.from_pretrained` opens, with a model card."""

    def __init__(self, request: Request, source: Source) -> None:
        super().__init__(request, source)
        before = source.imported
        self._family = hf_config.family_of(
            source.target.config.model, request.dialect, before and before.config
        )
        self.label = FAMILIES[self._family].dialect.name
        self._check_names(self.label)

    def notes(self) -> list[str]:
        """Return what the user should know."""
        return list(hf_state.notes(self.label, self.source.tokenizer))

    @functools.cached_property
    def units(self) -> Sequence[Unit]:
        """Parts of safetensors files, and the documents."""
        return hf_state.units(
            self.source.checkpoint, self.source.target.config, self.staging.path,
            family=self._family, largest=self.request.largest_file, block=self.block,
            tokenizer=self.source.tokenizer, before=self.source.imported,
        )  # fmt: skip

    def complete(self, results: Mapping[str, Any]) -> None:
        """Write the model card."""
        directory, model = self.staging.path, self.source.target.config.model
        written = name_map(self.label).to_theirs(self.source.checkpoint.variables, model)
        check_written(safetensors.open_directory(Directory(directory)), written, str(directory))
        (directory / model_card.FILE).write_text(self._card(directory), "utf-8")

    def _card(self, directory: Path) -> str:
        source, ref = self.source, self.source.ref
        name, logged = ref.title, model_card.Logged({}, {}, 0)
        if ref.format == "jaxforge":
            name = urls.path(source.trained.checkpoint.dir).name or ref.run.name
            logged = model_card.read_logged(ref.run, int(ref.directory.name.rpartition("_")[2]))
        card = model_card.model_card(
            name, source.trained, source.checkpoint.progress,
            parameters=sum(math.prod(t.shape) for t in source.checkpoint.params.values()),
            model_type=self._family,
            logged=None if ref.format == "hf" else logged,
            has_tokenizer=(directory / "tokenizer.json").exists(),
        )  # fmt: skip
        return redacted_message(card)


WRITERS: Mapping[str, type[Writer]] = {"jaxforge": RunWriter, "dcp": DcpWriter, "hf": HfWriter}
"""The writer of each format."""


def of_run(config: JobConfig, run: Path) -> JobConfig:
    """Return the config that a run directory gets, which names the directory."""
    checkpoint = config.checkpoint.model_copy(update={"dir": str(run), "load_path": None})
    return config.model_copy(update={"checkpoint": checkpoint})


def _copy_files(source: Path, target: Path) -> None:
    """Copy the files of a directory, which may be in a bucket; nothing if there is none."""
    for path in filter(Path.is_file, source.iterdir() if source.is_dir() else ()):
        target.mkdir(parents=True, exist_ok=True)
        (target / path.name).write_bytes(path.read_bytes())


def _point_latest(checkpoint: Path) -> None:
    """Make `latest` as KempnerForge has it: a relative link, replaced in one step.

    Raises:
        StorageError: the file system has no links, or is full; the checkpoint is whole.
    """
    temporary = checkpoint.parent / "latest.tmp"
    try:
        temporary.unlink(missing_ok=True)
        os.symlink(checkpoint.name, temporary)
        temporary.replace(checkpoint.parent / "latest")
    except OSError as error:
        raise StorageError(
            f"{checkpoint} is whole, but {temporary.with_name('latest')} could not be made to "
            f"point to it ({error.strerror}): name the checkpoint itself to who loads it"
        ) from error
