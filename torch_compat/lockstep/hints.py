"""Hints at the cause of a difference, derived from its values."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxforge.config.job import JobConfig
from jaxforge.config.optimizer import OptimizerConfig
from torch_compat.lockstep.rows import root_mean_square

_MAX_UNEXPLAINED = 0.02  # fraction of a difference that an explanation may leave

_FIRST_TOKENS_AGREE = (
    "the first token of each sequence agrees, which attends only to its own value: values and "
    "output are right, and queries, keys or their scores are not. Look at rope_theta and its "
    "scaling, the "
    "layout of rotary channels, q and k (swapped, transposed, which head is which), norms of q and "
    "k, the scale of attention, the mask"
)
_FIRST_TOKENS_DIFFER = (
    "the first token of each sequence differs, which attends only to its own value: look at values "
    "and output (weights, biases, which key head serves which query head), and at a norm after it"
)
_MLP = (
    "its input agrees: look at gate and up (which is which), the activation, biases, the "
    "router and its weights where there are experts, and at a norm after it"
)
WEIGHTS_HINT = "the module does not have the checkpoint's values: look at how they are loaded"
SECOND_UPDATE_HINT = (
    "the first update agrees, but the second does not: look at betas or momentum, which have no "
    "effect on the first"
)
_EMBED = "look at the embedding's rows, its multiplier, and learned positions"


@dataclasses.dataclass(frozen=True)
class Pair:
    """Value of both models; [b, s, d] in the forward pass."""

    ours: np.ndarray
    theirs: np.ndarray


def forward_hint(name: str, pairs: Mapping[str, Pair], config: JobConfig) -> str:
    """Return a hint for the first forward value that differs.

    Args:
        name: name of the value.
        pairs: all values of the forward pass by name.
        config: config of jaxforge's model.
    """
    pair = pairs[name]
    if factor := factor_hint(pair.ours, pair.theirs):
        return f"{factor}: a scale is missing or applied twice{_scales(name, config)}"
    kind = name.rpartition(".")[2]
    if kind == "attention":
        return _attention_hint(pair, config)
    if kind in ("after_attention", "residual"):
        return _sum_hint(name, pairs)
    if kind.endswith("norm"):
        return _norm_hint(pair)
    return {"embed": _EMBED, "mlp": _MLP}.get(
        kind, "the final norm agrees: look at the output head (its weight, whether it is tied, its "
        "bias), at logits_scaling and at final_logit_softcap",
    )  # fmt: skip


def factor_hint(ours: np.ndarray, theirs: np.ndarray) -> str:
    """Return a hint if one value is a multiple of the other, else an empty string."""
    factor = _multiple(ours, theirs)
    if factor is None or not _explains(theirs - ours, theirs - factor * ours):
        return ""
    return f"PyTorch's is {factor:.6g} times jaxforge's"


def loss_hint(ours: float, theirs: float, labels: np.ndarray) -> str:
    """Return a hint for losses of the same logits."""
    valid, total, ratio = int(np.sum(labels >= 0)), labels.size, theirs / ours
    if not valid < total:
        return f"PyTorch's is {ratio:.6g} times jaxforge's, for the same logits"
    if np.isclose(ratio, valid / total, rtol=1e-4):
        return (
            f"PyTorch's is {valid}/{total} times jaxforge's: divided by all {total} labels "
            f"instead of the {valid} that are not -100"
        )
    ignored = f"{total - valid} of {total} labels are -100"
    return f"PyTorch's is {ratio:.6g} times jaxforge's; {ignored}"


def gradient_hint(pair: Pair, *, is_untied: bool) -> str:
    """Return a hint for the first gradient that differs after equal forward values and loss.

    Args:
        pair: the gradient.
        is_untied: whether only the torch model has an output head of its own.
    """
    if is_untied:
        return (
            "the module's output head is a parameter of its own, but model.tie_embeddings is true: "
            "a tied embedding gets the gradients of both"
        )
    if (row := _only_row(pair)) is not None:
        return f"only row {row} differs: does PyTorch's embedding have padding_idx = {row}?"
    if factor := factor_hint(pair.ours, pair.theirs):
        return f"{factor}: the differentiated loss is scaled differently from the reported loss"
    return "forward values agree: look for a detach or a custom backward pass"


def update_hint(
    pair: Pair, grad: np.ndarray, param: np.ndarray, decay: float, optimizer: OptimizerConfig
) -> str:
    """Return a hint for first updates with the same gradients.

    Args:
        pair: the update.
        grad: the gradient.
        param: the parameter before.
        decay: jaxforge's weight decay of the parameter.
        optimizer: the `[optimizer]` section.
    """
    difference, lr = pair.theirs - pair.ours, optimizer.lr
    multiple = _multiple(param, difference)
    if multiple is not None and _explains(difference, difference - multiple * param):
        explained = decay - multiple / lr
        return f"consistent with a weight_decay of {explained:.4g}; jaxforge's is {decay:g}"
    if factor := factor_hint(pair.ours, pair.theirs):
        return f"{factor}: another learning rate (jaxforge's is {lr:g})"
    eps = _eps(pair.theirs + lr * decay * param, grad, lr) if optimizer.name == "adamw" else None
    if eps is not None:
        return f"consistent with an eps of {eps:.3g}; jaxforge's is {optimizer.eps:g}"
    return "the gradients are the same: look at the update rule and its settings"


def _attention_hint(pair: Pair, config: JobConfig) -> str:
    start = Pair(pair.ours[:, :1], pair.theirs[:, :1])
    if not config.model.attention_sinks and not _differ(start, pair):
        return _FIRST_TOKENS_AGREE
    return _FIRST_TOKENS_DIFFER


def _sum_hint(name: str, pairs: Mapping[str, Pair]) -> str:
    """Return a hint for the residual stream after equal summands."""
    before, kind = name.rsplit(".", 1)
    part = f"{before}.{'attention' if kind == 'after_attention' else 'mlp'}"
    before_sum = _sum_input(name, pairs)
    if before_sum is None or part not in pairs:
        return "its summands agree: look at how they are added (multipliers, post-norms, order)"
    added = Pair(
        pairs[name].ours - pairs[before_sum].ours, pairs[name].theirs - pairs[before_sum].theirs
    )
    factor = factor_hint(added.ours, added.theirs)
    how = f"but not its summand: {factor}" if factor else "but not the sum"
    return f"{part} agrees, {how}: look at residual_multiplier, post-norms and the order"


def _sum_input(name: str, pairs: Mapping[str, Pair]) -> str | None:
    before, kind = name.rsplit(".", 1)
    layer = int(before.split(".")[1])
    stream = "embed" if layer == 0 else f"layers.{layer - 1}.residual"
    summand = f"{before}.after_attention" if kind == "residual" else stream
    return summand if summand in pairs else None


def _norm_hint(pair: Pair) -> str:
    if _is_scaled_by_row(pair):
        return "each token differs by a factor: look at the norm's eps"
    by_channel = (np.moveaxis(x, -1, 0) for x in (pair.ours, pair.theirs))
    if _is_scaled_by_row(Pair(*(x.reshape(x.shape[0], -1) for x in by_channel))):
        return "each channel differs by a factor: look at the norm's weight (w, or 1 + w)"
    return "its input agrees: look at which norm it is (RMSNorm, LayerNorm), and its bias"


def _scales(name: str, config: JobConfig) -> str:
    keys = {"embed": ("embedding_multiplier",), "final_norm": ("logits_scaling",),
            "logits": ("logits_scaling",)}.get(name, ("residual_multiplier",))  # fmt: skip
    ours = ", ".join(f"model.{key} is {getattr(config.model, key):g}" for key in keys)
    return f" ({ours})"


def _eps(update: np.ndarray, grad: np.ndarray, lr: float) -> float | None:
    """Return the eps that explains AdamW's first update without decay, lr · |g| / (|g| + eps)."""
    size = np.abs(np.asarray(grad, np.float64))
    with np.errstate(divide="ignore", invalid="ignore"):
        eps = size * (lr / np.abs(update) - 1)
    eps = eps[(size > 0) & np.isfinite(eps)]
    if not eps.size or (middle := float(np.median(eps))) <= 0:
        return None
    quarters = np.quantile(eps, (0.25, 0.75))
    return middle if np.ptp(quarters) < 0.05 * middle else None


