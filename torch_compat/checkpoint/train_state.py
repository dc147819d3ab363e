"""Position of a PyTorch run: step, tokens and position in the data.

KempnerForge and Megatron-Bridge store it in `train_state.pt` next to the DCP files, MindSpeed in
`extra_state/`, Megatron-LM in `common.pt`, and torchtitan in the DCP files.
"""

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxforge.config.data import DataConfig
from jaxforge.config.job import JobConfig
from jaxforge.data.order import data_seed
from jaxforge.errors import UserError
from jaxforge.state.progress import Progress
from jaxforge.storage import urls
from torch_compat.checkpoint import megatron_files
from torch_compat.checkpoint.optimizer_state import group_lr
from torch_compat.formats import limits
from torch_compat.formats.dcp_reader import Dcp
from torch_compat.formats.lazy import to_count
from torch_compat.formats.limits import shown
from torch_compat.formats.pickles import Call, Global, New
from torch_compat.formats.torch_zip import Archive
from torch_compat.names.megatron import MEGATRON

TRAIN_STATE = "train_state.pt"
SKIPS_IDLE_EXPERTS = "skip_idle_experts"
EXTRA_STATE = "extra_state/extra_state_rank_0.pt"
_LAST_LOGGED = ("last_avg_loss", "last_mfu", "last_tokens_per_second", "last_reserved_memory",
                "last_grad_norm")  # fmt: skip
_SAMPLES = "consumed_train_samples"


_STEP_KEYS = ("step", "global_step", "iter_num", "iteration", "train_state.step")
"""Keys of the step in files of scripts; the first existing key is used."""


class TorchTrainState(NamedTuple):
    """Position of a PyTorch run; None for values that it does not record.

    Attributes:
        step: steps attempted.
        tokens: tokens seen.
        updates: updates according to the LR scheduler.
        epoch: complete passes over the data.
        batches: batches that each rank has drawn in this epoch.
        ranks: number of data-parallel ranks.
        skips_idle_experts: for an export of jaxforge, whether the run skips experts without tokens.
        samples: sequences read, which only Megatron and exports of jaxforge record.
    """

    step: int | None = None
    tokens: int | None = None
    updates: int | None = None
    epoch: int = 0
    batches: int | None = None
    ranks: int | None = None
    skips_idle_experts: bool | None = None
    samples: int | None = None


def read_train_state(dcp: Dcp) -> TorchTrainState:
    """Read the file of KempnerForge or MindSpeed, or else keys of the checkpoint.

    Raises:
        UserError: the file or a value is damaged.
    """
    if dcp.file:
        return _read_torch_file(dcp)
    for name, reader in ((TRAIN_STATE, _parse_train_state), (EXTRA_STATE, _parse_extra_state)):
        if dcp.directory.has(name):
            file, where = dcp.directory.open(name), f"{dcp.directory}/{name}"
            return reader(Archive(file, 0, file.size, where).object(), where)
    if dcp.directory.has(megatron_files.COMMON) or megatron_files.ITERATION_KEY in dcp.objects:
        return _read_megatron(dcp)
    return TorchTrainState(
        step=_number(dcp, "train_state.step"),
        tokens=_number(dcp, "train_state.ntokens_seen"),
        updates=_number(dcp, "lr_scheduler.last_epoch"),
    )


def to_progress(
    torch_state: TorchTrainState, updates: int, config: JobConfig, *, is_megatron: bool = False
) -> tuple[Progress, list[str]]:
    """Convert a position to jaxforge's counters; also return notes for the user.

    Args:
        torch_state: position of the PyTorch run.
        updates: updates according to the optimizer.
        config: config of the run. If the run is beyond the first epoch, its data are opened.
        is_megatron: whether Megatron wrote the checkpoint, whose data order jaxforge lacks.
    """
    notes = []
    step = updates if torch_state.step is None else torch_state.step
    if step < updates:  # every update was a step
        notes.append(
            f"the checkpoint's step {step} is below the {updates} updates of its optimizer, as a "
            f"step within an epoch is: training continues from step {updates}"
        )
        step = updates
    # The optimizer's count is the one that its moments (bias correction) belong to.
    n_updates = updates if torch_state.updates is None else torch_state.updates
    if n_updates != updates:
        notes.append(
            f"the optimizer counts {updates} updates and the LR scheduler {n_updates}; "
            f"jaxforge has one count, so the schedule continues from {updates}"
        )
    is_constant = len(config.train.stages()) == 1
    samples = torch_state.samples
    # Tokens of a ramp of batch sizes do not divide into equal steps.
    if samples is None and is_constant:
        samples = _samples_by_tokens(torch_state, step, n_updates, config.train.seq_len)
    if samples is None:
        samples, how = _samples_by_batches(torch_state, step, config)
        notes.append(f"the tokens seen do not determine the number of sequences read; {how}")
    if is_megatron:
        notes.append(
            f"Megatron has read {samples} sequences in its own order, which has no counterpart "
            f"here: the first {samples} sequences of this run's order are skipped"
        )
    elif config.data.order != "torch" and config.data.shuffle:
        notes.append(
            'data.order = "grain" shuffles in another order than PyTorch: set '
            'data.order = "torch" to continue with the next batch'
        )
    tokens = samples * config.train.seq_len if torch_state.tokens is None else torch_state.tokens
    return Progress(
        step=step, samples=samples, tokens=tokens, skipped=max(0, step - n_updates)
    ), notes


