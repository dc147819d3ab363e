"""QK-Clip of Kimi K2 (arXiv:2507.20534): a limit on attention logits, enforced by the weights.

The forward pass of an update records the largest logit of each head, S (`eval.MAX_LOGITS`). After
the optimizer's step, the query and key weights of heads with S > t are scaled such that the same
tokens would have logits smaller by t / S. Heads below the limit do not change.
"""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from jaxforge.model.mixer import Mixer
from jaxforge.model.mixers import mixer_class
from jaxforge.parallel.stages import Stack

Path = tuple[str, ...]


def clip_logits(
    config: ModelConfig,
    params: dict[str, Any],
    largest: Float[Array, "rows heads"],
    order: Stack,
    limit: float,
) -> dict[str, Any]:
    """Return parameters with the weights of heads scaled whose largest logit exceeds a limit.

    Args:
        config: the model.
        params: parameters after the optimizer's step.
        largest: largest logits in the step, by row of `order`; 0 for layers without logits.
        order: order of the layers in `largest`.
        limit: largest logit.
    """
    clipped = dict(params)
    for stack, layers in config.stacks.items():
        for name in config.layer_parts[layers[0]].mixers:
            mixer = mixer_class(name)
            if mixer.scores_pairs:
                by_head = order.rows_of_stack(stack, largest)
                factors = jnp.where(by_head > limit, limit / by_head, 1.0)
                scaled = mixer.scale_logits(config, params[stack][name], factors)
                clipped[stack] = {**clipped[stack], name: scaled}
    return clipped


def check_mixers(config: ModelConfig, frozen: Iterable[Path]) -> None:
    """Check that the logits of all mixers can be scaled.

    Args:
        config: the model.
        frozen: paths of frozen parameters.

    Raises:
        UserError: a mixer of your own has logits and no `scale_logits`, no mixer has logits, or
            parameters of such a mixer are frozen.
    """
    scoring = {name: mixer_class(name) for name in config.mixers}
    scoring = {name: mixer for name, mixer in scoring.items() if mixer.scores_pairs}
    if not scoring:
        raise UserError(
            "optimizer.qk_clip has no effect: no layer of the model has attention logits. Remove it"
        )
    for name, mixer in scoring.items():
        if mixer.scale_logits.__func__ is Mixer.scale_logits.__func__:  # type: ignore[attr-defined]
            raise UserError(
                f'optimizer.qk_clip: mixer "{name}" does not define scale_logits. Define it, '
                "or remove optimizer.qk_clip"
            )
    if constant := sorted(".".join(path) for path in frozen if path[1:2] and path[1] in scoring):
        raise UserError(
            f"optimizer.qk_clip scales weights of attention, and {constant[0]} is frozen. Remove "
            "optimizer.qk_clip, or change optimizer.freeze_patterns"
        )
