"""An export to DCP: what each pipeline stage holds, and where the run stands."""

import dataclasses
import functools
import itertools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxforge.errors import StorageError
from torch_compat.checkpoint import dcp_state, stages, train_state
from torch_compat.checkpoint.compare import check_written
from torch_compat.checkpoint.name_maps import name_map
from torch_compat.checkpoint.state import AbstractTarget, CheckpointState
from torch_compat.formats import dcp_writer, torch_zip
from torch_compat.formats.dcp_reader import open_dcp
from torch_compat.formats.dcp_writer import Entry
from torch_compat.formats.files import Directory
from torch_compat.formats.lazy import LazyTensor
from torch_compat.formats.staging import Unit
from torch_compat.names import kempnerforge


@dataclasses.dataclass(frozen=True)
class DcpExport:
    """One checkpoint that becomes a `step_<n>` of DCP.

    Attributes:
        checkpoint: what to write.
        target: what its config declares.
        dialect: whose names to use.
        layout: of optimizer state; None takes the dialect's.
        ranks: data-parallel ranks that will go on with it.
        stages: pipeline stages that will; with several, each gets a checkpoint of its own.
        weights_only: leave the optimizer out.
    """

    checkpoint: CheckpointState
    target: AbstractTarget
    dialect: str
    layout: str | None
    ranks: int
    stages: int
    weights_only: bool

    @property
    def name(self) -> str:
        """Of the directory: `step_<n>`, or `step-<n>` for torchtitan."""
        assert self.checkpoint.progress is not None
        separator = "-" if self._is_titan else "_"
        return f"step{separator}{self.checkpoint.progress.step}"

    def notes(self) -> list[str]:
        """What the user should know.

        Raises:
            UserError: the position in the data falls within a batch of so many ranks.
        """
        if self._has_place:
            self._train_state()
        if self._is_titan and self.checkpoint.moments is not None:
            return dcp_state.titan_notes(self.target)
        is_theirs = self.dialect.startswith("kempnerforge")
        return list(kempnerforge.unknown(self.target.config.model)) if is_theirs else []

    def work(
        self, directory: Path, block: int
    ) -> tuple[list[Unit], Callable[[Mapping[str, Any]], None]]:
        """What there is to do.

        Args:
            directory: where the files go.
            block: bytes that may be in memory at a time.

        Returns:
            The units to write, and what makes a checkpoint of their results.
        """
        parts = self._parts()
        units = {
            stage: dcp_writer.units(entries, directory / stage, block, prefix=stage)
            for stage, entries in parts.items()
        }

        def finish(done: Mapping[str, Any]) -> None:
            if self._has_place:
                self._write_place(directory)
            for stage, entries in parts.items():
                places = {unit.name: done[unit.name] for unit in units[stage]}
                dcp_writer.write_metadata(entries, places, directory / stage, block)
            every = itertools.chain.from_iterable(part.items() for part in parts.values())
            written = {key: e.value for key, e in every if isinstance(e.value, LazyTensor)}
            check_written(open_dcp(Directory(directory)).tensors, written, str(directory))

        return list(itertools.chain.from_iterable(units.values())), finish

    def _parts(self) -> dict[str, dict[str, Entry]]:
        """What each pipeline stage writes, by the name of its directory."""
        flat = self.layout == "flat" if self.layout else self._is_titan
        entries = functools.partial(
            dcp_state.entries, target=self.target, dialect=name_map(self.dialect),
            flat=flat, prefix="" if self._is_titan else "model.", weights_only=self.weights_only,
        )  # fmt: skip
        checkpoint = stages.split(self.checkpoint, self.target.config.model.n_layers, self.stages)
        parts = {stage: entries(part) for stage, part in checkpoint.items()}
        if self._is_titan and self.checkpoint.moments is not None:
            parts[""] |= dcp_state.place_within(self.checkpoint, self.target)
        return parts

    @property
    def _is_titan(self) -> bool:
        return self.dialect.startswith("torchtitan")

    @property
    def _has_place(self) -> bool:
        return self.checkpoint.moments is not None and not self._is_titan

    def _train_state(self) -> dict[str, Any]:
        assert self.checkpoint.progress is not None
        updates = int(self.checkpoint.scalars["updates"])
        return train_state.to_torch(
            self.checkpoint.progress, updates, self.target.config, self.ranks
        )

    def _write_place(self, directory: Path) -> None:
        progress = self.checkpoint.progress
        assert progress is not None
        with (directory / train_state.TRAIN_STATE).open("wb") as file:
            for piece in torch_zip.archive(self._train_state()):
                file.write(piece)
        about = {"step": progress.step, "tokens_seen": progress.tokens}
        (directory / "metadata.json").write_text(json.dumps(about, indent=2))


def point_latest(checkpoint: Path) -> None:
    """Makes `latest`, as KempnerForge keeps it: a relative link, replaced in one step.

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
