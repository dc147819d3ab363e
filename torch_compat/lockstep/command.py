"""`jaxforge verify --torch`: find the first value in which a PyTorch model differs."""

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError
from torch_compat.checkpoint import checkpoints, dcp_state, mup
from torch_compat.checkpoint.checkpoints import CheckpointRef
from torch_compat.checkpoint.dcp_state import ReadOptions
from torch_compat.checkpoint.name_maps import NAME_MAPS, name_map
from torch_compat.checkpoint.state import CheckpointState
from torch_compat.formats.lazy import DTYPES, LazyTensor, from_array
from torch_compat.lockstep import batches, jaxforge_model, torch_model
from torch_compat.lockstep.batches import Arrays
from torch_compat.lockstep.comparison import (
    Comparison,
    Row,
    as_json,
    comparison_notes,
    comparison_rows,
    first_difference,
    print_rows,
)
from torch_compat.lockstep.jaxforge_model import JaxforgeValues
from torch_compat.lockstep.module_locations import locations, modules_by_path
from torch_compat.lockstep.torch_model import TorchSubject
from torch_compat.names.table import EMBEDDING, HEAD, NameMap, detect_dialect
from torch_compat.names.translation import summarize_names

_IN_BFLOAT16 = "in bfloat16 rounding hides small faults: --train.mixed_precision=fp32 reveals them"
_FLOATS = ("float64", "float32", "float16", "bfloat16")
_ONE_DEVICE = (
    *(f"--distributed.{axis}=1"
      for axis in ("dp_shard", "dp_replicate", "tp", "pp", "cp", "ep")),
    "--train.global_batch_size=None", "--train.batch_ramp=[]", "--train.grad_accum_steps=1",
    "--eval.enabled=false", "--eval.activations_interval=0", "--early_stop.active=false",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Job:
    """Comparison that the user requests.

    Attributes:
        spec: MODULE:FACTORY.
        checkpoint: path of the checkpoint with the weights.
        config: config file, or None.
        overrides: settings that override the config.
        batch: .npz file of the batch, or None.
        size: number of sequences and tokens of a batch that is not from a file.
        dialect: dialect of the module's names; None: detected.
        loaded: whether the factory loads the weights itself.
    """

    spec: str
    checkpoint: str
    config: Path | None = None
    overrides: Sequence[str] = ()
    batch: Path | None = None
    size: tuple[int, int] = (2, 64)
    dialect: str | None = None
    loaded: bool = False


@dataclasses.dataclass(frozen=True)
class Report:
    """Result of the comparison.

    Attributes:
        rows: a row for each compared value, in the order of computation.
        notes: notes for the user, such as values that were not compared.
    """

    rows: list[Row]
    notes: list[str]

    @property
    def same(self) -> bool:
        """Return whether nothing differs."""
        return first_difference(self.rows) is None


def lockstep(job: Job) -> Report:
    """Run both models on the same weights and batch, and compare their values.

    Raises:
        UserError: an input cannot be read, or names do not match.
    """
    reference = checkpoints.find(job.checkpoint)
    config = load_config(reference, job)
    standard = config.with_values({"model": mup.to_standard(config.model)})
    subject = torch_model.build(job.spec, standard)
    # The dialect option is about the module; only a DCP has no other record of its names.
    dialect_of_keys = job.dialect if reference.is_torch else None
    checkpoint = reference.read(config, ReadOptions(weights_only=True, dialect=dialect_of_keys))
    params = mup.fold_multipliers(checkpoint.params, config.model)
    checkpoint, notes = dataclasses.replace(checkpoint, params=params), _mup_notes(config)
    config = standard
    batch, batch_note = batches.batch(config, job.batch, job.size, torch_model.padding(subject))
    if subject.loss is None:
        config = with_cross_entropy_only(config)
    jaxforge_values = jaxforge_model.compute(config, checkpoint, batch)
    dialect = choose_dialect(subject, checkpoint, job.dialect)
    subject = dataclasses.replace(subject, current_key=dialect.current_key)
    if job.loaded:
        torch_model.cast_module(subject, jaxforge_model.activation_dtype(config))
    else:
        load_weights(
            subject,
            select_weights(subject, reference, checkpoint, dialect, config),
            dialect,
            config,
        )
    report = compare_models(jaxforge_values, subject, dialect, config, batch)
    notes += [*checkpoint.notes, batch_note]
    if jaxforge_model.activation_dtype(config) != "float32":
        notes.append(_IN_BFLOAT16)
    return Report(report.rows, [*notes, *report.notes])


def compare_models(
    jaxforge_values: JaxforgeValues,
    subject: TorchSubject,
    dialect: NameMap,
    config: JobConfig,
    batch: Arrays,
) -> Report:
    """Run the module, whose weights are loaded, and compare it with jaxforge's values."""
    modules = modules_by_path(subject.module.named_modules())
    at = locations(jaxforge_values.params, dialect, config.model, set(modules))
    weights = torch_model.state_values(subject)
    torch_values = torch_model.run(subject, batch, at)
    updates = None
    if subject.optimizer is not None:
        updates = _updates(jaxforge_values, subject, dialect, config)
    comparison = Comparison(jaxforge_values, torch_values, weights, updates, dialect, config, at)
    return Report(list(comparison_rows(comparison)), list(comparison_notes(comparison)))


def load_config(reference: CheckpointRef, job: Job) -> JobConfig:
    """Return the config of the checkpoint, for one device.

    Raises:
        UserError: no config exists, or its precision is not supported.
    """
    config = reference.required_config(job.config, (*_ONE_DEVICE, *job.overrides))
    if config.train.mixed_precision not in ("fp32", "bf16"):
        raise UserError(
            f'train.mixed_precision = "{config.train.mixed_precision}": lockstep compares in fp32 '
            "and bf16. Add --train.mixed_precision=fp32"
        )
    return config


def with_cross_entropy_only(config: JobConfig) -> JobConfig:
    """Return the config with plain cross-entropy, the default loss of the torch model."""
    weights = ("moe_aux_loss_weight", "moe_sequence_aux_loss_weight", "moe_router_z_loss_weight")
    values = {f"model.{name}": 0.0 for name in weights}
    return config.with_values(values | {"train.z_loss_weight": 0.0})


def choose_dialect(
    subject: TorchSubject, checkpoint: CheckpointState, named: str | None
) -> NameMap:
    """Return the dialect of the module's names, preferably the checkpoint's.

    Raises:
        UserError: no dialect matches.
    """
    if named is not None:
        return name_map(named)
    keys = list(subject.trained)
    stored = NAME_MAPS.get(checkpoint.dialect)
    if stored is not None and all(map(stored.knows, keys)):
        return stored
    dialect = detect_dialect(keys, NAME_MAPS.values())
    if dialect is None and stored is not None and any(map(stored.knows, keys)):
        return stored  # the module has further tensors, or other names of experts
    if dialect is None:
        raise UserError(
            f"the module's names ({summarize_names(keys)}) match no dialect. Return the module "
            "that has a dialect's names at its root, or register a name map and add --dialect "
            "(docs/torch_compat.md, Models of your own)"
        )
    return dialect


def select_weights(
    subject: TorchSubject, reference: CheckpointRef, checkpoint: CheckpointState, dialect: NameMap,
    config: JobConfig,
) -> Mapping[str, LazyTensor]:  # fmt: skip
    """Return the checkpoint's tensors by the module's names: unchanged if the names match."""
    stored, names = _raw_tensors(reference, subject.current_key), set(subject.trained)
    # Files may leave out a tied head.
    tied = {dialect.find_key(HEAD)} if config.model.tie_embeddings else set()
    if stored.keys() >= names - tied:
        return stored
    weights = dialect.to_dialect(checkpoint.variables, config.model)
    return max(stored, weights, key=lambda tensors: len(tensors.keys() & names))


def load_weights(
    subject: TorchSubject, tensors: Mapping[str, LazyTensor], dialect: NameMap, config: JobConfig
) -> None:
    """Load the weights; a tied head that the checkpoint lacks gets the embedding's values."""
    dtype = jaxforge_model.activation_dtype(config)
    arrays = {n: t.cast(DTYPES[dtype]).all() for n, t in tensors.items() if t.dtype.name in _FLOATS}
    keys, allowed = set(subject.state), set[str]()
    if config.model.tie_embeddings:
        head, table = dialect.find_key(HEAD), dialect.find_key(EMBEDDING)
        allowed |= {head} if head else set()
        if head in keys and head not in arrays and table in arrays:
            arrays[head] = arrays[table]
    allowed |= {key for key in (*keys, *arrays) if dialect.ignores(key)}
    untrained = keys - subject.trained.keys()
    allowed |= {key for key in untrained if not dialect.knows(key)}  # computed tables
    torch_model.fill(subject, arrays, dtype, allowed)


def print_report(report: Report, *, is_json: bool) -> None:
    """Print the report to stdout, as a table or as JSON."""
    if is_json:
        print(json.dumps({**as_json(report.rows), "notes": report.notes}, indent=2))
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    print_rows(console, report.rows)
    for note in report.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)


