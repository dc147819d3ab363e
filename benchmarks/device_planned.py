"""Comparison of planned and measured memory, time and program of a step.

    python benchmarks/device_planned.py [--quick] [--cases WORDS]

The cases are those of `step.py`. A process without the device plans the step; this process compiles
and runs it. The allocator's peak never decreases, so each case needs its own process.

Not in `make bench`: part of `gpu.py` and `tpu.py`.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import results
import step

from jaxforge.config.job import JobConfig
from jaxforge.parallel.hardware import CHIPS, chip_by_kind
from jaxforge.tools.plan.compiled import peak_memory
from jaxforge.tools.plan.hlo import HloProgram
from jaxforge.tools.plan.plan import as_json, plan
from jaxforge.tools.plan.topology import Topology

ROOT = Path(__file__).parents[1]
TOLERANCE = 0.03  # of memory
CALLS = {
    "calls of cuDNN's attention": 'custom_call_target="__cudnn$fmha',
    "calls of cuBLAS": 'custom_call_target="__cublas',
    "calls of Mosaic's kernels": 'custom_call_target="mosaic_gpu',
    "calls of Pallas' kernels in Triton": 'custom_call_target="__gpu$xla.gpu.triton"',
    "products in Triton": '"kind":"__triton',
    "calls of attention and other kernels for TPU": 'custom_call_target="tpu_custom_call"',
}
"""What stands in the operations of a compiled program that are kernels of these."""


def topology() -> Topology:
    """Return the topology of this device, as a command line names it.

    Raises:
        SystemExit: the device is unknown.
    """
    device = jax.devices()[0]
    if device.platform == "cpu":
        return Topology.parse("cpu:1")
    kind = device.device_kind
    chip = chip_by_kind(kind)
    if chip is None or chip.name not in CHIPS:
        raise SystemExit(f"no topology is known for {kind}: {', '.join(CHIPS)}")
    return Topology.parse(f"{chip.name}:{'x'.join('1' * chip.n_sides)}")


def calls_of(program: HloProgram) -> dict[str, int]:
    """Return the counts of operations in a program: kernel calls, fusions, loops."""
    operations = [op for ops in program.computations.values() for op in ops.values()]
    calls = {name: sum(mark in op.line for op in operations) for name, mark in CALLS.items()}
    kinds = [op.kind for op in operations]
    return {**calls, "fusions": kinds.count("fusion"), "loops": kinds.count("while")}


def planned(config: JobConfig, where: Topology) -> dict[str, Any]:
    """Return the plan of a config (as `--json`), and the operations of its program."""
    result = plan(config, where)
    program = result.step.program if result.step else None
    return {**as_json(result), "calls": calls_of(program) if program else {}}


def in_other_process(case: step.Case, where: Topology) -> subprocess.Popen:
    """Start a process that plans with the device's compiler, without using the device."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    where.prepare(env)
    command = [sys.executable, __file__, "--plan", step.job(case).model_dump_json(),
               "--topology", str(where)]  # fmt: skip
    return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE)


def said_by(process: subprocess.Popen) -> dict[str, Any]:
    """Return the plan that a process printed.

    Raises:
        SystemExit: the process failed; its output is on stderr.
    """
    output = process.communicate()[0]
    if process.returncode:
        raise SystemExit(f"planning failed with exit code {process.returncode}")
    report = json.loads(output.splitlines()[-1])
    if report["errors"]:
        raise SystemExit("the plan refuses: " + "; ".join(report["errors"]))
    return report


def claims_of(case: step.Case, *, quick: bool) -> list[results.Claim]:
    """Return claims about planned and measured values."""
    process = in_other_process(case, topology())
    run, compiled = step.compiled_step(case)
    report = said_by(process)
    rounds, repeats = (2, 2) if quick else (5, 4)
    seconds = step.measure({"ours": run}, rounds, repeats)["ours"]
    return [
        *memory_claims(case.name, report["memory_per_device"]["peak_bytes"], compiled),
        *time_claims(case.name, report.get("step"), seconds),
        *kind_claims(case.name, report.get("step"), step.by_kind(step.kernel_seconds(run))),
        *program_claims(case.name, report["calls"], calls_of(HloProgram(compiled.as_text(), 1))),
    ]


def memory_claims(name: str, peak: int, compiled: jax.stages.Compiled) -> Iterator[results.Claim]:
    """Yield claims about the planned peak, the compiled program's and the allocator's."""
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    reals = {
        "compiled here": peak_memory(compiled, device.platform),
        "the allocator's peak": stats.get("peak_bytes_in_use"),
    }
    for what, real in reals.items():
        if real:
            result = f"{real / 1e9:.2f} GB, planned {peak / 1e9:.2f}: {real / peak:.3f}"
            holds = abs(real / peak - 1) < TOLERANCE
            yield results.Claim(f"{name}: memory, {what}", result, f"within {TOLERANCE:.0%}", holds)


def time_claims(
    name: str, estimate: dict[str, Any] | None, seconds: float
) -> Iterator[results.Claim]:
    """Yield the estimated and the measured time, without a limit."""
    result = f"{1e3 * seconds:.1f} ms"
    if estimate:
        planned = estimate["seconds"]
        result += f", planned {1e3 * planned:.1f}: {seconds / planned:.3f}"
    yield results.Claim(f"{name}: step", result)


def kind_claims(
    name: str, estimate: dict[str, Any] | None, seconds: Counter[str]
) -> Iterator[results.Claim]:
    """Yield the estimated and the measured time of each kind of work, without a limit."""
    planned = estimate["seconds_by_kind"] if estimate else {}
    for kind, real in seconds.items():
        result = f"{1e3 * real:.1f} ms, planned {1e3 * planned.get(kind, 0):.1f}"
        yield results.Claim(f"{name}: kernels of {kind}", result)


def program_claims(
    name: str, there: dict[str, int], here: dict[str, int]
) -> Iterator[results.Claim]:
    """Yield claims that both programs contain the same attention."""
    for what in here:
        holds = here[what] == there[what] or "attention" not in what
        expected = "as planned" if "attention" in what else "-"
        result = f"{here[what]}, planned {there[what]}"
        yield results.Claim(f"{name}: {what}", result, expected, holds)


def main() -> int:
    """Print the claims and write the results; return 1 if a claim does not hold."""
    parser = results.arguments(__doc__, cases=True)
    parser.add_argument("--plan", metavar="JSON", help="a configuration: prints its plan")
    parser.add_argument("--topology", help="what to plan it for")
    args = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)  # what it gives back says less
    if args.plan:
        config = JobConfig.model_validate_json(args.plan)
        print(json.dumps(planned(config, Topology.parse(args.topology))))
        return 0
    cases = step.cases(args.cases, quick=args.quick)
    claims = [claim for case in cases for claim in claims_of(case, quick=args.quick)]
    return results.judge("planned", claims, ("jax", "jaxlib"), write=not args.quick)


if __name__ == "__main__":
    raise SystemExit(main())
