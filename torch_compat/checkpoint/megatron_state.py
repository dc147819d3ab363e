"""Keys of a Megatron-Core checkpoint, `torch_dist` or `fsdp_dtensor`, by purpose.

torch_dist       decoder.layers.self_attention.linear_qkv.weight
                 optimizer.state.exp_avg.decoder.layers.self_attention.linear_qkv.weight
fsdp_dtensor     model.module.decoder.layers.0.self_attention.linear_qkv.weight
                 optimizer.state.module.decoder.layers.0.self_attention.linear_qkv.weight.exp_avg
                 optimizer.param_to_group_meta.module.decoder.….lr
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxforge.config.job import JobConfig
from jaxforge.config.model import ModelConfig
from jaxforge.config.section import Structure
from jaxforge.errors import UserError
from torch_compat.checkpoint import megatron_buffers
from torch_compat.checkpoint.megatron_buffers import FLAT, UnmappedBuffersError
from torch_compat.checkpoint.megatron_config import model_table
from torch_compat.checkpoint.megatron_files import COMMON, Job, read_common
from torch_compat.checkpoint.model_keys import DcpKeys
from torch_compat.checkpoint.optimizer_state import MAIN_KEYS, STEP
from torch_compat.checkpoint.validation import invisible_differences
from torch_compat.families.values import is_size
from torch_compat.formats.dcp_reader import Dcp
from torch_compat.formats.lazy import LazyTensor, to_number
from torch_compat.formats.limits import shown
from torch_compat.names import megatron
from torch_compat.names.megatron import MEGATRON, WORD_EMBEDDINGS
from torch_compat.names.table import strip_wrappers

_PREFIX = re.compile(r"^model\d*\.")
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(.+)")
_PARAMETER = re.compile(r"(\w+_)?(weight|bias)\d*(_[wv])?|A_log|D|z|x|B|C|dt")
"""Last part of a parameter's name; letters are those of Mamba-2."""
_GROUP = re.compile(rf"optimizer\.param_to_group_meta\.(.+)\.({'|'.join((*MAIN_KEYS, STEP))})")
_FLAT_GROUPS = re.compile(
    r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.optimizer(/.+)?"
)
_NOT_MODEL = ("optimizer.", "chained_", "opt_param_scheduler", "rng_state", "rerun_state")
_EXTRA = "_extra_state"
_MASTERS = ("param", "fp32_param", "master_param")
_MODULE = re.compile(rf"decoder\.layers\.(\d{{1,9}})\.{re.escape(megatron.MODULE_NORM)}")
_OPTIMIZER = {"lr": "lr", "eps": "adam_eps", "weight_decay": "weight_decay"}
_STYLES = ("constant", "linear", "cosine")
_TRAIN = {"seq_len": "seq_length", "global_batch_size": "global_batch_size",
          "max_steps": "train_iters"}  # fmt: skip


def is_megatron(dcp: Dcp) -> bool:
    """Return whether a DCP has the keys of Megatron-Core's GPT model."""
    return any(key.endswith(WORD_EMBEDDINGS) and not _STATE.fullmatch(key) for key in dcp.tensors)


