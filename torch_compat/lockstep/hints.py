"""Hints at the kind of fault behind a difference, from its numbers."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxforge.config.job import JobConfig
from jaxforge.config.optimizer import OptimizerConfig
from jaxforge.tools.replay.compare import root_mean_square

_EXPLAINED = 0.02  # of a difference may be left over where a cause explains it

_HEAD_OF_EACH = (
    "the first token of each sequence agrees, whose attention is its own value: values and output "
    "are right, and queries, keys or their scores are not. Look at rope_theta and its scaling, the "
    "layout of rotary channels, q and k (swapped, transposed, which head is which), norms of q and "
    "k, the scale of attention, the mask"
)
_FROM_THE_FIRST = (
    "from the first token of each sequence on, whose attention is its own value: look at values "
    "and output (weights, biases, which key head serves which query head), and at a norm after it"
)
_MLP = (
    "what enters it agrees: look at gate and up (which is which), the activation, biases, the "
    "router and its weights where there are experts, and at a norm after it"
)
WEIGHTS = "the module does not have the checkpoint's values: look at how they are loaded"
"""Of weights."""
SECOND = (
    "the first update agrees, and a second by other gradients does not: look at betas or momentum, "
    "which the first hides"
)
"""Of a second update."""
_EMBED = "look at the embedding's rows, its multiplier, and learned positions"


@dataclasses.dataclass(frozen=True)
class Pair:
    """A value of both, [b, s, d] where it is of the forward pass."""

    ours: np.ndarray
    theirs: np.ndarray


def forward_hint(name: str, pairs: Mapping[str, Pair], config: JobConfig) -> str:
    """Return a hint for the first forward value that differs.

    Args:
        name: the point.
        pairs: all points.
        config: ours.
    """
    pair = pairs[name]
    if factor := factor_hint(pair.ours, pair.theirs):
        return f"{factor}: a scale is missing, or is there twice{_scales(name, config)}"
    kind = name.rpartition(".")[2]
    if kind == "attention":
        return _of_attention(pair, config)
    if kind in ("after_attention", "residual"):
        return _of_sum(name, pairs)
    if kind.endswith("norm"):
        return _of_norm(pair)
    return {"embed": _EMBED, "mlp": _MLP}.get(
        kind, "the final norm agrees: look at the output head (its weight, whether it is tied, its "
        "bias), at logits_scaling and at final_logit_softcap",
    )  # fmt: skip


def factor_hint(ours: np.ndarray, theirs: np.ndarray) -> str:
    """Says so where one is a multiple of the other; nothing where it is not."""
    factor = _multiple(ours, theirs)
    if factor is None or not _explains(theirs - ours, theirs - factor * ours):
        return ""
    return f"theirs is {factor:.6g} times ours"


def loss_hint(ours: float, theirs: float, labels: np.ndarray) -> str:
    """Return a hint for losses of the same logits."""
    valid, total, ratio = int(np.sum(labels >= 0)), labels.size, theirs / ours
    if not valid < total:
        return f"theirs is {ratio:.6g} times ours, of the same logits"
    if np.isclose(ratio, valid / total, rtol=1e-4):
        return (
            f"theirs is {valid}/{total} times ours: divided by all {total} labels, not by the "
            f"{valid} that count"
        )
    return f"theirs is {ratio:.6g} times ours; {valid} of {total} labels count, the others are -100"


def gradient_hint(pair: Pair, *, is_untied: bool) -> str:
    """Return a hint for the first gradient that differs after equal forward values and loss.

    Args:
        pair: the gradient.
        is_untied: whether theirs has an output head of its own, and ours has not.
    """
    if is_untied:
        return (
            "the module's output head is a parameter of its own, and model.tie_embeddings is true: "
            "tied, the embedding gets the gradients of both"
        )
    if (row := _only_row(pair)) is not None:
        return f"only row {row} differs: has the embedding of theirs padding_idx = {row}?"
    if factor := factor_hint(pair.ours, pair.theirs):
        return f"{factor}: what is differentiated is divided otherwise than the loss"
    return "forward values agree: look for a detach, or a backward pass of one's own"


def update_hint(
    pair: Pair, grad: np.ndarray, param: np.ndarray, decay: float, optimizer: OptimizerConfig
) -> str:
    """Return a hint for first updates by the same gradients.

    Args:
        pair: the update.
        grad: the gradient.
        param: the parameter before.
        decay: our weight decay of it.
        optimizer: the `[optimizer]` section.
    """
    apart, lr = pair.theirs - pair.ours, optimizer.lr
    multiple = _multiple(param, apart)
    if multiple is not None and _explains(apart, apart - multiple * param):
        return f"as a weight_decay of {decay - multiple / lr:.4g} would make it; ours is {decay:g}"
    if factor := factor_hint(pair.ours, pair.theirs):
        return f"{factor}: another learning rate (ours is {lr:g})"
    eps = _eps(pair.theirs + lr * decay * param, grad, lr) if optimizer.name == "adamw" else None
    if eps is not None:
        return f"as an eps of {eps:.3g} would make it; ours is {optimizer.eps:g}"
    return "the gradients are the same: look at the update rule and its settings"


def _of_attention(pair: Pair, config: JobConfig) -> str:
    start = Pair(pair.ours[:, :1], pair.theirs[:, :1])
    if not config.model.attention_sinks and not _differ(start, pair):
        return _HEAD_OF_EACH
    return _FROM_THE_FIRST


def _of_sum(name: str, pairs: Mapping[str, Pair]) -> str:
    """Return a hint for the residual stream after equal summands."""
    before, kind = name.rsplit(".", 1)
    part = f"{before}.{'attention' if kind == 'after_attention' else 'mlp'}"
    entering = _entering(name, pairs)
    if entering is None or part not in pairs:
        return "what is added agrees: look at how it is added (multipliers, norms after, order)"
    added = Pair(
        pairs[name].ours - pairs[entering].ours, pairs[name].theirs - pairs[entering].theirs
    )
    factor = factor_hint(added.ours, added.theirs)
    how = f"what it adds: {factor}" if factor else "it is added otherwise"
    return f"{part} agrees, {how}: look at residual_multiplier, norms after, and the order"


def _entering(name: str, pairs: Mapping[str, Pair]) -> str | None:
    before, kind = name.rsplit(".", 1)
    layer = int(before.split(".")[1])
    earlier = "embed" if layer == 0 else f"layers.{layer - 1}.residual"
    wanted = f"{before}.after_attention" if kind == "residual" else earlier
    return wanted if wanted in pairs else None


def _of_norm(pair: Pair) -> str:
    if _by_token(pair):
        return "each token has a factor of its own: look at the norm's eps"
    channels = Pair(np.moveaxis(pair.ours, -1, 0), np.moveaxis(pair.theirs, -1, 0))
    if _by_token(Pair(*(x.reshape(x.shape[0], -1) for x in (channels.ours, channels.theirs)))):
        return "each channel has a factor of its own: look at the norm's weight (w, or 1 + w)"
    return "what enters it agrees: look at which norm it is (RMSNorm, LayerNorm), and its bias"


def _scales(name: str, config: JobConfig) -> str:
    keys = {"embed": ("embedding_multiplier",), "final_norm": ("logits_scaling",),
            "logits": ("logits_scaling",)}.get(name, ("residual_multiplier",))  # fmt: skip
    ours = ", ".join(f"model.{key} is {getattr(config.model, key):g} here" for key in keys)
    return f" ({ours})"


def _eps(update: np.ndarray, grad: np.ndarray, lr: float) -> float | None:
    """The eps that explains an update of AdamW without decay: at first, lr · |g| / (|g| + eps)."""
    size = np.abs(np.asarray(grad, np.float64))
    with np.errstate(divide="ignore", invalid="ignore"):
        eps = size * (lr / np.abs(update) - 1)
    eps = eps[(size > 0) & np.isfinite(eps)]
    if not eps.size or (middle := float(np.median(eps))) <= 0:
        return None
    quarters = np.quantile(eps, (0.25, 0.75))
    return middle if np.ptp(quarters) < 0.05 * middle else None


def _only_row(pair: Pair) -> int | None:
    """The one row of a matrix that makes the difference."""
    if pair.ours.ndim != 2:
        return None
    apart = np.asarray(pair.theirs - pair.ours, np.float64)
    worst = int(np.argmax(np.sum(np.square(apart), -1)))
    return worst if _explains(apart, np.delete(apart, worst, 0)) else None


def _by_token(pair: Pair) -> bool:
    """Return whether theirs is ours times a factor for each row of the last dimension."""
    a, b = (np.asarray(x, np.float64) for x in (pair.ours, pair.theirs))
    squares = np.sum(a * a, -1, keepdims=True)
    factors = np.sum(a * b, -1, keepdims=True) / np.where(squares > 0, squares, 1)
    return _explains(b - a, b - factors * a)


def _multiple(ours: np.ndarray, theirs: np.ndarray) -> float | None:
    a, b = (np.asarray(x, np.float64).ravel() for x in (ours, theirs))
    squares = float(a @ a)
    return float(a @ b) / squares if squares > 0 and np.isfinite(squares) else None


def _explains(apart: np.ndarray, left: np.ndarray) -> bool:
    """Return whether an explanation leaves almost no difference."""
    return root_mean_square(left) < _EXPLAINED * root_mean_square(apart)


def _differ(part: Pair, whole: Pair) -> bool:
    """Return whether a part differs about as much as the whole."""
    apart = root_mean_square(part.theirs - part.ours) / max(root_mean_square(part.ours), 1e-30)
    of_all = root_mean_square(whole.theirs - whole.ours) / max(root_mean_square(whole.ours), 1e-30)
    return apart > _EXPLAINED * of_all
