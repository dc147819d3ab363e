"""Estimated and published speed for the same model, chips and batch; nothing runs.

    pip install ".[plan-tpu,plan-gpu]"
    python benchmarks/plan.py [--quick]

Published runs use other frameworks with other kernels, schedules and rematerialisation. The ratio
shows how far the estimate is from speeds that such chips have reached.

Not in `make bench`: needs a compiler for TPUs or GPUs.
"""

import os
from typing import NamedTuple

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1",
               "TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5litepod-4",
               "ALLOW_MULTIPLE_LIBTPU_LOAD": "true"}  # fmt: skip

import jax
import results
from aot import LLAMA_2_7B, LLAMA_3_8B
from experts_aot import MIXTRAL_8X7B
from rich.console import Console

from jaxforge.config.job import JobConfig
from jaxforge.tools.plan.plan import plan
from jaxforge.tools.plan.topology import Topology

LLAMA_2_70B = {"dim": 8192, "n_layers": 80, "n_heads": 64, "n_kv_heads": 8, "vocab_size": 32000,
               "ffn_hidden_dim": 28672}  # fmt: skip
LLAMA_3_70B = {**LLAMA_2_70B, "vocab_size": 128256, "rope_theta": 500000.0}

LLAMA_3_405B = {**LLAMA_3_70B, "dim": 16384, "n_layers": 126, "n_heads": 128,
                "ffn_hidden_dim": 53248}  # fmt: skip


class Published(NamedTuple):
    """Published run of another framework.

    Attributes:
        name: model and batch.
        source: publication.
        topology: hardware.
        model: `[model]`.
        rows: sequences per device, or per group of `tp` devices.
        seq_len: tokens per sequence.
        save: the most similar rematerialisation of jaxforge.
        tokens: tokens per second and device.
        ep: expert-parallel devices.
        tp: tensor-parallel devices.
    """

    name: str
    source: str
    topology: str
    model: dict
    rows: int
    seq_len: int
    save: str
    tokens: float
    ep: int = 1
    tp: int = 1


RUNS = (
    Published("Llama 3.1 8B, 3 x 8192", "MaxText recipe, v6e-8", "v6e:2x4", LLAMA_3_8B, 3, 8192,
              "full", 7138.9),
    Published("Llama 3.1 8B, 2 x 8192", "torchtitan docs/performance.md, torch.compile",
              "h100:1x8", LLAMA_3_8B, 2, 8192, "selective", 6667),
    Published("Llama 2 7B, 4 x 4096", "MaxText on GPU", "h100:1x8", LLAMA_2_7B, 4, 4096,
              "full", 11361),
    Published("Llama 3.1 8B, 2 x 8192", "torchtitan docs/performance.md, torch.compile",
              "h100:16x8", LLAMA_3_8B, 2, 8192, "selective", 6514),
    Published("Llama 3 8B, 12 x 8192, tp 8", "torchtitan, asynchronous TP's baseline",
              "h100:8x8", LLAMA_3_8B, 12, 8192, "selective", 4378, tp=8),
    Published("Llama 3 70B, 16 x 8192, tp 8", "torchtitan, asynchronous TP's baseline",
              "h100:32x8", LLAMA_3_70B, 16, 8192, "full", 597.3, tp=8),
    Published("Llama 3 8B, 2 x 8192", "torchtitan, float8 there, bfloat16 here",
              "h200:4x8", LLAMA_3_8B, 2, 8192, "selective", 10938),
    Published("Llama 2 70B, 4 x 4096", "MaxText tiering page", "v6e:16x16", LLAMA_2_70B, 4, 4096,
              "full", 900),
    Published("Llama 3.1 70B, 2 x 8192", "MaxText tiering page", "v6e:16x16", LLAMA_3_70B, 2, 8192,
              "full", 960),
    Published("Llama 3.1 405B, 1 x 8192", "MaxText tiering page", "v6e:16x16", LLAMA_3_405B, 1,
              8192, "full", 123),
    Published("Mixtral 8x7B, 4 x 4096", "MaxText tiering page", "v6e:16x16", MIXTRAL_8X7B, 4, 4096,
              "full", 3899, ep=8),
)  # fmt: skip


def config_of(run: Published) -> JobConfig:
    """Return the config as a user would write it."""
    train = {"batch_size": run.rows, "seq_len": run.seq_len, "grad_sync": "microbatch",
             "activation_checkpointing": run.save,
             "loss_fn": "chunked_cross_entropy"}  # fmt: skip
    model, mesh = {**run.model, "max_seq_len": run.seq_len}, {"ep": run.ep, "tp": run.tp}
    return JobConfig.model_validate({"model": model, "train": train, "distributed": mesh})


def main() -> None:
    """Print the table and write the results."""
    quick = results.arguments(__doc__).parse_args().quick
    jax.config.update("jax_enable_compilation_cache", False)
    rows = []
    for run in RUNS[: 1 if quick else None]:
        result = plan(config_of(run), Topology.parse(run.topology))
        rate = result.estimate.tokens_per_second_per_device if result.estimate else None
        memory = result.step.memory if result.step else None
        rows.append(
            {
                "case": f"{run.name}, {run.topology}",
                "published": run.source,
                "tokens/s a device, published": run.tokens,
                "tokens/s a device, estimated": round(rate) if rate else "-",
                "estimated / published": round(rate / run.tokens, 2) if rate else "-",
                "memory, GB": round(memory.peak / 1e9, 1) if memory else "-",
                "compiled in, s": round(result.step.seconds) if result.step else "-",
            }
        )
        Console().print(rows[-1], *result.errors, highlight=False)
        if not quick:
            results.write_json("plan", rows, ("jax", "jaxlib", "libtpu"), device="none",
                               notes=["estimates; nothing was run"])  # fmt: skip


if __name__ == "__main__":
    main()
