"""Writer of checkpoints in PyTorch's DCP format."""

import functools
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxforge.errors import StorageError
from torch_compat.checkpoint import dcp_state, stages, train_state
from torch_compat.checkpoint.name_maps import name_map, usual_dialect
from torch_compat.checkpoint.validation import check_written
from torch_compat.convert.source import Request, Source
from torch_compat.convert.writer import Writer
from torch_compat.formats import dcp_writer, torch_zip
from torch_compat.formats.dcp_reader import open_dcp
from torch_compat.formats.dcp_writer import Entry
from torch_compat.formats.files import Directory
from torch_compat.formats.lazy import LazyTensor
from torch_compat.formats.staging import Unit
from torch_compat.names import kempnerforge


class DcpWriter(Writer):
    """Writer of a DCP directory `step_<n>` with tensors and the training state."""

    prefix = "model."
    """Prefix of the model's keys."""
    owner = ""
    """Prefix of parameter names in the optimizer's keys."""

    def __init__(self, request: Request, source: Source) -> None:
        super().__init__(request, source)
        self._dialect = self._choose_dialect()
        self._check_names(self._dialect)
        self._is_titan = self._dialect.startswith("torchtitan")
        self._has_moments = source.checkpoint.moments is not None
        self._has_train_state = self._has_moments and not self._is_titan
        many = f", {request.stages} stages" if request.stages > 1 else ""
        self.label = f"{self._dialect}{many}"
        self.subdirectory = f"step{'-' if self._is_titan else '_'}{source.progress.step}"

    def _choose_dialect(self) -> str:
        """Return the name of the result's dialect."""
        return self.request.dialect or usual_dialect(self.source.target.config.model)

    def notes(self) -> list[str]:
        """Return notes for the user.

        Raises:
            UserError: the data position is not at a batch boundary of the requested ranks.
        """
        if self._has_train_state:
            self._train_state()
        if self._is_titan and self._has_moments:
            return dcp_state.torchtitan_notes(self.source.target)
        is_kempnerforge = self._dialect.startswith("kempnerforge")
        return (
            list(kempnerforge.incompatibilities(self.source.target.config.model))
            if is_kempnerforge
            else []
        )

    @functools.cached_property
    def _units(self) -> dict[str, list[Unit]]:
        """Units of each pipeline stage."""
        return {
            stage: dcp_writer.units(entries, self.staging.path / stage, self.block, prefix=stage)
            for stage, entries in self._stages.items()
        }

    @property
    def units(self) -> Sequence[Unit]:
        """Files of tensors of all stages."""
        return list(itertools.chain.from_iterable(self._units.values()))

    def complete(self, results: Mapping[str, Any]) -> None:
        """Write the metadata and the training state."""
        directory = self.staging.path
        if self._has_train_state:
            self._write_train_state(directory)
        for stage, entries in self._stages.items():
            locations = {unit.name: results[unit.name] for unit in self._units[stage]}
            dcp_writer.write_metadata(entries, locations, directory / stage, self.block)
        every = itertools.chain.from_iterable(part.items() for part in self._stages.values())
        written = {key: e.value for key, e in every if isinstance(e.value, LazyTensor)}
        # Read back before the commit: a directory that cannot be opened never gets its final name.
        check_written(open_dcp(Directory(directory)).tensors, written, str(directory))

    def _write_train_state(self, directory: Path) -> None:
        """Write the training state and a summary of it."""
        torch_zip.save(self._train_state(), directory / train_state.TRAIN_STATE)
        progress = self.source.progress
        about = {"step": progress.step, "tokens_seen": progress.tokens}
        (directory / "metadata.json").write_text(json.dumps(about, indent=2))

    def commit(self) -> None:
        """Rename the checkpoint to its final name and point `latest` to it."""
        super().commit()
        _point_latest(self.staging.destination)

    @functools.cached_property
    def _stages(self) -> dict[str, dict[str, Entry]]:
        """Entries of each pipeline stage by the name of its directory."""
        target, layout = self.source.target, self.request.layout
        entries = functools.partial(
            dcp_state.entries, target=target, dialect=name_map(self._dialect),
            flat=layout == "flat" if layout else self._is_titan,
            prefix="" if self._is_titan else self.prefix, owner=self.owner,
            weights_only=not self._has_moments,
        )  # fmt: skip
        checkpoint, n_layers = self.source.checkpoint, target.config.model.n_layers
        split = stages.split(checkpoint, n_layers, self.request.stages)
        parts = {stage: entries(part) for stage, part in split.items()}
        if self._is_titan and self._has_moments:
            parts[""] |= dcp_state.torchtitan_position(checkpoint, target)
        return parts

    def _train_state(self) -> dict[str, Any]:
        updates = int(self.source.checkpoint.scalars["updates"])
        return train_state.to_torch(
            self.source.progress, updates, self.source.target.config, self.request.ranks,
            self._lr_factors(name_map(self._dialect)),
        )  # fmt: skip


def _point_latest(checkpoint: Path) -> None:
    """Atomically replace `latest`, which in KempnerForge is a relative link.

    Raises:
        StorageError: the file system is full or has no links; the checkpoint is complete.
    """
    temporary = checkpoint.parent / "latest.tmp"
    try:
        # A link cannot be replaced in place: the rename is atomic, so that `latest` exists at all
        # times.
        temporary.unlink(missing_ok=True)
        os.symlink(checkpoint.name, temporary)
        temporary.replace(checkpoint.parent / "latest")
    except OSError as error:
        raise StorageError(
            f"{checkpoint} is complete, but {temporary.with_name('latest')} could not be linked to "
            f"it ({error.strerror}). Load the checkpoint by its own path"
        ) from error
