"""Maximal update parametrisation (muP): multipliers, initial values and rates by width.

Tensor Programs V (arXiv:2203.03466), table 8, relative to a base width, where it is the standard
parametrisation. With m = `model.dim` / `model.mup_base_width`:

    kind     parameters                             initial std   step of            result
                                                                  Adam, Lion  Muon
    input    embeddings, norms, biases, sinks       1             1           √m     1
    hidden   q k v o, gate up down, also experts'   1/√m          1/m         1      1
    output   head, router, shared expert's gate     1             1           √m     1/m

Entries are factors on what a model of the base width has. Next to them stand scores of attention,
1/head width in place of 1/√(head width) (`score_scale`), and Adam's eps, which gets 1/m, as all
gradients do. Weight decay stays lr · weight_decay per update at every width. Why, and what was
measured: docs/mup.md.

No JAX here: conversions go by it, too.
"""

import math

from jaxforge.config.model import EXPERTS, LAYERS, ModelConfig

_WIDTHS = frozenset({"embed", "expert_embed", "heads", "kv_heads", "mlp"})
"""Logical axes that grow with a model's width; vocabulary, positions and experts do not."""

Axes = tuple[str | None, ...]


def width_ratio(config: ModelConfig) -> float:
    """m: how many times wider than the base; 1 in the standard parametrisation."""
    return 1.0 if config.mup_base_width is None else config.dim / config.mup_base_width


def is_hidden(axes: Axes) -> bool:
    """Return whether a parameter is a width-to-width matrix in each layer and expert.

    Args:
        axes: its logical axes; what a model of one's own declares is told apart by them as well.
    """
    own = [axis for axis in axes if axis not in (LAYERS, EXPERTS)]
    return len(own) > 1 and _WIDTHS.issuperset(own)


def init_factor(config: ModelConfig, axes: Axes) -> float:
    """On the initial values of a parameter."""
    return width_ratio(config) ** -0.5 if is_hidden(axes) else 1.0


def lr_factor(config: ModelConfig, axes: Axes) -> float:
    """On the step of a rule whose steps are as large in every element: Adam's, Lion's."""
    return 1 / width_ratio(config) if is_hidden(axes) else 1.0


def muon_factor(config: ModelConfig, axes: Axes) -> float:
    """On a step along an orthogonal matrix, √max(1, rows/columns) times it.

    From width to width its largest singular value is right as it is (arXiv:2310.17813). The
    elements of another matrix get smaller by 1/√m, and are to stay as large.
    """
    return 1.0 if is_hidden(axes) else width_ratio(config) ** 0.5


def base_shape(config: ModelConfig, shape: tuple[int, ...], axes: Axes) -> tuple[float, ...]:
    """The shape of a parameter at the base width."""
    m = width_ratio(config)
    return tuple(n / m if axis in _WIDTHS else n for n, axis in zip(shape, axes, strict=True))


def output_multiplier(config: ModelConfig) -> float:
    """On what output matrices give, and on Adam's eps."""
    return 1 / width_ratio(config)


def score_scale(config: ModelConfig) -> float | None:
    """Return the factor of attention scores; None stands for 1/√(head width).

    √base / head width, where `mup_base_head_dim` says the base's: that is 1/√base there.
    """
    base = config.mup_base_head_dim
    if base is None or base == config.head_size:
        return config.attention_scale
    usual = 1 / math.sqrt(base) if config.attention_scale is None else config.attention_scale
    return usual * base / config.head_size
