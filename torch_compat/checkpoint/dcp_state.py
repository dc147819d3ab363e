"""Conversion between the keys of a DCP checkpoint and `CheckpointState`."""

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxforge.checkpoint.weights import Weights
from jaxforge.errors import UserError
from jaxforge.state.progress import Progress
from torch_compat.checkpoint import (
    expert_counts,
    megatron_state,
    numbered_state,
    optimizer_state,
    train_state,
    untrained,
)
from torch_compat.checkpoint.model_keys import DcpKeys, find_model, unknown
from torch_compat.checkpoint.optimizer_state import (
    MAIN_KEYS,
    STEP,
    WEIGHT_SUM,
    GroupKey,
    optimizer_layout,
)
from torch_compat.checkpoint.state import AbstractTarget, CheckpointState
from torch_compat.formats.dcp_reader import Dcp
from torch_compat.formats.dcp_writer import Entry
from torch_compat.formats.lazy import LazyTensor, from_array, to_number, zeros
from torch_compat.names.megatron import MEGATRON
from torch_compat.names.table import EMBEDDING, HEAD, NameMap, strip_wrappers
from torch_compat.names.translation import Translation, summarize_names, translate

_OPTIMIZER = re.compile(
    r"(?:.*\.)?optim(?:izers?)?(?:_state_dict|_\d+|\.[A-Z]\w*)?\.(state|param_groups)\.(.+)"
)
"""Keys of optimizer state. Lightning numbers its optimizers; Composer writes their class names."""
_NOT_MODEL = re.compile(
    r"(train_state|lr_scheduler|lr_schedulers|scheduler|dataloader|rng|rng_state)(\..*|$)"
    r"|.*\._extra_state"
)


@dataclasses.dataclass(frozen=True)
class ReadOptions:
    """Options of the user for reading a checkpoint.

    Attributes:
        dialect: name of the dialect. None: detect it.
        weights_only: ignore the optimizer state and the position in the run.
        keep_place: with `weights_only`, read the position in the run.
        keep_step: with `weights_only`, read the step and the number of tokens, but not the position
            in the data.
        fill_optimizer: replace absent optimizer state by zeros.
        resize_vocab: truncate a padded vocabulary, or extend it by rows of zeros.
        weights: "ema": read the average of the parameters of a run of jaxforge in their place.
        is_compared: read the tensors of the model as they are, also if they do not match the model.
    """

    dialect: str | None = None
    weights_only: bool = False
    keep_place: bool = False
    keep_step: bool = False
    fill_optimizer: bool = False
    resize_vocab: bool = False
    weights: Weights = "raw"
    is_compared: bool = False


def sort_keys(dcp: Dcp, dialect: str | None = None) -> DcpKeys:
    """Assign the keys of a DCP checkpoint to model, optimizer and other state.

    Raises:
        UserError: two keys belong to one parameter.
    """
    if megatron_state.is_megatron(dcp):
        return megatron_state.sort_keys(dcp)
    state: dict[str, dict[str, Any]] = {}
    groups: dict[str, dict[str, Any]] = {}
    model: dict[str, LazyTensor] = {}
    unassigned = []
    for key in (*dcp.tensors, *dcp.objects):
        if match := _OPTIMIZER.fullmatch(key):
            # A parameter's name may contain dots, a field of optimizer state does not.
            owner, _, field = match[2].rpartition(".")
            if match[1] == "state":
                value = dcp.tensors[key] if key in dcp.tensors else dcp.objects(key)
                # Nested and flattened dicts give the same flat key, so both layouts are read here.
                state.setdefault(strip_wrappers(owner), {})[field] = value
            elif field in MAIN_KEYS and key in dcp.objects:
                groups.setdefault(owner, {})[field] = dcp.objects(key)
            elif field in MAIN_KEYS:
                groups.setdefault(owner, {})[field] = _number(dcp.tensors[key], key)
        elif _NOT_MODEL.fullmatch(key) or key not in dcp.tensors:
            # Objects are never weights; RNG states and counters may be tensors.
            unassigned.append(key)
        else:
            stripped = strip_wrappers(key)
            if stripped in model:
                raise UserError(f"{dcp.where}: {key} and another key are both {stripped}")
            model[stripped] = dcp.tensors[key]
    result = find_model(model, dialect)
    # `find_model` has removed a prefix of the model's keys. The optimizer's owners lose the same
    # one.
    state = {result.owner(owner): fields for owner, fields in state.items()}
    unassigned += result.left_out
    return DcpKeys(
        result.dialect, result.params, state, list(groups.values()), unassigned, result.left_out
    )


