"""Meaning of KempnerForge's config files, and of keys that jaxforge no longer stores.

plugins = ["my_module"]            [plugins] modules = ["my_module"]
model.head_dim_override = 128      model.head_dim = 128
optimizer.muon_momentum = 0.9      [optimizer.muon] momentum = 0.9; the same for soap_ and
                                   schedule_free_, the form in which older runs stored them
dim = 4096 (no table at all)       [model] dim = 4096, as in KempnerForge's configs/model

`reading.forms` converts the values of the other keys.
"""

import copy
from collections.abc import Mapping
from typing import Any

from jaxforge.config.job import JobConfig
from jaxforge.config.metrics import WRITERS
from jaxforge.config.model import ModelConfig
from jaxforge.config.optimizer import SchedulerConfig
from jaxforge.config.reading.toml import Path
from jaxforge.errors import UserError

_HEAD_DIM = "head_dim_override"
_TEXT = "jaxforge trains text models"

NO_EFFECT: dict[Path, str] = {
    ("model", "attention_backend"): (
        "model.sdpa_backend chooses the kernel; all separate documents"
    ),
    ("train", "compile_model"): "every update is a single compiled program",
    ("optimizer", "fused"): "XLA fuses the update of all parameters",
    ("data", "pin_memory"): (
        "batches are transferred to the devices before the step that needs them"
    ),
    ("data", "hf_dataset_image_field"): _TEXT,
    ("data", "hf_dataset_prompt_field"): _TEXT,
    ("data", "hf_image_size"): _TEXT,
    ("distributed", "backend"): "XLA provides the collectives for each platform",
    ("distributed", "nccl_timeout_sec"): "jax.distributed has its own timeouts between processes",
    ("checkpoint", "ignore_freeze_mismatch"): f"{_TEXT}, which have no frozen parameters",
}
"""Keys that have an effect only in PyTorch, and what does their job here."""

_WRITER: Path = ("metrics", "writers")

STORED_AS: dict[Path, Path] = {
    ("model", _HEAD_DIM): ("model", "head_dim"),
    ("model", "mixer"): ("model", "mixer_pattern"),
    ("model", "moe_frequency"): ("model", "feed_forward_pattern"),
    ("model", "ffn_dim_multiplier"): ("model", "ffn_hidden_dim"),
    ("model", "moe_expert_ffn_multiplier"): ("model", "moe_expert_dim"),
    ("train", "rampup_batch_size"): ("train", "batch_ramp"),
    ("data", "mixture_file"): ("data", "datasets"),
    ("data", "anneal_start_step"): ("data", "phases", 0, "start_step"),
    ("data", "anneal_weights"): ("data", "phases", 0, "dataset_weights"),
    **{
        ("eval", key): ("eval", "datasets", 0, key)
        for key in ("dataset_path", "file_pattern", "hf_dataset_name", "hf_dataset_config",
                    "hf_dataset_split")
    },
    ("metrics", "log_straggler"): ("metrics", "straggler_report_interval"),
    **{("metrics", f"{name}_interval"): (*_WRITER, 0, "interval") for name in WRITERS},
    **{
        ("metrics", f"{name}_{key}"): (*_WRITER, 0, stored)
        for name, key, stored in (
            ("tensorboard", "dir", "location"),
            ("wandb", "project", "project"), ("wandb", "run_name", "run_name"),
            ("wandb", "run_id", "run_id"),
            ("mlflow", "experiment", "project"), ("mlflow", "run_name", "run_name"),
            ("mlflow", "run_id", "run_id"), ("mlflow", "tracking_uri", "location"),
            ("trackio", "project", "project"), ("trackio", "run_name", "run_name"),
            ("trackio", "space", "location"),
        )
    },
    **{("metrics", f"enable_{name}"): _WRITER for name in WRITERS},
    ("early_stop", "active"): ("early_stop",),
    ("checkpoint", "dyn_ckpt_window", "strategy"): ("checkpoint", "dyn_ckpt_window"),
}  # fmt: skip
"""Keys that are read, and the stored key of each; 0 is the index of a table in a list."""

_NAMES: dict[Path, Path] = {
    ("model", _HEAD_DIM): ("model", "head_dim"),
    ("plugins", "hooks"): ("plugins", "callbacks"),  # in configs of runs before November 2026
}
_TABLES = {"muon_": "muon", "soap_": "soap", "schedule_free_": "schedule_free_adamw"}
"""Beginning of flat keys of `[optimizer]` -> table."""

_ALIBI = "retired with ALiBi, BLOOM and MPT: position_embedding is rotary or learned"
_CONSTANT = "a constant since November 2026: remove it"

