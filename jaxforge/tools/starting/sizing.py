"""Size of a run: model, batch and length for the available data and machine.

The rules are those of docs/configs.md ("A config to start with"), and each number's reason is
written next to it in the config.
"""

import math
from typing import NamedTuple

from jaxforge.tools.starting.machine import Machine
from jaxforge.tools.starting.prepared import PreparedData, longest_sequence, windows
from jaxforge.tools.starting.sizes import SHAPES, Shape

TOKENS_PER_PARAMETER = 20  # Hoffmann et al. (arXiv:2203.15556)
EPOCHS = 4  # as good as new text, nearly (Muennighoff et al., arXiv:2305.16264)
FEWEST_UPDATES = 100  # below, there is nothing to see

_SHORTEST = 64  # tokens, to which sequences are cut so that what is held out has one
_CPU_FLOPS = 4e10  # of a core, as models of a few million parameters run
_CPU_SECONDS = 600
_GPU_FLOPS = 1e14  # of a device: a third of an A100's peak
_GPU_SECONDS = 86_400
_LARGEST_ON_CPU = SHAPES[1]
_STATE = 16  # bytes a parameter: weight, two moments and gradient, in float32
_SPLIT, _WHOLE = 12, 8  # the same with several devices: what they share, and what each holds
_USABLE = 0.75 * 0.85  # of a device: JAX takes three quarters, and estimates need room
_FOR_STATE = 0.5
_ACTIVATIONS = 48  # bytes that a token leaves in a layer, for each of its width, in bfloat16


class Size(NamedTuple):
    """Size of a run.

    Attributes:
        shape: of the model.
        parameters: of the model.
        seq_len: tokens of a sequence.
        batch: sequences of an update.
        accum: microbatches of an update.
        recomputes: whether blocks are computed again, for want of memory.
        max_steps: updates.
        epochs: how often the data are read.
        limit: what decided on the length: "parameters", "data", "time" or "least".
    """

    shape: Shape
    parameters: int
    seq_len: int
    batch: int
    accum: int
    recomputes: bool
    max_steps: int
    epochs: float
    limit: str

    @property
    def tokens(self) -> int:
        """Tokens of an update."""
        return self.batch * self.seq_len


def choose_size(prepared: PreparedData, machine: Machine) -> Size:
    """A run for data and machine.

    Args:
        prepared: the data.
        machine: where it is to run.
    """
    available = EPOCHS * prepared.train.tokens
    shape = _shape(prepared, machine, available)
    parameters = shape.parameters(prepared.train.vocab_size)
    lengths = {
        "parameters": TOKENS_PER_PARAMETER * parameters,
        "data": available,
        "time": int(_flops(machine) / (6 * parameters)),
    }
    limit = min(lengths, key=lambda name: lengths[name])
    seq_len = _seq_len(prepared, machine)
    per_epoch = max(1, windows(prepared.train, seq_len))
    wanted = lengths[limit] / seq_len
    batch, accum, recomputes = _batch(shape, parameters, machine, seq_len, wanted, per_epoch)
    steps = round(lengths[limit] / (batch * seq_len))
    if steps < FEWEST_UPDATES:
        steps, limit = FEWEST_UPDATES, "least"
    epochs = steps * batch / per_epoch
    return Size(shape, parameters, seq_len, batch, accum, recomputes, steps, epochs, limit)


def _flops(machine: Machine) -> float:
    """Return the FLOPs that the machine computes in the allowed time of a run."""
    if machine.is_cpu:
        return machine.cores * _CPU_FLOPS * _CPU_SECONDS
    return machine.devices * _GPU_FLOPS * _GPU_SECONDS


def _shape(prepared: PreparedData, machine: Machine, available: int) -> Shape:
    """The largest that data, memory and time suffice for; the smallest where none does."""
    vocab_size, largest = prepared.train.vocab_size, SHAPES[0]
    for shape in SHAPES:
        n = shape.parameters(vocab_size)
        fits = machine.memory is None or _STATE * n <= (
            _FOR_STATE * machine.devices * machine.memory * _USABLE
        )
        is_quick = machine.is_cpu or 6 * TOKENS_PER_PARAMETER * n * n <= _flops(machine)
        if TOKENS_PER_PARAMETER * n <= available and fits and is_quick:
            largest = shape
        if machine.is_cpu and shape == _LARGEST_ON_CPU:
            break
    return largest


def _seq_len(prepared: PreparedData, machine: Machine) -> int:
    """The power of two that holds a document, where there are any so long."""
    mean = prepared.train.tokens / prepared.train.documents
    least, most = (128, 256) if machine.is_cpu else (512, 2048)
    wanted = min(most, max(least, 2 ** math.ceil(math.log2(mean))))
    there, held_out = longest_sequence(prepared.train), prepared.validation
    if held_out is not None and longest_sequence(held_out) >= _SHORTEST:
        there = min(there, longest_sequence(held_out))
    return wanted if wanted <= there else _power_below(there)


def _batch(
    shape: Shape, parameters: int, machine: Machine, seq_len: int, sequences: float, per_epoch: int
) -> tuple[int, int, bool]:
    """Sequences and microbatches of an update, and whether blocks must be computed again."""
    if machine.memory is None:
        return min(8, _power_below(per_epoch)), 1, False
    # About two thousand updates, of half a million tokens at most (as GPT-3's small models).
    wanted = min(2**19 / seq_len, max(2**14 / seq_len, sequences / 2000), per_epoch)
    of_device = _power_below(wanted / machine.devices)
    state = (_SPLIT / machine.devices + _WHOLE) * parameters
    saved = _ACTIVATIONS * shape.n_layers * shape.dim * seq_len
    rows = (machine.memory * _USABLE - state) / saved
    recomputes = rows < 1
    at_once = min(of_device, _power_below(rows), 64)
    return of_device * machine.devices, of_device // at_once, recomputes


def _power_below(number: float) -> int:
    """The largest power of two that is no larger, and at least 1."""
    return 2 ** math.floor(math.log2(number)) if number >= 1 else 1


def learning_rate(parameters: int) -> float:
    """A peak that suits AdamW: by Kaplan et al. (arXiv:2001.08361, eq. D.1), and 2e-3 if small."""
    if parameters < 2 * 10**7:
        return 2e-3
    return float(f"{3.239e-3 - 1.395e-4 * math.log(parameters):.1e}")