def read(dcp: Dcp, target: AbstractTarget, options: ReadOptions) -> CheckpointState:
    """Read the state of a PyTorch run.

    Args:
        dcp: the checkpoint.
        target: state that the config declares.
        options: options of the user.

    Raises:
        UserError: the checkpoint is of another model, or parts of it are missing.
    """
    keys = sort_keys(dcp, options.dialect)
    if keys.dialect is MEGATRON:
        keys = megatron_state.without_modules(keys, target.config.model.mtp_depth)
    if keys.dialect is None:
        raise UserError(unknown(keys.params, dcp.where))
    notes: list[str] = []
    if keys.left_out:
        notes.append(f"left out: {summarize_names(keys.left_out)}, which are not part of the model")
    by = Translation(
        keys.dialect, target.config.model, options.resize_vocab, dcp.where, options.is_compared
    )
    if not options.weights_only:
        megatron_state.check_mapped(keys, dcp.where)
    # Megatron's weights are rounded copies of float32 masters. A run that resumes needs the
    # masters.
    alone = options.weights_only or not keys.state
    theirs = keys.params if alone else {**keys.params, **keys.masters}
    params, state, more = untrained.translate_model(theirs, target, by, goes_on=not alone)
    checkpoint = CheckpointState(
        params, dialect=keys.dialect.name, model_state=state, notes=(*notes, *more)
    )
    if alone:
        return _without_optimizer(checkpoint, dcp, target, options)
    return _with_optimizer(checkpoint, dcp, keys, target, by, options)


def _without_optimizer(
    checkpoint: CheckpointState, dcp: Dcp, target: AbstractTarget, options: ReadOptions
) -> CheckpointState:
    """Return a checkpoint of weights with the position in the run, as far as it is wanted."""
    where = train_state.read_train_state(dcp)
    notes, progress = [*checkpoint.notes], None
    if not options.weights_only:
        notes.append("the checkpoint has no optimizer state: training starts at step 0")
    if options.keep_place and where.step is not None:
        updates = where.step if where.updates is None else where.updates
        is_megatron = checkpoint.dialect == MEGATRON.name
        progress, more = train_state.to_progress(
            where, updates, target.config, is_megatron=is_megatron
        )
        notes += more
    elif options.keep_step and where.step is not None:
        progress = Progress(step=where.step, tokens=where.tokens or 0)
    return dataclasses.replace(checkpoint, progress=progress, notes=tuple(notes))