def order_notes(dialect: str, data: DataConfig) -> Iterator[str]:
    """Yield a note about the order in which a resumed run reads the data of a torch job.

    `to_progress` has the notes about Megatron's order and data.order = "grain".
    """
    is_torch = data.order == "torch" or not data.shuffle
    if not is_torch or dialect == MEGATRON.name:
        return
    order, job, value = (
        ("the order of PyTorch's DistributedSampler", "read its data in file order", "false")
        if data.shuffle
        else ("file order", "shuffled its data", "true")
    )
    yield (
        f"training continues in {order}. Checkpoint and config do not record that of the job: if "
        f"the job {job}, set --data.shuffle={value}"
    )


def absent_data(data: DataConfig) -> Iterator[str]:
    """Yield notes about training data that do not exist on this machine."""
    if not data.has_source:
        yield "the config names no data: set data.dataset_path to those of the job"
    paths = {f"data.datasets.{source.name}": source.path for source in data.datasets}
    for key, path in {"data.dataset_path": data.dataset_path, **paths}.items():
        if path and not urls.in_bucket(path) and not os.path.exists(path):
            yield f"{key} = {path} does not exist on this machine: set it to the data of the job"


def _samples_by_tokens(
    torch_state: TorchTrainState, step: int, updates: int, seq_len: int
) -> int | None:
    """Return the number of sequences read, or None if the tokens do not determine it.

    Only applied updates count tokens; skipped steps read as many sequences each. The result does
    not depend on ranks, batch size or epochs.
    """
    if not torch_state.tokens or not updates or torch_state.tokens % (seq_len * updates):
        return None
    return torch_state.tokens // (seq_len * updates) * step


def _samples_by_batches(
    torch_state: TorchTrainState, step: int, config: JobConfig
) -> tuple[int, str]:
    """Return the number of sequences read by sampler position or by steps, and a note on that."""
    ranks = (
        torch_state.ranks or max(1, config.distributed.dp_shard) * config.distributed.dp_replicate
    )
    rows = config.train.microbatch_size(ranks)
    if torch_state.batches is None:
        samples = config.train.ramp(ranks).samples(step)
        return samples, f"assuming {samples} sequences, as {step} steps read"
    before = torch_state.epoch * _epoch_length(config, rows, ranks) if torch_state.epoch else 0
    return (
        before + torch_state.batches * rows,
        f"assuming {torch_state.batches} batches of {rows}",
    )


def to_torch(
    progress: Progress,
    updates: int,
    config: JobConfig,
    ranks: int,
    lr_factors: Sequence[float] = (1.0, 1.0),
) -> dict[str, Any]:
    """Return the content of KempnerForge's `train_state.pt`.

    Args:
        progress: progress of the run.
        updates: number of updates.
        config: config of the run.
        ranks: data-parallel ranks that will resume from it.
        lr_factors: factor on the learning rate of each parameter group.

    Raises:
        UserError: the position falls within a batch of that many ranks.
    """
    rows = config.train.microbatch_size(ranks)
    epoch, samples = 0, progress.samples
    # PyTorch's sampler counts within an epoch, jaxforge over all epochs.
    if samples >= rows and config.data.order == "torch":
        epoch, samples = divmod(samples, _epoch_length(config, rows, ranks))
    if samples % rows:
        raise UserError(
            f"{progress.samples} sequences are read, which is not a multiple of {rows}, "
            f"the sequences that {ranks} ranks read at once (--ranks)"
        )
    seed = data_seed(config)
    # KempnerForge ignores unknown keys and does not write them again.
    is_moe = config.model.is_moe
    return {
        **({SKIPS_IDLE_EXPERTS: config.skips_idle_experts} if is_moe else {}),
        "step": progress.step,
        "tokens_seen": progress.tokens,
        "rng": _random_states(config.train.seed),
        "scheduler": lambda_lr(config, updates, lr_factors),
        "dataloader": {
            "epoch": epoch,
            "batches_yielded": samples // rows,
            "sampler": {"epoch": epoch, "seed": seed, "num_replicas": ranks, "rank": 0},
        },
    }


