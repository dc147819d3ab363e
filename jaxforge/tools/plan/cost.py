"""Cost model: durations of operations on a chip.

On TPU, an operation takes the compiler's cycles. On GPU, and for the kernels of attention and
experts on TPU, a roofline (Williams et al., 2009) gives the time: the longer of FLOPs / peak FLOP/s
and bytes / memory bandwidth, with both rates multiplied by the fraction that kernels reach
(`EFFICIENCY`). Bytes count traffic with the device's memory. For an operation that slices an array
or updates a slice in place, only the slices count. docs/plan.md compares the sums with published
runs.
"""

import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from jaxforge.parallel.hardware import Chip
from jaxforge.parallel.rates import EFFICIENCY
from jaxforge.tools.plan.hlo import (
    Computation,
    HloProgram,
    Operation,
    parse_arrays,
    root_of,
)

_NOTHING = frozenset(
    {
        "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "iota", "after-all",
        "partition-id", "replica-id", "opt-barrier", "domain", "add-dependency",
    }
)  # fmt: skip
_SLICES = ("dynamic-slice", "slice", "gather")
_VIEWS = ("bitcast", "reshape")
_FUSIONS = ("fusion", "fusion-start")
_PRODUCTS = {"fwd": 2, "forward": 2, "dq": 3, "dkv": 4, "bwd": 5}
"""Matrix products of size [queries, keys, head] in each attention kernel.

Forward: S = QK', PV. The backward kernels recompute S and dP = dO V':
dq: S, dP, dQ; dkv: S, dP, dK, dV; bwd (both in one kernel): S, dP, dQ, dK, dV.
"""


class OperationCost(NamedTuple):
    """Work of one execution of an operation on one device.

    Attributes:
        kind: "products", "attention", "experts", "memory" (all other work) or "nothing".
        flops: FLOPs of its matrix products.
        bytes: bytes read and written.
        by: implementation, for kernels that are slower or faster than others of their kind: "fp8"
            for products of 8-bit floats; "" otherwise.
    """

    kind: str
    flops: float
    bytes: float
    by: str = ""


