"""Maximal update parametrization (muP): multipliers, initial values and learning rates by width.

Tensor Programs V (arXiv:2203.03466), table 8, relative to a base width, at which it equals the
standard parametrization. With m = `model.dim` / `model.mup_base_width`:

    kind     parameters                             initial std   step of            result
                                                                  Adam, Lion  Muon
    input    embeddings, norms, biases, sinks       1             1           √m     1
    hidden   q k v o, gate up down, also experts'   1/√m          1/m         1      1
    output   head, router, shared expert's gate     1             1           √m     1/m

Entries are factors relative to a model of the base width. In addition, attention scores are scaled
by 1/head width instead of 1/√(head width) (`score_scale`), and Adam's eps by 1/m, as all gradients
are. Weight decay stays lr · weight_decay per update at every width. docs/mup.md has the reasons and
measurements.

This module does not import JAX, because conversions use it, too.
"""

import math

from jaxforge.config.model import EXPERTS, LAYERS, ModelConfig

_WIDTHS = frozenset({"embed", "expert_embed", "heads", "kv_heads", "latent", "latent_embed", "mlp"})
"""Logical axes that grow with a model's width; vocabulary, positions and experts do not. Ranks of
latents count as widths: DeepSeek-V2's and V3's are a quarter to a tenth of the residual stream."""

Axes = tuple[str | None, ...]


def width_ratio(config: ModelConfig) -> float:
    """Return m, the width relative to the base width; 1 in the standard parametrization."""
    return 1.0 if config.mup_base_width is None else config.dim / config.mup_base_width


def is_hidden(axes: Axes) -> bool:
    """Return whether a parameter is a width-to-width matrix in each layer and expert.

    Args:
        axes: logical axes of the parameter, which also classify parameters of custom models.
    """
    dimensions = [axis for axis in axes if axis not in (LAYERS, EXPERTS)]
    return len(dimensions) > 1 and _WIDTHS.issuperset(dimensions)


def init_factor(config: ModelConfig, axes: Axes) -> float:
    """Return the factor of the initial values of a parameter."""
    return width_ratio(config) ** -0.5 if is_hidden(axes) else 1.0


def lr_factor(config: ModelConfig, axes: Axes) -> float:
    """Return the factor of steps of elementwise normalized rules such as Adam and Lion."""
    return 1 / width_ratio(config) if is_hidden(axes) else 1.0


def muon_factor(config: ModelConfig, axes: Axes) -> float:
    """Return the factor of Muon's step, √max(1, rows/columns) times an orthogonal matrix.

    For width-to-width matrices the largest singular value of the step needs no factor
    (arXiv:2310.17813). Elements of other matrices would shrink by 1/√m and must keep their size.
    """
    return 1.0 if is_hidden(axes) else width_ratio(config) ** 0.5


def base_shape(config: ModelConfig, shape: tuple[int, ...], axes: Axes) -> tuple[float, ...]:
    """Return the shape of a parameter at the base width."""
    m = width_ratio(config)
    return tuple(n / m if axis in _WIDTHS else n for n, axis in zip(shape, axes, strict=True))


def output_multiplier(config: ModelConfig) -> float:
    """Return the factor of the results of output matrices, and of Adam's eps."""
    return 1 / width_ratio(config)


def score_scale(config: ModelConfig) -> float | None:
    """Return the factor of attention scores; None stands for 1/√(head width).

    With `mup_base_head_dim` the factor is √base / head width, which is 1/√base at the base.
    """
    base = config.mup_base_head_dim
    if base is None or base == config.head_size:
        return config.attention_scale
    base_scale = 1 / math.sqrt(base) if config.attention_scale is None else config.attention_scale
    return base_scale * base / config.head_size


def attention_scale(config: ModelConfig, head_size: int) -> float | None:
    """Return `score_scale` times the factor of YaRN with `mscale_all_dim`, for heads of a width."""
    scale, scaling = score_scale(config), config.rope_scaling
    if scaling is None or scaling.score_factor == 1.0:
        return scale
    return scaling.score_factor * (head_size**-0.5 if scale is None else scale)
