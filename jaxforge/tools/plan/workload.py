"""Work of a program's operations: floating-point operations and bytes moved.

For operations whose time the compiler does not write into the program: all of them on GPU, kernels
of attention and experts on TPU. Bytes are those of the device's memory: of an array that an
operation only cuts pieces from, or writes a piece into, the pieces.
"""

import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from jaxforge.tools.plan.hlo import Computation, HloProgram, Operation, parse_arrays

_NOTHING = frozenset(
    {
        "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "iota", "after-all",
        "partition-id", "replica-id", "opt-barrier", "domain", "add-dependency",
    }
)  # fmt: skip
_CUTS = ("dynamic-slice", "slice", "gather")
_SAME = ("bitcast", "reshape")
_PRODUCTS = {"fwd": 2, "forward": 2, "dq": 3, "dkv": 4, "bwd": 5}
"""Products of a query-by-key size in attention's kernels; those of the backward pass make the
scores and their gradient anew."""


class OperationCost(NamedTuple):
    """Work of one execution on one device.

    Attributes:
        kind: products, attention, experts, memory (all else), or nothing.
        flops: of its matrix products.
        bytes: read and written.
        by: who made a kernel that is slower than others of its kind; "": nobody.
    """

    kind: str
    flops: float
    bytes: float
    by: str = ""


class Workload:
    """The work of the operations of a program.

    Args:
        program: any.
        visible: pairs of a query and a key that see each other, as a part of all pairs.
    """

    def __init__(self, program: HloProgram, visible: float) -> None:
        self._program, self._visible = program, visible

    def of(self, operation: Operation, within: Computation) -> OperationCost:
        """Return the work of an operation; the body of a loop or call is not included."""
        if operation.kind in _NOTHING:
            return OperationCost("nothing", 0, 0)
        if operation.kind == "custom-call":
            return self._of_kernel(operation, within)
        flops = self._flops(operation, within)
        return OperationCost(
            "products" if flops else "memory", flops, self._bytes(operation, within)
        )

    def _of_kernel(self, operation: Operation, within: Computation) -> OperationCost:
        moved = operation.bytes + sum(within[name].bytes for name in operation.operands)
        target = operation.text("custom_call_target")
        name = f"{operation.name} {target}".lower()
        if target.endswith("triton") and (
            kernel := re.search(r'name = "flash_(\w+)"', operation.line)
        ):
            return OperationCost(
                "attention", self._flash(operation, within, kernel[1]), moved, "triton"
            )
        if "fmha" in target or "splash" in name or "flash" in name:
            by = "masked cudnn" if "fmhaScaleBias" in target else ""
            return OperationCost("attention", self._attention(operation, within, name), moved, by)
        if "gemm" in target or "matmul" in target:
            return OperationCost("products", self._gemm(operation, within), moved)
        if target in ("tpu_custom_call", "mosaic_gpu_v2", "mosaic_gpu"):
            flops = _grouped(operation, within)
            return OperationCost("experts" if flops else "memory", flops, moved)
        return OperationCost("nothing", 0, 0)  # allocations and marks of the compiler's

    def _attention(self, operation: Operation, within: Computation, name: str) -> float:
        """By the sizes of the queries [..., S, D] or [B, S, H, D], and of scores where named."""
        backward = "backward" in name or "bwd" in name
        products = _PRODUCTS["bwd" if backward else "fwd"]
        for part in ("dkv", "dq"):
            products = _PRODUCTS[part] if part in name else products
        if scores := re.search(
            r'"intermediate_tensor_shape".*?"dimensions": ?\[(.*?)\]', operation.line
        ):
            pairs = math.prod(int(n) for n in re.findall(r"\d+", scores[1]))
            query = max((dims for dims, _ in _inputs(operation, within)), key=len)
            return 2 * products * pairs * query[-1] * self._visible
        given = (dims for dims, size in _inputs(operation, within) if size > 1)  # masks: bytes
        heads = [dims for dims in given if len(dims) >= 3]
        widths = {dims[-1] for dims in heads}  # a logsumexp may be wider than a head
        planned = (dims for dims, _ in parse_arrays(operation.shape) if dims and dims[-1] in widths)
        width = max(planned, key=math.prod)[-1]
        query, key, *_ = (dims for dims in heads if dims[-1] == width)
        pairs = math.prod(query[:-1]) * key[-2]
        return 2 * products * pairs * query[-1] * self._visible

    def _flash(self, operation: Operation, within: Computation, kernel: str) -> float:
        """Return the FLOPs of flash attention: q [B, S, H, D] and k [B, T, K, D] come first."""
        heads = (dims for dims, _ in _inputs(operation, within) if len(dims) == 4)
        query, key = next(heads), next(heads)
        return 2 * _PRODUCTS[kernel] * math.prod(query) * key[1] * self._visible

    def _gemm(self, operation: Operation, within: Computation) -> float:
        """A call of cuBLAS: the size that is summed over is written in its configuration."""
        match = re.search(r'"lhs_contracting_dimensions":\["(\d+)"', operation.line)
        lhs = next(_inputs(operation, within))[0]
        result = next(parse_arrays(operation.shape))[0]
        return 2 * math.prod(result) * (lhs[int(match[1])] if match else lhs[-1])

    def _flops(self, operation: Operation, within: Computation) -> float:
        if operation.kind == "dot":
            lhs = within[operation.operands[0]].shape
            dims = next(parse_arrays(lhs))[0]
            contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", operation.line)
            axes = [int(axis) for axis in contracted[1].split(",") if axis] if contracted else []
            return 2 * operation.elements * math.prod(dims[axis] for axis in axes)
        if operation.kind == "fusion":
            return self._inside(operation.attribute("calls"))
        return 0

    @functools.cache  # noqa: B019  a workload lives as long as its program
    def _inside(self, name: str) -> float:
        inner = self._program.computations[name]
        return sum(self._flops(operation, inner) for operation in inner.values())

    def _bytes(self, operation: Operation, within: Computation) -> float:
        operands = [within[name] for name in operation.operands]
        if operation.kind in _CUTS:
            return 2 * operation.bytes
        if operation.kind == "dynamic-update-slice":
            return 2 * operands[1].bytes
        if operation.kind == "broadcast":
            return operation.bytes
        if operation.kind != "fusion":
            return operation.bytes + sum(operand.bytes for operand in operands)
        read, written = self._of_fusion(operation.attribute("calls"))
        whole = sum(operand.bytes for i, operand in enumerate(operands) if i not in read)
        return whole + sum(read.values()) + (operation.bytes if written is None else written)

    @functools.cache  # noqa: B019
    def _of_fusion(self, name: str) -> tuple[dict[int, float], float | None]:
        """Bytes read of the operands that are not read whole; those written, if less than all."""
        inner = self._program.computations[name]
        users = _users(inner)
        read: dict[int, float] = {}
        in_place: set[str] = set()
        for update in inner.values():
            if update.kind == "dynamic-update-slice":
                in_place.add(_origin(inner, update.operands[0]))
        for update in inner.values():
            if update.kind != "parameter":
                continue
            ends = [(end, _origin(inner, end.operands[0])) for end in _ends(update.name, users)]
            if update.name in in_place:
                read[int(update.arguments)] = 0.0
            elif ends and all(end.kind in _CUTS and cut == update.name for end, cut in ends):
                read[int(update.arguments)] = float(sum(end.bytes for end, _ in ends))
        updates = [update for update in inner.values() if update.kind == "dynamic-update-slice"]
        if not updates:
            return read, None
        return read, float(sum(inner[update.operands[1]].bytes for update in updates))


