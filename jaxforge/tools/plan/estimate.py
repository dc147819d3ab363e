"""How fast a compiled step will be: an estimate, and what it is made from."""

from typing import NamedTuple

from jaxforge.config.job import JobConfig
from jaxforge.parallel.hardware import CHIPS
from jaxforge.parallel.mesh import STAGES, data_parallel_size
from jaxforge.telemetry.flops import causal_flops_per_token, flops_per_token, pairs_twice
from jaxforge.tools.plan.compiled import Step
from jaxforge.tools.plan.cost import Network, rates_of
from jaxforge.tools.plan.timeline import Simulation, Timeline
from jaxforge.tools.plan.topology import Topology

MADE_FROM = {
    "tpu": "the compiler's cycles; attention, experts and collectives by FLOPs, bytes and links",
    "gpu": "a roofline over the compiled program; collectives by bytes and links",
}


class Estimate(NamedTuple):
    """Of one step; nothing was run.

    Attributes:
        timeline: of one device.
        seconds: of an update.
        tokens: of an update, over all devices.
        tokens_per_second: per device.
        mfu: model FLOPs over the peak, in KempnerForge's convention; attention counted in full.
        causal_mfu: in Megatron's, attention half.
        flops_per_token: KempnerForge's convention.
        causal_flops_per_token: Megatron's.
        devices: of the job.
        hours: to `train.max_steps`, without evaluation and checkpoints.
        device_hours: on all devices.
        made_from: in words.
    """

    timeline: Timeline
    seconds: float
    tokens: int
    tokens_per_second: float
    mfu: float
    causal_mfu: float
    flops_per_token: int
    causal_flops_per_token: int
    devices: int
    hours: float
    device_hours: float
    made_from: str


def timeline_of(config: JobConfig, topology: Topology, step: Step) -> Timeline:
    """The step in time; of devices that are not known, its collectives alone.

    Args:
        config: of the step.
        topology: that it was compiled for.
        step: compiled; it has a program.
    """
    assert step.program is not None
    chip = CHIPS.get(topology.chip)
    rates = rates_of(step.program, chip, visible_pairs(config))
    network = Network(step.mesh, chip)
    longest = step.mesh.shape[STAGES] > 1
    return Simulation(step.program, rates, network, longest=longest).run()


def estimate(config: JobConfig, topology: Topology, step: Step, line: Timeline) -> Estimate | None:
    """The speed of a step; None for devices of which too little is known.

    Args:
        config: of the step.
        topology: that it was compiled for.
        step: compiled.
        line: its timeline.
    """
    chip, train = CHIPS.get(topology.chip), config.train
    if chip is None:
        return None
    rows = train.microbatch_size(data_parallel_size(step.mesh)) * train.grad_accum_steps
    tokens = rows * train.seq_len
    hours = line.seconds * train.max_steps / 3600
    full = flops_per_token(config.model, train.seq_len)
    causal = causal_flops_per_token(config.model, train.seq_len)
    per_device = tokens / line.seconds / topology.n_devices
    return Estimate(
        timeline=line,
        seconds=line.seconds,
        tokens=tokens,
        tokens_per_second=per_device,
        mfu=per_device * full / chip.peak_flops,
        causal_mfu=per_device * causal / chip.peak_flops,
        flops_per_token=full,
        causal_flops_per_token=causal,
        devices=topology.n_devices,
        hours=hours,
        device_hours=hours * topology.n_devices,
        made_from=MADE_FROM[chip.platform],
    )


def visible_pairs(config: JobConfig) -> float:
    """Pairs of a query and a key that see each other, over all pairs, on average over layers."""
    model, length = config.model, config.train.seq_len
    return pairs_twice(model, length) / (2 * model.n_layers * length**2)
