"""Machine that a config is sized for: this one or a named one; without JAX."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from jaxforge.errors import UserError
from jaxforge.parallel.hardware import SMALLEST_TPU_MEMORY

FORMS = "cpu, or GPUs by number and memory as in 8x80GB"


class Machine(NamedTuple):
    """Devices of one machine.

    Attributes:
        devices: how many; a CPU is one.
        memory: bytes of a device; of a CPU None, as its time is what runs out.
        cores: of the CPU.
    """

    devices: int = 1
    memory: float | None = None
    cores: int = 1

    @property
    def is_cpu(self) -> bool:
        """True if the machine has only CPUs."""
        return self.memory is None

    def __str__(self) -> str:
        """For a reader."""
        if self.memory is None:
            return f"a CPU of {self.cores} core{'s' if self.cores > 1 else ''}"
        return (
            f"{self.devices} device{'s' if self.devices > 1 else ''} of {self.memory / 1e9:.0f} GB"
        )

    @classmethod
    def parse(cls, text: str) -> "Machine":
        """Reads `cpu` or `8x80GB`.

        Raises:
            UserError: it is neither.
        """
        if text == "cpu":
            return cls(cores=_cores())
        form = re.fullmatch(r"(\d+)x(\d+)(?:GB)?", text)
        if form is None or not (int(form[1]) and int(form[2])):
            raise UserError(f"--machine {text}: expected {FORMS}")
        return cls(int(form[1]), float(form[2]) * 1e9, _cores())

    @classmethod
    def here(cls) -> "Machine":
        """This one: its GPUs by their driver, its TPUs by their files, or else its CPU."""
        if os.environ.get("JAX_PLATFORMS", "").partition(",")[0] != "cpu":
            if gpus := gpu_memories():
                return cls(len(gpus), min(gpus), _cores())
            if tpus := _tpus():
                return cls(tpus, SMALLEST_TPU_MEMORY, _cores())  # only JAX could ask for it
        return cls(cores=_cores())


def gpu_memories() -> list[float]:
    """Bytes of each of NVIDIA's GPUs that the driver knows."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = said.stdout.split() if said.returncode == 0 else []
    return [int(line) * 2.0**20 for line in lines if line.isdigit()]


def _tpus() -> int:
    """Chips of this host."""
    by_driver = len(list(Path("/dev").glob("accel[0-9]*")))
    return by_driver or len(list(Path("/dev/vfio").glob("[0-9]*")))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
