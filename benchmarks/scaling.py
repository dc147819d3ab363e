"""Planned memory, communication and speed of every config for a cluster.

    pip install ".[plan-tpu,plan-gpu]"
    python benchmarks/scaling.py [--quick]

Nothing runs on a device. docs/plan.md describes the estimates.

Not in `make bench`: needs a compiler for TPUs or GPUs.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import planned
import results
from rich.console import Console

CLUSTERS = {
    "llama_1b_gpu_8": "h100:1x8",
    "llama_7b_gpu_64": "h100:8x8",
    "llama_13b_gpu_128": "h100:16x8",
    "llama_70b_gpu_512": "h100:64x8",
    "llama_1b_tpu_v5e_16": "v5e:4x4",
    "llama_7b_tpu_v5e_256": "v5e:16x16",
    "llama_7b_tpu_v5p_64": "v5p:4x4x4",
    "llama_7b_tpu_v6e_64": "v6e:8x8",
    "llama_13b_tpu_v5p_128": "v5p:4x4x8",
    "llama_13b_tpu_v6e_128": "v6e:8x16",
    "llama_70b_tpu_v5p_512": "v5p:8x8x8",
    "llama_70b_tpu_v6e_256": "v6e:16x16",
    "llama_8b_128k_gpu_16": "h100:2x8",
    "llama_8b_128k_tpu_v5p_64": "v5p:4x4x4",
}
PROCESSES = 2


def row(name: str) -> dict[str, Any]:
    """Return a row of the table."""
    report = planned.report(planned.CONFIGS / f"{name}.toml", CLUSTERS[name])
    memory, step = report.get("memory_per_device"), report.get("step")
    result: dict[str, Any] = {
        "config": name,
        "topology": CLUSTERS[name],
        "mesh": planned.mesh_in_words(report),
        "reduces": report["execution"]["grad_sync"] if "execution" in report else "-",
        "fits": "yes" if report["fits"] else "; ".join(report["errors"] + report["advice"]),
        "memory, GB": round(memory["peak_bytes"] / 1e9, 1) if memory else "-",
        "of the device, %": round(100 * memory["peak_bytes"] / memory["capacity_bytes"])
        if memory
        else "-",
    }
    if step:
        result |= {
            "step, s": round(step["seconds"], 2),
            "waiting, %": round(100 * step["waited_seconds"] / step["seconds"]),
            "tokens/s a device": round(step["tokens_per_second_per_device"]),
            "MFU, %": round(100 * step["mfu"], 1),
            "days to max_steps": round(step["hours_to_max_steps"] / 24, 1),
            "compiled in, s": round(report["compile_seconds"]),
        }
    Console().print(result, highlight=False)
    return result


def main() -> None:
    """Print the rows and write the results."""
    quick = results.arguments(__doc__).parse_args().quick
    names = list(CLUSTERS)[: 1 if quick else None]
    with ThreadPoolExecutor(PROCESSES) as pool:
        rows = list(pool.map(row, names))
    if not quick:
        results.write_json("scaling", rows, ("jax", "jaxlib", "libtpu"), device="none",
                           notes=["estimates; nothing was run"])  # fmt: skip


if __name__ == "__main__":
    main()