def _inputs(operation: Operation, within: Computation) -> Iterator[tuple[tuple[int, ...], float]]:
    for name in operation.operands:
        yield from parse_arrays(within[name].shape)


def _grouped(operation: Operation, within: Computation) -> float:
    """A product of rows with their experts' matrices: [rows, K] x [E, K, N], or its gradient."""
    inputs = [
        dims for dims, _ in _inputs(operation, within) if len(dims) in (2, 3) and min(dims) > 1
    ]
    results = [dims for dims, _ in parse_arrays(operation.shape) if len(dims) in (2, 3)]
    if len(inputs) < 2 or not results:
        return 0
    result = max(results, key=math.prod)
    matrices = [dims for dims in (*inputs, result) if len(dims) == 3]
    if not matrices:
        return 0
    widths = matrices[0][1:]
    shared = next((dim for dim in inputs[0] if dim in widths), 1)
    return 2 * math.prod(inputs[0]) / shared * math.prod(widths)


def _users(inner: Computation) -> dict[str, list[Operation]]:
    users: dict[str, list[Operation]] = {}
    for item in inner.values():
        if item.kind != "parameter":
            for name in item.operands:
                users.setdefault(name, []).append(item)
    return users


def _ends(name: str, users: dict[str, list[Operation]]) -> Iterator[Operation]:
    """The operations that use an array, those that only rename it followed."""
    for user in users.get(name, ()):
        if user.kind in _SAME:
            yield from _ends(user.name, users)
        else:
            yield user


def _origin(inner: Computation, name: str) -> str:
    while inner[name].kind in _SAME:
        name = inner[name].operands[0]
    return name
