"""Plan of a run before it starts: checks, compiled step, estimated speed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jaxforge.config.ineffective_settings import ineffective_settings
from jaxforge.config.job import JobConfig
from jaxforge.config.reading.unresolved import UnresolvedConfig
from jaxforge.config.resolution import World, resolve
from jaxforge.data.sources import sequences_per_epoch
from jaxforge.errors import UserError
from jaxforge.model.experts import filled_rows
from jaxforge.model.flops import causal_flops_per_token, flops_per_token, visible_fraction
from jaxforge.parallel.hardware import CHIPS
from jaxforge.parallel.mesh import STAGES, data_parallel_size, token_parallel_size
from jaxforge.parallel.pipeline.schedule import SCHEDULES
from jaxforge.tools.plan import checks
from jaxforge.tools.plan.compiled import Step, compile_step, devices_of
from jaxforge.tools.plan.cost import rates_of
from jaxforge.tools.plan.hlo import HloProgram
from jaxforge.tools.plan.network import Network
from jaxforge.tools.plan.timeline import CollectiveKey, Simulation, Timeline, Traffic
from jaxforge.tools.plan.topology import Topology
from jaxforge.training.health import out_of_memory

_ESTIMATED_FROM = {
    "tpu": "the compiler's cycles; attention, experts and collectives by FLOPs, bytes and links",
    "gpu": "a roofline over the compiled program; collectives by bytes and links",
}


class Estimate(NamedTuple):
    """Estimated speed of a step, with the fields of `--json`.

    Attributes:
        estimated_from: method of the estimate.
        seconds: duration of an update.
        tokens: tokens of an update, over all devices.
        tokens_per_second: throughput of all devices.
        tokens_per_second_per_device: throughput per device.
        mfu: model FLOPs over peak FLOPs in KempnerForge's convention: attention counts in full.
        mfu_causal: the same in Megatron's convention: attention counts half.
        flops_per_token: model FLOPs in KempnerForge's convention.
        flops_per_token_causal: model FLOPs in Megatron's convention.
        seconds_by_kind: busy time of a device by kind of work.
        waited_seconds: time in which a device waits for collectives.
        hours_to_max_steps: duration of the run without evaluation and checkpoints.
        device_hours: the same, summed over all devices.
    """

    estimated_from: str
    seconds: float
    tokens: int
    tokens_per_second: float
    tokens_per_second_per_device: float
    mfu: float
    mfu_causal: float
    flops_per_token: int
    flops_per_token_causal: int
    seconds_by_kind: dict[str, float]
    waited_seconds: float
    hours_to_max_steps: float
    device_hours: float


@dataclass
class Plan:
    """Plan of one configuration on one machine.

    Attributes:
        topology: the target hardware.
        config: the resolved config; None if it cannot be resolved.
        errors: reasons for which a run would be refused.
        warnings: valid but unlikely settings.
        step: the compiled step; None if a run would be refused.
        timeline: timeline of the step; None if compilation failed.
        estimate: estimated speed; None if the device's rates are unknown.
        advice: changes that may make the run fit, the cheapest first; empty if it fits.
    """

    topology: Topology
    config: JobConfig | None = None
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    step: Step | None = None
    timeline: Timeline | None = None
    estimate: Estimate | None = None
    advice: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        """True if the run would start and fit."""
        return self.step is not None and self.step.program is not None and self.step.memory.fits


def plan(
    config: JobConfig | UnresolvedConfig, topology: Topology, *, every_size: bool = False
) -> Plan:
    """Check a configuration, compile its step and estimate the speed.

    Mistakes in the configuration become `Plan.errors`.

    Args:
        config: the configuration, resolved or not.
        topology: the target hardware.
        every_size: compile the smaller batches of a ramp as well.

    Raises:
        UserError: the compiler for the machine is not installed.
    """
    result, devices = Plan(topology), devices_of(topology)
    try:
        config = resolve(config, World(topology.n_devices), sequences_per_epoch).config
        result.config = config
        platform = CHIPS[topology.chip].platform if topology.chip in CHIPS else topology.chip
        result.warnings = [
            *ineffective_settings(config, platform), *checks.warnings(config, topology.n_devices)
        ]  # fmt: skip
        teacher, of_teacher = checks.known_teacher(config, is_elsewhere=True)
        result.warnings += of_teacher
        step = result.step = compile_step(
            config, topology, devices, every_size=every_size, teacher=teacher
        )
        config = result.config = step.config
    # Reported with the warnings so far, as a start would refuse the config.
    except UserError as error:
        result.errors = str(error).splitlines()
        return result
    if step.program is not None:
        result.timeline = timeline_of(config, topology, step.mesh, step.program)
        result.estimate = estimate(config, topology, step, result.timeline)
    if not result.fits:
        result.advice = list(_advice(config, step))
    return result


def timeline_of(config: JobConfig, topology: Topology, mesh: Mesh, program: HloProgram) -> Timeline:
    """Simulate a step; for devices with unknown rates, only its collectives.

    Args:
        config: config of the step.
        topology: the hardware that it was compiled for.
        mesh: its mesh.
        program: the compiled step.
    """
    chip, model, length = CHIPS.get(topology.chip), config.model, config.train.seq_len
    visible = visible_fraction(model, length)
    rates = rates_of(program, chip, visible, length, filled_rows(model, mesh.shape["ep"]))
    longest = mesh.shape[STAGES] > 1
    return Simulation(program, rates, Network(mesh, chip), longest=longest).run()


def estimate(config: JobConfig, topology: Topology, step: Step, line: Timeline) -> Estimate | None:
    """Return the estimated speed of a step; None for devices with unknown rates.

    Args:
        config: config of the step.
        topology: the hardware that it was compiled for.
        step: the compiled step.
        line: its timeline.
    """
    chip, train = CHIPS.get(topology.chip), config.train
    if chip is None:
        return None
    rows = train.microbatch_size(data_parallel_size(step.mesh)) * train.grad_accum_steps
    tokens = rows * train.seq_len
    # Without evaluations, saves and restarts.
    hours = line.seconds * train.max_steps / 3600
    full = flops_per_token(config.model, train.seq_len)
    causal = causal_flops_per_token(config.model, train.seq_len)
    per_device = tokens / line.seconds / topology.n_devices
    return Estimate(
        estimated_from=_ESTIMATED_FROM[chip.platform],
        seconds=line.seconds,
        tokens=tokens,
        tokens_per_second=per_device * topology.n_devices,
        tokens_per_second_per_device=per_device,
        mfu=per_device * full / chip.peak_flops,
        mfu_causal=per_device * causal / chip.peak_flops,
        flops_per_token=full,
        flops_per_token_causal=causal,
        seconds_by_kind=dict(line.busy),
        waited_seconds=line.waited,
        hours_to_max_steps=hours,
        device_hours=hours * topology.n_devices,
    )


def _advice(config: JobConfig, step: Step) -> Iterator[str]:
    memory, train = step.memory, config.train
    state = 2 * memory.parameters + memory.optimizer  # gradients are as large as parameters
    yield from out_of_memory.fewer_copies(config, step.mesh)
    if state > memory.capacity:
        yield from out_of_memory.smaller_state(config, state, memory.capacity)
        return
    dp = data_parallel_size(step.mesh)
    reduces_whole = train.grad_sync == "update" and token_parallel_size(step.mesh) > 1
    yield from out_of_memory.smaller_step(
        config, train.microbatch_size(dp) // dp, reduces_whole=reduces_whole
    )


def as_json(planned: Plan) -> dict[str, Any]:
    """Return a plan as plain values: bytes, seconds, and numbers without a unit."""
    report: dict[str, Any] = {
        "topology": str(planned.topology),
        "devices": planned.topology.n_devices,
        "fits": planned.fits,
        "errors": planned.errors,
        "warnings": planned.warnings,
        "advice": planned.advice,
    }
    if planned.step is not None:
        report["mesh"] = {axis: size for axis, size in planned.step.mesh.shape.items() if size > 1}
        sizes = planned.step.memory._asdict()
        report["memory_per_device"] = {f"{name}_bytes": size for name, size in sizes.items()}
        report["pipeline_bubble"] = bubble(planned)
        train = planned.step.config.train
        report["execution"] = {
            "grad_sync": train.grad_sync,
            "recomputation": train.activation_checkpointing,
            "why": planned.step.why,
        }
        if planned.step.between_groups is not None:
            report["bytes_between_groups"] = planned.step.between_groups._asdict()
        report["compile_seconds"] = round(planned.step.seconds, 1)
    if planned.timeline is not None:
        report["collectives"] = [
            {
                **key._asdict(),
                "axes": list(key.axes),
                "count": traffic.count,
                "bytes": round(traffic.bytes),
                "seconds": traffic.seconds,
                "waited_seconds": traffic.waited,
            }
            for key, traffic in collectives_by_wait(planned.timeline)
        ]
    if planned.estimate is not None:
        report["step"] = {"is_estimate": True, **planned.estimate._asdict()}
    return report


def bubble(planned: Plan) -> float:
    """Return the fraction of the time in which pipeline stages are idle; 0 without stages."""
    assert planned.config is not None
    d, accum = planned.config.distributed, planned.config.train.grad_accum_steps
    return SCHEDULES[d.pp_schedule](d.pp, accum, d.chunks).bubble() if d.pp > 1 else 0.0


def collectives_by_wait(timeline: Timeline) -> Sequence[tuple[CollectiveKey, Traffic]]:
    """Return collectives, the longest waits first, then the slowest."""
    return sorted(
        timeline.traffic.items(), key=lambda item: (-item[1].waited, -item[1].seconds, item[0])
    )
