"""Pre-training of decoder language models in JAX, with the semantics of PyTorch training loops."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from jaxforge.aux_outputs import AuxOutputs as AuxOutputs
    from jaxforge.config.reading.load import load_config as load_config
    from jaxforge.data.sources import register_dataset as register_dataset
    from jaxforge.inference.run import Run as Run
    from jaxforge.model.mixer import Mixer as Mixer
    from jaxforge.model.mixer import register_mixer as register_mixer
    from jaxforge.model.transformer import register_model as register_model
    from jaxforge.optim.optimizer import register_optimizer as register_optimizer
    from jaxforge.optim.schedule import register_scheduler as register_scheduler
    from jaxforge.program import Program as Program
    from jaxforge.step.losses import register_loss as register_loss
    from jaxforge.training.callbacks.callback import Callback as Callback
    from jaxforge.training.eval_functions import register_eval_function as register_eval_function
    from jaxforge.training.launch import fit as fit

__version__ = "0.1.0"  # pyproject.toml reads it here

_PUBLIC = {
    "AuxOutputs": "jaxforge.aux_outputs",
    "Callback": "jaxforge.training.callbacks.callback",
    "Mixer": "jaxforge.model.mixer",
    "Program": "jaxforge.program",
    "Run": "jaxforge.inference.run",
    "fit": "jaxforge.training.launch",
    "load_config": "jaxforge.config.reading.load",
    "register_dataset": "jaxforge.data.sources",
    "register_eval_function": "jaxforge.training.eval_functions",
    "register_loss": "jaxforge.step.losses",
    "register_mixer": "jaxforge.model.mixer",
    "register_model": "jaxforge.model.transformer",
    "register_optimizer": "jaxforge.optim.optimizer",
    "register_scheduler": "jaxforge.optim.schedule",
}
"""The module of each public name. Modules are imported on first use, since JAX takes seconds."""
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    if name in _PUBLIC:
        from importlib import import_module

        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'jaxforge' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names."""
    return [*__all__, "__version__"]
