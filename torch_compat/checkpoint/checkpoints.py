"""References to checkpoints of any format: jaxforge, PyTorch DCP, `torch.save`, Hugging Face."""

import dataclasses
import os
import posixpath
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from jaxforge.checkpoint.paths import PREFIX, SUBDIRECTORY, has_run, stored_config
from jaxforge.checkpoint.paths import find as find_step
from jaxforge.checkpoint.weights import Weights
from jaxforge.cli.suggestions import path_hint
from jaxforge.config.job import JobConfig
from jaxforge.config.optimizer import SchedulerConfig
from jaxforge.config.reading.load import load_config, make_config
from jaxforge.errors import UserError, file_error
from jaxforge.storage import trust, urls
from torch_compat.checkpoint import (
    adapters,
    dcp_state,
    hf_config,
    hf_state,
    hf_tokenizer,
    megatron_files,
    megatron_state,
    mup,
    orbax_store,
    train_state,
)
from torch_compat.checkpoint.dcp_state import ReadOptions
from torch_compat.checkpoint.state import CheckpointState, Tensors, abstract_target
from torch_compat.families import FAMILIES
from torch_compat.formats import safetensors, torch_file
from torch_compat.formats.dcp_reader import Dcp, is_dcp, open_dcp, stage_directories
from torch_compat.formats.files import Directory
from torch_compat.formats.lazy import LazyTensor
from torch_compat.formats.limits import shown

Format = Literal["jaxforge", "dcp", "pt", "hf", "peft"]
"""Formats that are read. dcp: also a checkpoint of Megatron-Core; pt: a file of `torch.save`; peft:
an adapter, read as its base model with merged weights, like runs that train adapters."""
Target = Literal["jaxforge", "dcp", "pt", "hf", "megatron", "peft"]
"""Formats that are written."""

_STEP = re.compile(r"(?:global_)?step[_-](\d+)|iter_(\d{7,})")  # MindSpeed writes global_step
_STEP_PARENTS = ("checkpoints", "checkpoint")  # names of directories of steps
_GENERIC_STEMS = ("checkpoint", "ckpt", "model", "pytorch_model", "last", "best")  # of files


