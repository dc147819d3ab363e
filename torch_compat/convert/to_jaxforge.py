"""Writer of run directories of jaxforge."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxforge.checkpoint.paths import PREFIX, SUBDIRECTORY
from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError
from torch_compat.checkpoint import hf_state, hf_tokenizer, orbax_store, train_state
from torch_compat.convert import average
from torch_compat.convert.source import Request, Source
from torch_compat.convert.writer import Writer
from torch_compat.formats.staging import Staging, Unit


class RunWriter(Writer):
    """Writer of a run directory of jaxforge with a checkpoint."""

    def __init__(self, request: Request, source: Source) -> None:
        super().__init__(request, source)
        step = source.progress.step
        self.label = f"step {step}" if source.checkpoint.moments else "weights only, step 0"
        self.subdirectory = f"{SUBDIRECTORY}/{PREFIX}_{step}"

    def notes(self) -> list[str]:
        """Return notes for the user."""
        source, config = self.source, self.source.target.config
        notes = [*hf_tokenizer.vocabulary_notes(source.tokenizer, config.model.vocab_size)]
        if source.ref.is_torch and source.progress.samples:
            notes += train_state.order_notes(source.checkpoint.dialect, config.data)
            notes += train_state.absent_data(config.data)
        return notes

    def stage(self, plan: dict[str, Any]) -> Staging:
        """Begin or resume the checkpoint of the run."""
        self._import = orbax_store.stage(
            self.source.checkpoint, self.source.target, self.request.destination, plan, self.block
        )
        self.staging = self._import.staging
        return self.staging

    @property
    def units(self) -> Sequence[Unit]:
        """Files of arrays."""
        return self._import.units

    def complete(self, results: Mapping[str, Any]) -> None:
        """Write `config.toml` and `tokenizer/`, which `commit` publishes with the checkpoint."""
        from jaxforge.runs import run_directory  # imported here: it imports JAX

        # Staged next to the arrays: `finish_import` moves these files after the checkpoint is
        # durable, so a run with a config always has a checkpoint.
        beside, ref = self._import.run_files, self.source.ref
        if isinstance(ref, average.AveragedCheckpoint):
            beside.mkdir(parents=True, exist_ok=True)
            (beside / average.FILE).write_text(ref.about(self.request.options))
        if ref.format == "jaxforge":
            templates = f"{hf_tokenizer.TOKENIZER}/{hf_tokenizer.TEMPLATES}"
            for name in (hf_tokenizer.TOKENIZER, templates, hf_state.IMPORTED):
                _copy_files(ref.run / name, beside / name)
        try:
            run_directory.prepare(
                beside, config_for_run(self.source.target.config, self.request.destination)
            )
        except UserError as error:
            raise error.__cause__ or error from None  # a disk error, not an error of a setting
        if ref.format == "hf":
            hf_tokenizer.copy_tokenizer(ref.directory, beside / hf_tokenizer.TOKENIZER)
            hf_state.write_documents(hf_state.document_contents(ref.directory), beside)

    def commit(self) -> None:
        """Let Orbax commit the checkpoint."""
        self._import.commit()


def config_for_run(config: JobConfig, run: Path) -> JobConfig:
    """Return the config for a run directory, with the directory as `checkpoint.dir`."""
    start = {"load_path": None, "branch_from": None}
    checkpoint = config.checkpoint.with_values({"dir": str(run), **start})
    return config.with_values({"checkpoint": checkpoint})


def _copy_files(source: Path, target: Path) -> None:
    """Copy the files of a directory, which may be in a bucket or may not exist."""
    for path in filter(Path.is_file, source.iterdir() if source.is_dir() else ()):
        target.mkdir(parents=True, exist_ok=True)
        (target / path.name).write_bytes(path.read_bytes())
