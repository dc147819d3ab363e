"""Request for a conversion, and its source: an opened and checked checkpoint of any format."""

import dataclasses
import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path

from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError
from jaxforge.state.progress import Progress
from torch_compat.checkpoint import hf_state, hf_tokenizer, mup, originals
from torch_compat.checkpoint.checkpoints import CheckpointRef, Target
from torch_compat.checkpoint.dcp_state import ReadOptions
from torch_compat.checkpoint.state import AbstractTarget, CheckpointState, abstract_target
from torch_compat.checkpoint.untrained import check_present
from torch_compat.checkpoint.validation import check_fits, invisible_differences
from torch_compat.formats.lazy import DTYPES

_DEFAULTS = ReadOptions()


@dataclasses.dataclass(frozen=True)
class Request:
    """Conversion that the user requests.

    Attributes:
        source: the checkpoint.
        destination: for "jaxforge" the run directory, for "hf" the directory to create, for "dcp"
            and "megatron" the parent directory of `step_<n>` or `iter_<n>`.
        to: format of the result.
        config: config file; None: the config in the source, which a DCP lacks.
        overrides: settings that override the config.
        options: options of reading the source.
        dialect: dialect of the result; None: KempnerForge's, or the first family that fits.
        layout: layout of optimizer state in a DCP; None: the dialect's.
        ranks: data-parallel ranks that will resume from a DCP.
        stages: pipeline stages that will resume; each of several gets its own checkpoint.
        dtype: dtype of the weights; None: unchanged.
        largest_file: maximum bytes of a safetensors file.
        max_memory: bytes of memory for tensors in transit.
        text_only: whether an export to hf leaves out images and sound of the original.
    """

    source: CheckpointRef
    destination: Path
    to: Target
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
    text_only: bool = False


@dataclasses.dataclass(frozen=True)
class Source:
    """Checkpoint that is opened for a conversion.

    Attributes:
        ref: the checkpoint.
        files: stamps of its files before it was opened (`CheckpointRef.stamps`).
        trained: config with which the model was trained.
        checkpoint: state to write.
        target: arrays that the config of the result declares.
        notes: notes for the user.
    """

    ref: CheckpointRef
    files: dict[str, dict[str, str]]
    trained: JobConfig
    checkpoint: CheckpointState
    target: AbstractTarget
    notes: tuple[str, ...]

    @property
    def progress(self) -> Progress:
        """Progress of the checkpoint's run; the initial progress if it holds only weights."""
        return self.checkpoint.progress or Progress()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for _, tensor in self.checkpoint.tensors())

    @functools.cached_property
    def imported(self) -> hf_state.ImportedDocuments | None:
        """JSON files of the Hugging Face model that the source is or was imported from."""
        if self.ref.format == "jaxforge":
            return hf_state.read_imported_documents(self.ref.run)
        return hf_state.read_documents(self.ref.directory) if self.ref.format == "hf" else None

    @functools.cached_property
    def original(self) -> originals.Original | None:
        """Checkpoint with images or sound that the model is the language model of.

        Raises:
            UserError: it cannot be read, or has other tensors than at the import.
        """
        if self.ref.format == "jaxforge":
            return hf_state.open_original_of_run(self.ref.run)
        return hf_state.open_original(self.ref.directory) if self.ref.format == "hf" else None

    @functools.cached_property
    def tokenizer(self) -> Path | None:
        """Directory of the tokenizer: of the run, the config's data, or the Hugging Face model.

        Raises:
            UserError: the config's data name a tokenizer that does not exist.
        """
        if self.ref.format == "jaxforge":
            directory = self.ref.run / hf_tokenizer.TOKENIZER
            return directory if directory.is_dir() else None
        from jaxforge.data.corpus.tokenizer_files import (  # imported here: 0.3 s
            load_tokenizer,
            tokenizer_of,
        )

        copy = Path(self._scratch.name, hf_tokenizer.TOKENIZER)
        if spec := tokenizer_of(self.target.config.data):
            load_tokenizer(spec).save(copy)
        elif self.ref.format == "hf":
            hf_tokenizer.copy_tokenizer(self.ref.directory, copy)
        return copy if copy.is_dir() else None

    @functools.cached_property
    def _scratch(self) -> tempfile.TemporaryDirectory:
        return tempfile.TemporaryDirectory(prefix="jaxforge-")

    def close(self) -> None:
        """Remove temporary files."""
        if "_scratch" in vars(self):
            self._scratch.cleanup()

    def check_unchanged(self) -> None:
        """Check that no file has changed since the conversion began.

        Raises:
            UserError: files were replaced, added or removed.
        """
        if self.ref.stamps() != self.files:
            raise UserError(
                f"{self.ref} changed while it was converted, so that no result was "
                "written. Run the same command again when the source no longer changes"
            )


