"""Sizes of a run from its depth or its compute: `jaxforge init --depth N`, `--flops C`.

Formulas, with d the width, S the tokens of a sequence and N all parameters (docs/dial.md):

    width           d = 64 x depth, rounded up to a multiple of 128 (as nanochat)
    heads           128 channels each (as nanochat)
    feed-forward    8/3 d, rounded to a multiple of 128 (Llama's SwiGLU)
    tokens          D = 20 N (Hoffmann et al. 2022, arXiv:2203.15556)
    compute         C = D x FLOPs per token, attention in full (model/flops.py)
    batch           B = 0.2920 C'^0.3271 tokens (DeepSeek LLM, arXiv:2401.02954, formula 1), where
                    C' = C without the output head
    learning rate   2^-8 at width 128, transferred by muP (docs/mup.md)

The same formula 1 of DeepSeek LLM has a learning rate, 0.3118 C'^-0.1250, for the standard
parametrisation. The config shows this rate for comparison. This module does not
import JAX.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxforge.config.job import JobConfig
from jaxforge.config.reading.load import make_config, parse_overrides
from jaxforge.data.corpus.tokenizer import BPE_VOCAB_SIZE
from jaxforge.errors import UserError
from jaxforge.model.flops import flops_per_token
from jaxforge.tools.starting.sizes import (
    TOKENS_PER_PARAMETER,
    PreparedData,
    longest_sequence,
    parameters,
    power_below,
)

DEEPEST = 256
"""Largest depth."""

_SEQ_LEN, _SEQ_LEN_ON_CPU = 2048, 256

_WIDTH_PER_LAYER = 64
_MULTIPLE = 128  # of widths and heads, for the matrix units of GPUs and TPUs

MUP_WIDTH, MUP_HEAD, MUP_STD, MUP_LR = 128, 32, 0.08, 2.0**-8
"""Narrow model of docs/mup.md: width, head width, initial deviation and its best learning rate."""

WARMUP, STABLE = "2%", "78%"
"""Shares of a run. The last 20 % decay linearly to 0, which is as good as a cosine of the same
length (Hägele et al. 2024, arXiv:2405.18392)."""


class Wish(NamedTuple):
    """Request of the command line.

    Attributes:
        vocab_size: vocabulary of the tokenizer.
        seq_len: tokens of a sequence.
        ratio: tokens per parameter.
        settings: settings of the user, such as "--model.n_heads=8", which override the dial.
    """

    vocab_size: int
    seq_len: int
    ratio: float = TOKENS_PER_PARAMETER
    settings: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        data: PreparedData | None,
        *,
        is_on_cpu: bool = False,
        ratio: float | None = None,
        settings: Sequence[str] = (),
    ) -> "Wish":
        """Return the request for data and a kind of machine.

        Args:
            data: the data; None if they are not prepared yet.
            is_on_cpu: choose short sequences.
            ratio: tokens per parameter; None for the default.
            settings: settings of the user.
        """
        vocab_size, seq_len = BPE_VOCAB_SIZE, _SEQ_LEN_ON_CPU if is_on_cpu else _SEQ_LEN
        if data is not None:
            vocab_size = data.train.vocab_size
            seq_len = min(seq_len, power_below(longest_sequence(data.train)))
        wish = cls(vocab_size, seq_len, ratio or TOKENS_PER_PARAMETER, settings)
        requested = wish.overrides.get("train.seq_len")
        if isinstance(requested, int) and requested > 0:  # other values are refused later
            return wish._replace(seq_len=requested)
        return wish

    @property
    def overrides(self) -> dict[str, Any]:
        """Values that the user has set, not yet validated, by key such as "train.seq_len"."""
        settings = parse_overrides(self.settings)
        return {".".join(map(str, setting.path)): setting.value for setting in settings}


class Dial(NamedTuple):
    """Sizes that do not depend on the machine.

    Attributes:
        depth: the depth that was chosen.
        config: shape and sequence length with the settings of the user.
        parameters: all parameters, without norm vectors.
        tokens: tokens of the run.
    """

    depth: int
    config: JobConfig
    parameters: int
    tokens: float

    @property
    def flops_per_token(self) -> int:
        """Model FLOPs per token."""
        return flops_per_token(self.config.model, self.config.train.seq_len)

    @property
    def flops(self) -> float:
        """Model FLOPs of the run."""
        return self.tokens * self.flops_per_token

    @property
    def compute_of_law(self) -> float:
        """FLOPs of the run as DeepSeek LLM counts them, without the output head."""
        model = self.config.model
        # 6 FLOPs per parameter and token: 2 forward and 4 backward.
        head = 6 * (1 + model.mtp_depth) * model.vocab_size * model.dim
        return self.tokens * (self.flops_per_token - head)

    @property
    def batch_tokens(self) -> float:
        """Tokens of an update by the formula."""
        return optimal_batch(self.compute_of_law)


def optimal_batch(compute: float) -> float:
    """Return the batch in tokens for FLOPs without the output head: 0.2920 C^0.3271."""
    return 0.2920 * compute**0.3271


def optimal_rate(compute: float) -> float:
    """Return the rate of the standard parametrisation for the same FLOPs: 0.3118 C^-0.1250."""
    return 0.3118 * compute**-0.1250


def shape(depth: int) -> dict[str, Any]:
    """Return the settings of `[model]` that follow from the depth."""
    width = _MULTIPLE * math.ceil(_WIDTH_PER_LAYER * depth / _MULTIPLE)
    return {
        "dim": width,
        "n_layers": depth,
        "n_heads": width // _MULTIPLE,
        "ffn_hidden_dim": _MULTIPLE * round(8 / 3 * width / _MULTIPLE),
    }


def dial_depth(depth: int, wish: Wish) -> Dial:
    """Return the sizes of a depth.

    Args:
        depth: number of layers.
        wish: the request.

    Raises:
        UserError: a setting of the user is invalid, or the depth is too large.
    """
    if depth > DEEPEST:
        raise UserError(f"--depth {depth}: must be at most {DEEPEST}")
    values = {
        "model": {**shape(depth), **model_settings(wish)},
        "train": {"seq_len": wish.seq_len},
    }
    config = make_config(values, _of_shape(wish.settings))
    if config.model.is_moe:
        raise UserError(
            "model.num_experts: the formulas of --depth and --flops are for dense models. "
            "Use --preset moe, or add experts to the written config"
        )
    count = parameters(config.model)
    return Dial(depth, config, count, wish.ratio * count)


def dial_flops(flops: float, wish: Wish) -> Dial:
    """Return the sizes of the depth whose compute is nearest, with the tokens that spend `flops`.

    Args:
        flops: model FLOPs of the run.
        wish: the request.

    Raises:
        UserError: as `dial_depth`, or no depth has this compute.
    """
    low, high = 1, DEEPEST
    while high - low > 1:  # invariant: compute of `low` <= flops < compute of `high`
        middle = (low + high) // 2
        low, high = (middle, high) if dial_depth(middle, wish).flops <= flops else (low, middle)
    below, above = dial_depth(low, wish), dial_depth(high, wish)
    # Nearest in the ratio: compute grows by a factor from depth to depth.
    nearest = below if flops * flops <= below.flops * above.flops else above
    if not below.flops / 2 <= flops <= 2 * above.flops:
        least, most = dial_depth(1, wish).flops, dial_depth(DEEPEST, wish).flops
        raise UserError(
            f"--flops {flops:g}: depths from 1 to {DEEPEST} take {least:.2g} to {most:.2g} FLOPs. "
            "Choose --depth and --ratio"
        )
    return nearest._replace(tokens=flops / nearest.flops_per_token)


def sequences(batch_tokens: float, seq_len: int, n_devices: int) -> int:
    """Return the sequences of an update: a power of two for each device, nearest to the batch."""
    # Rounded in the exponent, so that the ratio to the law is at most the root of two.
    for_each = batch_tokens / seq_len / n_devices
    return n_devices * (2 ** round(math.log2(for_each)) if for_each > 1 else 1)


def model_settings(wish: Wish) -> dict[str, Any]:
    """Return the settings of `[model]` that do not follow from the depth."""
    return {
        "vocab_size": wish.vocab_size,
        "max_seq_len": wish.seq_len,
        "init_std": MUP_STD,
        "mup_base_width": MUP_WIDTH,
        "mup_base_head_dim": MUP_HEAD,
    }


def _of_shape(settings: Sequence[str]) -> list[str]:
    """Return the settings on which the sizes depend."""
    paths = [{item.path[:2] for item in parse_overrides([word])} for word in settings]
    return [
        word
        for word, keys in zip(settings, paths, strict=True)
        if any(path[0] in ("model", "plugins") or path == ("train", "seq_len") for path in keys)
    ]