def lambda_lr(config: JobConfig, updates: int, lr_factors: Sequence[float]) -> dict[str, Any]:
    """Return the state of a `LambdaLR`, with all keys of torch 2.0 to 2.13.

    Args:
        config: config of the run.
        updates: number of updates.
        lr_factors: factor on the learning rate of each parameter group.
    """
    lr = group_lr(config, updates)
    return {
        "base_lrs": [config.optimizer.lr * factor for factor in lr_factors],
        "last_epoch": updates,
        "verbose": False,
        "_step_count": updates + 1,
        "_is_initial": False,
        "_get_lr_called_within_step": False,
        "_last_lr": [lr * factor for factor in lr_factors],
        "lr_lambdas": [None] * len(lr_factors),
    }


def extra_state(
    progress: Progress, updates: int, config: JobConfig, lr_factors: Sequence[float]
) -> dict[str, Any]:
    """Return the content of MindSpeed's `extra_state`; each rank reads a copy.

    MindSpeed's first mean of the loss after a resume is over the steps since
    `_global_step_last_logged`.

    Args:
        progress: progress of the run.
        updates: number of updates.
        config: config of the run.
        lr_factors: factor on the learning rate of each parameter group.
    """
    return {
        "global_step": progress.step,
        "_global_step_last_logged": progress.step,
        "_last_logged_step": progress.step,
        "lr_scheduler": lambda_lr(config, updates, lr_factors),
        "train_metric": {
            "consume_tokens": progress.tokens, "last_iteration": progress.step, "last_epoch": 0,
            **dict.fromkeys(_LAST_LOGGED, 0.0),
        },
        "torch_rng_state": _random_states(config.train.seed)["torch_cpu"],
    }  # fmt: skip


def to_torchtitan(
    progress: Progress, updates: int, config: JobConfig
) -> dict[tuple[str, str], Any]:
    """Return the position of a run in torchtitan's checkpoints: path -> value.

    Schedulers store only `last_epoch` since 2026, and the state of `LambdaLR` before. The position
    in torchtitan's data has no counterpart here.
    """
    schedule = lambda_lr(config, updates, [1.0])
    return {
        ("train_state", "step"): progress.step,
        ("train_state", "ntokens_seen"): progress.tokens,
        **{("lr_scheduler", key): value for key, value in schedule.items()},
    }


def _read_megatron(dcp: Dcp) -> TorchTrainState:
    """Read Megatron-LM's iteration, and the sequences among its arguments."""
    try:
        step = megatron_files.read_iteration(dcp)
        job = megatron_files.read_job(dcp.directory, dcp)
        samples = job and job.train.get("consumed_train_samples")
        return TorchTrainState(step=_optional(step), samples=_optional(samples))
    except ValueError as error:
        raise UserError(
            f"{dcp.where}: its iteration or samples are not counts ({error})"
        ) from error


def _parse_bridge_state(state: Mapping[str, Any], where: str) -> TorchTrainState:
    try:
        step, samples = to_count(state["step"]), to_count(state[_SAMPLES])
    except (KeyError, ValueError) as error:
        why = shown(repr(error))
        raise UserError(f"{where}: not a training state of Megatron-Bridge ({why})") from error
    return TorchTrainState(step=step, samples=samples)


def _parse_train_state(state: Any, where: str) -> TorchTrainState:  # noqa: ANN401 (untrusted)
    if isinstance(state, dict) and _SAMPLES in state:
        return _parse_bridge_state(state, where)
    try:
        data, scheduler = state.get("dataloader") or {}, state.get("scheduler") or {}
        torch_state = TorchTrainState(
            step=to_count(state["step"]),
            tokens=to_count(state["tokens_seen"]),
            updates=_optional(scheduler.get("last_epoch")),
            epoch=to_count(data.get("epoch", 0)),
            batches=_optional(data.get("batches_yielded")),
            ranks=_optional((data.get("sampler") or {}).get("num_replicas")),
            skips_idle_experts=state.get(SKIPS_IDLE_EXPERTS),
        )
        if not isinstance(torch_state.skips_idle_experts, bool | None):
            raise ValueError(f"{SKIPS_IDLE_EXPERTS} is not a flag")
        if torch_state.ranks is not None and not 1 <= torch_state.ranks <= limits.WIDTH:
            raise ValueError(f"{torch_state.ranks} ranks")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        why = shown(repr(error))
        raise UserError(f"{where}: not a training state of KempnerForge ({why})") from error
    return torch_state


