"""Optimizer state of Megatron-Core in flat buffers (`dp_reshardable`).

Each model-parallel rank (`dp_group_idx`) stores the state of its parameters in buckets, without
names. The layout follows from Megatron-Core's `_ParamAndGradBuffer`: parameters are in the reverse
order of their registration, and each starts at a multiple of 64 elements.

    bucket_idx_0    output_layer | final_layernorm, padding | linear_fc2 of the last layer | ...
    bucket_idx_1    ... | linear_proj of the first layer | word_embeddings

The order depends on the layer spec, and the sizes depend on tensor and pipeline parallelism. None
of them is stored with the buffers, so `read` tries all combinations. A combination is accepted if
the parameters fill every bucket exactly and the stored float32 copies round to the weights.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from torch_compat.formats.dcp_reader import Dcp
from torch_compat.formats.flattened import region
from torch_compat.formats.lazy import LazyTensor, full_index, interleave_rows
from torch_compat.names.megatron import WORD_EMBEDDINGS, is_gated, join_gates

Bucket = Mapping[str, LazyTensor]
"""Field -> one-dimensional tensor."""

FLAT = re.compile(r"(chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.(gbuf_|param_state)")
"""Beginning of the keys of flat buffers."""
_BUCKET = re.compile(
    r"(?:chained_0\.)?optimizer\.distributed\.dp_group_idx_([0-9]{1,9})"
    r"\.gbuf_idx_([0-9]{1,9})\.dtype_\(.+\)\.bucket_idx_([0-9]{1,9})\.(\w+)"
)
_MASTER = "param"
_ALIGNMENT = 64  # elements
_COMPARED_ROWS = 16  # of each matrix
_COLUMN_PARALLEL = re.compile(
    r"(embedding\.word_embeddings|output_layer|.*\.linear_qkv|.*\.linear_fc1)\.(weight|bias)"
)
_ROW_PARALLEL = re.compile(r".*\.(linear_proj|linear_fc2)\.weight")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.experts\.(\d+)\.linear_fc([12])\..+")
_INPUT_NORM = "self_attention.linear_qkv.layer_norm_"
_IN_LAYER = (
    "self_attention.linear_proj.", _INPUT_NORM, "self_attention.linear_qkv.",
    "self_attention.q_layernorm.", "self_attention.k_layernorm.", "mlp.linear_fc1.layer_norm_",
    "mlp.router.", "mlp.linear_fc1.", "mlp.linear_fc2.", "mlp.experts.",
    "mlp.shared_experts.gate_weight", "mlp.shared_experts.linear_fc1.",
    "mlp.shared_experts.linear_fc2.",
)  # fmt: skip
"""Order in which TransformerEngine's layer spec registers the modules of a layer."""


class UnmappedBuffersError(ValueError):
    """The buffers have a layout that cannot be derived; the message is the reason."""


class _Spec(NamedTuple):
    """Properties of a job that determine the layout of its buffers.

    Attributes:
        tensor_ranks: size of tensor parallelism.
        stages: number of pipeline stages.
        is_local: whether layers are built without TransformerEngine, so that the input norm is a
            module before attention.
        is_grouped: whether one module holds the first matrices of all experts, and another one
            the second matrices.
    """

    tensor_ranks: int
    stages: int
    is_local: bool
    is_grouped: bool


def read(dcp: Dcp, weights: Mapping[str, LazyTensor]) -> dict[str, dict[str, LazyTensor]]:
    """Return optimizer state by field and parameter.

    Args:
        dcp: the checkpoint.
        weights: parameter by layer and expert -> weight (`megatron.unstack`).

    Raises:
        UnmappedBuffersError: the layout of the buffers is unknown.
        UserError: a file is damaged.
    """
    ranks = _buckets(dcp)
    # The bias of a router is a module's buffer and not a parameter.
    weights = {k: t for k, t in join_gates(weights) if not k.endswith(".expert_bias")}
    differing: list[str] = []
    for spec in _specs(len(ranks), weights):
        locations = _locate(ranks, weights, spec)
        if locations is None:
            continue
        fields = {
            field: {
                name: _merge(name, weights, [region(bucket[field], start, shape)
                                             for bucket, start, shape in shard_locations])
                for name, shard_locations in locations.items()
            }
            for field in ranks[0][0]
        }  # fmt: skip
        # Sizes alone may fit several orders, for example of equal matrices. Values of the float32
        # copies tell whether each parameter got its own range.
        names = [n for n, copy in fields[_MASTER].items() if not _agrees(weights[n], copy)]
        if not names:
            return fields
        # The message names a parameter of the combination that differs least.
        differing = min(differing or names, names, key=len)
    if differing:
        raise UnmappedBuffersError(f"their float32 copies differ from {differing[0]}")
    raise UnmappedBuffersError("their sizes fit no order of this model's parameters")


