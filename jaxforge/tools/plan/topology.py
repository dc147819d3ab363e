"""Machines as named on the command line: `v5e:16x16`, `v5p:4x4x8*2`, `h100:8x8`, `cpu:8`."""

import math
import re
from collections.abc import Mapping, MutableMapping
from difflib import get_close_matches
from typing import NamedTuple

from jaxforge.parallel.hardware import CHIPS

CPU = "cpu"
TPUS = {name: chip.n_sides for name, chip in CHIPS.items() if chip.platform == "tpu"}
"""Number of dimensions of a slice, by kind of TPU."""

FORMS = "v5e:16x16, v6e:4x8, v5p:4x4x8, v5p:4x4x8*2 (slices), h100:8x8 (nodes x GPUs), cpu:8"


class Topology(NamedTuple):
    """Target hardware, which need not be attached to this machine.

    Attributes:
        chip: kind of device: a key of `CHIPS`, or `cpu`.
        shape: TPUs: chips of a slice per dimension; GPUs: (nodes, GPUs per node);
            CPU: (devices,).
        slices: number of TPU slices; 1 for other platforms.
    """

    chip: str
    shape: tuple[int, ...]
    slices: int = 1

    @classmethod
    def parse(cls, text: str) -> "Topology":
        """Parse the command-line form of a topology.

        Raises:
            ValueError: the text is no topology; the message lists the valid forms.
        """
        form = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)(?:\*(\d+))?", text.strip().lower())
        if form is None:
            raise ValueError(f"topology {text!r}: expected one of the forms {FORMS}")
        chip, slices = form[1], int(form[3] or 1)
        lengths = tuple(int(length) for length in form[2].split("x"))
        known = {**{name: known.n_sides for name, known in CHIPS.items()}, CPU: 1}
        if chip not in known:
            raise ValueError(
                f"topology {text!r}: expected one of {', '.join(known)} before the :"
                f"{_nearest(chip, text, known, len(lengths))}"
            )
        if len(lengths) != known[chip]:
            unit = "sides" if chip in TPUS else "nodes x GPUs" if chip in CHIPS else "number"
            raise ValueError(f"topology {text!r}: {chip} has {known[chip]} {unit}, as in {FORMS}")
        if not all(lengths) or not slices:
            raise ValueError(f"topology {text!r}: every number must be at least 1, as in {FORMS}")
        if slices > 1 and chip not in TPUS:
            raise ValueError(f"topology {text!r}: only TPUs have slices, as in v5p:4x4x8*2")
        return cls(chip, lengths, slices)

    def __str__(self) -> str:
        """Return the command-line form."""
        text = f"{self.chip}:{'x'.join(map(str, self.shape))}"
        return f"{text}*{self.slices}" if self.slices > 1 else text

    @property
    def n_devices(self) -> int:
        """Number of devices of all hosts."""
        return math.prod(self.shape) * self.slices

    def prepare(self, env: MutableMapping[str, str]) -> None:
        """Set the environment variables that a compiler for this topology needs.

        Must run before JAX is imported. JAX then uses the local CPU alone. The TPU compiler does
        not query the network for its location, and several of its processes may run at once. The
        compilation cache is off: XLA:CPU cannot serialize a program that it loaded from the cache
        (docs/upstream.md).
        """
        env.update(JAX_PLATFORMS="cpu", JAX_ENABLE_COMPILATION_CACHE="false")
        if self.chip == CPU:
            flag = f"--xla_force_host_platform_device_count={self.n_devices}"
            env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} {flag}".strip()
        elif self.chip in TPUS:
            env.update(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="true")
            env.setdefault("TPU_WORKER_HOSTNAMES", "localhost")  # else libtpu queries and warns
            env.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
            env.setdefault("TPU_STDERR_LOG_LEVEL", "3")
            env.setdefault("TPU_MIN_LOG_LEVEL", "3")
        env.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def _nearest(chip: str, text: str, known: Mapping[str, int], n_sides: int) -> str:
    """Suggest the most similar known chip, preferably with this number of sides."""
    fitting = [name for name, count in known.items() if count == n_sides]
    near = get_close_matches(chip, fitting, n=1) or get_close_matches(chip, known, n=1, cutoff=0.0)
    if known[near[0]] == n_sides:
        return f'; did you mean "{near[0]}{text.strip()[len(chip) :]}"?'
    return f'; did you mean "{near[0]}", with {known[near[0]]} sides?'
