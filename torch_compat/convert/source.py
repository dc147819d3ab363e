"""The request for a conversion, and its source: a checkpoint of any format, opened and checked."""

import dataclasses
import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path

from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError
from jaxforge.state.progress import Progress
from torch_compat.checkpoint import hf_state, mup
from torch_compat.checkpoint.checkpoints import CheckpointRef, Format
from torch_compat.checkpoint.dcp_state import ReadOptions
from torch_compat.checkpoint.state import AbstractTarget, CheckpointState, abstract_target
from torch_compat.checkpoint.untrained import check_present
from torch_compat.checkpoint.validation import check_fits, invisible_differences
from torch_compat.formats.lazy import DTYPES

_DEFAULTS = ReadOptions()


@dataclasses.dataclass(frozen=True)
class Request:
    """A conversion as the user asks for it.

    Attributes:
        source: the checkpoint.
        destination: for "jaxforge" the run directory, for "hf" the directory to make, for "dcp" the
            directory in which `step_<n>` appears.
        to: the format of the result.
        config: a config file; None takes the config in the source, which a DCP has not.
        overrides: settings over the config.
        options: how to read the source.
        dialect: whose names to write; None takes KempnerForge's, or the model's first family.
        layout: of optimizer state in a DCP; None takes the dialect's.
        ranks: data-parallel ranks that will go on with a DCP.
        stages: pipeline stages that will; with several, each gets a checkpoint of its own.
        dtype: dtype of the weights; None keeps theirs.
        largest_file: bytes of a safetensors file.
        max_memory: bytes for tensors on their way.
    """

    source: CheckpointRef
    destination: Path
    to: Format
    config: Path | None = None
    overrides: Sequence[str] = ()
    options: ReadOptions = _DEFAULTS
    dialect: str | None = None
    layout: str | None = None
    ranks: int = 1
    stages: int = 1
    dtype: str | None = None
    largest_file: int = 5_000_000_000
    max_memory: int = 256 << 20


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint that was opened for a conversion.

    Attributes:
        ref: the checkpoint.
        files: its files, as they were before it was opened (`CheckpointRef.stamps`).
        trained: the config that its model was trained with.
        checkpoint: its state, as it is to be written.
        target: what the config of the result declares.
        notes: what the user should know.
    """

    ref: CheckpointRef
    files: dict[str, dict[str, str]]
    trained: JobConfig
    checkpoint: CheckpointState
    target: AbstractTarget
    notes: tuple[str, ...]

    @property
    def progress(self) -> Progress:
        """Progress of the checkpoint's run; the beginning if it holds weights only."""
        return self.checkpoint.progress or Progress()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for _, tensor in self.checkpoint.tensors())

    @functools.cached_property
    def imported(self) -> hf_state.ImportedDocuments | None:
        """The JSON files of the Hugging Face model that it is, or was imported from."""
        if self.ref.format == "jaxforge":
            return hf_state.read_imported_documents(self.ref.run)
        return hf_state.read_documents(self.ref.directory) if self.ref.format == "hf" else None

    @functools.cached_property
    def tokenizer(self) -> Path | None:
        """Return the directory of the tokenizer: the run's, that of the config's data, or the
        model's.

        Raises:
            UserError: the config's data name one that does not exist.
        """
        if self.ref.format == "jaxforge":
            of_run = self.ref.run / hf_state.TOKENIZER
            return of_run if of_run.is_dir() else None
        from jaxforge.data.corpus.tokenizer import load_tokenizer, tokenizer_of  # here: 0.3 seconds

        copy = Path(self._scratch.name, hf_state.TOKENIZER)
        if spec := tokenizer_of(self.target.config.data):
            load_tokenizer(spec).save(copy)
        elif self.ref.format == "hf":
            hf_state.copy_tokenizer(self.ref.directory, copy)
        return copy if copy.is_dir() else None

    @functools.cached_property
    def _scratch(self) -> tempfile.TemporaryDirectory:
        return tempfile.TemporaryDirectory(prefix="jaxforge-")

    def check_unchanged(self) -> None:
        """Check that the files are those that the conversion began with.

        Raises:
            UserError: some were replaced, came or went.
        """
        if self.ref.stamps() != self.files:
            raise UserError(
                f"{self.ref} changed while it was converted: nothing is there under the "
                "name of the result; run the same command again when the source is at rest"
            )


def open_source(request: Request) -> Source:
    """Open the source, and check all that can be checked without reading tensors.

    Raises:
        UserError: it is damaged, not of the config, or has no counterpart in the format asked for.
    """
    ref, to = request.source, request.to
    config = ref.required_config(request.config, request.overrides)
    has_moments = to != "hf" and not request.options.weights_only
    files = ref.stamps()
    options = dataclasses.replace(
        request.options, weights_only=not has_moments, keep_step=to != "jaxforge"
    )
    checkpoint = ref.read(config, options)
    trained, notes = config, [*checkpoint.notes]
    if to != "jaxforge":
        mup.check_export(config.model, weights_only=not has_moments)
    if ref.format == "jaxforge":
        if request.config or request.overrides:
            trained = ref.required_config(None, ())
        declared, where = abstract_target(config), str(ref)
        check_fits(checkpoint, declared, trained.model, where)
        absent = check_present(checkpoint, declared, where)
        notes += [*invisible_differences(trained.model, config.model), *absent]
    elif checkpoint.counts_experts:
        config = config.with_idle_experts_skipped()
    if to == "jaxforge":
        checkpoint = _of_new_run(checkpoint, goes_on=has_moments)
    else:
        checkpoint = dataclasses.replace(
            checkpoint, params=mup.fold_multipliers(checkpoint.params, config.model)
        )
        config = config.model_copy(update={"model": mup.to_standard(config.model)})
    if request.dtype:
        params = {n: t.cast(DTYPES[request.dtype]) for n, t in checkpoint.params.items()}
        checkpoint = dataclasses.replace(checkpoint, params=params)
    return Source(ref, files, trained, checkpoint, abstract_target(config), tuple(notes))


def _of_new_run(checkpoint: CheckpointState, *, goes_on: bool) -> CheckpointState:
    """Return the state for a run directory; weights alone start at step 0."""
    progress = checkpoint.progress if goes_on else None
    if progress is None:
        return CheckpointState(
            checkpoint.params,
            progress=Progress(),
            dialect=checkpoint.dialect,
            model_state=checkpoint.model_state,
        )
    return dataclasses.replace(
        checkpoint, progress=dataclasses.replace(progress, run_id=Progress().run_id)
    )
