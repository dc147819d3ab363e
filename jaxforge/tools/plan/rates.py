"""How long operations take: by the compiler's cycles on TPU, by a roofline on GPU.

Roofline (Williams et al., 2009): the longer of FLOPs over the chip's rate and bytes over that of
its memory, each times what kernels reach of it. Those parts are constants of ours, below;
docs/plan.md holds the sum against published runs.
"""

from typing import NamedTuple

from jaxforge.tools.plan.chips import Chip
from jaxforge.tools.plan.hlo import Computation, Operation, Program
from jaxforge.tools.plan.timeline import Rates
from jaxforge.tools.plan.work import Workload


class Reached(NamedTuple):
    """What kernels reach of a data sheet.

    Attributes:
        by_kind: part of the peak FLOP/s, by kind of work, and by `Work.by` where that says one.
        memory: part of the memory's bandwidth.
        launch: seconds between the end of a kernel and the beginning of the next.
    """

    by_kind: dict[str, float]
    memory: float
    launch: float


_ON_GPU = {
    "products": 0.72,
    "attention": 0.55,
    "experts": 0.5,
    "triton": 0.35,  # FlashAttention-2 on H100 (Shah et al. 2024, arXiv:2407.08608)
    "masked cudnn": 0.16,  # on H100 (jax-ml/jax#35114)
}
REACHED = {
    "gpu": Reached(_ON_GPU, 0.85, 1.5e-6),
    "tpu": Reached({"products": 0.9, "attention": 0.45, "experts": 0.6}, 0.8, 0),
}


class Roofline:
    """Rates of a device whose compiler says nothing of times.

    Args:
        work: of the program.
        chip: the device.
    """

    def __init__(self, work: Workload, chip: Chip) -> None:
        self._work, self._chip, self._reached = work, chip, REACHED[chip.platform]

    def seconds(self, operation: Operation, within: Computation) -> tuple[str, float]:
        """Kind of the work, and seconds."""
        work = self._work.of(operation, within)
        if work.kind == "nothing":
            return work.kind, 0
        products = 0.0
        if work.flops:
            part = self._reached.by_kind[work.by or work.kind]
            products = work.flops / (self._chip.peak_flops * part)
        moved = work.bytes / (self._chip.bandwidth * self._reached.memory)
        return work.kind, max(products, moved) + self._reached.launch


class Cycles:
    """Rates of a TPU: the compiler's, which it does not write to Pallas kernels.

    Of what has no products, the shorter of its estimate and the roofline's: it charges memory-bound
    operations two to ten times what the memory needs.

    Args:
        program: whose operations are asked for.
        work: of the program.
        chip: the device.
    """

    def __init__(self, program: Program, work: Workload, chip: Chip) -> None:
        self._program, self._chip = program, chip
        self._roofline = Roofline(work, chip)

    def seconds(self, operation: Operation, within: Computation) -> tuple[str, float]:
        """Kind of the work, and seconds."""
        if operation.kind == "custom-call":
            return self._roofline.seconds(operation, within)
        if not operation.cycles:
            return "nothing", 0
        seconds = operation.cycles / self._chip.cycles_per_second
        if self._program.category(operation) == "matmul":
            return "products", seconds
        return "memory", min(seconds, self._roofline.seconds(operation, within)[1] or seconds)


class Unknown:
    """Rates of a device of which nothing is known."""

    def seconds(self, operation: Operation, within: Computation) -> tuple[str, float]:
        """None at all."""
        return "nothing", 0


def rates_of(program: Program, chip: Chip | None, visible: float) -> Rates:
    """The rates for a program on a chip; `visible` as in `Workload`."""
    if chip is None:
        return Unknown()
    work = Workload(program, visible)
    return Cycles(program, work, chip) if chip.platform == "tpu" else Roofline(work, chip)
