"""Machine of a dialled run: microbatches that fit its memory, and the time of an update."""

from typing import NamedTuple

from jaxforge.config import rules
from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError
from jaxforge.model.flops import causal_flops_per_token
from jaxforge.parallel import device_memory, hardware
from jaxforge.parallel.device_memory import gigabytes
from jaxforge.parallel.mesh import abstract_mesh, data_parallel_size
from jaxforge.step.execution import RECOMPUTATIONS, USABLE
from jaxforge.tools.plan.dry_run_memory import Device, Fit, chip_device, fits_by_device
from jaxforge.tools.plan.search import replaced
from jaxforge.tools.plan.topology import CPU, Topology
from jaxforge.tools.starting.machine import Machine, gpu_kind
from jaxforge.tools.starting.sizes import CPU_FLOPS

_MOST_TOKENS = {"cpu": 2**13}
_MOST_TOKENS_OF_CHIPS = 2**15
"""Largest microbatch of a device: products of more tokens are not faster."""
SHARE_OF_PEAK = 0.4
"""Causal MFU of published runs of dense models: 35 to 49 % in the table of docs/plan.md."""
_LEAST_TOKENS = 2**13
"""Microbatch of a device below which blocks are recomputed instead, for larger products."""


class Target(NamedTuple):
    """Machine of a run.

    Attributes:
        name: name for the user.
        n_devices: number of devices of the job.
        device: kind of device.
        rate: causal model FLOP/s of a run on a device; None if unknown.
    """

    name: str
    n_devices: int
    device: Device
    rate: float | None

    @property
    def is_cpu(self) -> bool:
        """True for CPUs."""
        return self.device.platform == CPU

    @classmethod
    def of_topology(cls, topology: Topology) -> "Target":
        """Return the target of `--topology`."""
        n = topology.n_devices
        if topology.chip == CPU:
            rate = Machine.parse(CPU).cores * CPU_FLOPS / n
            device = Device(CPU, CPU, device_memory.host_memory() // n)
            return cls(str(topology), n, device, rate)
        chip = hardware.CHIPS[topology.chip]
        rate = SHARE_OF_PEAK * chip.peak_flops
        return cls(str(topology), n, chip_device(topology.chip), rate)

    @classmethod
    def of_machine(cls, machine: Machine) -> "Target":
        """Return the target of this machine: its GPUs according to their driver, or its CPU.

        Raises:
            UserError: the machine has TPUs, whose kind only a program that holds them could query.
        """
        if machine.memory is None:
            return cls.of_topology(Topology(CPU, (1,)))._replace(name=str(machine))
        kind = gpu_kind()
        if kind is None:
            raise UserError(
                "this machine has TPUs of an unknown kind. Add --topology, such as v6e:2x4"
            )
        chip = hardware.chip_by_kind(kind.name)
        if chip is not None and chip.target is not None:
            return cls.of_topology(Topology(chip.name, (1, machine.devices)))
        memory = hardware.usable_gpu_memory(machine.memory)
        device = Device(kind.name, "gpu", memory, kind.capability)
        rate = SHARE_OF_PEAK * chip.peak_flops if chip else None
        return cls(f"{machine.devices} x {kind.name}", machine.devices, device, rate)


class Split(NamedTuple):
    """Microbatches of an update, and their estimated memory.

    Attributes:
        rows: sequences of a microbatch on a device.
        accum: microbatches of an update.
        remat: value of `train.activation_checkpointing`.
        memory: estimated bytes of a device.
    """

    rows: int
    accum: int
    remat: str
    memory: int


def split_batch(config: JobConfig, target: Target) -> Split:
    """Return the microbatches that fit, with as little recomputation as large products allow.

    Args:
        config: the run, with `train.global_batch_size`, a multiple of the devices.
        target: the machine.

    Raises:
        UserError: the settings are invalid for the machine, or not even one sequence fits.
    """
    rules.check(config, target.n_devices)
    train, for_each = config.train, _sequences_of_device(config, target)
    most = max(1, _MOST_TOKENS.get(target.device.platform, _MOST_TOKENS_OF_CHIPS) // train.seq_len)
    least = _largest_divisor(for_each, min(most, -(-_LEAST_TOKENS // train.seq_len)))
    if config.is_set("train.grad_accum_steps"):
        # The number of the user leaves one size of microbatches.
        most = least = for_each // train.grad_accum_steps
    is_remat_set = config.is_set("train.activation_checkpointing")
    policies = (train.activation_checkpointing,) if is_remat_set else _policies(target)
    # From the fastest policy on: take the first with which microbatches are large enough.
    for remat in policies:
        if for_each <= min(most, _most_rows(config, target, remat, accum=1)):
            return _split(config, target, for_each, 1, remat)
        # Several microbatches need a buffer of accumulated gradients.
        several = _most_rows(config, target, remat, accum=2)
        rows = _largest_divisor(for_each, min(most, several))
        if rows >= least or (rows and remat == policies[-1]):
            return _split(config, target, rows, for_each // rows, remat)
    raise UserError(_too_large(config, target, policies[-1]))


def _policies(target: Target) -> tuple[str, ...]:
    """Return the rematerialisation policies to try, from the fastest to the smallest.

    "none" is left out on TPUs, where it is not the fastest: compiled for v6e at depth 12, a step
    takes 0.172 s by the plan, and 0.167 s with "selective".
    """
    return RECOMPUTATIONS[1:] if target.device.platform == "tpu" else RECOMPUTATIONS


def _sequences_of_device(config: JobConfig, target: Target) -> int:
    """Return the sequences of an update on a data-parallel device."""
    assert config.train.global_batch_size is not None
    dp = data_parallel_size(abstract_mesh(config, target.n_devices))
    return config.train.global_batch_size // dp


def _most_rows(config: JobConfig, target: Target, remat: str, *, accum: int) -> int:
    """Return the largest number of sequences of a microbatch that fits a device."""
    change = {"activation_checkpointing": remat, "grad_accum_steps": accum}
    return _fit(replaced(config, change, {}), target).most_rows


def _split(config: JobConfig, target: Target, rows: int, accum: int, remat: str) -> Split:
    change = {"activation_checkpointing": remat, "grad_accum_steps": accum}
    return Split(rows, accum, remat, _fit(replaced(config, change, {}), target).memory.total)


def _fit(config: JobConfig, target: Target) -> Fit:
    usable = target.device._replace(capacity=int(USABLE * target.device.capacity))
    *_, fits = fits_by_device(config, abstract_mesh(config, target.n_devices), [usable])
    return fits[usable]


def _largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of a number up to `most`; 0 if `most` is 0."""
    return next((n for n in range(min(number, most), 0, -1) if number % n == 0), 0)


def _too_large(config: JobConfig, target: Target, remat: str) -> str:
    change = {"activation_checkpointing": remat, "grad_accum_steps": 2, "global_batch_size": None}
    one_row = replaced(config, {**change, "batch_size": 1}, {})
    need = _fit(one_row, target).memory.total
    return (
        f"the model does not fit: a step of one sequence needs about {gigabytes(need)} of a "
        f"device, and {target.name} has {gigabytes(target.device.capacity)}. Choose a smaller "
        "--depth or --flops, or more devices (--topology)"
    )


def update_seconds(config: JobConfig, target: Target) -> float | None:
    """Return the seconds of an update at the rate of the target; None if it is unknown."""
    if target.rate is None:
        return None
    train = config.train
    assert train.global_batch_size is not None
    flops = causal_flops_per_token(config.model, train.seq_len)
    return train.global_batch_size * train.seq_len * flops / target.n_devices / target.rate