def _buckets(dcp: Dcp) -> list[list[Bucket]]:
    """Return the buckets of each model-parallel rank."""
    by_rank: dict[int, dict[int, dict[str, LazyTensor]]] = {}
    for key, tensor in dcp.tensors.items():
        if not FLAT.match(key):
            continue
        match = _BUCKET.fullmatch(key)
        if match is None:
            raise UnmappedBuffersError("experts have separate buffers, or the layout is an old one")
        rank, buffer, bucket = int(match[1]), int(match[2]), int(match[3])
        if buffer:
            raise UnmappedBuffersError(
                "each rank has several buffers, as with virtual pipeline stages or FP8 weights"
            )
        by_rank.setdefault(rank, {}).setdefault(bucket, {})[match[4]] = tensor
    ranks: list[list[Bucket]] = [
        [of_rank[i] for i in sorted(of_rank)] for _, of_rank in sorted(by_rank.items())
    ]
    buckets = list(itertools.chain(*ranks))
    shapes = [{tensor.shape for tensor in bucket.values()} for bucket in buckets]
    fields = {tuple(sorted(bucket)) for bucket in buckets}
    # A missing bucket would shift the range of every later parameter.
    is_numbered = sorted(by_rank) == list(range(len(by_rank))) and all(
        sorted(of_rank) == list(range(len(of_rank))) for of_rank in by_rank.values()
    )
    if not ranks or not is_numbered or any(len(each) != 1 for each in shapes):
        raise UnmappedBuffersError("buckets are missing")
    if any(len(shape) != 1 for shape in itertools.chain(*shapes)):
        raise UnmappedBuffersError("they are not one-dimensional")
    if len(fields) != 1 or _MASTER not in ranks[0][0]:
        raise UnmappedBuffersError("they lack float32 copies of the weights")
    return ranks


