"""The user's torch module: subject, filled with a checkpoint's weights, hooked and run."""

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
from torch_compat.lockstep.batches import Arrays
from torch_compat.lockstep.module_locations import ModuleLocation, modules_by_path
from torch_compat.names.table import strip_wrappers
from torch_compat.names.translation import shorten_problems, summarize_names

if TYPE_CHECKING:
    import torch

_IGNORED = -100  # default of torch.nn.functional.cross_entropy


@dataclasses.dataclass(frozen=True)
class TorchSubject:
    """Objects that the user's factory returns.

    Attributes:
        module: the model.
        optimizer: parameters -> optimizer.
        loss: (logits, labels) -> loss; None: the mean cross-entropy of labels that are not -100.
        current_key: function that renames outdated keys (`NameMap.current_key`).
    """

    module: "torch.nn.Module"
    optimizer: Callable[..., Any] | None = None
    loss: Callable[..., Any] | None = None
    current_key: Callable[[str], str] = str

    def named(self, tensors: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        """Return tensors by their names in the dialect, without wrappers."""
        return {self.current_key(strip_wrappers(name)): tensor for name, tensor in tensors}

    @property
    def state(self) -> "dict[str, torch.Tensor]":
        """State dict of the module."""
        return self.named(self.module.state_dict(keep_vars=True).items())

    @property
    def trained(self) -> "dict[str, torch.nn.Parameter]":
        """Parameters of the module; tied parameters appear once."""
        return self.named(self.module.named_parameters())


@dataclasses.dataclass(frozen=True)
class TorchValues:
    """Values that the torch model computes from a batch; gradients have the module's names."""

    points: Arrays
    loss: float
    grads: Arrays


def build(spec: str, config: JobConfig) -> TorchSubject:
    """Import MODULE and call FACTORY.

    Raises:
        UserError: torch is not installed, the factory does not exist, or it returns no module.
    """
    try:
        import torch
    except ImportError as error:
        raise UserError("lockstep runs a PyTorch model: pip install torch") from error
    with _user_code(f"--torch {spec}"):
        objects = _call(_load_factory(spec), spec, config)
    parts = objects if isinstance(objects, tuple) else (objects,)
    is_valid = isinstance(parts[0], torch.nn.Module) and len(parts) <= 3
    if not is_valid or not all(part is None or callable(part) for part in parts[1:]):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise UserError(
            f"--torch {spec} returned {kinds}: it must return the torch.nn.Module, or "
            "(module, parameters -> optimizer), or (module, that or None, (logits, labels) -> loss)"
        )
    return TorchSubject(*parts)


def fill(
    subject: TorchSubject, tensors: Mapping[str, np.ndarray], dtype: str, allowed: set[str]
) -> None:
    """Copy a checkpoint's weights into the module by name.

    Args:
        subject: the module, which is cast to `dtype`.
        tensors: name -> values.
        dtype: "float32" or "bfloat16".
        allowed: names that the module or the checkpoint may have alone.

    Raises:
        UserError: names or shapes do not match the module.
    """
    import torch

    state = subject.state
    problems = [f"only in the checkpoint: {n}" for n in tensors if n not in state.keys() | allowed]
    problems += [f"only in the module: {n}" for n in state if n not in tensors.keys() | allowed]
    both = [name for name in state if name in tensors]
    problems += [
        f"{name} is {list(tensors[name].shape)} in the checkpoint and {list(state[name].shape)} "
        "in the module" for name in both if tensors[name].shape != tuple(state[name].shape)
    ]  # fmt: skip
    if problems:
        raise UserError(
            "the module's state_dict does not match the checkpoint. Build the module with the same "
            "config, or load its weights in the factory and add --loaded\n  "
            + "\n  ".join(shorten_problems(problems))
        )
    cast_module(subject, dtype)
    with torch.no_grad():
        for name in both:
            # torch cannot read NumPy's bfloat16, and float32 holds its values exactly.
            wide = torch.from_numpy(np.array(tensors[name], np.float32))
            state[name].copy_(wide)


def cast_module(subject: TorchSubject, dtype: str) -> None:
    """Cast the module to a dtype."""
    import torch

    subject.module.to(getattr(torch, dtype))


def run(subject: TorchSubject, batch: Arrays, locations: Sequence[ModuleLocation]) -> TorchValues:
    """Run the forward and backward pass without dropout, and capture values at the locations.

    Raises:
        UserError: the module returns no logits.
    """
    import torch

    module, points = subject.module.eval(), dict[str, Any]()
    modules = modules_by_path(module.named_modules())
    handles = [_hook(modules[location.module], location, points) for location in locations]
    device = next(module.parameters()).device
    tokens, labels = (
        torch.from_numpy(np.asarray(batch[name], np.int64)).to(device)
        for name in ("input_ids", "labels")
    )
    # The factory may have left gradients, to which the backward pass would add.
    module.zero_grad(set_to_none=True)
    with _user_code("the torch module"):
        logits = _logits(module(tokens))
        if subject.loss:
            loss = subject.loss(logits, labels)
        else:
            flat = logits.flatten(0, 1).float(), labels.flatten()
            loss = torch.nn.functional.cross_entropy(*flat, ignore_index=_IGNORED)
        loss.backward()
    for handle in handles:
        handle.remove()
    grads = {
        name: _array(torch.zeros_like(p) if p.grad is None else p.grad)
        for name, p in subject.trained.items()
    }
    return TorchValues({**points, "logits": _array(logits)}, float(loss.detach().double()), grads)


def compute_two_updates(
    subject: TorchSubject, grads: Mapping[str, np.ndarray]
) -> tuple[Arrays, Arrays]:
    """Return the updates for gradients and then for -1/2 of them, in float64 to avoid rounding."""
    import torch

    assert subject.optimizer is not None
    subject.module.double()
    named = subject.trained
    optimizer = subject.optimizer(list(named.values()))
    updates = []
    # The opposite sign: running means then differ from the gradient, which reveals their decay
    # rates.
    for scale in (1.0, -0.5):
        before = {name: p.detach().clone() for name, p in named.items()}
        for name, p in named.items():
            grad = torch.from_numpy(np.asarray(grads[name], np.float64) * scale)
            p.grad = grad.to(p.device)
        optimizer.step()
        updates.append({n: (p.detach() - before[n]).cpu().numpy() for n, p in named.items()})
    return updates[0], updates[1]


def state_values(subject: TorchSubject) -> Arrays:
    """Return the floating-point tensors of the state dict, as float32."""
    return {name: _array(t) for name, t in subject.state.items() if t.is_floating_point()}


def padding(subject: TorchSubject) -> set[int]:
    """Return the tokens whose row of the embedding gets no gradient (`padding_idx`)."""
    indices = (getattr(module, "padding_idx", None) for module in subject.module.modules())
    return {int(index) for index in indices if index is not None}


@contextlib.contextmanager
def _user_code(what: str) -> Iterator[None]:
    """Report exceptions of the user's code with their traceback, and not as exit code 1.

    Exit code 1 means that the models differ.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        traceback.print_exc()
        raise UserError(f"{what} failed: {type(error).__name__}: {error}") from error


def _load_factory(spec: str) -> Callable[..., Any]:
    name, _, attribute = spec.partition(":")
    if not name or not attribute:
        raise UserError(f"--torch {spec}: must be MODULE:FACTORY, such as mymodel:build")
    try:
        trust.use_working_directory()
        module = importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"--torch {spec}: {name} cannot be imported ({error}). It must be on PYTHONPATH or in "
            "the working directory"
        ) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        names = [n for n, x in vars(module).items() if callable(x) and not n.startswith("_")]
        functions = summarize_names(names)
        raise UserError(f"--torch {spec}: {name} has no function {attribute}; it has {functions}")
    return factory


def _call(factory: Callable[..., Any], spec: str, config: JobConfig) -> Any:  # noqa: ANN401
    required = [
        p for p in inspect.signature(factory).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]  # fmt: skip
    if len(required) > 1:
        names = ", ".join(p.name for p in required)
        raise UserError(f"--torch {spec} requires {names}: it may only require the config")
    return factory(config) if required else factory()


def _hook(module: Any, location: ModuleLocation, points: dict[str, Any]) -> Any:  # noqa: ANN401 (torch's)
    def record(value: Any) -> None:  # noqa: ANN401
        # A module may run more than once, for example under activation checkpointing.
        if (tensor := _first(value)) is not None and location.point not in points:
            points[location.point] = _array(tensor) * location.factor

    def before(_: Any, args: tuple, kwargs: dict) -> None:  # noqa: ANN401
        record((*args, *kwargs.values()))

    def after(_: Any, args: tuple, output: Any) -> None:  # noqa: ANN401
        record(output)

    if location.is_input:
        return module.register_forward_pre_hook(before, with_kwargs=True)
    return module.register_forward_hook(after)


def _first(value: Any) -> Any:  # noqa: ANN401 (what a module takes or gives)
    """Return the first floating-point tensor, or None."""
    if isinstance(value, tuple | list):
        return next((first for x in value if (first := _first(x)) is not None), None)
    is_tensor = hasattr(value, "is_floating_point") and value.is_floating_point()
    return value if is_tensor else None


def _logits(output: Any) -> Any:  # noqa: ANN401
    logits = getattr(output, "logits", None)
    logits = _first(output) if logits is None else logits
    if logits is None or logits.ndim != 3:
        raise UserError(
            "module(tokens) returned no logits [batch, tokens, vocabulary]. Wrap it in a module "
            "that does, with the same names"
        )
    return logits


def _array(tensor: Any) -> np.ndarray:  # noqa: ANN401
    return tensor.detach().float().cpu().numpy().copy()
