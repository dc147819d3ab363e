"""`python -m torch_compat lockstep`: which value of a PyTorch model is the first to differ."""

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError
from jaxforge.tools.replay import compare
from jaxforge.tools.replay.compare import Row, first_difference
from torch_compat.checkpoint import checkpoints, dcp_state, mup
from torch_compat.checkpoint.checkpoints import CheckpointRef
from torch_compat.checkpoint.dcp_state import ReadOptions
from torch_compat.checkpoint.name_maps import NAME_MAPS, name_map
from torch_compat.checkpoint.state import CheckpointState
from torch_compat.formats.lazy import DTYPES, LazyTensor, from_array
from torch_compat.lockstep import batches, ours, theirs
from torch_compat.lockstep.comparison import Comparison, comparison_rows
from torch_compat.lockstep.jaxforge_model import JaxforgeValues
from torch_compat.lockstep.module_locations import locations, modules_by_path
from torch_compat.lockstep.torch_model import TorchSubject
from torch_compat.names.table import EMBEDDING, HEAD, NameMap, detect_dialect
from torch_compat.names.translation import summarize_names

Arrays = dict[str, np.ndarray]

_IN_BFLOAT16 = (
    "in bfloat16 small faults hide behind rounding: --train.mixed_precision=fp32 sees them"
)
_FLOATS = ("float64", "float32", "float16", "bfloat16")
_ONE_DEVICE = (
    *(f"--distributed.{axis}=1"
      for axis in ("dp_shard", "dp_replicate", "tp", "pp", "cp", "ep")),
    "--train.global_batch_size=None", "--train.batch_ramp=[]", "--train.grad_accum_steps=1",
    "--eval.enabled=false", "--eval.activations_interval=0", "--early_stop.active=false",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Job:
    """Request of the user.

    Attributes:
        spec: MODULE:FACTORY.
        checkpoint: where the weights are.
        config: the config file, if named.
        overrides: settings over it.
        batch: an .npz file, if named.
        size: rows and tokens of a batch that is drawn.
        dialect: whose names the module has, if named.
        loaded: whether the factory has loaded the weights itself.
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
        rows: every value, in the order in which they are made.
        notes: what was not compared, and what the user should know.
    """

    rows: list[Row]
    notes: list[str]

    @property
    def same(self) -> bool:
        """Return whether nothing differs."""
        return first_difference(self.rows) is None


def lockstep(job: Job) -> Report:
    """Runs both and compares them.

    Raises:
        UserError: something of it cannot be read, or names do not match.
    """
    reference = checkpoints.find(job.checkpoint)
    config = config_of(reference, job)
    standard = config.model_copy(update={"model": mup.to_standard(config.model)})
    built = theirs.build(job.spec, standard)
    # The dialect that the user names is the module's; a checkpoint of other names has its own.
    dialect_of_keys = job.dialect if reference.is_torch else None
    checkpoint = reference.read(config, ReadOptions(weights_only=True, dialect=dialect_of_keys))
    params = mup.fold_multipliers(checkpoint.params, config.model)
    checkpoint, notes = dataclasses.replace(checkpoint, params=params), _parametrisation(config)
    config = standard
    batch, of_batch = batches.batch(config, job.batch, job.size, theirs.padding(built))
    if built.loss is None:
        config = with_cross_entropy_only(config)
    our_side = ours.compute(config, checkpoint, batch)
    dialect = choose_dialect(built, checkpoint, job.dialect)
    built = dataclasses.replace(built, current_key=dialect.current_key)
    if job.loaded:
        theirs.cast_module(built, ours.activation_dtype(config))
    else:
        load(built, select_weights(built, reference, checkpoint, dialect, config), dialect, config)
    report = compare_models(our_side, built, dialect, config, batch)
    notes += [*checkpoint.notes, of_batch]
    if ours.activation_dtype(config) != "float32":
        notes.append(_IN_BFLOAT16)
    return Report(report.rows, [*notes, *report.notes])


def compare_models(
    our_side: JaxforgeValues,
    built: TorchSubject,
    dialect: NameMap,
    config: JobConfig,
    batch: Arrays,
) -> Report:
    """Runs the module, which has its weights, and compares it with what ours made."""
    modules = modules_by_path(built.module.named_modules())
    at = locations(our_side.params, dialect, config.model, set(modules))
    held = theirs.values(built)
    their_side = theirs.run(built, batch, at)
    updates = None
    if built.optimizer is not None:
        updates = _updates(our_side, built, dialect, config)
    comparison = Comparison(
        our_side, their_side, held, updates, dialect, config, batch["labels"], at
    )
    return Report(*comparison_rows(comparison))


def config_of(reference: CheckpointRef, job: Job) -> JobConfig:
    """The config of the checkpoint, for one device.

    Raises:
        UserError: there is none, or it is of a precision that is not compared.
    """
    config = reference.required_config(job.config, (*_ONE_DEVICE, *job.overrides))
    if config.train.mixed_precision not in ("fp32", "bf16"):
        raise UserError(
            f'train.mixed_precision = "{config.train.mixed_precision}": lockstep compares in fp32 '
            "and bf16; add --train.mixed_precision=fp32"
        )
    return config


def with_cross_entropy_only(config: JobConfig) -> JobConfig:
    """With a loss that is the cross-entropy alone, as theirs is where the factory gives none."""
    model = {"moe_aux_loss_weight": 0.0, "moe_sequence_aux_loss_weight": 0.0,
             "moe_router_z_loss_weight": 0.0}  # fmt: skip
    return config.model_copy(
        update={
            "model": config.model.model_copy(update=model),
            "train": config.train.model_copy(update={"z_loss_weight": 0.0}),
        }
    )


def choose_dialect(built: TorchSubject, checkpoint: CheckpointState, named: str | None) -> NameMap:
    """Whose names the module has: the checkpoint's own, if they fit.

    Raises:
        UserError: nobody's.
    """
    if named is not None:
        return name_map(named)
    keys = list(built.trained)
    own = NAME_MAPS.get(checkpoint.dialect)
    if own is not None and all(map(own.knows, keys)):
        return own
    reference = detect_dialect(keys, NAME_MAPS.values())
    if reference is None and own is not None and any(map(own.knows, keys)):
        return own  # of a model of it that has more, or other names of experts
    if reference is None:
        raise UserError(
            f"the module's names ({summarize_names(keys)}) are those of no dialect: return the module that "
            "has a dialect's names at its root, or register a name map and say --dialect "
            "(docs/torch_compat.md, Models of your own)"
        )
    return reference


def select_weights(
    built: TorchSubject, reference: CheckpointRef, checkpoint: CheckpointState, dialect: NameMap,
    config: JobConfig,
) -> Mapping[str, LazyTensor]:  # fmt: skip
    """The checkpoint's tensors by the module's names: by their own where those are the module's."""
    own, names = _raw(reference, built.current_key), set(built.trained)
    tied = {dialect.find_key(HEAD)} if config.model.tie_embeddings else set()
    if own.keys() >= names - tied:
        return own
    weights = dialect.to_dialect(checkpoint.variables, config.model)
    return max(own, weights, key=lambda tensors: len(tensors.keys() & names))


def load(
    built: TorchSubject, tensors: Mapping[str, LazyTensor], dialect: NameMap, config: JobConfig
) -> None:
    """Fills the module; a head that the checkpoint leaves to the embedding gets its values."""
    kind = ours.activation_dtype(config)
    arrays = {n: t.cast(DTYPES[kind]).all() for n, t in tensors.items() if t.dtype.name in _FLOATS}
    keys, allowed = set(built.state), set[str]()
    if config.model.tie_embeddings:
        head, table = dialect.find_key(HEAD), dialect.find_key(EMBEDDING)
        allowed |= {head} if head else set()
        if head in keys and head not in arrays and table in arrays:
            arrays[head] = arrays[table]
    allowed |= {key for key in (*keys, *arrays) if dialect.ignores(key)}
    untrained = keys - built.trained.keys()
    allowed |= {key for key in untrained if not dialect.knows(key)}  # tables that are computed
    theirs.fill(built, arrays, kind, allowed)


def print_report(report: Report, as_json: bool) -> None:
    """The table, or JSON, on stdout."""
    if as_json:
        print(json.dumps({**compare.as_json(report.rows), "notes": report.notes}, indent=2))
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    compare.print_rows(console, report.rows, ("ours", "PyTorch"))
    for note in report.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)


