"""The torch side: the user's module, filled with a checkpoint's weights, hooked and run."""

import contextlib
import dataclasses
import importlib
import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError
from jaxforge.storage import trust
from torch_compat.lockstep.module_locations import ModuleLocation, modules_by_path
from torch_compat.names.table import strip_wrappers
from torch_compat.names.translation import summarize_names

if TYPE_CHECKING:
    import torch

Arrays = dict[str, np.ndarray]
_IGNORED = -100  # torch.nn.functional.cross_entropy


@dataclasses.dataclass(frozen=True)
class TorchSubject:
    """Objects that the user's factory returns.

    Attributes:
        module: the model.
        optimizer: parameters -> optimizer.
        loss: (logits, labels) -> loss; None is the mean cross-entropy of the labels that count.
        current: a name of the module as its dialect's table has it (`NameMap.current`).
    """

    module: "torch.nn.Module"
    optimizer: Callable[..., Any] | None = None
    loss: Callable[..., Any] | None = None
    current_key: Callable[[str], str] = str

    def named(self, tensors: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        """Tensors of the module by name, without wrappers."""
        return {self.current_key(strip_wrappers(name)): tensor for name, tensor in tensors}

    @property
    def state(self) -> "dict[str, torch.Tensor]":
        """Its state dict."""
        return self.named(self.module.state_dict(keep_vars=True).items())

    @property
    def trained(self) -> "dict[str, torch.nn.Parameter]":
        """Its parameters; those that are tied, once."""
        return self.named(self.module.named_parameters())


@dataclasses.dataclass(frozen=True)
class TorchValues:
    """Values that the torch model computes from a batch; parameters have the module's names."""

    points: Arrays
    loss: float
    grads: Arrays


def build(spec: str, config: JobConfig) -> TorchSubject:
    """Calls MODULE:FACTORY.

    Raises:
        UserError: there is no torch, no such factory, or it makes no module.
    """
    try:
        import torch
    except ImportError as error:
        raise UserError("lockstep runs a PyTorch model: pip install torch") from error
    with _saying(f"--torch {spec}"):
        objects = _called(_factory(spec), spec, config)
    parts = objects if isinstance(objects, tuple) else (objects,)
    is_right = isinstance(parts[0], torch.nn.Module) and len(parts) <= 3
    if not is_right or not all(value_ is None or callable(value_) for value_ in parts[1:]):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise UserError(
            f"--torch {spec} returned {kinds}: return the torch.nn.Module, or (module, "
            "parameters -> optimizer), or (module, that or None, (logits, labels) -> loss)"
        )
    return TorchSubject(*parts)


def fill(
    built: TorchSubject, tensors: Mapping[str, np.ndarray], dtype: str, allowed: set[str]
) -> None:
    """Puts a checkpoint's weights in, by name, all of them.

    Args:
        built: the module, which gets the dtype of the run.
        tensors: name -> values.
        dtype: "float32" or "bfloat16".
        allowed: names that the checkpoint may lack, or have over.

    Raises:
        UserError: names or shapes are not those of the module.
    """
    import torch

    into = built.state
    problems = [f"only in the checkpoint: {n}" for n in tensors if n not in into.keys() | allowed]
    problems += [f"only in the module: {n}" for n in into if n not in tensors.keys() | allowed]
    both = [name for name in into if name in tensors]
    problems += [
        f"{name} is {list(tensors[name].shape)} in the checkpoint and {list(into[name].shape)} in "
        "the module" for name in both if tensors[name].shape != tuple(into[name].shape)
    ]  # fmt: skip
    if problems:
        raise UserError(
            "the module's state_dict is not that of the checkpoint: make the module of the same "
            "config, or load its weights in the factory and say --loaded\n  "
            + "\n  ".join(
                (*problems[:20], *([summarize_names(problems)] if len(problems) > 20 else []))
            )
        )
    cast_module(built, dtype)
    with torch.no_grad():
        for name in both:
            wide = torch.from_numpy(np.array(tensors[name], np.float32))
            into[name].copy_(wide)


def cast_module(built: TorchSubject, dtype: str) -> None:
    """Gives the module a dtype."""
    import torch

    built.module.to(getattr(torch, dtype))


def run(built: TorchSubject, batch: Arrays, locations: Sequence[ModuleLocation]) -> TorchValues:
    """Forward and backward, without dropout.

    Raises:
        UserError: the module does not give logits for tokens.
    """
    import torch

    module, seen = built.module.eval(), dict[str, Any]()
    modules = modules_by_path(module.named_modules())
    handles = [_hook(modules[location.module], location, seen) for location in locations]
    device = next(module.parameters()).device
    tokens, labels = (
        torch.from_numpy(np.asarray(batch[name], np.int64)).to(device)
        for name in ("input_ids", "labels")
    )
    module.zero_grad(set_to_none=True)
    with _saying("the torch module"):
        logits = _logits(module(tokens))
        if built.loss:
            loss = built.loss(logits, labels)
        else:
            flat = logits.flatten(0, 1).float(), labels.flatten()
            loss = torch.nn.functional.cross_entropy(*flat, ignore_index=_IGNORED)
        loss.backward()
    for handle in handles:
        handle.remove()
    grads = {
        name: _array(torch.zeros_like(p) if p.grad is None else p.grad)
        for name, p in built.trained.items()
    }
    return TorchValues({**seen, "logits": _array(logits)}, float(loss.detach().double()), grads)


def compute_two_updates(
    built: TorchSubject, grads: Mapping[str, np.ndarray]
) -> tuple[Arrays, Arrays]:
    """Updates by given gradients and by -1/2 of them, in float64, which hides nothing of a rule."""
    import torch

    assert built.optimizer is not None
    built.module.double()
    named = built.trained
    optimizer = built.optimizer(list(named.values()))
    objects = []
    for scale in (1.0, -0.5):
        before = {name: p.detach().clone() for name, p in named.items()}
        for name, p in named.items():
            given = torch.from_numpy(np.asarray(grads[name], np.float64) * scale)
            p.grad = given.to(p.device)
        optimizer.step()
        objects.append({n: (p.detach() - before[n]).cpu().numpy() for n, p in named.items()})
    return objects[0], objects[1]


def values(built: TorchSubject) -> Arrays:
    """All of its state dict that is floating, as float32."""
    return {name: _array(t) for name, t in built.state.items() if t.is_floating_point()}


def padding(built: TorchSubject) -> set[int]:
    """Tokens whose row of the embedding gets no gradient (`padding_idx`)."""
    indices = (getattr(module, "padding_idx", None) for module in built.module.modules())
    return {int(value_) for value_ in indices if value_ is not None}


@contextlib.contextmanager
def _saying(what: str) -> Iterator[None]:
    """Report exceptions of the user's code with their traceback; exit code 1 is taken."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        traceback.print_exc()
        raise UserError(f"{what} failed: {type(error).__name__}: {error}") from error


def _factory(spec: str) -> Callable[..., Any]:
    name, _, attribute = spec.partition(":")
    if not name or not attribute:
        raise UserError(f"--torch {spec}: name MODULE:FACTORY, such as mymodel:build")
    try:
        trust.use_working_directory()
        module = importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"--torch {spec}: {name} cannot be imported ({error}): it must be on PYTHONPATH, or in "
            "the directory where this runs"
        ) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        there = [
            n for n, value_ in vars(module).items() if callable(value_) and not n.startswith("_")
        ]
        raise UserError(
            f"--torch {spec}: {name} has no function {attribute}; it has {summarize_names(there)}"
        )
    return factory


def _called(factory: Callable[..., Any], spec: str, config: JobConfig) -> Any:  # noqa: ANN401
    wanted = [
        p for p in inspect.signature(factory).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]  # fmt: skip
    if len(wanted) > 1:
        names = ", ".join(p.name for p in wanted)
        raise UserError(f"--torch {spec} wants {names}: it must take nothing, or the config")
    return factory(config) if wanted else factory()


def _hook(module: Any, location: ModuleLocation, seen: dict[str, Any]) -> Any:  # noqa: ANN401 (torch's)
    def note(value: Any) -> None:  # noqa: ANN401
        if (tensor := _first(value)) is not None and location.point not in seen:
            seen[location.point] = _array(tensor) * location.factor

    def before(_: Any, args: tuple, kwargs: dict) -> None:  # noqa: ANN401
        note((*args, *kwargs.values()))

    def after(_: Any, args: tuple, output: Any) -> None:  # noqa: ANN401
        note(output)

    if location.is_input:
        return module.register_forward_pre_hook(before, with_kwargs=True)
    return module.register_forward_hook(after)


def _first(value: Any) -> Any:  # noqa: ANN401 (what a module takes or gives)
    """The first tensor of floats."""
    if isinstance(value, tuple | list):
        return next((indices for value_ in value if (indices := _first(value_)) is not None), None)
    is_tensor = hasattr(value, "is_floating_point") and value.is_floating_point()
    return value if is_tensor else None


def _logits(output: Any) -> Any:  # noqa: ANN401
    logits = getattr(output, "logits", None)
    logits = _first(output) if logits is None else logits
    if logits is None or logits.ndim != 3:
        raise UserError(
            "the module gave no logits [batch, tokens, vocabulary] for module(tokens): wrap it in "
            "one that does, under the same names"
        )
    return logits


def _array(tensor: Any) -> np.ndarray:  # noqa: ANN401
    return tensor.detach().float().cpu().numpy().copy()