class Workload:
    """Costs of the operations of a program.

    Args:
        program: the program.
        visible: fraction of query-key pairs of a sequence that the attention mask allows.
        length: tokens of a sequence. The kernel of TPUs gets packed sequences joined to one.
        filled: fraction of the rows in buffers of experts that have a token. Kernels skip the rest.
    """

    def __init__(
        self, program: HloProgram, visible: float, length: int, filled: float = 1.0
    ) -> None:
        self._program, self._visible, self._length = program, visible, length
        self._filled = filled

    def of(self, operation: Operation, within: Computation) -> OperationCost:
        """Return the cost of an operation, without the body of a loop or call."""
        if operation.kind in _NOTHING:
            return OperationCost("nothing", 0, 0)
        if operation.kind == "custom-call":
            return self._of_kernel(operation, within)
        flops, moved = self._flops(operation, within), self._bytes(operation, within)
        if not flops:
            return OperationCost("memory", 0, moved)
        by = "fp8" if self._is_fp8(operation, within) else ""
        return OperationCost("products", flops, moved, by)

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
            by = _cudnn_kernel(target)
            return OperationCost("attention", self._attention(operation, within, name), moved, by)
        if "gemm" in target or "matmul" in target:
            by = "fp8" if _has_fp8_operand(operation, within) else ""
            return OperationCost("products", self._gemm(operation, within), moved, by)
        if target in ("tpu_custom_call", "mosaic_gpu_v2", "mosaic_gpu"):
            flops = self._filled * _grouped(operation, within)
            return OperationCost("experts" if flops else "memory", flops, moved)
        return OperationCost("nothing", 0, 0)  # allocations and markers of the compiler

    def _attention(self, operation: Operation, within: Computation, name: str) -> float:
        """Return the FLOPs of an attention kernel.

        Sizes are those of the queries, [..., S, D] or [B, S, H, D], and of the scores if cuDNN's
        configuration names them.
        """
        backward = "backward" in name or "bwd" in name
        products = _PRODUCTS["bwd" if backward else "fwd"]
        for part in ("dkv", "dq"):
            products = _PRODUCTS[part] if part in name else products
        if scores := re.search(
            r'"intermediate_tensor_shape".*?"dimensions": ?\[(.*?)\]', operation.line
        ):
            pairs = math.prod(int(n) for n in re.findall(r"\d+", scores[1]))
            # The queries are the first of the inputs with the most dimensions.
            query = max((dims for dims, _ in _inputs(operation, within)), key=len)
            return 2 * products * pairs * query[-1] * self._visible
        inputs = (dims for dims, size in _inputs(operation, within) if size > 1)  # no masks
        heads = [dims for dims in inputs if len(dims) >= 3]
        # The largest output whose last dimension is one of an input's is [..., head size]; a
        # logsumexp may have a larger last dimension.
        widths = {dims[-1] for dims in heads}
        outputs = (dims for dims, _ in parse_arrays(operation.shape) if dims and dims[-1] in widths)
        width = max(outputs, key=math.prod)[-1]
        same = [dims for dims in heads if dims[-1] == width]
        # Where the values alone have the width of the result, they follow queries and keys.
        first = heads.index(same[0]) - (2 if len(same) == 1 else 0)
        query, key, value = heads[first : first + 3]
        pairs = math.prod(query[:-1]) * min(key[-2], self._length)
        # Half of the products, or about half, contract or return the channels of values.
        return products * pairs * (query[-1] + value[-1]) * self._visible

    def _flash(self, operation: Operation, within: Computation, kernel: str) -> float:
        """Return the FLOPs of flash attention: q [B, S, H, D] and k [B, T, K, D] come first."""
        heads = (dims for dims, _ in _inputs(operation, within) if len(dims) == 4)
        query, key = next(heads), next(heads)
        return 2 * _PRODUCTS[kernel] * math.prod(query) * key[1] * self._visible

    def _gemm(self, operation: Operation, within: Computation) -> float:
        """Return the FLOPs of a cuBLAS call, whose configuration names the contracted dimension."""
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
        if operation.kind in _FUSIONS:
            return self._inside(operation.attribute("calls"))
        return 0

    @functools.cache  # noqa: B019  a workload lives as long as its program
    def _inside(self, name: str) -> float:
        inner = self._program.computations[name]
        return sum(self._flops(operation, inner) for operation in inner.values())

    def _is_fp8(self, operation: Operation, within: Computation) -> bool:
        """Return whether an operation's products, all of them, multiply 8-bit floats."""
        if operation.kind == "dot":
            return _has_fp8_operand(operation, within)
        inner = self._program.computations[operation.attribute("calls")]
        products = (item for item in inner.values() if self._flops(item, inner))
        return all(self._is_fp8(item, inner) for item in products)

    def _bytes(self, operation: Operation, within: Computation) -> float:
        operands = [within[name] for name in operation.operands]
        # The slice is read and written; the array that it is taken from does not count.
        if operation.kind in _SLICES:
            return 2 * operation.bytes
        if operation.kind == "dynamic-update-slice":
            return 2 * operands[1].bytes
        if operation.kind == "broadcast":
            return operation.bytes
        if operation.kind not in _FUSIONS:
            return operation.bytes + sum(operand.bytes for operand in operands)
        read, written = self._of_fusion(operation.attribute("calls"))
        in_full = sum(operand.bytes for i, operand in enumerate(operands) if i not in read)
        return in_full + sum(read.values()) + written

    @functools.cache  # noqa: B019
    def _of_fusion(self, name: str) -> tuple[dict[int, float], float]:
        """Return the partial traffic of a fusion with its operands and its result.

        The result is that of the called computation: the shape of a `fusion-start` also has the
        operands.

        Returns:
            Bytes read, by index, of the operands that are not read in full; bytes written.
        """
        inner = self._program.computations[name]
        users = _users(inner)
        read: dict[int, float] = {}
        updates = [update for update in inner.values() if update.kind == "dynamic-update-slice"]
        in_place = {_origin(inner, update.operands[0]) for update in updates}
        for parameter in inner.values():
            if parameter.kind != "parameter":
                continue
            uses = [(use, _origin(inner, use.operands[0])) for use in _uses(parameter.name, users)]
            if parameter.name in in_place:
                # Updated in place: elements outside the update are not touched.
                read[int(parameter.arguments)] = 0.0
            # Read only through slices: traffic is that of the slices.
            elif uses and all(
                use.kind in _SLICES and source == parameter.name for use, source in uses
            ):
                read[int(parameter.arguments)] = float(sum(use.bytes for use, _ in uses))
        if not updates:
            return read, root_of(inner).bytes
        return read, float(sum(inner[update.operands[1]].bytes for update in updates))


def _cudnn_kernel(target: str) -> str:
    """Return the kind of cuDNN's attention kernels that are slower than its causal forward pass."""
    if "fmhaScaleBias" in target:
        return "masked cudnn"
    return "cudnn backward" if "fmha" in target and "Backward" in target else ""