def _read_torch_file(dcp: Dcp) -> TorchTrainState:
    """Read the counters that scripts store next to `model` and `optimizer`."""

    def first(keys: Sequence[str]) -> int | None:
        return next((n for key in keys if (n := _number(dcp, key)) is not None), None)

    epoch = first(("epoch",))
    updates = first(("scheduler.last_epoch", "lr_scheduler.last_epoch"))
    if updates is not None and epoch is not None and abs(updates - epoch) <= 1:
        updates = None  # the scheduler counts epochs
    return TorchTrainState(
        step=first(_STEP_KEYS),
        tokens=first(("tokens_seen", "tokens")),
        updates=updates,
        samples=first(("samples_seen",)),
    )


def _parse_extra_state(state: Any, where: str) -> TorchTrainState:  # noqa: ANN401 (untrusted)
    try:
        step, metric = to_count(state["global_step"]), state.get("train_metric") or {}
        is_current = metric.get("last_iteration") == step  # tokens are updated with each log line
        return TorchTrainState(
            step=step,
            tokens=_optional(metric.get("consume_tokens")) if is_current else None,
            updates=_optional((state.get("lr_scheduler") or {}).get("last_epoch")),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        why = shown(repr(error))
        raise UserError(f"{where}: not an extra state of MindSpeed ({why})") from error


def _number(dcp: Dcp, key: str) -> int | None:
    if key not in dcp.tensors and key not in dcp.objects:
        return None
    try:
        return to_count(dcp.tensors[key] if key in dcp.tensors else dcp.objects(key))
    except UserError:
        raise
    except ValueError as error:
        raise UserError(
            f"{dcp.where}: {key} is not a number of steps or tokens ({error})"
        ) from error


def _optional(value: Any) -> int | None:  # noqa: ANN401
    return None if value is None else to_count(value)


def _epoch_length(config: JobConfig, rows: int, ranks: int) -> int:
    """Return the number of sequences in the full batches of an epoch."""
    from jaxforge.data import dataset, sources  # here, as it imports JAX and Grain

    try:
        data = sources.open_training_data(config)
    except UserError as error:
        raise UserError(
            f"the run is beyond its first epoch, so the size of the data is needed: {error}"
        ) from error
    if isinstance(data, dataset.Streaming):
        raise UserError("the run is beyond its first epoch of a stream, whose length is not known")
    if isinstance(data, dataset.Mixture):  # each rank has a sampler of its own
        return sum(n // ranks for n in data.sizes.values()) // (rows // ranks) * rows
    return len(data) // rows * rows


def _random_states(seed: int) -> Mapping[str, Any]:
    """Return states of fresh generators; training a text model does not use them."""
    # torch and NumPy use the same Mersenne Twister with the same seeding, so one state serves both.
    twister: Any = np.random.RandomState(seed % 2**32).get_state()
    keys = np.asarray(twister[1], np.uint32)
    return {
        "python": random.Random(seed).getstate(),
        # 624: all numbers of the state count as used, so that the first draw computes new ones.
        "numpy": ("MT19937", _numpy_array(keys), 624, 0, 0.0),
        "torch_cpu": _torch_generator(seed, keys),
    }


def _numpy_array(array: np.ndarray) -> New:
    """Return the pickle of an array with names that all NumPy versions can load."""
    code = array.dtype.newbyteorder("<").str.lstrip("<")
    dtype = New(
        Call(Global("numpy", "dtype"), (code, False, True)),
        (3, "<", None, None, None, -1, -1, 0),
    )
    rebuild = Call(
        Global("numpy.core.multiarray", "_reconstruct"), (Global("numpy", "ndarray"), (0,), b"b")
    )
    return New(rebuild, (1, array.shape, dtype, False, array.tobytes()))


def _torch_generator(seed: int, keys: np.ndarray) -> np.ndarray:
    """Return the result of `torch.Generator().manual_seed(seed).get_state()`."""
    layout = np.dtype([
        ("seed", "<u8"), ("left", "<i4"), ("seeded", "<i4"), ("next", "<u8"), ("state", "<u8", 624),
        ("normal", "<f8", 3), ("normal_is_valid", "<i4"), ("pad", "<i4"), ("float_normal", "<f8"),
    ])  # fmt: skip
    state = np.zeros((), layout)
    state["seed"], state["left"], state["seeded"], state["state"] = seed, 1, 1, keys
    return np.frombuffer(state.tobytes(), np.uint8)