RETIRED: dict[str, tuple[Any, str]] = {
    "model.alibi_max_bias": (8.0, _ALIBI),
    "model.embedding_norm": (False, "retired with BLOOM: remove it"),
    "model.head_bias": (False, "retired with GPT-J, Phi-1 and Phi-2: remove it"),
    "train.min_loss_scale": (1.0, _CONSTANT),
    "train.loss_scale_growth_factor": (2.0, _CONSTANT),
    "train.loss_scale_backoff_factor": (0.5, _CONSTANT),
    "train.health_check_timeout_sec": (10.0, _CONSTANT),
    "train.watchdog_checkpoint_sec": (1800.0, "train.watchdog_setup_sec also limits a save"),
    "metrics.straggler_threshold": (0.7, _CONSTANT),
    "metrics.device_speed_interval": (
        0, "metrics.straggler_report_interval also compares the speed of devices"
    ),
    "profiling.python_tracer": (False, "Python calls are not traced: remove it"),
    "eval.activations_set": ("", "the first evaluation set is captured: remove it"),
}  # fmt: skip
"""Retired key -> its default value, and the note of the message about another value.

Configs that earlier runs stored name every key. A retired key with its default value is ignored.
"""


def rewrite(
    values: dict[Any, Any], lines: Mapping[Path, int], source: str
) -> tuple[dict[Any, Any], dict[Path, int]]:
    """Return the tables of a file and the lines of its keys, in jaxforge's form.

    Raises:
        UserError: If the file gives a key different values by two names.
    """
    values, lines = dict(values), dict(lines)
    # The files of KempnerForge's configs/model have keys without a table.
    if _is_model_alone(values):
        values = {"model": values}
        lines = {("model", *path): line for path, line in lines.items()}
    if isinstance(values.get("plugins"), list):
        values["plugins"] = {"modules": values["plugins"]}
        if ("plugins",) in lines:
            lines["plugins", "modules"] = lines["plugins",]
    lines = {renamed(path): line for path, line in lines.items()}
    return {name: _with_new_names(name, values[name], source) for name in values}, lines


def drop_ineffective(values: dict[Any, Any]) -> tuple[str, ...]:
    """Remove the keys that have an effect only in PyTorch, and return a line about each.

    A file with such a key was written for KempnerForge, and gets its default warm-up.
    """
    notes = []
    for (section, key), answer in NO_EFFECT.items():
        table = values.get(section)
        if isinstance(table, dict) and table.pop(key, None) is not None:
            notes.append(f"{section}.{key} has no effect: {answer}")
    # Such a file means KempnerForge's default warm-up, not a tenth of the run.
    if notes and isinstance(scheduler := values.setdefault("scheduler", {}), dict):
        usual = SchedulerConfig.model_fields["warmup_steps"].default
        scheduler.setdefault("warmup_steps", usual)
    saving = values.get("checkpoint")
    if isinstance(saving, dict) and saving.get("async_mode") == "async_with_pinned_mem":
        saving["async_mode"] = "async"
        notes.append('checkpoint.async_mode = "async_with_pinned_mem" is the same as "async"')
    return tuple(notes)


def renamed(path: Path) -> Path:
    """Return the path of a setting by its name in jaxforge."""
    if path[:2] in _NAMES:
        return (*_NAMES[path[:2]], *path[2:])
    key = str(path[1]) if path[0] == "optimizer" and len(path) > 1 else ""
    for start, table in _TABLES.items():
        if key.startswith(start) and key not in _TABLES.values():
            return ("optimizer", table, key.removeprefix(start), *path[2:])
    return path


def _with_new_names(section: str, table: object, source: str) -> object:
    """Return a section with the keys that have another name in jaxforge renamed."""
    if not isinstance(table, dict):
        return table
    paths = {name: renamed((section, name)) for name in table}
    result = {name: copy.copy(table[name]) for name in table if paths[name] == (section, name)}
    for name, value in table.items():
        *parents, key = paths[name][1:]
        owner = result.setdefault(parents[0], {}) if parents else result
        # A value of another type is refused by validation, with its line.
        if name in result or not isinstance(owner, dict):
            continue
        if owner.get(key, value) != value:
            raise UserError(
                f"{source}: {'.'.join(map(str, paths[name]))} = {owner[key]} and "
                f"{section}.{name} = {value} are two names of one key: remove one"
            )
        owner[key] = value
    return result


def _is_model_alone(values: Mapping[Any, Any]) -> bool:
    readable = {path[1] for path in (*STORED_AS, *NO_EFFECT) if path[0] == "model"}
    keys = {*ModelConfig.model_fields, *readable}
    return bool(values) and values.keys() <= keys and not values.keys() & JobConfig.model_fields


def without_retired_defaults(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the tables of a config without retired keys that have their default values."""
    remaining = dict(values)
    for name, (default, _) in RETIRED.items():
        section, key = name.split(".")
        table = remaining.get(section)
        if isinstance(table, Mapping) and key in table and table[key] == default:
            remaining[section] = {k: value for k, value in table.items() if k != key}
    return remaining
