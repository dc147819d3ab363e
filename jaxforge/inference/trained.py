"""Trained models: the parameters of a checkpoint on any mesh."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxforge.checkpoint.layout import model_tree, variables
from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.checkpoint.paths import find_step
from jaxforge.checkpoint.relayout import by_layer, by_stage
from jaxforge.checkpoint.restore import load_base
from jaxforge.checkpoint.weights import WEIGHTS, Weights
from jaxforge.config import rules
from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError
from jaxforge.model.transformer import Model, Params, join
from jaxforge.parallel import device_memory
from jaxforge.parallel.mesh import make_mesh
from jaxforge.parallel.sharding import param_shardings
from jaxforge.program import Program
from jaxforge.runs import run_directory
from jaxforge.state.progress import Progress
from jaxforge.training.foreign import open_foreign

# The mesh and the schedule of training do not apply to inference, nor does a choice of "auto".
_ANY_MESH = [
    "--distributed.dp_shard=-1",
    *(f"--distributed.{axis}=1" for axis in ("dp_replicate", "tp", "pp", "cp", "ep")),
]
_NO_TRAINING = [
    "--train.activation_checkpointing=none",
    "--train.grad_sync=update",
    "--train.offload=[]",
    "--train.objective=next_token",
    "--train.global_batch_size=None",
    "--train.batch_ramp=[]",
    "--eval.enabled=false",
    "--eval.activations_interval=0",
    "--early_stop.active=false",
]


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """Opened checkpoint whose parameters have not been read yet.

    Attributes:
        run: the run directory.
        step: step of the checkpoint.
        program: model and mesh for the run's config with overrides, without accumulation.
        weights: "ema" for the average of the parameters.
    """

    run: Path
    step: int
    program: Program
    weights: Weights = "raw"

    @property
    def config(self) -> JobConfig:
        """Config of the program."""
        return self.program.config

    @property
    def mesh(self) -> Mesh:
        """Mesh of the parameters."""
        return self.program.mesh

    @property
    def model(self) -> Model:
        """Model of the program."""
        return self.program.model

    @contextlib.contextmanager
    def in_use(self, params: Params | None = None) -> Iterator[Params]:
        """Yield the parameters on their mesh, within the mesh and precision of the program.

        Args:
            params: the parameters, if they have been read before.

        Raises:
            UserError: the parameters, or the computation in the context, exceed the memory.
        """
        like = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            model_tree(self.model.abstract, self.model.state.abstract),
            model_tree(
                param_shardings(self.model.abstract, self.model.axes, self.mesh),
                param_shardings(*self.model.state, self.mesh),
            ),
        )
        try:
            with self.program.context():
                yield self._restore(like) if params is None else params
        except (jax.errors.JaxRuntimeError, MemoryError) as error:
            if not device_memory.is_out_of_memory(error):
                raise
            raise UserError(_does_not_fit(error, like)) from error

    def progress(self) -> Progress:
        """Return the counters of the checkpoint."""
        checkpoints = Checkpoints(self.run, self.config.checkpoint, read_only=True)
        with contextlib.closing(checkpoints):
            return checkpoints.progress(self.step)

    def _restore(self, like: Params) -> Params:
        """Read the parameters; each device reads only its own shards."""
        checkpoints = Checkpoints(self.run, self.config.checkpoint, read_only=True)
        try:
            # A checkpoint is in the order of layers, whatever stages the run had.
            abstract = by_layer(like, self.model.stack)
            restored = checkpoints.restore_model(abstract, self.step, self.weights)
            params = variables(by_stage(restored, self.model.stack, like))
            if not self.config.lora.rank:
                return params
            # With LoRA, a checkpoint holds adapters, and the record of the base they belong to.
            recorded = checkpoints.progress(self.step).base
            return join(load_base(self.program, open_foreign, recorded).params, params)
        finally:
            checkpoints.close()


def open_run(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    step: int | None = None,
    devices: Sequence[jax.Device] | None = None,
    weights: Weights = "raw",
) -> TrainedModel:
    """Open a run directory, or one of its checkpoints.

    Args:
        path: path of either.
        overrides: settings over the run's config, such as "--distributed.tp=2". By default all
            devices are `dp_shard`, whatever the mesh of training was.
        step: step of the checkpoint; by default the newest, or the one that `path` names.
        devices: the devices to use; all by default.
        weights: "ema" reads the average of the parameters (`train.ema_decay`) in their place.

    Raises:
        UserError: the checkpoint does not exist, or the config cannot run on these devices.
    """
    run, step = find_step(path, step)
    config = run_directory.read_config(run, [*_ANY_MESH, *overrides, *_NO_TRAINING])
    devices = list(jax.devices() if devices is None else devices)
    # No accumulation; pipeline stages require at least as many microbatches as stages.
    config = config.with_values({"train.grad_accum_steps": config.distributed.pp})
    rules.check(config, len(devices))
    if weights not in WEIGHTS:
        raise UserError(f'weights = "{weights}": expected one of {", ".join(WEIGHTS)}')
    trained = TrainedModel(run, step, Program(config, make_mesh(config, devices)), weights)
    _ = trained.model  # raises for an unregistered model before the checkpoint is read
    return trained


def _does_not_fit(error: BaseException, params: Params) -> str:
    needs = device_memory.gigabytes(device_memory.bytes_per_device(params))
    has = device_memory.gigabytes(device_memory.capacity())
    return (
        f"out of memory: {device_memory.first_line(error)}\non each device parameters take {needs} "
        f"of {has}. What helps: a smaller --batch-size, fewer tokens, or more devices to split "
        "them over (--distributed.tp)"
    )
