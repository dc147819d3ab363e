"""Machines as named on the command line: `v5e:16x16`, `v5p:4x4x8*2`, `h100:8x8`, `cpu:8`."""

import math
import re
from collections.abc import Mapping, MutableMapping, Sequence
from difflib import get_close_matches
from typing import NamedTuple

from jaxforge.parallel.hardware import CHIPS

CPU = "cpu"
TPUS = {name: chip.n_sides for name, chip in CHIPS.items() if chip.platform == "tpu"}
"""Number of dimensions of a slice, by kind of TPU."""

FORMS = (
    "v5e:16x16, v6e:4x8, v5p:4x4x8, tpu7x:4x4x8, v5p:4x4x8*2 (slices), h100:8x8 (nodes x GPUs), "
    "gb200:2x72 (NVLink domains x GPUs), cpu:8"
)


class Topology(NamedTuple):
    """Target hardware, which need not be attached to this machine.

    Attributes:
        chip: kind of device: a key of `CHIPS`, or `cpu`.
        shape: TPUs: chips of a slice per dimension; GPUs: (nodes or NVLink domains, GPUs of each);
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
            ValueError: the text is not a topology; the message lists the valid forms.
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
        if problem := _domain_problem(chip, lengths):
            raise ValueError(f"topology {text!r}: {problem}")
        return cls(chip, lengths, slices)

    def __str__(self) -> str:
        """Return the command-line form."""
        text = f"{self.chip}:{'x'.join(map(str, self.shape))}"
        return f"{text}*{self.slices}" if self.slices > 1 else text

    @property
    def n_devices(self) -> int:
        """Number of JAX devices of all hosts; a TPU7x chip has two."""
        per_chip = CHIPS[self.chip].per_chip if self.chip in CHIPS else 1
        return math.prod(self.shape) * per_chip * self.slices

    def prepare(self, env: MutableMapping[str, str]) -> None:
        """Set the environment variables that a compiler for this topology needs.

        Must run before JAX is imported. JAX then uses the local CPU alone. The TPU compiler does
        not query the network for its location, and several of its processes may run at once. The
        compilation cache is off: XLA:CPU cannot serialize a program that it loaded from the cache
        (docs/upstream.md).
        """
        # JAX reads these when it is imported.
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


def _domain_problem(chip: str, lengths: Sequence[int]) -> str | None:
    """Return why no NVLink domain has this number of GPUs, and what to write; None: one has."""
    if chip not in CHIPS or chip in TPUS:
        return None
    known, n_gpus = CHIPS[chip], lengths[1]
    if n_gpus > known.per_domain:
        parts = math.ceil(n_gpus / known.per_domain)
        each = _whole_hosts(math.ceil(n_gpus / parts), known.per_host)
        return (
            f"NVLink connects at most {known.per_domain} {chip} GPUs. "
            f"Write {chip}:{lengths[0] * parts}x{each}"
        )
    if n_gpus > known.per_host and n_gpus % known.per_host:
        return (
            f"a host has {known.per_host} {chip} GPUs, and {n_gpus} is not a multiple of "
            f"{known.per_host}. Write {chip}:{lengths[0]}x{_whole_hosts(n_gpus, known.per_host)}"
        )
    return None


def _whole_hosts(n_gpus: int, per_host: int) -> int:
    return math.ceil(n_gpus / per_host) * per_host


def _nearest(chip: str, text: str, known: Mapping[str, int], n_sides: int) -> str:
    """Suggest the most similar known chip, preferably with this number of sides."""
    fitting = [name for name, count in known.items() if count == n_sides]
    # A cutoff of 0 always yields a name: the message needs an example.
    near = get_close_matches(chip, fitting, n=1) or get_close_matches(chip, known, n=1, cutoff=0.0)
    if known[near[0]] == n_sides:
        return f'; did you mean "{near[0]}{text.strip()[len(chip) :]}"?'
    return f'; did you mean "{near[0]}", with {known[near[0]]} sides?'
