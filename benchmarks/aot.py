"""Cycles, simulated step, traffic and memory of train steps compiled for TPU slices, without a TPU.

    pip install "jax[tpu]"
    python benchmarks/aot.py [--quick] [--cases WORDS]

Each case is compiled with gradients reduced in float32 and in the compute dtype. The peer is a
plain JAX program of the same model, precision and rematerialisation (`plain_jax.py`), which reduces
them in bfloat16; `MAXTEXT` has published figures of a second peer. The simulated step is that of
`jaxforge plan --json`, for both programs. The estimate of cycles is described in
`jaxforge/tools/plan/hlo.py`. Results of single cases (`--cases`) are printed and not written.

Not in `make bench`: needs a compiler for TPUs or GPUs.
"""

import os
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}

import jax
import plain_jax
import results
from jax.sharding import Mesh
from program_cost import cost_of
from rich.console import Console

from jaxforge.config.job import JobConfig
from jaxforge.parallel import targets, xla_flags
from jaxforge.parallel.mesh import make_mesh
from jaxforge.program import Program
from jaxforge.tools.plan.compiled import peak_memory
from jaxforge.tools.plan.hlo import HloProgram
from jaxforge.tools.plan.plan import timeline_of
from jaxforge.tools.plan.topology import Topology

LLAMA_2_7B = {"dim": 4096, "n_layers": 32, "n_heads": 32, "vocab_size": 32000,
              "ffn_hidden_dim": 11008}  # fmt: skip
LLAMA_3_8B = {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256,
              "ffn_hidden_dim": 14336, "rope_theta": 500000.0}  # fmt: skip
PRODUCTS = "dots_with_no_batch_dims_saveable"
DEVICES = 16


@dataclass
class Case:
    """Model on a slice of 16 chips: one sequence per chip, weights sharded over all chips."""

    name: str
    topology: str
    model: dict
    seq_len: int
    save: str

    def config(self, reduce_dtype: str) -> JobConfig:
        """Return the config as a user would write it."""
        train = {
            "batch_size": 1,
            "seq_len": self.seq_len,
            "activation_checkpointing": self.save,
            "grad_sync": "microbatch",
            "reduce_dtype": reduce_dtype,
        }
        model = {**self.model, "max_seq_len": self.seq_len}
        return JobConfig.model_validate(
            {"model": model, "train": train, "distributed": {"dp_shard": DEVICES}}
        )


CASES = (
    Case("Llama 2 7B, v5e 4x4, full remat", "v5e:4x4", LLAMA_2_7B, 2048, "full"),
    Case("Llama 2 7B, v5e 4x4, products saved", "v5e:4x4", LLAMA_2_7B, 2048, PRODUCTS),
    Case("Llama 3 8B, v6e 4x4, full remat", "v6e:4x4", LLAMA_3_8B, 4096, "full"),
    Case("Llama 3 8B, v5p 2x2x4, full remat", "v5p:2x2x4", LLAMA_3_8B, 4096, "full"),
)


CYCLES, SECONDS = "M cycles", "s, simulated"
SENT, ALONE, MEMORY = "GB sent", "GB sent synchronously", "GB of memory"
COUNT = "synchronous collectives"
MAXTEXT = {
    CASES[0].name: {CYCLES: 1546, SENT: 40.6, ALONE: 1.29, COUNT: 169, MEMORY: 8.72},
    CASES[1].name: {CYCLES: 1411, SENT: 41.8, ALONE: 0.28, COUNT: 105, MEMORY: 13.4},
    CASES[2].name: {CYCLES: 1431, SENT: 45.4, ALONE: 10.6, COUNT: 232, MEMORY: 11.9},
    CASES[3].name: {CYCLES: 1546, SENT: 45.4, ALONE: 10.6, COUNT: 232, MEMORY: 11.2},
}
"""Figures of MaxText 0.2.5, whose programs this script does not compile (`NOTES`)."""
NOTES = (
    f"{DEVICES} chips, one sequence each, bfloat16",
    "cycles leave out collectives and attention kernels; the simulated step has both, and waits",
    "synchronous collectives overlap with nothing",
    "MaxText 0.2.5 was compiled once, on 2026-11-21, with jax 0.12.0.1 and libtpu 0.0.51: its "
    "train_compile with the same model, slice, sequence length and FSDP, remat_policy full or "
    "minimal, and its default flags; its step was not simulated",
)


