"""Machine for which a config is sized, the local one or another; JAX is not imported."""

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
        devices: number of devices; 1 for a CPU.
        memory: bytes of a device; None for a CPU, where time is the limit.
        cores: cores of the CPU.
    """

    devices: int = 1
    memory: float | None = None
    cores: int = 1

    @property
    def is_cpu(self) -> bool:
        """True if the machine has only CPUs."""
        return self.memory is None

    def __str__(self) -> str:
        """Describe the machine in a few words."""
        if self.memory is None:
            return f"a CPU of {self.cores} core{'s' if self.cores > 1 else ''}"
        return (
            f"{self.devices} device{'s' if self.devices > 1 else ''} of {self.memory / 1e9:.0f} GB"
        )

    @classmethod
    def parse(cls, text: str) -> "Machine":
        """Parse `cpu` or the form `8x80GB`.

        Raises:
            UserError: the text has neither form.
        """
        if text == "cpu":
            return cls(cores=_cores())
        form = re.fullmatch(r"(\d+)x(\d+)(?:GB)?", text)
        if form is None or not (int(form[1]) and int(form[2])):
            raise UserError(f"--machine {text}: expected {FORMS}")
        return cls(int(form[1]), float(form[2]) * 1e9, _cores())

    @classmethod
    def here(cls) -> "Machine":
        """Detect this machine: GPUs by their driver, TPUs by their device files, else the CPU."""
        # Neither JAX nor a driver library is loaded: `init` must not occupy devices.
        if os.environ.get("JAX_PLATFORMS", "").partition(",")[0] != "cpu":
            if gpus := gpu_memories():
                # The smallest GPU limits all, since their shares are equal.
                return cls(len(gpus), min(gpus), _cores())
            tpus = list(Path("/dev").glob("accel[0-9]*")) or list(Path("/dev/vfio").glob("[0-9]*"))
            if tpus:  # only JAX could query their memory
                return cls(len(tpus), SMALLEST_TPU_MEMORY, _cores())
        return cls(cores=_cores())


def gpu_memories() -> list[float]:
    """Return the bytes of each NVIDIA GPU, from the driver."""
    return [int(line) * 2.0**20 for line in _query_gpus("memory.total") if line.isdigit()]


class GpuKind(NamedTuple):
    """Kind of a GPU.

    Attributes:
        name: name by its driver, such as "NVIDIA H100 80GB HBM3".
        capability: compute capability, such as "9.0".
    """

    name: str
    capability: str


def gpu_kind() -> GpuKind | None:
    """Return the kind of this machine's first NVIDIA GPU, from the driver; None without a GPU."""
    for line in _query_gpus("name,compute_cap"):
        name, _, capability = line.rpartition(",")
        return GpuKind(name.strip(), capability.strip())
    return None


def _query_gpus(fields: str) -> list[str]:
    """Return a line for each NVIDIA GPU."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return [line.strip() for line in lines]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