@dataclasses.dataclass(frozen=True)
class CheckpointRef:
    """Reference to an existing checkpoint.

    Attributes:
        format: format of the checkpoint.
        directory: directory of the checkpoint; for jaxforge, that of the step.
        file: name of the file in the directory; "" if the directory is the checkpoint.
    """

    format: Format
    directory: Directory
    file: str = ""

    def __str__(self) -> str:
        return f"{self.directory}/{self.file}" if self.file else str(self.directory)

    @property
    def is_torch(self) -> bool:
        """True for a checkpoint of a PyTorch loop, which has the keys of state dicts."""
        return self.format in ("dcp", "pt")

    @property
    def has_adapters(self) -> bool:
        """True for adapters, which belong to a model in another directory.

        Raises:
            UserError: the config of a run is damaged.
        """
        if self.format != "jaxforge":
            return self.format == "peft"
        lora = stored_config(self._path).get("lora")
        return isinstance(lora, dict) and bool(lora.get("rank"))

    def config(
        self, path: Path | None, overrides: Sequence[str] = (), *, is_compared: bool = False
    ) -> JobConfig | None:
        """Return the config of the checkpoint; None if neither user nor checkpoint has one.

        Args:
            path: config file given by the user.
            overrides: settings that override the config.
            is_compared: whether the checkpoint is only compared. Its plugins are then imported only
                on request, even for the user's own runs.

        Raises:
            UserError: the config is invalid, or is needed and cannot be read.
        """
        if self.format == "peft":
            return self._base_of_peft().config(path, overrides, is_compared=is_compared)
        config = self._stored_config(path, overrides, is_compared=is_compared)
        return config and adapters.without_adapters(config)

    def _stored_config(
        self, path: Path | None, overrides: Sequence[str], *, is_compared: bool
    ) -> JobConfig | None:
        """Return the config of the checkpoint, with the `[lora]` section of a run."""
        directory = self.run if self.format == "jaxforge" else self.directory.path
        # A config may name plugins, which are code: whose run it is decides whether they are
        # imported.
        trusts = trust.if_granted(directory) if is_compared else trust.of_run(directory)
        if path is not None:
            config = load_config(path, overrides, trusts)
            is_megatron = megatron_files.is_known(self.directory)
            # The file is KempnerForge's own, so keys that it leaves out have KempnerForge's
            # defaults.
            if self.is_torch and not is_megatron and (usual := _usual_settings(config)):
                return load_config(path, [*overrides, *usual], trusts)
            return config
        if self.format == "jaxforge":
            config = orbax_store.open_orbax(self._path, trusts)[1]
            values, source = config.model_dump(mode="json"), str(self.directory)
            return make_config(values, overrides, source, trusts) if overrides else config
        if self.format == "hf":
            table, _ = hf_state.read_config(self.directory)
            train = {"seq_len": min(2048, table["max_seq_len"])}  # within the model's limit
            source = f"{self.directory}/{hf_config.CONFIG}"
            return make_config({"model": table, "train": train}, overrides, source)
        if job := megatron_files.read_job(self.directory):
            return make_config(megatron_state.config_values(job), overrides, job.where)
        return None

    def required_config(self, path: Path | None, overrides: Sequence[str]) -> JobConfig:
        """Return the config of the checkpoint.

        Raises:
            UserError: neither the checkpoint nor the user has a config, or it is invalid.
        """
        config = self.config(path, overrides)
        if config is None:
            raise UserError(
                f"{self}: a checkpoint of PyTorch does not record its model: "
                "give the run's config, --config FILE"
            )
        return config

    def read(self, config: JobConfig, options: ReadOptions) -> CheckpointState:
        """Read the checkpoint as a state with jaxforge's names.

        Raises:
            UserError: the checkpoint does not match the config, or is damaged.
        """
        if self.format == "peft":
            return self._merged_peft(config, options)
        if self.format == "jaxforge":
            checkpoint, stored = orbax_store.open_orbax(self._path)
            if stored.lora.rank:
                return self._merged_run(checkpoint, stored, config, options)
            if options.weights == "ema":
                return checkpoint.averaged(str(self))
            return (
                dataclasses.replace(checkpoint, moments=None)
                if options.weights_only
                else checkpoint
            )
        # Only runs of jaxforge store an average next to the parameters.
        if options.weights == "ema":
            raise UserError(
                f"--weights ema: {self} is not a run of jaxforge, whose checkpoints may have an "
                "average of the parameters. Remove --weights"
            )
        mup.check_import(config.model, str(self))
        if self.format == "hf":
            return hf_state.read(self.directory, abstract_target(config), options)
        return self._read_dcp(config, options)

    def _merged_run(
        self,
        checkpoint: CheckpointState,
        stored: JobConfig,
        config: JobConfig,
        options: ReadOptions,
    ) -> CheckpointState:
        """Return the weights of a run that trains adapters, merged into its base model."""
        path = config.checkpoint.load_path or stored.checkpoint.load_path
        if path is None:
            raise UserError(f"{self}: its config names no base model: give --checkpoint.load_path")
        base = find(path)
        if base.format == "jaxforge" and base.has_adapters:
            raise UserError(
                f"{self}: its base model {base} holds adapters. Merge them into a new run: "
                "jaxforge convert RUN NEW --to jaxforge"
            )
        read = base.read(config, dataclasses.replace(options, weights_only=True, weights="raw"))
        if options.weights == "ema":
            checkpoint = checkpoint.averaged(str(self))
        assert checkpoint.progress is not None
        # Adapters of another base would merge without an error, as shapes agree.
        adapters.check_base(read.params, checkpoint.progress.base, config.model, str(base))
        merged = adapters.merge(read, checkpoint.params, stored.lora.scale)
        notes = ["left out: the optimizer state of the adapters"]
        if checkpoint.ema:
            notes.append("left out: the average of the adapters, which --weights ema exports")
        state = checkpoint.model_state or merged.model_state
        return dataclasses.replace(
            merged, dialect="jaxforge", notes=(*read.notes, *notes), model_state=state, ema={}
        )

    def _base_of_peft(self) -> "CheckpointRef":
        """Return the base model of a PEFT adapter.

        Raises:
            UserError: the adapter names no directory of this machine.
        """
        base = adapters.read_config(self.directory).base
        where = f"{self.directory}/{adapters.CONFIG}: base_model_name_or_path = {shown(base)!r}"
        remedy = "Download the model and write its path there"
        if urls.in_bucket(base):  # a file of others must not decide which servers are contacted
            raise UserError(f"{where} is a URL, which is not opened. {remedy}")
        try:
            reference = find(base)
        except UserError as error:
            raise UserError(f"{where} is not a checkpoint on this machine. {remedy}") from error
        if reference.has_adapters:
            raise UserError(
                f"{where} holds adapters. Merge them with `torch_compat convert`, and write the "
                "path of the result there"
            )
        return reference

    def _merged_peft(self, config: JobConfig, options: ReadOptions) -> CheckpointState:
        """Return the weights of the base model with the merged adapter."""
        base = self._base_of_peft()
        read = base.read(config, dataclasses.replace(options, weights_only=True))
        scale = adapters.read_config(self.directory).scale
        merged = adapters.merge(read, self.peft_adapter(config, base), scale)
        note = f"the adapter of {self} is merged into {base}"
        return dataclasses.replace(merged, notes=(*read.notes, note))

    def peft_adapter(self, config: JobConfig, base: "CheckpointRef | None") -> Tensors:
        """Return the tensors of a PEFT adapter by our names.

        Args:
            config: config with the model.
            base: the base model, which determines the family; None: the first one that fits.

        Raises:
            UserError: the adapter does not fit the model.
        """
        family = hf_state.read_config(base.directory)[1] if base and base.format == "hf" else None
        family = family or hf_config.select_family(config.model)
        return adapters.read_peft(self.directory, FAMILIES[family].dialect, config.model)

    def adapters(self, weights: Weights = "raw") -> tuple[Tensors, JobConfig]:
        """Return the adapters of a run by our names, and its config.

        Args:
            weights: "ema" returns the average of the adapters in their place.

        Raises:
            UserError: the checkpoint is not a run that trains adapters, or has no average.
        """
        checkpoint, stored = (
            orbax_store.open_orbax(self._path) if self.format == "jaxforge" else (None, None)
        )
        if checkpoint is None or stored is None or not stored.lora.rank:
            raise UserError(f"{self} holds no adapters: --to peft exports runs with lora.rank")
        if weights == "ema":
            checkpoint = checkpoint.averaged(str(self))
        return adapters.adapters_of(checkpoint.params), stored

    def _read_dcp(self, config: JobConfig, options: ReadOptions) -> CheckpointState:
        dcp, target = self.dcp(), abstract_target(config)
        job = None if self.file else megatron_files.read_job(self.directory, dcp)
        if job is None or not megatron_state.is_megatron(dcp):
            return dcp_state.read(dcp, target, options)
        notes = megatron_state.check_job(job, config)
        keys = dcp_state.sort_keys(dcp)
        # The files tell that the further rows are padding, so that the user need not say so.
        if megatron_state.is_padded(keys, job, config.model):
            options = dataclasses.replace(options, resize_vocab=True)
        checkpoint = dcp_state.read(dcp, target, options)
        return dataclasses.replace(checkpoint, notes=(*checkpoint.notes, *notes))

    def raw(self) -> Mapping[str, LazyTensor]:
        """Return the tensors by the checkpoint's own keys."""
        if self.is_torch:
            return self.dcp().tensors
        if self.format == "hf":
            return hf_state.tensors(self.directory)
        if self.format == "peft":
            weights = self.directory.open(adapters.WEIGHTS)
            return safetensors.open_file(weights, f"{self.directory}/{adapters.WEIGHTS}")
        return dict(orbax_store.open_orbax(self._path)[0].tensors())

    def stamps(self) -> dict[str, dict[str, str]]:
        """Return directory -> file -> fingerprint, for all files that are read."""
        try:
            return self._stamps()
        except FileNotFoundError:
            return {}  # the checkpoint is being removed

    def _stamps(self) -> dict[str, dict[str, str]]:
        if self.format == "jaxforge" and urls.in_bucket(self.directory.path):
            from jaxforge.storage import files

            entries = files.entries(self.directory.path)
            return {self.directory.path: {entry.name: entry.version for entry in entries}}
        if self.format == "hf":
            # Files that are not read, such as a README, may change during a conversion.
            stamps = self.directory.stamps().items()
            templates = self.directory / hf_tokenizer.TEMPLATES
            return {
                str(self.directory): {n: s for n, s in stamps if hf_state.is_read(n)},
                str(templates): templates.stamps(),
            }
        if self.format == "peft":
            return {str(self.directory): self.directory.stamps()} | self._base_of_peft()._stamps()
        if self.format == "pt":
            return {str(self): {self.file: self.directory.stamps()[self.file]}}
        if self.format == "dcp":
            extra = self.directory / posixpath.dirname(train_state.EXTRA_STATE)
            directories = [self.directory, *stage_directories(self.directory), extra]
        else:
            roots = [self._path / "state", self._path / "config", self.run / hf_tokenizer.TOKENIZER]
            directories = [Directory(d) for root in roots for d, _, _ in os.walk(root)]
        return {str(directory): directory.stamps() for directory in directories}

    @property
    def run(self) -> Path:
        """Run directory of a jaxforge checkpoint."""
        return find_step(self._path)[0]

    @property
    def title(self) -> str:
        """Last part of the path that is neither a step nor a directory of steps."""
        names = [*reversed(self.directory.path.split("/"))]
        if self.file and (stem := self.file.rpartition(".")[0]) not in _GENERIC_STEMS:
            names.insert(0, stem)
        return next(
            (n for n in names if n and n not in _STEP_PARENTS and not _STEP.fullmatch(n)), "model"
        )

    @property
    def _path(self) -> Path:
        """Path of a jaxforge checkpoint."""
        return urls.path(self.directory.path)

    def dcp(self) -> Dcp:
        """Open a checkpoint of a PyTorch loop."""
        assert self.is_torch
        if self.file:
            return torch_file.open_file(self.directory, self.file)
        return open_dcp(self.directory)