def _updates(
    jaxforge_values: JaxforgeValues, subject: TorchSubject, dialect: NameMap, config: JobConfig
) -> tuple[Arrays, Arrays]:
    """Return two updates of the torch optimizer for the gradients of jaxforge."""
    lazy = {name: from_array(grad) for name, grad in jaxforge_values.grads.items()}
    grads = {key: t.all() for key, t in dialect.to_dialect(lazy, config.model).items()}
    names = subject.trained
    head = dialect.find_key(HEAD)
    if head in names and head not in grads and config.model.tie_embeddings:
        grads[head] = grads[dialect.key_for(EMBEDDING)]
    # Such as experts under other names in memory. `_notes` says that they are not compared.
    if missing := [name for name in names if name not in grads]:
        for name in missing:
            grads[name] = np.zeros(tuple(names[name].shape), np.float32)
    return torch_model.compute_two_updates(subject, grads)


def _raw_tensors(
    reference: CheckpointRef, current_key: Callable[[str], str]
) -> Mapping[str, LazyTensor]:
    """Return the tensors of a DCP or Hugging Face checkpoint by their keys, without prefixes."""
    if reference.is_torch:
        return dcp_state.sort_keys(reference.dcp()).params
    if reference.format == "hf":
        return {current_key(key): tensor for key, tensor in reference.raw().items()}
    return {}


def _mup_notes(config: JobConfig) -> list[str]:
    if mup.is_standard(config.model):
        return []
    return [
        "the weights of both models contain the multipliers of muP, as in an export; updates use "
        "the standard parametrisation"
    ]
