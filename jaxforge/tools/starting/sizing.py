"""Size of a run: model, batch and length for the available data and machine.

docs/configs.md ("A config to start with") documents the rules. The config has the reason for each
number in a comment.
"""

import math
from typing import NamedTuple

from jaxforge.tools.starting.machine import Machine
from jaxforge.tools.starting.prepared import PreparedData, longest_sequence, windows
from jaxforge.tools.starting.sizes import SHAPES, Shape

TOKENS_PER_PARAMETER = 20  # Hoffmann et al. (arXiv:2203.15556)
EPOCHS = 4  # almost as good as new text (Muennighoff et al., arXiv:2305.16264)
FEWEST_UPDATES = 100  # fewer show no learning

_SHORTEST = 64  # tokens; sequences are shortened to the held-out set's, but not below this
CPU_FLOPS = 4e10  # of a core, for models of a few million parameters
_CPU_SECONDS = 600
_GPU_FLOPS = 1e14  # of a device: a third of an A100's peak
_GPU_SECONDS = 86_400
_LARGEST_ON_CPU = SHAPES[1]
_STATE = 16  # bytes per parameter: weight, two moments and gradient, in float32
_SPLIT, _WHOLE = 12, 8  # bytes per parameter that several devices share, and that each holds
_USABLE = 0.75 * 0.85  # of a device: JAX preallocates three quarters; a margin for estimates
_FOR_STATE = 0.5
_ACTIVATIONS = 48  # bytes of saved activations per token, layer and unit of width, in bfloat16


class Size(NamedTuple):
    """Size of a run.

    Attributes:
        shape: shape of the model.
        parameters: parameters of the model.
        seq_len: tokens of a sequence.
        batch: sequences of an update.
        accum: microbatches of an update.
        max_steps: number of updates.
        epochs: number of epochs.
        limit: limit that determines the length: "parameters", "data", "time" or "least".
    """

    shape: Shape
    parameters: int
    seq_len: int
    batch: int
    accum: int
    max_steps: int
    epochs: float
    limit: str

    @property
    def tokens(self) -> int:
        """Tokens of an update."""
        return self.batch * self.seq_len


def choose_size(prepared: PreparedData, machine: Machine) -> Size:
    """Choose the size of a run for data and a machine.

    Args:
        prepared: the data.
        machine: the target machine.
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
    batch, accum = _batch(shape, parameters, machine, seq_len, wanted, per_epoch)
    steps = round(lengths[limit] / (batch * seq_len))
    if steps < FEWEST_UPDATES:
        steps, limit = FEWEST_UPDATES, "least"
    epochs = steps * batch / per_epoch
    return Size(shape, parameters, seq_len, batch, accum, steps, epochs, limit)


def _flops(machine: Machine) -> float:
    """Return the FLOPs that the machine computes in the allowed time of a run."""
    if machine.is_cpu:
        return machine.cores * CPU_FLOPS * _CPU_SECONDS
    return machine.devices * _GPU_FLOPS * _GPU_SECONDS


def _shape(prepared: PreparedData, machine: Machine, available: int) -> Shape:
    """Return the largest shape for which data, memory and time suffice; else the smallest."""
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
    """Return a power of two that holds an average document, if the data have such a sequence."""
    mean = prepared.train.tokens / prepared.train.documents
    least, most = (128, 256) if machine.is_cpu else (512, 2048)
    wanted = min(most, max(least, 2 ** math.ceil(math.log2(mean))))
    available, held_out = longest_sequence(prepared.train), prepared.validation
    if held_out is not None and longest_sequence(held_out) >= _SHORTEST:
        available = min(available, longest_sequence(held_out))
    return wanted if wanted <= available else power_below(available)


def _batch(
    shape: Shape, parameters: int, machine: Machine, seq_len: int, sequences: float, per_epoch: int
) -> tuple[int, int]:
    """Return sequences and microbatches of an update."""
    if machine.memory is None:
        return min(8, power_below(per_epoch)), 1
    # About two thousand updates of at most half a million tokens (as GPT-3's small models).
    wanted = min(2**19 / seq_len, max(2**14 / seq_len, sequences / 2000), per_epoch)
    per_device = power_below(wanted / machine.devices)
    state = (_SPLIT / machine.devices + _WHOLE) * parameters
    saved = _ACTIVATIONS * shape.n_layers * shape.dim * seq_len
    rows = (machine.memory * _USABLE - state) / saved
    microbatch = min(per_device, power_below(rows), 64)
    return per_device * machine.devices, per_device // microbatch


def power_below(number: float) -> int:
    """Return the largest power of two up to a number; at least 1."""
    return 2 ** math.floor(math.log2(number)) if number >= 1 else 1


def learning_rate(parameters: int) -> float:
    """Return a peak learning rate for AdamW.

    It follows Kaplan et al. (arXiv:2001.08361, eq. D.1); small models take 2e-3.
    """
    if parameters < 2 * 10**7:
        return 2e-3
    return float(f"{3.239e-3 - 1.395e-4 * math.log(parameters):.1e}")
