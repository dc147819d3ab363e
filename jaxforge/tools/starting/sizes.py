"""Sizes of runs: prepared data, shapes of models, the size for data and a machine, and presets.

docs/configs.md ("A config to start with") documents the rules. A config has the reason for each
number in a comment.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxforge.errors import UserError
from jaxforge.tools.starting.machine import Machine

if TYPE_CHECKING:  # both are slow to import, and a help needs neither
    from jaxforge.config.model import ModelConfig
    from jaxforge.data.corpus.manifest import Manifest

TRAIN, VALIDATION, TOKENIZER = "train", "validation", "tokenizer"
"""Subdirectories of a prepared directory."""


class PreparedData(NamedTuple):
    """A prepared directory.

    Attributes:
        directory: absolute path, present or future.
        train: manifest of the training set.
        validation: manifest of the held-out set; None if there is none.
    """

    directory: Path
    train: "Manifest"
    validation: "Manifest | None" = None

    @classmethod
    def read(cls, directory: Path, path: Path | None = None) -> "PreparedData":
        """Read the manifests.

        Args:
            directory: the directory of `prepare --output`.
            path: future path of the directory, if it will be renamed.

        Raises:
            UserError: the directory was not made by `prepare`.
        """
        from jaxforge.data.corpus.manifest import FILE_NAME, Manifest

        train = Manifest.read(directory / TRAIN)
        if train is None:
            raise UserError(
                f"{directory} was not made by `jaxforge prepare`: {directory / TRAIN / FILE_NAME} "
                "does not exist. Prepare the text first, and give the directory of --output"
            )
        validation = Manifest.read(directory / VALIDATION)
        return cls((path or directory).absolute(), train, validation)

    @property
    def pattern(self) -> str:
        """Glob of the shards."""
        return "*.bin" if self.train.shards[0].file.endswith(".bin") else "*.npy"

    def at(self, name: str) -> str:
        """Return the path of a subdirectory."""
        return str(self.directory / name)


def windows(manifest: "Manifest", seq_len: int) -> int:
    """Return the sequences of an epoch; each file is split separately into seq_len + 1 tokens."""
    return sum(shard.tokens // (seq_len + 1) for shard in manifest.shards)


def longest_sequence(manifest: "Manifest") -> int:
    """Return the tokens of the longest sequence that a single file can hold."""
    return max(shard.tokens for shard in manifest.shards) - 1


TOKENS_PER_PARAMETER = 20  # Hoffmann et al. (arXiv:2203.15556)
EPOCHS = 4  # almost as good as new text (Muennighoff et al., arXiv:2305.16264)
FEWEST_UPDATES = 100  # fewer show no learning

_SHORTEST = 64  # tokens; sequences are shortened to the held-out set's, but not below this
CPU_FLOPS = 4e10  # of a core, for models of a few million parameters
_CPU_SECONDS = 600
_GPU_FLOPS = 1e14  # of a device: a third of an A100's peak
_GPU_SECONDS = 86_400
_STATE = 16  # bytes per parameter: weight, two moments and gradient, in float32
_SPLIT, _WHOLE = 12, 8  # bytes per parameter that several devices share, and that each holds
_USABLE = 0.75 * 0.85  # of a device: JAX preallocates three quarters; a margin for estimates
_FOR_STATE = 0.5
_ACTIVATIONS = 48  # bytes of saved activations per token, layer and unit of width, in bfloat16


class Shape(NamedTuple):
    """Shape of a decoder; the feed-forward follows `model.ffn_dim_multiplier`.

    Attributes:
        dim: width.
        n_layers: depth.
        n_heads: query heads.
        n_kv_heads: key/value heads.
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int

    def parameters(self, vocab_size: int) -> int:
        """Return the parameters of the model, with one matrix for embedding and head."""
        from jaxforge.config.model import ModelConfig

        return parameters(ModelConfig(**self._asdict(), vocab_size=vocab_size, tie_embeddings=True))


SHAPES: Sequence[Shape] = (
    Shape(128, 4, 4, 2),
    Shape(256, 6, 8, 4),
    Shape(384, 8, 6, 3),
    Shape(512, 8, 8, 4),
    Shape(768, 12, 12, 4),
    Shape(1024, 16, 16, 4),
    Shape(1024, 24, 16, 4),
    Shape(1536, 24, 16, 8),
    Shape(2048, 24, 32, 8),
    Shape(2560, 32, 32, 8),
    Shape(4096, 32, 32, 8),
)
"""Shapes from a million to seven billion parameters, growing by a factor of about two."""


def parameters(model: "ModelConfig") -> int:
    """Return the parameters of a Llama-style model, dense or with experts, without norm vectors."""
    from jaxforge.model.flops import matrix_elements

    matrices = matrix_elements(model, 2 + model.is_gated, model.num_experts)  # with the head
    has_experts = (*model.has_experts, *model.has_experts[-1:] * model.mtp_depth)
    routers = model.num_experts * model.dim * sum(has_experts)
    tables = (0 if model.tie_embeddings else 1) - model.mtp_depth  # depths share the head
    return matrices + routers + tables * model.vocab_size * model.dim


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
    # In tokens, at 6 FLOPs per parameter and token.
    lengths = {
        "parameters": TOKENS_PER_PARAMETER * parameters,
        "data": available,
        "time": int(_flops(machine) / (6 * parameters)),
    }
    # The scarcest of parameters, data and time limits the run, and is named in the config.
    limit = min(lengths, key=lambda name: lengths[name])
    seq_len = _seq_len(prepared, machine)
    per_epoch = max(1, windows(prepared.train, seq_len))
    target = lengths[limit] / seq_len
    batch, accum = _batch(shape, parameters, machine, seq_len, target, per_epoch)
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
        # Larger shapes learn too little in the minutes of a run on a CPU.
        if machine.is_cpu and shape == SHAPES[1]:
            break
    return largest


