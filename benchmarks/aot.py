"""Estimated cycles and memory of train steps compiled for TPU slices, without a TPU.

    pip install "jax[tpu]"
    python benchmarks/aot.py [--quick]

The peer is a plain JAX program of the same model, precision and rematerialisation
(`plain_jax.py`). The estimate of cycles is described in `jaxforge/tools/plan/hlo.py`.
"""

import os
from dataclasses import dataclass

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}

import jax
import plain_jax
import results
from program_cost import cost_of
from rich.console import Console

from jaxforge.config.job import JobConfig
from jaxforge.parallel import targets, xla_flags
from jaxforge.parallel.mesh import make_mesh
from jaxforge.program import Program
from jaxforge.tools.plan.hlo import HloProgram

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

    def config(self) -> JobConfig:
        """Return the config as a user would write it."""
        train = {
            "batch_size": 1,
            "seq_len": self.seq_len,
            "activation_checkpointing": self.save,
            "grad_sync": "microbatch",
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


def our_step(case: Case, devices: list[jax.Device]) -> jax.stages.Lowered:
    """Lower the train step of jaxforge."""
    config = case.config()
    return Program(config, make_mesh(config, devices)).lower()


def measure(lowered: jax.stages.Lowered, options: dict[str, str | bool]) -> dict[str, float]:
    """Compile with these options and return the compiler's figures."""
    compiled = lowered.compile(options)
    cost = cost_of(HloProgram(compiled.as_text(), DEVICES))
    return {
        "M cycles": sum(cost.cycles.values()) / 1e6,
        "M cycles of products": cost.cycles["matmul"] / 1e6,
        "GB of memory": compiled.memory_analysis().peak_memory_in_bytes / 1e9,
        "synchronous collectives": sum(cost.synchronous.values()),
        "GB sent in them": cost.synchronous_bytes / 1e9,
    }


def main() -> None:
    """Print the table and write the results."""
    quick = results.arguments(__doc__).parse_args().quick
    if not targets.has_tpu_compiler():
        raise SystemExit('the compiler for TPU is missing: pip install "jax[tpu]"')
    rows = []
    for case in CASES[: 1 if quick else None]:
        devices = list(targets.tpus(case.topology))
        ours = measure(our_step(case, devices), xla_flags.compiler_options(devices[0], {}))
        theirs = measure(plain_jax.lower_step(case.config(), devices)[0], {})
        Console().print(case.name, ours, theirs, highlight=False)
        rows += [
            results.Row(case.name, round(ours[unit], 2), "plain JAX", round(theirs[unit], 2), unit,
                        smaller_is_better=True)
            for unit in ours
        ]  # fmt: skip
    packages = ("jax", "jaxlib", "libtpu", "optax")
    notes = [f"{DEVICES} chips, one sequence each, bfloat16; cycles leave out collectives and "
             "attention kernels"]  # fmt: skip
    results.report("aot", rows, packages, device="tpu", notes=notes, write=not quick)


if __name__ == "__main__":
    main()