def find(path: str | os.PathLike) -> CheckpointRef:
    """Return the checkpoint at a path or URL; the latest in a directory of several.

    Links are resolved, so that a newer step or another `latest` does not change the reference.

    Raises:
        UserError: there is no checkpoint.
    """
    location = os.fspath(path)
    try:
        return _find(location)
    except OSError as error:  # such as a name that is too long
        raise file_error(shown(location), error) from error


def _find(location: str) -> CheckpointRef:
    if has_run(location):
        run, step = find_step(urls.path(location))
        return CheckpointRef("jaxforge", Directory(run / SUBDIRECTORY / f"{PREFIX}_{step}"))
    if file := torch_file.find_file(location):
        return CheckpointRef("pt", *file)
    directory = Directory(location)
    # The directory itself first: a checkpoint may contain directories that look like steps.
    for candidate in (directory, *_latest(directory)):
        if is_dcp(candidate):
            return CheckpointRef("dcp", candidate.resolved())
        if adapters.is_peft(candidate):
            return CheckpointRef("peft", candidate.resolved())
        if hf_state.is_hf(candidate):
            return CheckpointRef("hf", candidate.resolved())
        megatron_files.check_format(candidate)
    files = torch_file.names_in(directory)
    hint = f". Name the file: {directory}/{files[0]}" if files else path_hint(location)
    raise UserError(
        f"{location}: no checkpoint there: neither a run of jaxforge, nor a DCP checkpoint "
        "(.metadata), nor a file of torch.save (.pt), nor one of Hugging Face (config.json and "
        f".safetensors){hint}"
    )


