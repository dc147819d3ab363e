"""Reference or teacher of a run: loading, and the fields that it adds to batches.

With `distillation.logits`, no teacher is loaded: its fields are read with the data.

The frozen model is not a part of the training state. It is loaded again at each start. A checkpoint
holds only a hash of each of its arrays (`Progress.frozen`), by which a resume with other weights is
refused.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from jaxforge.checkpoint.layout import drop_unsaved, model_tree, split_adapters, variables
from jaxforge.checkpoint.paths import find, has_run
from jaxforge.checkpoint.relayout import by_layer, by_stage
from jaxforge.checkpoint.restore import (
    OpenForeign,
    at_path,
    changed_array,
    opened,
    restore_recorded,
)
from jaxforge.config import rules
from jaxforge.config.job import JobConfig
from jaxforge.config.model import ModelConfig
from jaxforge.data.teacher_logits import Manifest
from jaxforge.errors import UserError
from jaxforge.model.runtime import kernel_target
from jaxforge.model.transformer import Params
from jaxforge.parallel import agreement
from jaxforge.program import AbstractBatch, Program
from jaxforge.runs import run_directory
from jaxforge.state.progress import Progress
from jaxforge.step.frozen_model import FrozenModel, frozen_config
from jaxforge.step.update_loss import Batch
from jaxforge.storage import urls
from jaxforge.training.foreign import foreign_model

log = logging.getLogger(__name__)

_Signature = tuple[frozenset[str], tuple[int, ...]]
LoweredFields = Mapping[_Signature, jax.stages.Lowered]
"""Traced programs that add fields, by the names of a batch's fields and the shape of the labels."""

_KEYS = {"dpo": "dpo.reference", "distillation": "distillation.teacher"}


class FrozenFields:
    """Adds the fields of `train.objective` to batches.

    Args:
        params: its parameters; None: the base model of the run's adapters.
    """

    def __init__(self, model: FrozenModel, params: Params | None) -> None:
        self.model, self.params = model, params
        self._add = jax.jit(model.add_fields)
        self._compiled: dict[_Signature, jax.stages.Compiled] = {}

    def __call__(self, policy: Params, batch: Batch) -> Batch:
        """Return a batch with further fields."""
        # Batches of other shapes, such as those of an evaluation, compile at their first use.
        program = self._compiled.get(_signature(batch), self._add)
        return program(self._params_of(policy), batch)

    def lower(self, policy: Params, batches: Iterable[AbstractBatch]) -> LoweredFields:
        """Trace the program for batches; return the results by the signature of the batch."""
        params = self._params_of(policy)
        return {_signature(batch): self._add.lower(params, batch) for batch in batches}

    def compile(self, lowered: LoweredFields) -> None:
        """Compile the results of `lower`, so that a run does not compile in a step."""
        self._compiled |= {key: program.compile() for key, program in lowered.items()}

    def _params_of(self, policy: Params) -> Params:
        return split_adapters(policy)[1] if self.params is None else self.params


def _signature(batch: AbstractBatch | Batch) -> _Signature:
    """Return what programs depend on: evaluation batches have other fields than a mixture's."""
    return frozenset(batch), batch["labels"].shape


def open_frozen(
    program: Program,
    open_foreign: OpenForeign,
    progress: Progress,
    teacher: ModelConfig | None = None,
) -> FrozenFields | None:
    """Load the frozen model of `train.objective`. Collective.

    Return None if there is none: for next tokens, or with `distillation.logits`, which are fields
    of the data.

    Without `dpo.reference`, the reference is `checkpoint.load_path`: with adapters, the base model
    that the state holds already.

    Args:
        program: program of the run.
        open_foreign: opens a reference that is not a jaxforge run.
        progress: counters of the run; the hashes are compared, and recorded at the first start.
        teacher: `[model]` of the teacher; None: it is read.

    Raises:
        UserError: the model does not exist, does not fit, or is not the recorded one.
    """
    config, objective = program.config, program.config.train.objective
    if objective == "next_token":
        return None
    # Saved logits are fields of the data: no second model has to fit into memory.
    if objective == "distillation" and (logits := config.distillation.logits):
        manifest = Manifest.read(urls.path(logits))
        agreement.check({"distillation.logits": manifest.to_json()})
        log.info("distillation.logits = %s: logits of %s", logits, manifest.teacher)
        _record("distillation.logits", logits, manifest.arrays, progress)
        return None
    if objective == "distillation":
        path = config.distillation.teacher
    else:
        path = config.dpo.reference or config.checkpoint.load_path
        if path is None:
            raise UserError(
                "pairs of answers need a reference model: set dpo.reference to its path"
            )
    assert path
    settings = frozen_config(config, teacher or teacher_model(config))
    try:
        rules.check(settings, program.mesh.size)
    except UserError as error:
        raise UserError(f"{_KEYS[objective]} = {path}: {error}") from error
    model = FrozenModel(settings, config, program.mesh, kernel_target(program.mesh))
    # Adapters leave the base model untouched, so it is the reference without a copy.
    if objective == "dpo" and config.dpo.reference is None and config.lora.rank:
        return FrozenFields(model, None)
    return FrozenFields(model, _load(model, path, _KEYS[objective], open_foreign, progress))


def teacher_model(config: JobConfig) -> ModelConfig | None:
    """Return the `[model]` section of the teacher; None if the objective has no teacher.

    Raises:
        UserError: there is no checkpoint at `distillation.teacher`, or its config cannot be read.
    """
    path = config.distillation.teacher
    if config.train.objective != "distillation" or path is None:
        return None
    try:
        if has_run(path):
            return run_directory.read_config(find(urls.path(path))[0]).model
        return foreign_model(path) or config.model
    except UserError as error:
        raise UserError(f"distillation.teacher = {path}: {error}") from error


def _load(
    frozen: FrozenModel, path: str, key: str, open_foreign: OpenForeign, progress: Progress
) -> Params:
    config, stack = frozen.config, frozen.model.stack
    like = model_tree(frozen.like, frozen.like_state)
    with opened(at_path(config, path), config, open_foreign) as source:
        log.info("%s is %s", key, source.name)
        restored, record = restore_recorded(source, by_layer(like, stack))
    # Compared before use: a resume with other weights would silently change the loss.
    _record(key, path, record, progress)
    return variables(by_stage(restored, stack, drop_unsaved(like, restored)))


def _record(key: str, path: str, record: dict[str, Any], progress: Progress) -> None:
    """Record the arrays of the frozen model, or compare them with those of the first start.

    Raises:
        UserError: an array differs.
    """
    if name := changed_array(record, progress.frozen):
        raise UserError(
            f"{key} = {path} is not the model that the run began with: {name} differs. Restore "
            f"that model, or set {key} to a copy"
        )
    progress.frozen = record