def sort_keys(dcp: Dcp) -> DcpKeys:
    """Assign the keys of a Megatron-Core checkpoint to model, optimizer and other state.

    Raises:
        UserError: two keys belong to one parameter, or a file is damaged.
    """
    where = str(dcp.directory)
    model: dict[str, LazyTensor] = {}
    fields: dict[str, dict[str, LazyTensor]] = {}
    unassigned = list(dcp.objects)
    bare = _without_prefix(dcp)
    for key, tensor in dcp.tensors.items():
        if match := _STATE.fullmatch(key):
            field, name = _field_and_parameter(match[1])
            fields.setdefault(field, {})[strip_wrappers(name)] = tensor
        elif key.startswith(_NOT_MODEL) or key.endswith(_EXTRA):
            unassigned.append(key)
        elif (name := bare(key)) in model:
            raise UserError(f"{where}: {key} and another key are both {name}")
        else:
            model[name] = tensor
    n_layers = megatron.count_layers(model)
    model = megatron.modules_as_layers(model, n_layers)
    fields = {f: megatron.modules_as_layers(named, n_layers) for f, named in fields.items()}
    # Names per layer and expert, with gate and up apart, whatever the layout of the file is.
    params = megatron.separate(model, where)
    unmapped = ""
    if any(FLAT.match(key) for key in dcp.tensors):
        try:
            # Buffers hold gate and up as one tensor, so the weights are compared in that form.
            fields |= megatron_buffers.read(dcp, megatron.unstack(model, where))
        except UnmappedBuffersError as error:
            unmapped = str(error)
    counts = fields.pop(STEP, {})
    by_field = {field: megatron.separate(named, where) for field, named in fields.items()}
    masters = {
        name: tensor for field in _MASTERS for name, tensor in by_field.pop(field, {}).items()
    }
    steps, groups = _steps_and_groups(dcp, counts.values())
    state: dict[str, dict[str, Any]] = {}
    for field, tensors in by_field.items():
        for name, tensor in tensors.items():
            # Megatron counts per group. torch has the count in the state of each parameter.
            state.setdefault(name, {STEP: steps[0]} if steps else {})[field] = tensor
    if len(set(steps)) > 1:
        raise UserError(f"{where}: its parameter groups report the steps {sorted(set(steps))[:3]}")
    return DcpKeys(
        MEGATRON,
        params,
        state,
        groups,
        unassigned,
        masters=masters,
        unmapped=unmapped,
    )


def without_modules(keys: DcpKeys, depth: int) -> DcpKeys:
    """Return the keys without modules of multi-token prediction beyond a depth."""
    layers = sorted(int(match[1]) for key in keys.params if (match := _MODULE.fullmatch(key)))
    spare = tuple(f"decoder.layers.{layer}." for layer in layers[depth:])
    left_out = tuple(key for key in keys.params if spare and key.startswith(spare))
    if not left_out:
        return keys

    def retained(named: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in named.items() if not key.startswith(spare)}

    return keys._replace(
        params=retained(keys.params), state=retained(keys.state), masters=retained(keys.masters),
        left_out=left_out,
    )  # fmt: skip


def _without_prefix(dcp: Dcp) -> Callable[[str], str]:
    """Return a function that removes the wrappers and prefixes of the model's keys."""
    table = next(
        key for key in dcp.tensors if key.endswith(WORD_EMBEDDINGS) and not _STATE.fullmatch(key)
    )
    prefix = strip_wrappers(_PREFIX.sub("", table)).removesuffix(WORD_EMBEDDINGS)
    return lambda key: strip_wrappers(_PREFIX.sub("", key)).removeprefix(prefix)


def check_mapped(keys: DcpKeys, where: str) -> None:
    """Check that optimizer state is assigned to parameters.

    Raises:
        UserError: it is in flat buffers of an unknown layout.
    """
    if keys.unmapped:
        raise UserError(
            f"{where}: its optimizer state is in flat buffers without names, which cannot be "
            f"assigned to parameters: {keys.unmapped}. Import with --weights-only, or save with "
            "--dist-ckpt-optim-fully-reshardable there"
        )


def config_values(job: Job) -> dict[str, Any]:
    """Return the sections of a config that continues a job.

    Raises:
        UserError: the model has no counterpart in jaxforge.
    """
    optimizer: dict[str, Any] = {
        key: value
        for key, theirs in _OPTIMIZER.items()
        if isinstance(value := job.optimizer.get(theirs), int | float)
    }
    betas = [job.optimizer.get(f"adam_beta{i}") for i in (1, 2)]
    if all(isinstance(beta, float) for beta in betas):
        optimizer["betas"] = betas
    train: dict[str, Any] = {
        key: value
        for key, theirs in _TRAIN.items()
        if type(value := job.train.get(theirs)) is int and value > 0
    }
    model = model_table(job.model, job.where)
    if model.get("mtp_depth"):
        train["mtp_loss_weight"] = job.model.get("mtp_loss_scaling_factor") or 0.1
    return {
        "model": model, "train": train, "optimizer": optimizer, "scheduler": _schedule(job),
    }  # fmt: skip


