"""Check that a saved state has the arrays that a config asks for."""

from collections.abc import Iterable
from pathlib import Path

from flax.traverse_util import flatten_dict
from jaxtyping import PyTree

from jaxforge.checkpoint import layout
from jaxforge.checkpoint.paths import is_precision_specific
from jaxforge.config.fine_tuning import is_adapter
from jaxforge.config.model import MTP
from jaxforge.errors import UserError


def check_model(wanted: PyTree, saved: PyTree, path: Path) -> None:
    """Compare the shapes of the model's arrays.

    Args:
        wanted: the tree that the config asks for, at least its model's part.
        saved: the same part of the saved tree.
        path: the checkpoint, for the message.

    Raises:
        UserError: an array differs; the message names the first one.
    """
    actual_shapes, shapes = (_shapes(layout.variables(tree)) for tree in (saved, wanted))
    _check_adapters(shapes, actual_shapes, path)
    stored, depth = _modules(actual_shapes), _modules(shapes)
    if stored != depth:
        raise UserError(
            f"{path} does not fit [model]: model.mtp_depth = {depth}, but the checkpoint has "
            f"{stored} modules of multi-token prediction: set model.mtp_depth = {stored}"
        )
    spare = {name for name in actual_shapes.keys() - shapes.keys() if is_precision_specific(name)}
    for name in sorted((shapes.keys() | actual_shapes.keys()) - spare):
        expected, actual = shapes.get(name, "absent"), actual_shapes.get(name, "absent")
        if expected != actual:
            raise UserError(
                f"{path} does not fit [model]: {name} is {actual} in the checkpoint "
                f"and {expected} in the config; change [model] or checkpoint.dir"
            )


def _check_adapters(wanted: Iterable[str], saved: Iterable[str], path: Path) -> None:
    """Check that both or neither of two models are adapters without their base."""
    has_adapters = [any(map(is_adapter, names)) for names in (wanted, saved)]
    if has_adapters == [False, True]:
        raise UserError(
            f"{path} holds adapters without the model they belong to. Set [lora] as in its run, or "
            "merge them into a new run: jaxforge convert RUN NEW --to jaxforge"
        )
    if has_adapters == [True, False]:
        raise UserError(
            f"{path} holds a whole model, and lora.rank asks for adapters. Set checkpoint.dir to a "
            "new directory, and checkpoint.load_path to this model"
        )


def check_adapters(wanted: PyTree, saved: PyTree, source: str) -> None:
    """Compare the shapes of adapters.

    Args:
        wanted: the adapters that `[lora]` asks for.
        saved: those of the source.
        source: name of the source, for the message.

    Raises:
        UserError: an adapter differs; the message names the first one.
    """
    expected, actual = _shapes(wanted), _shapes(saved)
    for name in sorted(expected.keys() | actual.keys()):
        ours, theirs = expected.get(name, "absent"), actual.get(name, "absent")
        if ours != theirs:
            raise UserError(
                f"{source} does not fit [lora]: {name} is {theirs} in the adapter and {ours} in "
                "the config. Set lora.rank and lora.targets as the adapter was trained"
            )


def check_optimizer(wanted: PyTree, saved: PyTree, path: Path) -> None:
    """Compare the shapes of the optimizer's state.

    Args:
        wanted: the fields that the config asks for.
        saved: the saved fields.
        path: the checkpoint, for the message.

    Raises:
        UserError: the checkpoint has the state of another optimizer.
    """
    saved, wanted = (layout.drop_precision_specific(fields) for fields in (saved, wanted))
    if _shapes(saved) != _shapes(wanted):
        ours, theirs = sorted(wanted), sorted(saved)
        raise UserError(
            f"{path} has the state of another optimizer than "
            f"{layout.differing_key(ours, theirs)} asks for: it holds {', '.join(theirs)}, "
            f"where {', '.join(ours)} are expected; bring it back, or start a new run from it "
            'with checkpoint.load_path and checkpoint.exclude_from_loading = ["optimizer"]'
        )


def _modules(names: Iterable[str]) -> int:
    """Return the number of modules of multi-token prediction with these parameters."""
    paths = (name.split(".") for name in names)
    return len({path[1] for path in paths if path[0] == MTP})


def _shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
    return {name: tuple(leaf.shape) for name, leaf in flatten_dict(tree, sep=".").items()}