def _with_optimizer(
    checkpoint: CheckpointState,
    dcp: Dcp,
    keys: DcpKeys,
    target: AbstractTarget,
    by: Translation,
    options: ReadOptions,
) -> CheckpointState:
    """Return a checkpoint with its optimizer state and the position in the run."""
    where, notes = train_state.read_train_state(dcp), [*checkpoint.notes]
    if numbered_state.is_numbered(keys.state):
        # Buffers have no number in `optimizer.state_dict()`.
        trained = {by.dialect.key_for(name) for name in target.params}
        of_model = {key: tensor for key, tensor in keys.params.items() if key in trained}
        assigned = numbered_state.state_by_name(keys.state, of_model, dcp)
        keys = keys._replace(state=assigned.state)
        optimizer, stacking = target.config.optimizer, target.stacking
        decays = {
            by.dialect.key_for(n): optimizer.decays(stacking.array_of(n), is_matrix=len(shape) > 1)
            for n, shape in target.params.items() if optimizer.weight_decay
        }  # fmt: skip
        notes += optimizer_state.decay_disagreements(assigned.decays, decays)
    states, more = untrained.drop_untrained_moments(keys.state, target, by.dialect)
    notes += more
    counts = _counts(keys, target, dcp.where)
    # Whether experts have counts of their own decides which moments must exist, so this comes
    # first.
    settled = expert_counts.resolve_skip_idle_experts(
        states, counts, target, by, where.skips_idle_experts
    )
    if settled is not target:
        target = settled
        notes.append(expert_counts.NOTE)
    skips = target.config.skips_idle_experts
    absent = expert_counts.unreached(states, target, by.dialect) if skips else set()
    moments, missing = _moments(states, target, by, options.fill_optimizer, absent)
    if missing:
        notes.append(f"{missing} moments are not in the checkpoint and start from zero")
    common = expert_counts.drop_expert_counts(counts, target, by.dialect)
    scalars, updates = _scalars(common, target, where, dcp.where)
    if skips:
        moments |= _counts_of_experts(counts, scalars, target, by, absent)
    is_megatron = by.dialect.name == MEGATRON.name
    progress, more = train_state.to_progress(where, updates, target.config, is_megatron=is_megatron)
    settings = optimizer_state.common_settings(keys.groups)
    notes += more + optimizer_state.disagreements(settings, target.config)
    return dataclasses.replace(
        checkpoint, moments=moments, scalars=scalars, progress=progress, settings=settings,
        notes=tuple(notes),
    )  # fmt: skip


def entries(
    checkpoint: CheckpointState,
    target: AbstractTarget,
    dialect: NameMap,
    *,
    flat: bool,
    prefix: str,
    weights_only: bool,
    owner: str = "",
) -> dict[str, Entry]:
    """Return the entries of a checkpoint that PyTorch loads, by key.

    Args:
        checkpoint: the state.
        target: state that the config declares.
        dialect: dialect of the names.
        flat: flatten the optimizer state like `flatten_optimizer_state_dict` and torchtitan.
        prefix: prefix of the model's keys, such as "model."; "" puts them at the root.
        weights_only: omit the optimizer.
        owner: prefix of parameter names in the optimizer's keys.

    Raises:
        UserError: a parameter has no counterpart in the dialect.
    """
    config = target.config.model
    params = dialect.to_dialect(checkpoint.params, config)
    state = dialect.to_dialect(checkpoint.model_state, config)
    written: dict[str, Entry] = {}
    root = tuple(prefix.rstrip(".").split(".")) if prefix else ()

    def add(path: tuple[str | int, ...], value: Any) -> None:  # noqa: ANN401
        entry = Entry(path, value)
        written[entry.key] = entry

    # One state dict in PyTorch: a loader does not tell buffers from parameters.
    with_head = params | state
    if config.tie_embeddings and dialect.writes_tied_head:
        with_head[dialect.key_for(HEAD)] = params[dialect.key_for(EMBEDDING)]
    for key, tensor in with_head.items():
        add((*root, key), tensor)
    if weights_only or checkpoint.moments is None:
        return written
    settings = group_settings(checkpoint, target, dialect)
    for key, fields in _state_by_key(checkpoint, target, dialect, settings).items():
        for field, value in fields.items():
            add(("optimizer", f"state.{owner}{key}.{field}") if flat else
                ("optimizer", "state", f"{owner}{key}", field), value)  # fmt: skip
    updates = int(checkpoint.scalars["updates"])
    settings = {f"{owner}{key}": of_key for key, of_key in settings.items()}
    for g, group in enumerate(optimizer_state.groups(target.config, updates, settings)):
        members = group["params"]
        if not flat:
            for name, value in group.items():
                add(("optimizer", "param_groups", g, name), value)
            continue
        # Flattened: every parameter repeats the settings of its group.
        for key in members:
            for name, value in group.items():
                if name != "params":
                    add(("optimizer", f"param_groups.{key}.{name}"), value)
    return written