def _seq_len(prepared: PreparedData, machine: Machine) -> int:
    """Return a power of two that holds an average document, if the data have such a sequence."""
    mean = prepared.train.tokens / prepared.train.documents
    least, most = (128, 256) if machine.is_cpu else (512, 2048)
    target = min(most, max(least, 2 ** math.ceil(math.log2(mean))))
    available, held_out = longest_sequence(prepared.train), prepared.validation
    if held_out is not None and longest_sequence(held_out) >= _SHORTEST:
        available = min(available, longest_sequence(held_out))
    return target if target <= available else power_below(available)


def _batch(
    shape: Shape, parameters: int, machine: Machine, seq_len: int, sequences: float, per_epoch: int
) -> tuple[int, int]:
    """Return sequences and microbatches of an update."""
    if machine.memory is None:
        return min(8, power_below(per_epoch)), 1
    # About two thousand updates of at most half a million tokens (as GPT-3's small models).
    target = min(2**19 / seq_len, max(2**14 / seq_len, sequences / 2000), per_epoch)
    # Powers of two divide into microbatches without remainder.
    per_device = power_below(target / machine.devices)
    # Bytes of a device: its share of the state, and what each device holds in full.
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


class Preset(NamedTuple):
    """Preset config without data.

    Attributes:
        about: description in one line.
        devices: number of devices.
        machine: description of the machine.
        model: settings of `[model]`.
        seq_len: tokens of a sequence.
        batch: sequences of an update.
        accum: microbatches of an update.
        lr: peak learning rate.
        is_on_cpu: for CPUs, which are fastest in float32.
        distributed: settings of `[distributed]`, except dp_shard, which takes all other devices.
        active: active parameters per token of a mixture of experts.
        steps: number of updates, if 20 tokens per parameter would take too long.
    """

    about: str
    devices: int
    machine: str
    model: Mapping[str, Any]
    seq_len: int
    batch: int
    accum: int
    lr: float
    is_on_cpu: bool = False
    distributed: Mapping[str, int] = {}
    active: int | None = None
    steps: int | None = None

    @property
    def parameters(self) -> int:
        """Parameters of the model with the preset's vocabulary."""
        from jaxforge.config.model import ModelConfig

        return parameters(ModelConfig(**self.model))

    @property
    def max_steps(self) -> int:
        """Number of updates: `steps`, or for 20 tokens per active parameter."""
        if self.steps is not None:
            return self.steps
        tokens = TOKENS_PER_PARAMETER * (self.active or self.parameters)
        return round(tokens / (self.batch * self.seq_len))


_LLAMA_3 = {"vocab_size": 128256, "rope_theta": 500000.0, "max_seq_len": 4096}

PRESETS: Mapping[str, Preset] = {
    "tiny": Preset(
        "the quickstart's shape, for ten minutes or so",
        1, "a CPU",
        {**SHAPES[1]._asdict(), "vocab_size": 4096, "max_seq_len": 256, "tie_embeddings": True},
        256, 8, 1, 2e-3, is_on_cpu=True, steps=1000,
    ),
    "124m": Preset(
        "the shape of GPT-2 small, with Llama's blocks",
        1, "a GPU of 24 GB or more",
        {"dim": 768, "n_layers": 12, "n_heads": 12, "n_kv_heads": 12, "ffn_hidden_dim": 2048,
         "vocab_size": 50304, "max_seq_len": 1024, "tie_embeddings": True},
        1024, 512, 32, 6e-4,
    ),
    "1b": Preset(
        "the shape of Llama 3.2 1B",
        8, "a node of 8 GPUs of 80 GB",
        {**SHAPES[8]._asdict(), "n_layers": 16, "ffn_hidden_dim": 8192, **_LLAMA_3,
         "tie_embeddings": True},
        4096, 256, 4, 3e-4,
    ),
    "7b": Preset(
        "the shape of Mistral 7B",
        8, "a node of 8 GPUs of 80 GB, or several",
        {**SHAPES[10]._asdict(), "ffn_hidden_dim": 14336, "vocab_size": 32000,
         "max_seq_len": 4096},
        4096, 1024, 64, 3e-4,
    ),
    "moe": Preset(
        "the shape of OLMoE: 7B parameters, 1.3B of them active",
        8, "a node of 8 GPUs of 80 GB",
        {"dim": 2048, "n_layers": 16, "n_heads": 16, "n_kv_heads": 16, "ffn_hidden_dim": 1024,
         "vocab_size": 50304, "max_seq_len": 4096, "qk_norm": True, "num_experts": 64,
         "moe_top_k": 8, "moe_expert_dim": 1024, "moe_router_z_loss_weight": 1e-3},
        4096, 1024, 32, 4e-4, distributed={"ep": 8}, active=1_280_000_000,
    ),
}  # fmt: skip
"""Presets by name, from small to large."""
