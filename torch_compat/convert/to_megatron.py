"""Writer of Megatron-Core's `torch_dist` checkpoints."""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxforge.errors import UserError
from jaxforge.storage import safe_files
from torch_compat.checkpoint import megatron_export, megatron_files
from torch_compat.checkpoint.train_state import TRAIN_STATE
from torch_compat.checkpoint.validation import check_written
from torch_compat.convert.source import Request, Source
from torch_compat.convert.writer import Writer
from torch_compat.formats import dcp_writer, torch_zip
from torch_compat.formats.dcp_reader import open_dcp
from torch_compat.formats.dcp_writer import Entry
from torch_compat.formats.files import Directory
from torch_compat.formats.lazy import LazyTensor
from torch_compat.formats.staging import Unit
from torch_compat.names.megatron import MEGATRON


class MegatronWriter(Writer):
    """Writer of an `iter_<n>` for Megatron-LM and Megatron-Bridge, and of the tracker file."""

    label = MEGATRON.name

    def __init__(self, request: Request, source: Source) -> None:
        super().__init__(request, source)
        self._has_moments = source.checkpoint.moments is not None
        if request.dialect not in (None, MEGATRON.name):
            raise UserError(
                f"--dialect {request.dialect}: --to megatron has its own names. Remove it"
            )
        if request.dtype and self._has_moments:
            raise UserError(
                f"--dtype {request.dtype}: a checkpoint with optimizer state has float32 weights, "
                "which Megatron-Core rounds itself. Remove it, or add --weights-only"
            )
        megatron_export.check(source.checkpoint, source.target)
        self._check_names(MEGATRON.name)
        self.subdirectory = f"iter_{source.progress.step:07d}"

    def notes(self) -> list[str]:
        """Return notes for the user."""
        if not self._has_moments:
            return ["load it in Megatron with --finetune, because it has only weights"]
        return [
            "resume in Megatron with --use-distributed-optimizer --override-opt_param-scheduler: "
            "Megatron has its own schedule and data order",
            *megatron_export.decay_notes(self.source.target),
        ]

    @functools.cached_property
    def _entries(self) -> dict[str, Entry]:
        return megatron_export.entries(self.source.checkpoint, self.source.target.config.model)

    @functools.cached_property
    def units(self) -> Sequence[Unit]:
        """Files of tensors."""
        return dcp_writer.units(self._entries, self.staging.path, self.block)

    def complete(self, results: Mapping[str, Any]) -> None:
        """Write the metadata and the files of the job's config and progress."""
        directory, config = self.staging.path, self.source.target.config
        progress, scalars = self.source.progress, self.source.checkpoint.scalars
        updates = int(scalars["updates"]) if self._has_moments else None
        states = {
            megatron_files.COMMON: megatron_export.common(config, progress, updates),
            TRAIN_STATE: megatron_export.train_state(progress),
        }
        for name, state in states.items():
            torch_zip.save(state, directory / name)
        (directory / megatron_files.RUN_CONFIG).write_text(
            megatron_export.run_config(config, has_optimizer=self._has_moments)
        )
        (directory / megatron_files.FORMAT).write_text(json.dumps(megatron_files.TORCH_DIST))
        dcp_writer.write_metadata(self._entries, results, directory, self.block)
        tensors = {k: e.value for k, e in self._entries.items() if isinstance(e.value, LazyTensor)}
        check_written(open_dcp(Directory(directory)).tensors, tensors, str(directory))

    def commit(self) -> None:
        """Rename the checkpoint to its final name and write the name to the tracker file."""
        super().commit()
        tracker = self.staging.destination.parent / megatron_files.TRACKER
        # After the rename: the tracker must never name an iteration that does not exist.
        safe_files.replace_text(tracker, str(self.source.progress.step))