def _state_by_key(
    checkpoint: CheckpointState, target: AbstractTarget, dialect: NameMap, keys: Iterable[str]
) -> dict[str, dict[str, Any]]:
    """Return the fields of the optimizer state of each trained parameter, by their keys."""
    assert checkpoint.moments is not None
    kind, config = optimizer_layout(target.config), target.config.model
    fields = {
        kind.fields[field]: dialect.to_dialect(tensors, config)
        for field, tensors in checkpoint.moments.items()
        if field in kind.fields
    }
    counts = functools.partial(expert_counts.counts_by_torch_key, checkpoint, dialect=dialect)
    steps = counts("updates") if kind.counts else {}
    sums = counts(WEIGHT_SUM) if WEIGHT_SUM in checkpoint.scalars else {}
    result: dict[str, dict[str, Any]] = {}
    for key in keys:
        state: dict[str, Any] = {}
        if key in steps:
            state[STEP] = from_array(np.asarray(steps[key], np.float32))
        state |= {theirs: tensors[key] for theirs, tensors in fields.items() if key in tensors}
        if key in sums:
            state[WEIGHT_SUM] = sums[key]
        result[key] = state
    return result


def group_settings(
    checkpoint: CheckpointState, target: AbstractTarget, dialect: NameMap
) -> dict[str, GroupKey]:
    """Return the settings by which the trained parameters are grouped, by their keys.

    Raises:
        UserError: parameters that the dialect stores in one tensor have different factors.
    """
    optimizer, settings = target.config.optimizer, dict[str, GroupKey]()
    for name, tensor in checkpoint.params.items():
        array = target.stacking.array_of(name)
        if optimizer.freezes(array):
            continue
        key, is_matrix = dialect.key_for(name), len(tensor.shape) > 1
        decays = dialect.has_one_group or optimizer.decays(array, is_matrix=is_matrix)
        of_name = GroupKey(decays, optimizer.lr_factor(array))
        before = settings.get(key, of_name)
        if before.lr_factor != of_name.lr_factor:
            raise UserError(
                f"{key} of {dialect.name} holds several parameters, which optimizer.lr_patterns "
                "gives different learning rates: export with --weights-only"
            )
        # A tensor is in one group: it decays if any of its parameters does.
        settings[key] = of_name._replace(decays=decays or before.decays)
    return settings


def torchtitan_position(checkpoint: CheckpointState, target: AbstractTarget) -> dict[str, Entry]:
    """Return the entries of the position in the run, which torchtitan stores in the checkpoint."""
    assert checkpoint.progress is not None
    values = train_state.to_torchtitan(
        checkpoint.progress, int(checkpoint.scalars["updates"]), target.config
    )
    entries = [Entry(path, value) for path, value in values.items()]
    return {entry.key: entry for entry in entries}


def torchtitan_notes(target: AbstractTarget) -> list[str]:
    """Return notes for users who resume an export in torchtitan."""
    notes = [
        "resume in torchtitan with --checkpoint.exclude_from_loading dataloader: its position in "
        "the data has no counterpart here, so its data start from the beginning"
    ]
    names = {
        target.stacking.array_of(name): len(shape) > 1 for name, shape in target.params.items()
    }
    decays = target.config.optimizer.decays
    spared = [name for name, is_matrix in names.items() if not decays(name, is_matrix=is_matrix)]
    if spared:
        notes.append(
            f"torchtitan's one parameter group decays {summarize_names(spared)} too, unless its "
            "config has other groups; here they did not decay"
        )
    return notes


