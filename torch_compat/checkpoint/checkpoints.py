"""Checkpoints of all formats: jaxforge, PyTorch DCP, `torch.save` and Hugging Face."""

import dataclasses
import os
import posixpath
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from jaxforge.checkpoint.paths import PREFIX, SUBDIRECTORY, has_run
from jaxforge.checkpoint.paths import find as find_step
from jaxforge.cli.suggestions import path_hint
from jaxforge.config.job import JobConfig
from jaxforge.config.reading.load import load_config, make_config
from jaxforge.config.scheduler import SchedulerConfig
from jaxforge.errors import UserError
from jaxforge.storage import trust, urls
from torch_compat.checkpoint import dcp_state, hf_config, hf_state, mup, orbax_store, train_state
from torch_compat.checkpoint.dcp_state import Options
from torch_compat.checkpoint.state import CheckpointState, abstract_target
from torch_compat.formats import torch_file
from torch_compat.formats.dcp_reader import Dcp, is_dcp, open_dcp, parts
from torch_compat.formats.files import Directory
from torch_compat.formats.lazy import LazyTensor

Format = Literal["jaxforge", "dcp", "pt", "hf"]
"""pt: a file of `torch.save`."""

_STEP = re.compile(r"(?:global_)?step[_-](\d+)")  # MindSpeed's are global
_ROOMS = ("checkpoints", "checkpoint")  # directories of steps
_GENERAL = ("checkpoint", "ckpt", "model", "pytorch_model", "last", "best")  # stems of files


@dataclasses.dataclass(frozen=True)
class CheckpointRef:
    """A checkpoint that is there.

    Attributes:
        format: what it is.
        directory: where; that of the step, of jaxforge's too.
        file: name of the file in it; "" if the directory is the checkpoint.
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

    def config(
        self, path: Path | None, overrides: Sequence[str] = (), *, is_compared: bool = False
    ) -> JobConfig | None:
        """The config that it is of; None where neither it nor the user says.

        Args:
            path: the config file that the user names.
            overrides: settings over it.
            is_compared: the checkpoint is looked at and not converted: its plugins are imported
                only if the user asks for it, even those of a run of the user's own.

        Raises:
            UserError: the config is wrong, or is needed and cannot be read.
        """
        directory = self.run if self.format == "jaxforge" else self.directory.path
        trusts = trust.if_granted(directory) if is_compared else trust.of_run(directory)
        if path is not None:
            config = load_config(path, overrides, trusts)
            if self.is_torch and (usual := _usual_settings(config)):
                return load_config(path, [*overrides, *usual], trusts)
            return config
        if self.format == "jaxforge":
            config = orbax_store.open_orbax(self._path, trusts)[1]
            values, source = config.model_dump(mode="json"), str(self.directory)
            return make_config(values, overrides, source, trusts) if overrides else config
        if self.format == "hf":
            table, _ = hf_state.read_config(self.directory)
            train = {"seq_len": min(2048, table["max_seq_len"])}  # one that the model can have
            source = f"{self.directory}/{hf_config.CONFIG}"
            return make_config({"model": table, "train": train}, overrides, source)
        return None

    def required_config(self, path: Path | None, overrides: Sequence[str]) -> JobConfig:
        """Return the config that it is of.

        Raises:
            UserError: neither the checkpoint nor the user says, or the config is wrong.
        """
        config = self.config(path, overrides)
        if config is None:
            raise UserError(
                f"{self}: a checkpoint of PyTorch does not say which model it is of: "
                "give the run's config, --config FILE"
            )
        return config

    def read(self, config: JobConfig, options: Options) -> CheckpointState:
        """Read the checkpoint as a state with jaxforge's names.

        Raises:
            UserError: it is not of that config, or damaged.
        """
        if self.format == "jaxforge":
            checkpoint = orbax_store.open_orbax(self._path)[0]
            return (
                dataclasses.replace(checkpoint, moments=None)
                if options.weights_only
                else checkpoint
            )
        mup.check_import(config.model, str(self))
        if self.format == "hf":
            return hf_state.read(self.directory, abstract_target(config), options)
        return dcp_state.read(self.dcp(), abstract_target(config), options)

    def raw(self) -> Mapping[str, LazyTensor]:
        """Its tensors by its own keys."""
        if self.is_torch:
            return self.dcp().tensors
        if self.format == "hf":
            return hf_state.tensors(self.directory)
        return dict(orbax_store.open_orbax(self._path)[0].tensors())

    def stamps(self) -> dict[str, dict[str, str]]:
        """Return directory -> file -> what changes with the file, of all files that are read."""
        try:
            return self._stamps()
        except FileNotFoundError:
            return {}  # it is just being removed

    def _stamps(self) -> dict[str, dict[str, str]]:
        if self.format == "jaxforge" and urls.in_bucket(self.directory.path):
            from jaxforge.storage import buckets  # here, as its clients take a second to import

            return {self.directory.path: buckets.stamps(self.directory.path)}
        if self.format == "hf":
            stamps = self.directory.stamps().items()
            return {str(self.directory): {n: s for n, s in stamps if hf_state.is_read(n)}}
        if self.format == "pt":
            return {str(self): {self.file: self.directory.stamps()[self.file]}}
        if self.format == "dcp":
            beside = self.directory / posixpath.dirname(train_state.EXTRA_STATE)
            every = [self.directory, *parts(self.directory), beside]
        else:
            roots = [self._path / "state", self._path / "config", self.run / hf_state.TOKENIZER]
            every = [Directory(d) for root in roots for d, _, _ in os.walk(root)]
        return {str(directory): directory.stamps() for directory in every}

    @property
    def run(self) -> Path:
        """The run directory of jaxforge's own checkpoint."""
        return find_step(self._path)[0]

    @property
    def title(self) -> str:
        """The last part of the path that is no step and no directory of steps."""
        names = [*reversed(self.directory.path.split("/"))]
        if self.file and (stem := self.file.rpartition(".")[0]) not in _GENERAL:
            names.insert(0, stem)
        return next((n for n in names if n and n not in _ROOMS and not _STEP.fullmatch(n)), "model")

    @property
    def _path(self) -> Path:
        """Path of a checkpoint of jaxforge."""
        return urls.path(self.directory.path)

    def dcp(self) -> Dcp:
        """Open a checkpoint of a PyTorch loop."""
        assert self.is_torch
        if self.file:
            return torch_file.open_file(self.directory, self.file)
        return open_dcp(self.directory)