def measure(
    lowered: jax.stages.Lowered,
    options: dict[str, str | bool],
    config: JobConfig,
    mesh: Mesh,
    topology: str,
) -> dict[str, Any]:
    """Compile with these options and return the figures of one device and step.

    Args:
        lowered: the step.
        options: options of the compiler.
        config: config of the step.
        mesh: its mesh.
        topology: its devices, as `jaxforge plan` names them.
    """
    compiled = lowered.compile(options)
    program = HloProgram(compiled.as_text(), mesh.size)
    cost = cost_of(program)
    line = timeline_of(config, Topology.parse(topology), mesh, program)
    waits = Counter[str]()
    for key, traffic in line.traffic.items():
        waits[key.kind] += traffic.waited
    return {
        CYCLES: round(sum(cost.cycles.values()) / 1e6, 2),
        SECONDS: round(line.seconds, 4),
        "waits, s": {kind: round(s, 3) for kind, s in waits.most_common() if s >= 0.001},
        SENT: round(sum(traffic.bytes for traffic in line.traffic.values()) / 1e9, 2),
        ALONE: round(cost.synchronous_bytes / 1e9, 2),
        COUNT: sum(cost.synchronous.values()),
        MEMORY: round(peak_memory(compiled, "tpu") / 1e9, 2),
    }


def our_figures(case: Case, devices: list[jax.Device], reduce_dtype: str) -> dict[str, Any]:
    """Return the figures of the train step of jaxforge."""
    config = case.config(reduce_dtype)
    program = Program(config, make_mesh(config, devices))
    traits = xla_flags.traits(config, program.model.runtime.unroll)
    options = xla_flags.compiler_options(devices[0], {}, has=traits)
    return measure(program.lower(), options, config, program.mesh, case.topology)


def main() -> None:
    """Print the figures and write the results."""
    args = results.arguments(__doc__, cases=True).parse_args()
    if not targets.has_tpu_compiler():
        raise SystemExit('the compiler for TPU is missing: pip install "jax[tpu]"')
    jax.config.update("jax_enable_compilation_cache", False)
    rows, programs = [], []
    cases = [case for case in CASES if args.cases in case.name]
    for case in cases[: 1 if args.quick else None]:
        devices = list(targets.tpus(case.topology))
        plain = case.config("compute")
        lowered = plain_jax.lower_step(plain, devices)[0]
        mesh = make_mesh(plain, devices)
        peers = {
            "plain JAX": measure(lowered, {}, plain, mesh, case.topology),
            "MaxText 0.2.5": MAXTEXT[case.name],
        }
        for dtype in ("float32", "compute"):
            name = f"{case.name}, reduced in {dtype}"
            began = time.perf_counter()
            figures = our_figures(case, devices, dtype)
            Console().print(name, figures, f"{time.perf_counter() - began:.0f} s", highlight=False)
            programs.append({"case": case.name, "program": f"jaxforge, {dtype}", **figures})
            rows += [
                results.Row(name, figures[unit], peer, theirs[unit], unit, smaller_is_better=True)
                for peer, theirs in peers.items()
                for unit in (CYCLES, SECONDS)
                if unit in theirs
            ]
        programs += [{"case": case.name, "program": peer, **of} for peer, of in peers.items()]
    packages = ("jax", "jaxlib", "libtpu", "optax")
    results.report("aot", rows, packages, device="tpu", notes=NOTES,
                   write=not args.quick and not args.cases, programs=programs)  # fmt: skip


if __name__ == "__main__":
    main()