def _moments(
    states: Mapping[str, Mapping[str, Any]],
    target: AbstractTarget,
    by: Translation,
    fill: bool,
    never_updated: set[str],
) -> tuple[dict[str, dict[str, LazyTensor]], int]:
    """Return our moments, and the number of missing tensors that were replaced by zeros.

    Parameters in `never_updated` have zero moments, which do not count as missing.
    """
    name, kind = target.config.optimizer.name, optimizer_layout(target.config)
    fields = {moment: kind.fields[moment] for moment in target.moments if moment in kind.fields}
    # Fields of another optimizer are an error even if all needed ones exist: its moments mean other
    # things.
    present = {field for state in states.values() for field in state} - {STEP, WEIGHT_SUM}
    needed = {field for moment, field in fields.items() if moment in kind.required}
    if not needed <= present <= set(fields.values()):
        raise UserError(
            f"{by.where}: its optimizer state has {', '.join(sorted(present))}; that of "
            f'optimizer.name = "{name}" has {", ".join(fields.values())}: set optimizer.name to '
            "the one that wrote it, or import with --weights-only"
        )
    moments, missing = {}, 0
    for moment, theirs in fields.items():
        tensors = {
            key: value
            for key, state in states.items()
            if isinstance(value := state.get(theirs), LazyTensor)
        }
        shapes = target.moments[moment]
        present_names = by.dialect.to_jaxforge(tensors, shapes, by.model).keys()
        absent = [
            name for name in shapes if name not in present_names and name not in never_updated
        ]
        if absent and not fill:
            raise UserError(
                f"{by.where}: {theirs} of {len(absent)} parameters is missing "
                f"({summarize_names(absent)}), "
                "for example of frozen ones, or of those that Muon leaves to AdamW; "
                "--fill-optimizer starts them from zero"
            )
        missing += len(absent)
        result = translate(
            tensors,
            {name: shape for name, shape in shapes.items() if name in present_names},
            by._replace(where=f"{by.where}: {theirs}", is_compared=False),
        )
        # All parts of a stacked array must have one dtype (`Stacking.join`).
        dtype = next((tensor.dtype for tensor in result.values()), np.dtype(np.float32))
        moments[moment] = {
            name: result[name] if name in present_names else zeros(shape, dtype)
            for name, shape in shapes.items()
        }
    return moments, missing


def _counts(keys: DcpKeys, target: AbstractTarget, where: str) -> dict[str, float]:
    """Return the update counter of each parameter: `step`, or a sum of weights."""
    field = WEIGHT_SUM if WEIGHT_SUM in target.scalars else STEP
    return {
        key: _number(value, f"{where}: {field} of {key}")
        for key, state in keys.state.items()
        if (value := state.get(field)) is not None
    }


def _scalars(
    counts: Mapping[str, float],
    target: AbstractTarget,
    where: train_state.TorchTrainState,
    name: str,
) -> tuple[dict[str, np.ndarray], int]:
    """Return the optimizer's scalar fields and its number of updates."""
    scalars: dict[str, np.ndarray] = {}
    if WEIGHT_SUM in target.scalars:
        sums = set(counts.values())
        if len(sums) != 1:
            raise UserError(f"{name}: {len(sums)} different sums of weights instead of one")
        weight_sum = sums.pop()
        scalars[WEIGHT_SUM] = np.asarray(weight_sum, np.float32)
        updates: int | None = optimizer_state.schedule_free_updates(weight_sum, target.config)
    else:
        updates = optimizer_state.count_updates(counts, name)
    if updates is None:
        # Lion and Muon do not count: the scheduler does, or else the steps of the job.
        updates = where.updates if where.updates is not None else where.step
    if updates is None:
        raise UserError(f"{name}: the number of updates is not recorded")
    if not 0 <= updates < 2**31:
        raise UserError(f"{name}: it records {updates} updates, which is impossible")
    scalars["updates"] = np.asarray(updates, np.int32)
    return scalars, updates


def _counts_of_experts(
    counts: Mapping[str, float],
    scalars: Mapping[str, np.ndarray],
    target: AbstractTarget,
    by: Translation,
    absent: set[str],
) -> dict[str, dict[str, LazyTensor]]:
    """Return the fields of the counters in `_scalars` for each expert."""
    field = WEIGHT_SUM if WEIGHT_SUM in scalars else "updates"
    of_experts = expert_counts.per_expert_counts(
        counts, float(scalars[field]), target, by.dialect, absent
    )
    steps = of_experts
    if field == WEIGHT_SUM:
        steps = {
            name: optimizer_state.schedule_free_updates(weight_sum, target.config)
            for name, weight_sum in of_experts.items()
        }
    result = {n: optimizer_state.parse_updates(step, by.where) for n, step in steps.items()}
    expert_counts.check(result, int(scalars["updates"]), target, by.where)
    return expert_counts.fields({field: of_experts, "updates": result})


def _number(value: Any, what: str) -> float:  # noqa: ANN401 (untrusted)
    try:
        return to_number(value)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{what} is not a number ({error})") from error