def open_source(request: Request) -> Source:
    """Open the source and check everything that can be checked without reading tensors.

    Raises:
        UserError: the source is damaged, does not match the config, or has no counterpart in the
            requested format.
    """
    ref, to = request.source, request.to
    config = ref.required_config(request.config, request.overrides)
    is_raw = request.options.weights == "raw"
    has_moments = to not in ("hf", "peft") and not request.options.weights_only and is_raw
    # Before the first read, so that a change at any later time is noticed.
    files = ref.stamps()
    options = dataclasses.replace(
        request.options, weights_only=not has_moments, keep_step=to != "jaxforge"
    )
    checkpoint = ref.read(config, options)
    trained, notes = config, [*checkpoint.notes]
    if ref.format == "jaxforge" and ref.has_adapters and to != "peft":
        notes.append(f"the adapters of {ref} are merged into their base model")
    if checkpoint.ema and (to != "jaxforge" or not has_moments):
        checkpoint = dataclasses.replace(checkpoint, ema={})
        notes.append("left out: the average of the parameters, which --weights ema exports")
    if not is_raw and to not in ("hf", "peft") and not request.options.weights_only:
        notes.append("left out: optimizer state, which belongs to the parameters")
    if to != "jaxforge":
        mup.check_export(config.model, weights_only=not has_moments)
    if ref.format == "jaxforge":
        if request.config or request.overrides:
            trained = ref.required_config(None, ())
        # A config may drop modules of multi-token prediction, but no other layers.
        spare = trained.model.mtp_depth - config.model.mtp_depth
        if spare > 0:
            first = config.model.n_layers + config.model.mtp_depth
            checkpoint = checkpoint.without_layers_from(first)
            notes.append(left_out_modules(spare))
        declared, where = abstract_target(config), str(ref)
        check_fits(checkpoint, declared, trained.model, where)
        absent = check_present(checkpoint, declared, where)
        notes += [*invisible_differences(trained.model, config.model), *absent]
    elif checkpoint.counts_experts:
        # The counters in the checkpoint show that its run skipped idle experts.
        config = config.with_values({"optimizer.skip_idle_experts": True})
    if to == "jaxforge":
        checkpoint = _for_new_run(checkpoint, resumes=has_moments)
    else:
        checkpoint = dataclasses.replace(
            checkpoint, params=mup.fold_multipliers(checkpoint.params, config.model)
        )
        config = config.with_values({"model": mup.to_standard(config.model)})
    if to != "hf" and request.dtype:  # the writer of "hf" knows what its family keeps in float32
        if request.dtype == hf_state.IN_8_BITS:
            raise UserError(f"--dtype {request.dtype} is possible with --to hf only")
        params = {n: t.cast(DTYPES[request.dtype]) for n, t in checkpoint.params.items()}
        checkpoint = dataclasses.replace(checkpoint, params=params)
    return Source(ref, files, trained, checkpoint, abstract_target(config), tuple(notes))


def left_out_modules(number: int) -> str:
    """Return the note about modules of multi-token prediction that are not converted."""
    return f"left out: {number} modules of multi-token prediction, which only training uses"


def _for_new_run(checkpoint: CheckpointState, *, resumes: bool) -> CheckpointState:
    """Return the state for a run directory; without moments the run starts at step 0."""
    progress = checkpoint.progress if resumes else None
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