def _specs(ranks: int, weights: Mapping[str, LazyTensor]) -> Iterator[_Spec]:
    has_experts = any(".mlp.experts." in name for name in weights)
    for tensor_ranks in range(1, ranks + 1):
        if ranks % tensor_ranks == 0:
            for is_local, is_grouped in itertools.product(
                (False, True), (False, True) if has_experts else (False,)
            ):
                yield _Spec(tensor_ranks, ranks // tensor_ranks, is_local, is_grouped)


_Location = tuple[Bucket, int, tuple[int, ...]]
"""Bucket, first element in it, and shape of a tensor rank's part of a parameter."""


def _locate(
    ranks: Sequence[Sequence[Bucket]], weights: Mapping[str, LazyTensor], spec: _Spec
) -> dict[str, list[_Location]] | None:
    """Return the location of each parameter on each tensor rank; None if the sizes differ."""
    locations: dict[str, list[_Location]] = {}
    orders = _orders(weights, spec)
    if orders is None:
        return None
    for stage, names in enumerate(orders):
        shapes = [_shard_shape(name, weights, spec.tensor_ranks) for name in names]
        for rank in range(spec.tensor_ranks):
            # Tensor ranks of a stage have consecutive numbers.
            buckets = ranks[stage * spec.tensor_ranks + rank]
            starts = _fill([bucket[_MASTER].shape[0] for bucket in buckets], shapes)
            if starts is None:
                return None
            for name, (bucket, start), shape in zip(names, starts, shapes, strict=True):
                shard_locations = locations.setdefault(name, [])
                if len(shard_locations) == rank:  # the last stage repeats a tied embedding
                    assert shape is not None
                    shard_locations.append((buckets[bucket], start, shape))
    return locations


def _fill(
    lengths: Sequence[int], shapes: Sequence[tuple[int, ...] | None]
) -> list[tuple[int, int]] | None:
    """Return bucket and first element of each parameter; None if the buckets are not filled.

    Args:
        lengths: elements of each bucket.
        shapes: shapes in the order of registration, which the buckets reverse.
    """
    starts: list[tuple[int, int]] = []
    bucket, end = 0, 0
    for shape in reversed(shapes):
        if shape is None:
            return None
        # A bucket ends with or without padding: both positions count as its end.
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        if lengths[bucket] in (start, end):
            bucket, start = bucket + 1, 0
        end = start + math.prod(shape)
        if bucket == len(lengths) or end > lengths[bucket]:
            return None
        starts.append((bucket, start))
    is_full = bucket == len(lengths) - 1 and end == lengths[bucket]
    return starts[::-1] if is_full else None


def _orders(weights: Mapping[str, LazyTensor], spec: _Spec) -> list[list[str]] | None:
    """Return the parameters of each stage in the order of registration; None for unequal stages."""
    layers: dict[int, list[str]] = {}
    for name in weights:
        if match := _LAYER.fullmatch(name):
            layers.setdefault(int(match[1]), []).append(name)
    if sorted(layers) != list(range(len(layers))) or len(layers) % spec.stages:
        return None
    per_stage = len(layers) // spec.stages
    orders = [
        [
            name
            for i in range(stage * per_stage, (stage + 1) * per_stage)
            for name in sorted(layers[i], key=lambda name: _position(name, spec))
        ]
        for stage in range(spec.stages)
    ]
    # A tied head is a copy of the embedding on the last stage. On a single stage it is the same
    # tensor.
    first = [WORD_EMBEDDINGS, "embedding.position_embeddings.weight"]
    head = "output_layer.weight"
    if head not in weights and spec.stages > 1:
        head = WORD_EMBEDDINGS
    last = ["decoder.final_layernorm.weight", "decoder.final_layernorm.bias"]
    if head != WORD_EMBEDDINGS or spec.stages > 1:
        last.append(head)
    orders[0] = [name for name in first if name in weights] + orders[0]
    orders[-1] += [name for name in last if name in weights]
    return orders


def _position(name: str, spec: _Spec) -> tuple[int, ...]:
    """Return a sort key that orders the parameters of a layer by registration."""
    match = _LAYER.fullmatch(name)
    assert match is not None
    module_name = match[2]
    is_bias = module_name.endswith("bias")
    if spec.is_local and module_name.startswith(_INPUT_NORM):
        return (-1, 0, 0, is_bias)
    module = next((i for i, start in enumerate(_IN_LAYER) if module_name.startswith(start)), None)
    if module is None:
        raise UnmappedBuffersError(f"the order of {name} is unknown")
    if expert := _EXPERT.fullmatch(module_name):
        number, matrix = int(expert[1]), int(expert[2])
        return (module, *((matrix, number) if spec.is_grouped else (number, matrix)), is_bias)
    return (module, 0, 0, is_bias)


def _parts(name: str, weights: Mapping[str, LazyTensor], ranks: int) -> list[np.ndarray] | None:
    """Return the rows or columns of a parameter on each tensor rank; None if not divisible."""
    shape, axis = weights[name].shape, 1 if _ROW_PARALLEL.fullmatch(name) else 0
    halves = 2 if is_gated(name, weights) else 1  # gate and up are split separately
    if axis >= len(shape) or shape[axis] % (halves * ranks):
        return None
    # [gate or up, rank, row of the rank]: each rank holds its part of gate, then its part of up.
    rows = np.arange(shape[axis]).reshape(halves, ranks, -1)
    return [rows[:, rank].reshape(-1) for rank in range(ranks)]


def _is_split(name: str) -> bool:
    """Return whether tensor parallelism splits a parameter."""
    return bool(_COLUMN_PARALLEL.fullmatch(name) or _ROW_PARALLEL.fullmatch(name))


def _shard_shape(
    name: str, weights: Mapping[str, LazyTensor], ranks: int
) -> tuple[int, ...] | None:
    """Return the shape of a tensor rank's part; None if the parameter is not divisible."""
    shape = weights[name].shape
    if ranks == 1 or not _is_split(name):
        return shape
    parts = _parts(name, weights, ranks)
    if parts is None:
        return None
    if _ROW_PARALLEL.fullmatch(name):
        return (shape[0], len(parts[0]))
    return (len(parts[0]), *shape[1:])


def _merge(
    name: str, weights: Mapping[str, LazyTensor], shards: Sequence[LazyTensor]
) -> LazyTensor:
    """Return the whole tensor of the parts of all tensor ranks."""
    if len(shards) == 1 or not _is_split(name):
        return shards[0]
    parts = _parts(name, weights, len(shards))
    assert parts is not None
    if _ROW_PARALLEL.fullmatch(name):
        return interleave_rows([shard.transposed() for shard in shards], parts).transposed()
    return interleave_rows(shards, parts)


def _agrees(weight: LazyTensor, copy: LazyTensor) -> bool:
    """Return whether a float32 copy rounds to the weight, judged by a few rows of a matrix."""
    shape = weight.shape
    indices = [full_index(shape)]
    if len(shape) > 1 and shape[0] > _COMPARED_ROWS:
        # Rows spread over the matrix: a shifted range differs in most of them.
        rows = {i * (shape[0] - 1) // (_COMPARED_ROWS - 1) for i in range(_COMPARED_ROWS)}
        indices = [(slice(row, row + 1), *full_index(shape[1:])) for row in sorted(rows)]
    return all(
        np.array_equal(weight.read(index), copy.read(index).astype(weight.dtype))
        for index in indices
    )