def find(path: str | os.PathLike) -> CheckpointRef:
    """Return the checkpoint at a path or URL; of a directory of several, the latest.

    It is that one for good: neither a newer step nor another `latest` changes what is found.

    Raises:
        UserError: nothing that is a checkpoint.
    """
    given = os.fspath(path)
    if has_run(given):
        run, step = find_step(urls.path(given))
        return CheckpointRef("jaxforge", Directory(run / SUBDIRECTORY / f"{PREFIX}_{step}"))
    if location := torch_file.find_file(given):
        return CheckpointRef("pt", *location)
    directory = Directory(given)
    for position in (directory, *_latest(directory)):
        if is_dcp(position):
            return CheckpointRef("dcp", position.resolved())
        if hf_state.is_hf(position):
            return CheckpointRef("hf", position.resolved())
    files = torch_file.names_in(directory)
    hint = f". Name the file: {directory}/{files[0]}" if files else path_hint(given)
    raise UserError(
        f"{given}: no checkpoint there: neither a run of jaxforge, nor a DCP checkpoint "
        "(.metadata), nor a file of torch.save (.pt), nor one of Hugging Face (config.json and "
        f".safetensors){hint}"
    )


def _usual_settings(config: JobConfig) -> list[str]:
    """Return KempnerForge's defaults for absent keys, where they differ from jaxforge's."""
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
    for position in (directory, *(directory / room for room in _ROOMS)):
        names = position.names()
        if "latest" in names:
            candidates.append(position / "latest")
        steps = [(int(match[1]), name) for name in names if (match := _STEP.fullmatch(name))]
        candidates += [position / name for _, name in sorted(steps, reverse=True)]
    return candidates
