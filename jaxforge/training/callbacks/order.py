"""The order of events in a step, from its launch to the launch of the next step."""

from collections.abc import Iterator
from typing import NamedTuple

from jaxforge.training.callbacks.activations import ActivationCapture
from jaxforge.training.callbacks.callback import Callback, RunCallback, RunParts
from jaxforge.training.callbacks.evaluation import Evaluation
from jaxforge.training.callbacks.exports import Exporter
from jaxforge.training.callbacks.host import (
    CollectGarbage,
    DirectoryLock,
    MemoryReport,
    Synchronize,
)
from jaxforge.training.callbacks.progress_txt import ProgressTxt
from jaxforge.training.callbacks.samples import Sampler
from jaxforge.training.callbacks.speed import CollectiveHealth, DeviceSpeed, Stragglers
from jaxforge.training.callbacks.weight_hash import WeightHashes


class Event(NamedTuple):
    """An event of a step, as docs/loop.md prints it.

    Attributes:
        name: name of the event.
        description: what happens.
        location: the file that implements the event, and the page that explains it.
        callback: the class that acts; None for events of the loop itself.
    """

    name: str
    description: str
    location: str
    callback: type[Callback] | None = None


CALLBACKS = "training/callbacks"
WATCHING = "[metrics.md](metrics.md#watching-a-run)"

ORDER = (
    Event("`on_epoch_begin`", "your callbacks, before the first step of an epoch of the data",
          f"`{CALLBACKS}/callback.py`, [library.md](library.md)"),
    Event("`on_step_begin`", "your callbacks, before the batch of the step is awaited",
          f"`{CALLBACKS}/callback.py`, [library.md](library.md)"),
    Event("launch", "the step is launched on the next batch, which is already on the devices; "
          "the host does not wait. Every `train.verify_interval` steps it is executed twice, and "
          "the results are compared", "`Trainer.train`, `training/health/attribution.py`"),
    Event("metrics", "metrics of the *previous* step are read and logged, if a sink is due",
          "`telemetry/tracker.py`, [metrics.md](metrics.md)"),
    Event("`on_step_end`", "your callbacks, after the metrics of this step are logged",
          f"`{CALLBACKS}/callback.py`, [library.md](library.md)"),
    Event("`on_epoch_end`", "your callbacks, after the step with the last sequence of an epoch",
          f"`{CALLBACKS}/callback.py`, [library.md](library.md)"),
    Event("directory", "after each step, the lock of the run directory is checked",
          f"`{CALLBACKS}/host.py`", DirectoryLock),
    Event("evaluation", "every `eval.interval` steps from `eval.start_step` on, set by set, "
          "then task by task; the save that is due at the same step starts before it",
          f"`{CALLBACKS}/evaluation.py`", Evaluation),
    Event("samples", "every `eval.sample_interval` steps",
          f"`{CALLBACKS}/samples.py`, "
          "[evaluate_and_generate.md](evaluate_and_generate.md#samples)", Sampler),
    Event("activations", "every `eval.activations_interval` steps",
          f"`{CALLBACKS}/activations.py`, [replay.md](replay.md#while-a-run-trains)",
          ActivationCapture),
    Event("memory", "after the first step, the memory of the devices is logged",
          f"`{CALLBACKS}/host.py`", MemoryReport),
    Event("garbage", "every `train.manual_gc_interval` steps, Python's garbage is collected",
          f"`{CALLBACKS}/host.py`", CollectGarbage),
    Event("synchronization", "every `train.train_sync_interval` steps, the host waits for the "
          "devices", f"`{CALLBACKS}/host.py`", Synchronize),
    Event("collectives", "every `train.nccl_health_check_interval` steps, all devices exchange a "
          "number", f"`{CALLBACKS}/speed.py`, {WATCHING}", CollectiveHealth),
    Event("weights", "every `train.check_weight_hash_across_dp_replicas_interval` steps, replicas "
          "of the weights are compared", f"`{CALLBACKS}/weight_hash.py`, {WATCHING}",
          WeightHashes),
    Event("stragglers", "every `metrics.straggler_report_interval` steps, slow hosts are named",
          f"`{CALLBACKS}/speed.py`, {WATCHING}", Stragglers),
    Event("device speed", "every `metrics.straggler_report_interval` steps, slow devices are named",
          f"`{CALLBACKS}/speed.py`, {WATCHING}", DeviceSpeed),
    Event("`on_interval`", "your callbacks, at their interval `every`",
          f"`{CALLBACKS}/callback.py`, [library.md](library.md)", Callback),
    Event("save", "on schedule, on request of a callback, after a new best, after the last step",
          "`checkpoint/save_policy.py`, `checkpoint/manager.py`"),
    Event("exports", "each `checkpoint.export_interval`-th checkpoint, in a process of its own",
          f"`{CALLBACKS}/exports.py`", Exporter),
    Event("`progress.txt`", "a line for each checkpoint", f"`{CALLBACKS}/progress_txt.py`",
          ProgressTxt),
    Event("exits", "early stop, then a callback's request, signal, duration, "
          "step interval, bad steps, the last step",
          "`training/preemption.py`, [launching.md](launching.md)"),
)  # fmt: skip
"""All events of a step, in order. Callbacks that are due run in the order of their rows.

Callbacks of users have the row of `Callback`: in events that several callbacks handle, such as
`on_eval_end`, they come before exports and `progress.txt`.
"""


def callbacks_of(run: RunParts) -> Iterator[Callback]:
    """Yield the callbacks that the config of a run asks for, in the order of `ORDER`.

    Raises:
        UserError: a callback lacks something it needs, such as a tokenizer.
    """
    for event in ORDER:
        if event.callback and issubclass(event.callback, RunCallback):
            callback = event.callback.of_run(run)
            if callback is not None:
                yield callback


def position(callback: Callback) -> int:
    """Return the index of the row of `ORDER` for a callback."""
    # A subclass has the row of its nearest base: users derive from built-in callbacks, too.
    rows = {event.callback: i for i, event in enumerate(ORDER)}
    return next(rows[base] for base in type(callback).__mro__ if base in rows)
