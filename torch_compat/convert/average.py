"""Mean of the weights of several checkpoints of a run: `jaxforge convert --average`.

The mean is read like a checkpoint, one block at a time: a block of each checkpoint is added in
float64 and rounded once to the dtype of the checkpoints. Non-trainable state (router biases) is
that of the newest checkpoint, as for buffers in torch.optim.swa_utils.AveragedModel.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path

import numpy as np

from jaxforge.checkpoint.paths import PREFIX, SUBDIRECTORY, durable_steps, find
from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError
from jaxforge.storage import urls
from torch_compat.checkpoint import orbax_store
from torch_compat.checkpoint.checkpoints import CheckpointRef
from torch_compat.checkpoint.dcp_state import ReadOptions
from torch_compat.checkpoint.state import CheckpointState
from torch_compat.formats.files import Directory
from torch_compat.formats.lazy import Index, LazyTensor

FILE = "average.json"
"""File of a run directory that names the checkpoints whose mean its weights are."""


@dataclasses.dataclass(frozen=True)
class AveragedCheckpoint(CheckpointRef):
    """Mean of checkpoints of a run, read as a checkpoint; the reference itself is the newest.

    Attributes:
        members: the checkpoints, in the order of their steps.
    """

    members: tuple[CheckpointRef, ...] = ()

    def __str__(self) -> str:
        return f"the mean of steps {', '.join(map(str, self.steps))} of {self.run}"

    @property
    def steps(self) -> list[int]:
        """Steps of the checkpoints."""
        return [int(member.directory.name.rpartition("_")[2]) for member in self.members]

    def read(self, config: JobConfig, options: ReadOptions) -> CheckpointState:
        """Read the mean as a state without optimizer.

        Raises:
            UserError: a checkpoint is damaged, or of another model than the newest one.
        """
        for member in self.members:
            _check_same_model(member, config)
        options = dataclasses.replace(options, weights_only=True)
        states = [member.read(config, options) for member in self.members]
        for member, state in zip(self.members, states, strict=True):
            _check_same_tensors(member, state.params, states[-1].params)
        params = {name: mean([state.params[name] for state in states]) for name in states[0].params}
        return dataclasses.replace(states[-1], params=params, moments=None, ema={})

    def stamps(self) -> dict[str, dict[str, str]]:
        """Return directory -> file -> fingerprint, for all files that are read."""
        return {name: stamp for member in self.members for name, stamp in member.stamps().items()}

    def about(self, options: ReadOptions) -> str:
        """Return the content of `FILE`."""
        content = {"run": str(self.run), "steps": self.steps, "weights": options.weights}
        return json.dumps(content) + "\n"


def mean(tensors: Sequence[LazyTensor]) -> LazyTensor:
    """Return the mean of tensors of one shape and dtype."""

    def read(index: Index) -> np.ndarray:
        # A float64 sum rounds far below the result, which is rounded once.
        total = tensors[0].read(index).astype(np.float64)
        for tensor in tensors[1:]:
            total += tensor.read(index)
        return (total / len(tensors)).astype(tensors[0].dtype)

    return dataclasses.replace(tensors[-1], read=read)


def select(path: str, choice: int | Sequence[int]) -> AveragedCheckpoint:
    """Return the mean of checkpoints of a run.

    Args:
        path: path or URL of the run.
        choice: number of newest checkpoints, or steps of checkpoints.

    Raises:
        UserError: the run does not exist, or does not have these checkpoints.
    """
    run, _ = find(urls.path(path))
    existing = sorted(durable_steps(run))
    known = f"{run} has {len(existing)} checkpoints: steps {', '.join(map(str, existing))}"
    if isinstance(choice, int):
        if choice > len(existing):
            raise UserError(f"--average {choice}: {known}. Choose at most {len(existing)}")
        chosen = existing[-choice:]
    else:
        chosen = sorted(choice)
        if missing := sorted(set(chosen) - set(existing)):
            raise UserError(f"--average: no checkpoint of step {missing[0]}. {known}")
        if len(set(chosen)) < len(chosen):
            raise UserError("--average names a step twice: remove one")
    parent = run / SUBDIRECTORY
    members = [CheckpointRef("jaxforge", Directory(parent / f"{PREFIX}_{step}")) for step in chosen]
    return AveragedCheckpoint("jaxforge", members[-1].directory, members=tuple(members))


def check_output(run: Path, output: Path) -> None:
    """Check that the mean does not become a checkpoint of an existing run.

    Raises:
        UserError: the directory is a run.
    """
    if output.absolute() == run or any(durable_steps(output)):
        raise UserError(f"{output} is a run. Name a new directory")


def _check_same_model(member: CheckpointRef, config: JobConfig) -> None:
    stored = orbax_store.open_orbax(urls.path(member.directory.path))[1].model
    for key in type(stored).model_fields:
        values = [attrgetter(key)(model) for model in (stored, config.model)]
        if values[0] != values[1]:
            raise UserError(
                f"{member} has model.{key} = {values[0]!r}, and the newest checkpoint "
                f"{values[1]!r}: weights of different models have no mean. Choose other steps"
            )


def _check_same_tensors(
    member: CheckpointRef,
    tensors_of_member: Mapping[str, LazyTensor],
    newest: Mapping[str, LazyTensor],
) -> None:
    for name in sorted(tensors_of_member.keys() | newest.keys()):
        kinds = [
            f"{t.dtype.name}{list(t.shape)}" if (t := tensors.get(name)) else "absent"
            for tensors in (tensors_of_member, newest)
        ]
        if kinds[0] != kinds[1]:
            raise UserError(
                f"{member}: {name} is {kinds[0]}, and {kinds[1]} in the newest checkpoint. Choose "
                "steps with the same weights"
            )
