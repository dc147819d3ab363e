"""Translation of a checkpoint's tensors to jaxforge's names.

Every key and every parameter is used exactly once; all problems are reported together.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jaxforge.cli.suggestions import listed
from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from torch_compat.formats.lazy import LazyTensor, equal
from torch_compat.names.table import EMBEDDING, HEAD, NameMap, differences

_MAX_SHOWN = 20
_KINDS = ("missing: ", "left over: ")
"""Prefixes by which problems are grouped before they are shortened."""
_RESIZE = "--resize-vocab truncates padding, or adds rows of zeros"
_FLOATS = ("float64", "float32", "float16", "bfloat16")


class Translation(NamedTuple):
    """Parameters of a translation.

    Attributes:
        dialect: the name map of the checkpoint's keys.
        model: the model config.
        resize_vocab: whether to truncate a padded vocabulary, or pad it with zeros.
        where: the checkpoint, for messages.
        is_compared: whether tensors may be missing, unused or of another shape. Unused tensors are
            then returned by their keys.
    """

    dialect: NameMap
    model: ModelConfig
    resize_vocab: bool
    where: str
    is_compared: bool = False


def translate(
    tensors: Mapping[str, LazyTensor], shapes: Mapping[str, tuple[int, ...]], by: Translation
) -> dict[str, LazyTensor]:
    """Return all tensors of a checkpoint by jaxforge's names.

    Args:
        tensors: key of the dialect, without prefixes -> tensor.
        shapes: jaxforge's name -> shape, for every tensor of the model.
        by: the parameters of the translation.

    Raises:
        UserError: tensors are missing, unused, or have other shapes; the message lists them.
    """
    translated = by.dialect.to_jaxforge(tensors, shapes, by.model)
    # Before the shapes are compared, where a padded vocabulary would be an error.
    if by.resize_vocab:
        translated = {
            name: tensor.resized(by.model.vocab_size)
            if name in (EMBEDDING, HEAD) and tensor.shape
            else tensor
            for name, tensor in translated.items()
        }
    # Whatever is neither used nor ignored is an error: a weight must not vanish.
    used = {by.dialect.key_for(name) for name in translated}
    unused = [key for key in tensors if key not in used and not by.dialect.ignores(key)]
    if by.model.tie_embeddings and (head := by.dialect.key_for(HEAD)) in unused:
        unused.remove(head)
        if EMBEDDING in translated and not equal(
            tensors[by.dialect.key_for(EMBEDDING)], tensors[head]
        ):
            raise UserError(
                f"{by.where}: model.tie_embeddings is true, but the output head differs from the "
                "embedding. Set it to false"
            )
    problems = list(differences(shapes, translated, unused))
    problems += [
        f"{name} is {tensor.dtype.name}, which no weight can be without scales: it is "
        "quantized, or not a tensor of the model"
        for name, tensor in translated.items()
        if tensor.dtype.name not in _FLOATS
    ]
    if problems and not by.is_compared:
        listed = "\n  ".join(shorten_problems(problems) + _advice(translated, by.model))
        raise UserError(f"{by.where} does not fit [model]:\n  {listed}")
    # The order of `shapes` is that of a checkpoint.
    ordered = {name: translated[name] for name in shapes if name in translated}
    return ordered | {key: tensors[key] for key in unused if by.is_compared}


def summarize_names(names: Iterable[str]) -> str:
    """Return the first three names and the number of further ones."""
    return listed(names, most=3)


def shorten_problems(problems: list[str]) -> list[str]:
    """Return the first problems of each kind and the number of others."""
    if len(problems) <= _MAX_SHOWN:
        return problems
    kinds: dict[str, list[str]] = {}
    for problem in problems:
        kind = next((kind for kind in _KINDS if problem.startswith(kind)), "")
        kinds.setdefault(kind, []).append(problem)
    # Each kind gets a share, so that no long list hides another kind.
    most = _MAX_SHOWN // len(kinds)
    lines = []
    for group in kinds.values():
        more = len(group) - most
        lines += [*group[:most], *([f"... and {more} more"] if more > 0 else [])]
    return lines


def _advice(translated: Mapping[str, LazyTensor], model: ModelConfig) -> list[str]:
    router = next((name for name in translated if name.endswith(".router.gate.weight")), "")
    counts = {
        EMBEDDING: ("the vocabulary has", "vocab_size", _RESIZE),
        router: ("the router has", "num_experts", "set it to the number of experts"),
    }
    advice = []
    for name, (what, key, how) in counts.items():
        rows, value = (
            translated[name].shape[:1] if name in translated else (),
            getattr(model, key),
        )
        if rows not in ((), (value,)):
            found_rows = f"{what} {rows[0]} rows in the checkpoint"
            advice.append(f"{found_rows} and model.{key} is {value}: {how}")
    return advice
