"""`v5e:16x16`, `v5p:4x4x8*2`, `h100:8x8`, `cpu:8`: machines, as they are said on a command line."""

import math
import re
from collections.abc import Mapping, MutableMapping
from difflib import get_close_matches
from typing import NamedTuple

from jaxforge.parallel.hardware import CHIPS

CPU = "cpu"
TPUS = {name: chip.n_sides for name, chip in CHIPS.items() if chip.platform == "tpu"}
"""Kinds of TPU and how many sides their slices have."""

FORMS = "v5e:16x16, v6e:4x8, v5p:4x4x8, v5p:4x4x8*2 (slices), h100:8x8 (nodes x GPUs), cpu:8"


class Topology(NamedTuple):
    """A machine that need not be here.

    Attributes:
        chip: kind of its devices: a key of `CHIPS`, or `cpu`.
        shape: of a slice, chips; nodes and GPUs of each; devices.
        slices: of TPUs; nodes of GPUs.
    """

    chip: str
    shape: tuple[int, ...]
    slices: int = 1

    @classmethod
    def parse(cls, text: str) -> "Topology":
        """Reads what a user wrote.

        Raises:
            ValueError: it is none; the message has the forms that there are.
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
            what = "sides" if chip in TPUS else "nodes x GPUs" if chip in CHIPS else "number"
            raise ValueError(f"topology {text!r}: {chip} has {known[chip]} {what}, as in {FORMS}")
        if not all(lengths) or not slices:
            raise ValueError(f"topology {text!r}: nothing may be 0, as in {FORMS}")
        if slices > 1 and chip not in TPUS:
            raise ValueError(f"topology {text!r}: only TPUs have slices, as in v5p:4x4x8*2")
        return cls(chip, lengths, slices)

    def __str__(self) -> str:
        """Return the topology as it is written."""
        text = f"{self.chip}:{'x'.join(map(str, self.shape))}"
        return f"{text}*{self.slices}" if self.slices > 1 else text

    @property
    def n_devices(self) -> int:
        """Devices of all hosts."""
        return math.prod(self.shape) * self.slices

    def prepare(self, env: MutableMapping[str, str]) -> None:
        """Set the environment that a compiler for this machine needs.

        To be called before JAX is imported: this machine is its CPU, whatever it has; the
        compiler for TPUs asks no network where it is, and several of them may run at once. Nothing
        comes from a cache: XLA:CPU writes no whole program from one it has read (docs/upstream.md).
        """
        env.update(JAX_PLATFORMS="cpu", JAX_ENABLE_COMPILATION_CACHE="false")
        if self.chip == CPU:
            flag = f"--xla_force_host_platform_device_count={self.n_devices}"
            env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} {flag}".strip()
        elif self.chip in TPUS:
            env.update(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="true")
            env.setdefault("TPU_WORKER_HOSTNAMES", "localhost")  # or libtpu asks, and complains
            env.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
            env.setdefault("TPU_STDERR_LOG_LEVEL", "3")
            env.setdefault("TPU_MIN_LOG_LEVEL", "3")
        env.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def _nearest(chip: str, text: str, known: Mapping[str, int], n_sides: int) -> str:
    """Return the topology with the most similar known chip name, preferably of this many sides."""
    fitting = [name for name, count in known.items() if count == n_sides]
    near = get_close_matches(chip, fitting, n=1) or get_close_matches(chip, known, n=1, cutoff=0.0)
    if known[near[0]] == n_sides:
        return f'; did you mean "{near[0]}{text.strip()[len(chip) :]}"?'
    return f'; did you mean "{near[0]}", with {known[near[0]]} sides?'
