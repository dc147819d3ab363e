"""Gathers of weights for each decoded token, in programs compiled for TPUs and GPUs without any.

    pip install "jax[tpu]"
    python benchmarks/decode_aot.py [--quick]

Llama 2 7B decodes one sequence per device: weights are split by tensor parallelism (`tp`), or as in
training (`dp_shard`). Matrices that are gathered inside the loop over tokens are counted, and the
bytes that a device sends there for each token.

Not in `make bench`: needs a compiler for TPUs or GPUs.
"""

import os
from collections.abc import Iterator
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}

import jax
import results
from aot import LLAMA_2_7B
from program_cost import gathered
from rich.console import Console

from jaxforge.config.job import JobConfig
from jaxforge.model.decoding import lower_decoding
from jaxforge.parallel import targets
from jaxforge.parallel.mesh import make_mesh
from jaxforge.parallel.sharding import param_shardings
from jaxforge.program import Program
from jaxforge.tools.plan.hlo import HloProgram, Operation, first_replica_group, sent_bytes

PROMPT, TOKENS = 64, 256
MESHES = ("tp", "dp_shard")


def measure(devices: list[jax.Device], axis: str) -> dict[str, Any]:
    """Return the compiler's figures of a mesh whose devices are all on one axis."""
    distributed = {"dp_shard": 1, axis: len(devices)}
    config = JobConfig.model_validate(
        {"model": {**LLAMA_2_7B, "max_seq_len": 2048}, "distributed": distributed}
    )
    program = Program(config, make_mesh(config, devices))
    model = program.model
    params = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        model.abstract,
        param_shardings(model.abstract, model.axes, program.mesh),
    )
    with program.context():
        compiled = lower_decoding(model, params, len(devices), PROMPT, TOKENS).compile()
    hlo = HloProgram(compiled.as_text(), len(devices))
    matrices = {leaf.shape[-2:] for leaf in jax.tree.leaves(params) if leaf.ndim > 1}
    matrices |= {shape[::-1] for shape in matrices}
    weights = [shape for shape in gathered(hlo) if shape[-2:] in matrices]
    loop = next(op for op in hlo.computations[hlo.entry].values() if op.kind == "while")
    sent = bytes_sent(hlo, loop.attribute("body"))
    return {
        "gathers of weights in the loop": len(weights),
        "MB sent per token": round(sent / 1e6, 2),
        "memory, GB": round(compiled.memory_analysis().peak_memory_in_bytes / 1e9, 2),
    }


def bytes_sent(program: HloProgram, name: str) -> float:
    """Return the bytes that a device sends in the collectives of a computation and its callees."""
    total, channels = 0.0, set[str]()
    for operation in program.computations[name].values():
        if operation.kind == "while":
            body = bytes_sent(program, operation.attribute("body"))
            total += body * program.trips(operation, name)
            continue
        for collective, computation in _collectives(program, operation, name):
            channel = collective.line.partition("channel_id=")[2].partition(",")[0]
            if channel and channel in channels:
                continue  # steps of one collective that is fused with other operations
            channels.add(channel)
            within = program.computations[computation]
            size = sum(within[operand].bytes for operand in collective.operands)
            group = len(first_replica_group(collective.line, program.devices))
            total += sent_bytes(str(collective.collective), size, group)
    return total


def _collectives(
    program: HloProgram, operation: Operation, name: str
) -> Iterator[tuple[Operation, str]]:
    """Yield an operation that is a collective, or those of a fusion, with their computations."""
    if operation.collective:
        yield operation, name
    elif operation.kind in ("fusion", "call", "async-start"):
        called = operation.attribute("to_apply" if operation.kind == "call" else "calls")
        for inner in program.computations[called].values():
            yield from _collectives(program, inner, called)


def main() -> None:
    """Print the table and write the results."""
    quick = results.arguments(__doc__).parse_args().quick
    machines = {}
    if targets.has_tpu_compiler():
        machines["v5e 4x4"] = list(targets.tpus("v5e:4x4"))
    if targets.has_gpu_compiler():
        machines["8 H100"] = list(targets.gpus("h100"))
    if not machines:
        raise SystemExit('a compiler is missing: pip install "jax[tpu]" or pip install ".[cuda]"')
    jax.config.update("jax_enable_compilation_cache", False)
    rows = []
    for machine, devices in machines.items():
        for axis in MESHES[-1:] if quick else MESHES:
            row = {"case": f"{machine}, {axis} {len(devices)}", **measure(devices, axis)}
            Console().print(row, highlight=False)
            rows.append(row)
    notes = [f"Llama 2 7B, one sequence per device, {PROMPT} + {TOKENS} tokens, bfloat16; compiled "
             "without a device"]  # fmt: skip
    if not quick:
        results.write_json("decode_aot", rows, ("jax", "jaxlib"), device="none", notes=notes)


if __name__ == "__main__":
    main()
