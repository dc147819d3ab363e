"""All that is known of a run before it starts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxforge.config import rules
from jaxforge.config.job import JobConfig
from jaxforge.config.reading.unresolved import UnresolvedConfig
from jaxforge.config.useless import useless
from jaxforge.data.epoch import sequences_per_epoch
from jaxforge.errors import UserError
from jaxforge.parallel.hardware import CHIPS
from jaxforge.parallel.mesh import data_parallel_size, token_parallel_size
from jaxforge.parallel.pipeline.schedule import SCHEDULES
from jaxforge.tools.plan import checks
from jaxforge.tools.plan.compiled import Step, compile_step, devices_of
from jaxforge.tools.plan.estimate import Estimate, estimate, timeline_of
from jaxforge.tools.plan.timeline import Key, Timeline, Traffic
from jaxforge.tools.plan.topology import Topology
from jaxforge.training.health import out_of_memory


@dataclass
class Plan:
    """Of one configuration on one machine.

    Attributes:
        topology: the machine.
        config: resolved; None where it could not be.
        errors: why a run would be refused.
        warnings: what is allowed and hardly meant.
        step: compiled; None where a run would be refused.
        timeline: of the step; None where it was not compiled to the end.
        estimate: of its speed; None where too little is known of the device.
        advice: changes that may make it fit, the cheapest first; empty where it does.
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
        """Whether it would run."""
        return self.step is not None and self.step.program is not None and self.step.memory.fits


def plan(
    config: JobConfig | UnresolvedConfig, topology: Topology, *, every_size: bool = False
) -> Plan:
    """Checks, compiles and estimates; mistakes of the configuration are in the plan.

    Args:
        config: as read.
        topology: the machine.
        every_size: compile the smaller batches of a ramp as well.

    Raises:
        UserError: the compiler for the machine is not installed.
    """
    made, devices = Plan(topology), devices_of(topology)
    try:
        if isinstance(config, UnresolvedConfig):
            config = config.resolve(topology.n_devices, sequences_per_epoch)
        made.config = config
        rules.check(config, topology.n_devices)
        platform = CHIPS[topology.chip].platform if topology.chip in CHIPS else topology.chip
        made.warnings = [
            *useless(config, platform), *checks.warnings(config, topology.n_devices)
        ]  # fmt: skip
        step = made.step = compile_step(config, topology, devices, every_size=every_size)
    except UserError as error:
        made.errors = str(error).splitlines()
        return made
    if step.program is not None:
        made.timeline = timeline_of(config, topology, step)
        made.estimate = estimate(config, topology, step, made.timeline)
    if not made.fits:
        made.advice = list(_advice(config, step))
    return made


def _advice(config: JobConfig, step: Step) -> Iterator[str]:
    memory, train = step.memory, config.train
    whole_state = 2 * memory.parameters + memory.optimizer  # gradients are as large
    yield from out_of_memory.fewer_copies(config, step.mesh)
    if whole_state > memory.capacity:
        yield from out_of_memory.smaller_state(config, whole_state, memory.capacity)
        return
    dp = data_parallel_size(step.mesh)
    whole = step.grad_sync.mode == "update" and token_parallel_size(step.mesh) > 1
    yield from out_of_memory.smaller_step(
        config, train.microbatch_size(dp) // dp, reduces_whole=whole
    )


def as_json(made: Plan, price: float | None = None) -> dict[str, Any]:
    """For machines; bytes, seconds, and numbers without a unit.

    Args:
        made: a plan.
        price: of a device and hour.
    """
    report: dict[str, Any] = {
        "topology": str(made.topology),
        "devices": made.topology.n_devices,
        "fits": made.fits,
        "errors": made.errors,
        "warnings": made.warnings,
        "advice": made.advice,
    }
    if made.step is not None:
        memory = made.step.memory
        report["mesh"] = {axis: size for axis, size in made.step.mesh.shape.items() if size > 1}
        report["memory_per_device"] = {
            "peak_bytes": memory.peak,
            "capacity_bytes": memory.capacity,
            "parameters_bytes": memory.parameters,
            "optimizer_bytes": memory.optimizer,
            "gradients_bytes": memory.gradients,
            "activations_bytes": memory.activations,
            "other_bytes": memory.other,
        }
        report["pipeline_bubble"] = bubble(made)
        report["grad_sync"] = made.step.grad_sync._asdict()
        report["compile_seconds"] = round(made.step.seconds, 1)
    if made.timeline is not None:
        report["collectives"] = [_collective(key, one) for key, one in by_time(made.timeline)]
    if made.estimate is not None:
        report["step"] = _step(made.estimate, price)
    return report


def bubble(made: Plan) -> float:
    """The part of the stages' time in which they have no work; 0 without stages."""
    assert made.config is not None
    d, accum = made.config.distributed, made.config.train.grad_accum_steps
    return SCHEDULES[d.pp_schedule](d.pp, accum, d.chunks).bubble() if d.pp > 1 else 0.0


def by_time(timeline: Timeline) -> Sequence[tuple[Key, Traffic]]:
    """Collectives, what is waited for longest first, then what takes longest."""
    return sorted(
        timeline.traffic.items(), key=lambda item: (-item[1].waited, -item[1].seconds, item[0])
    )


def _collective(key: Key, one: Traffic) -> dict[str, Any]:
    return {
        "kind": key.kind,
        "axes": list(key.axes),
        "in_loop": key.in_loop,
        "overlapped": key.overlapped,
        "count": one.count,
        "bytes": round(one.bytes),
        "seconds": one.seconds,
        "waited_seconds": one.waited,
    }


def _step(made: Estimate, price: float | None) -> dict[str, Any]:
    line = made.timeline
    return {
        "is_estimate": True,
        "estimated_from": made.made_from,
        "seconds": made.seconds,
        "tokens": made.tokens,
        "tokens_per_second": made.tokens_per_second * made.devices,
        "tokens_per_second_per_device": made.tokens_per_second,
        "mfu": made.mfu,
        "mfu_causal": made.causal_mfu,
        "flops_per_token": made.flops_per_token,
        "flops_per_token_causal": made.causal_flops_per_token,
        "seconds_by_kind": dict(line.busy),
        "waited_seconds": line.waited,
        "hours_to_max_steps": made.hours,
        "device_hours": made.device_hours,
        "cost": None if price is None else made.device_hours * price,
    }
