"""A dialect's tensors by our names: every key and parameter exactly once, or what is wrong."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from torch_compat.formats.lazy import LazyTensor, equal
from torch_compat.names.table import EMBEDDING, HEAD, NameMap, differences

_SHOWN = 20
_KINDS = ("missing: ", "left over: ")
"""What keeps many problems from being alike: names of ours, and names of the file."""
_RESIZE = "--resize-vocab cuts padding off, or adds rows of zeros"
_FLOATS = ("float64", "float32", "float16", "bfloat16")


class Translation(NamedTuple):
    """Parameters of a translation.

    Attributes:
        dialect: whose names the tensors have.
        model: the model they are of.
        resize_vocab: cut rows of a padded vocabulary off, or add rows of zeros.
        where: the checkpoint, for messages.
    """

    dialect: NameMap
    model: ModelConfig
    resize_vocab: bool
    where: str


def translate(
    theirs: Mapping[str, LazyTensor], shapes: Mapping[str, tuple[int, ...]], by: Translation
) -> dict[str, LazyTensor]:
    """Our names for all tensors of a dialect.

    Args:
        theirs: key -> tensor, prefixes taken off.
        shapes: our names -> shapes, all that there must be.
        by: what to go by.

    Raises:
        UserError: tensors are missing, left over, or of another shape; all of them are listed.
    """
    translated = by.dialect.to_jaxforge(theirs, shapes, by.model)
    if by.resize_vocab:
        translated = {
            name: tensor.resized(by.model.vocab_size)
            if name in (EMBEDDING, HEAD) and tensor.shape
            else tensor
            for name, tensor in translated.items()
        }
    used = {by.dialect.key_for(name) for name in translated}
    left = [key for key in theirs if key not in used and not by.dialect.ignores(key)]
    if by.model.tie_embeddings and (head := by.dialect.key_for(HEAD)) in left:
        left.remove(head)
        if EMBEDDING in translated and not equal(
            theirs[by.dialect.key_for(EMBEDDING)], theirs[head]
        ):
            raise UserError(
                f"{by.where}: model.tie_embeddings is true, but the output head differs from the "
                "embedding; set it to false"
            )
    problems = list(differences(shapes, translated, left))
    problems += [
        f"{name} is {tensor.dtype.name}, which no weight can be without scales: quantized, or "
        "not the model's"
        for name, tensor in translated.items()
        if tensor.dtype.name not in _FLOATS
    ]
    if problems:
        listed = "\n  ".join(shorten_problems(problems) + _advice(translated, by.model))
        raise UserError(f"{by.where} does not fit [model]:\n  {listed}")
    return {name: translated[name] for name in shapes}


def summarize_names(names: Iterable[str]) -> str:
    """A few names and how many more there are."""
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def shorten_problems(problems: list[str]) -> list[str]:
    """Return the first problems of each kind, and how many more there are."""
    if len(problems) <= _SHOWN:
        return problems
    kinds: dict[str, list[str]] = {}
    for problem in problems:
        kind = next((kind for kind in _KINDS if problem.startswith(kind)), "")
        kinds.setdefault(kind, []).append(problem)
    most = _SHOWN // len(kinds)
    lines = []
    for alike in kinds.values():
        more = len(alike) - most
        lines += [*alike[:most], *([f"... and {more} more"] if more > 0 else [])]
    return lines


def _advice(translated: Mapping[str, LazyTensor], model: ModelConfig) -> list[str]:
    router = next((name for name in translated if name.endswith(".router.gate.weight")), "")
    counts = {
        EMBEDDING: ("the vocabulary has", "vocab_size", _RESIZE),
        router: ("the router has", "num_experts", "that is how many experts there are"),
    }
    advice = []
    for name, (what, key, how) in counts.items():
        rows, wanted = translated[name].shape[:1] if name in translated else (), getattr(model, key)
        if rows not in ((), (wanted,)):
            advice.append(f"{what} {rows[0]} rows there and model.{key} is {wanted}: {how}")
    return advice