def _usual_settings(config: JobConfig) -> list[str]:
    """Return KempnerForge's defaults for absent keys whose defaults differ in jaxforge."""
    usual = []
    if not config.is_set(key := "scheduler.warmup_steps"):
        usual.append(f"--{key}={SchedulerConfig.model_fields['warmup_steps'].default}")
    data = config.data
    has_data = data.datasets or data.dataset_path or data.hf_dataset_name
    if (
        has_data
        and data.shuffle
        and not data.hf_streaming
        and not config.is_set(key := "data.order")
    ):
        usual.append(f"--{key}=torch")
    return usual


def _latest(directory: Directory) -> list[Directory]:
    """Return the target of `latest` and the steps, newest first, here or in `checkpoints/`."""
    candidates = []
    for parent in (directory, *(directory / name for name in _STEP_PARENTS)):
        names = parent.names()
        if "latest" in names:
            candidates.append(parent / "latest")
        elif tracked := megatron_files.latest(parent):
            candidates.append(tracked)
            continue  # a newer directory belongs to a save that did not end
        matches = [(match, name) for name in names if (match := _STEP.fullmatch(name))]
        steps = [(int(match[1] or match[2]), name) for match, name in matches]
        candidates += [parent / name for _, name in sorted(steps, reverse=True)]
    return candidates