def _updates(
    our_side: JaxforgeValues, built: TorchSubject, dialect: NameMap, config: JobConfig
) -> tuple[Arrays, Arrays] | None:
    """TorchValues by our gradients, by our names; None where gradients have no names of theirs."""
    lazy = {name: from_array(grad) for name, grad in our_side.grads.items()}
    grads = {key: t.all() for key, t in dialect.to_dialect(lazy, config.model).items()}
    names = built.trained
    head = dialect.find_key(HEAD)
    if head in names and head not in grads and config.model.tie_embeddings:
        grads[head] = grads[dialect.key_for(EMBEDDING)]
    if missing := [name for name in names if name not in grads]:
        for name in missing:
            grads[name] = np.zeros(tuple(names[name].shape), np.float32)
    return theirs.compute_two_updates(built, grads)


def _raw(reference: CheckpointRef, current_key: Callable[[str], str]) -> Mapping[str, LazyTensor]:
    """Tensors of the model by the checkpoint's names, prefixes taken off; none of a run of ours."""
    if reference.is_torch:
        return dcp_state.sort_keys(reference.dcp()).params
    if reference.format == "hf":
        return {current_key(key): tensor for key, tensor in reference.raw().items()}
    return {}


def _parametrisation(config: JobConfig) -> list[str]:
    if mup.is_standard(config.model):
        return []
    return [
        "the multipliers of muP are in the weights of both, as an export has them; updates are "
        "those of the standard parametrisation"
    ]
