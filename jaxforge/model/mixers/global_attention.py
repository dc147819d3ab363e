"""Attention with heads of other sizes than those of the attention in other layers."""

from jaxforge.config.mixers import GLOBAL_ATTENTION
from jaxforge.model.mixer import register_mixer
from jaxforge.model.mixers.attention import Attention


@register_mixer(GLOBAL_ATTENTION)
class GlobalAttention(Attention):
    """Attention with the heads of `model.global_attention`.

    In Gemma 4 it is the mixer of layers without a window: a few wide heads, whose keys may be their
    values, too.
    """

    name = GLOBAL_ATTENTION
    is_wide = True