def _schedule(job: Job) -> dict[str, Any]:
    """Return `[scheduler]` of a job; empty for a schedule whose formula jaxforge lacks."""
    arguments = {**job.train, **job.optimizer, **job.scheduler}
    style = arguments.get("lr_decay_style")
    numbers = {key: float(value) for key, value in arguments.items() if is_size(value)}
    lr, least = numbers.get("lr", 0.0), numbers.get("min_lr", 0.0)
    end = int(numbers.get("lr_decay_iters") or numbers.get("train_iters", 0))
    warmup = int(numbers.get("lr_warmup_fraction", 0) * end or numbers.get("lr_warmup_iters", 0))
    if style not in _STYLES or not warmup < max(end, 1):
        return {}
    table = {"name": style, "warmup_steps": warmup}
    if style == "constant":
        return table
    share = min(1.0, least / lr) if lr else 0.0
    return {**table, "decay_steps": end - warmup, "min_lr_ratio": share}


def check_job(job: Job, config: JobConfig) -> list[str]:
    """Check that a config describes the model of a job; return notes.

    Args:
        job: the job that wrote the checkpoint.
        config: config with which the checkpoint is read.

    Raises:
        UserError: settings differ that the shapes of weights do not show, such as heads.
    """
    trained = ModelConfig(**model_table(job.model, job.where))
    # With other heads, `linear_qkv` would be read wrongly.
    if problems := list(invisible_differences(trained, config.model, Structure)):
        raise UserError(f"{job.where} is of another model:\n  " + "\n  ".join(problems))
    notes = list(invisible_differences(trained, config.model))
    style = job.scheduler.get("lr_decay_style")
    if style is not None and not _schedule(job):
        notes.append(f"the job's schedule {shown(style)} is not imported. Set [scheduler]")
    return notes


def is_padded(keys: DcpKeys, job: Job, model: ModelConfig) -> bool:
    """Return whether the embedding has rows that pad the vocabulary."""
    table = keys.params.get(WORD_EMBEDDINGS)
    rows = table.shape[0] if table is not None and table.shape else 0
    return rows == job.padded_vocabulary and rows > model.vocab_size


def _field_and_parameter(key: str) -> tuple[str, str]:
    """Split the part of a key after `optimizer.state.` into field and parameter.

    The field comes first in `torch_dist` and last in `fsdp_dtensor`.
    """
    before, _, last = key.rpartition(".")
    if _PARAMETER.fullmatch(last):
        field, _, parameter = key.partition(".")
        return field, parameter
    return last, before


def _steps_and_groups(
    dcp: Dcp, stored_steps: Iterable[LazyTensor]
) -> tuple[list[float], list[dict[str, Any]]]:
    """Return all stored numbers of updates, and the settings of the parameter groups.

    Args:
        dcp: the checkpoint.
        stored_steps: numbers of updates stored by parameter.
    """
    groups: dict[str, dict[str, Any]] = {}
    counts: list[Any] = list(stored_steps)
    tables: list[Mapping[str, Any]] = []
    for key in dcp.objects:
        if match := _GROUP.fullmatch(key):
            groups.setdefault(match[1], {})[match[2]] = dcp.objects(key)
        elif _FLAT_GROUPS.fullmatch(key):
            tables += _dicts(dcp.objects(key, is_tolerant=True))
    if dcp.directory.has(COMMON):
        tables += _dicts(read_common(dcp.directory).get("optimizer"))
    tables += groups.values()
    # Each rank's group repeats the count. `sort_keys` refuses a checkpoint whose counts differ.
    counts += [each[key] for each in tables for key in (STEP, "common_step") if key in each]
    try:
        steps = [to_number(value) for value in counts]
    except ValueError as error:
        raise UserError(
            f"{dcp.directory}: {STEP} of the optimizer is not a number ({error})"
        ) from error
    return steps, [_usual(table) for table in tables if "betas" in table]


def _usual(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group by torch's names."""
    named = {key: group[key] for key in MAIN_KEYS if key in group}
    return {"initial_lr": group["max_lr"], **named} if group.get("max_lr") else named


def _dicts(value: object) -> list[Mapping[str, Any]]:
    """Return all dicts within nested dicts and lists, each once."""
    tables: list[Mapping[str, Any]] = []
    pending, seen = [value], set[int]()
    while pending:
        each = pending.pop()
        # n lists that each hold the next one twice would be visited 2^n times.
        if not isinstance(each, dict | list) or id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, dict):
            tables.append(each)
        pending += each.values() if isinstance(each, dict) else each
    return tables