def _only_row(pair: Pair) -> int | None:
    """Return the row of a matrix that explains the whole difference, or None."""
    if pair.ours.ndim != 2:
        return None
    difference = np.asarray(pair.theirs - pair.ours, np.float64)
    worst = int(np.argmax(np.sum(np.square(difference), -1)))
    return worst if _explains(difference, np.delete(difference, worst, 0)) else None


def _is_scaled_by_row(pair: Pair) -> bool:
    """Return whether both values differ by a factor for each row of the last dimension."""
    a, b = (np.asarray(x, np.float64) for x in (pair.ours, pair.theirs))
    squares = np.sum(a * a, -1, keepdims=True)
    factors = np.sum(a * b, -1, keepdims=True) / np.where(squares > 0, squares, 1)
    return _explains(b - a, b - factors * a)


def _multiple(ours: np.ndarray, theirs: np.ndarray) -> float | None:
    a, b = (np.asarray(x, np.float64).ravel() for x in (ours, theirs))
    squares = float(a @ a)
    return float(a @ b) / squares if squares > 0 and np.isfinite(squares) else None


def _explains(difference: np.ndarray, remainder: np.ndarray) -> bool:
    """Return whether an explanation leaves almost no difference."""
    return root_mean_square(remainder) < _MAX_UNEXPLAINED * root_mean_square(difference)


def _differ(part: Pair, whole: Pair) -> bool:
    """Return whether a part differs about as much as the whole."""
    relative = [
        root_mean_square(pair.theirs - pair.ours) / max(root_mean_square(pair.ours), 1e-30)
        for pair in (part, whole)
    ]
    return relative[0] > _MAX_UNEXPLAINED * relative[1]
