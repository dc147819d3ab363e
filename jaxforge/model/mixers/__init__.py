"""Built-in mixers, one file each."""

from jaxforge.config.model import MIXERS
from jaxforge.model.mixer import Mixer
from jaxforge.model.mixers import absent as absent
from jaxforge.model.mixers import attention as attention
from jaxforge.model.mixers import gated_delta_net as gated_delta_net
from jaxforge.model.mixers import latent_attention as latent_attention
from jaxforge.model.mixers import mamba2 as mamba2


def mixer_class(name: str) -> type[Mixer]:
    """Return the mixer that is registered as a name of `model.mixer_pattern`.

    Raises:
        UserError: the name is not registered.
    """
    mixer: type[Mixer] = MIXERS[name]  # type: ignore[assignment]  # a class is its own builder
    return mixer