def _has_fp8_operand(operation: Operation, within: Computation) -> bool:
    return within[operation.operands[0]].shape.startswith("f8")


def _inputs(operation: Operation, within: Computation) -> Iterator[tuple[tuple[int, ...], float]]:
    for name in operation.operands:
        yield from parse_arrays(within[name].shape)


def _grouped(operation: Operation, within: Computation) -> float:
    """Return the FLOPs of a grouped product, [rows, K] x [E, K, N], or of its gradients; else 0."""
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
    # Each row is multiplied by the matrix of one expert only: 2 rows K N.
    return 2 * math.prod(inputs[0]) / shared * math.prod(widths)


def _users(inner: Computation) -> dict[str, list[Operation]]:
    users: dict[str, list[Operation]] = {}
    for item in inner.values():
        if item.kind != "parameter":
            for name in item.operands:
                users.setdefault(name, []).append(item)
    return users


def _uses(name: str, users: dict[str, list[Operation]]) -> Iterator[Operation]:
    """Yield the operations that use an array, directly or through views."""
    for user in users.get(name, ()):
        if user.kind in _VIEWS:
            yield from _uses(user.name, users)
        else:
            yield user


def _origin(inner: Computation, name: str) -> str:
    while inner[name].kind in _VIEWS:
        name = inner[name].operands[0]
    return name


class Roofline:
    """Rates of a device whose compiler writes no times into its programs.

    Args:
        workload: costs of the program's operations.
        chip: the device.
    """

    def __init__(self, workload: Workload, chip: Chip) -> None:
        self._workload, self._chip, self._efficiency = workload, chip, EFFICIENCY[chip.platform]

    def seconds(self, operation: Operation, within: Computation) -> tuple[str, float]:
        """Return an operation's kind and seconds."""
        cost = self._workload.of(operation, within)
        if cost.kind == "nothing":
            return cost.kind, 0
        # A kernel overlaps products and transfers, so the longer of both counts.
        products = 0.0
        if cost.flops:
            fraction = self._efficiency.by_kind[cost.by or cost.kind]
            fp8 = self._chip.fp8_flops if cost.by == "fp8" else 0
            products = cost.flops / ((fp8 or self._chip.peak_flops) * fraction)
        transfers = cost.bytes / (self._chip.bandwidth * self._efficiency.memory)
        return cost.kind, max(products, transfers) + self._efficiency.launch


class Cycles:
    """Rates of a TPU, by the compiler's cycles; Pallas kernels and gathers use the roofline.

    The compiler's estimate for a memory-bound operation is two to ten times the time that the
    memory needs. Operations without products therefore take the shorter of both estimates.

    Args:
        program: program of the operations.
        workload: costs of its operations.
        chip: the device.
    """

    def __init__(self, program: HloProgram, workload: Workload, chip: Chip) -> None:
        self._program, self._chip = program, chip
        self._roofline = Roofline(workload, chip)

    def seconds(self, operation: Operation, within: Computation) -> tuple[str, float]:
        """Return an operation's kind and seconds."""
        if operation.kind == "custom-call" or self._gathers(operation):
            return self._roofline.seconds(operation, within)
        if not operation.cycles:
            return "nothing", 0
        seconds = operation.cycles / self._chip.cycles_per_second
        if self._program.category(operation) == "matmul":
            return "products", seconds
        return "memory", min(seconds, self._roofline.seconds(operation, within)[1] or seconds)

    def _gathers(self, operation: Operation) -> bool:
        """Return whether a fusion gathers rows, for which the compiler has no estimate."""
        if operation.kind != "fusion" or operation.cycles:
            return False
        inner = self._program.computations[operation.attribute("calls")].values()
        return any(inner_op.kind == "gather" for inner_op in inner)


class UnknownRates:
    """Rates of an unknown device."""

    def seconds(self, operation: Operation, within: Computation) -> tuple[str, float]:
        """Return kind "nothing" and 0 seconds."""
        return "nothing", 0


def rates_of(
    program: HloProgram, chip: Chip | None, visible: float, length: int, filled: float = 1.0
) -> UnknownRates | Cycles | Roofline:
    """Return the rates of a program's operations on a chip.

    Args:
        program: the program.
        chip: the device; None if it is unknown.
        visible: fraction of visible pairs of attention, as in `Workload`.
        length: tokens of a sequence.
        filled: fraction of filled rows of experts, as in `Workload`.
    """
    if chip is None:
        return UnknownRates()
    workload = Workload(program, visible, length, filled)
    return Cycles(program, workload, chip) if chip.platform == "tpu" else Roofline(workload, chip)
