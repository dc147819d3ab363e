"""All benchmarks and checks that need a GPU, those without a published figure first.

    python benchmarks/gpu.py [--seconds N] [--only NAME ...] [--output DIR] [--on-cpu]

See `device_checks.py`. By default it ends after nine minutes; `--only` continues with the checks
that had no time left. Nothing is downloaded. `--on-cpu` runs the same checks in miniature without a
GPU, and keeps no results without --output.

Exit code 0: all passed. 1: some failed or had no time left. 2: there is no GPU.

Not in `make bench`: needs a GPU.
"""

from device_checks import Accelerator, Check, golden, main, script


def checks(on_device: bool) -> list[Check]:
    """Return the checks to run: what was never measured first, and last what was."""
    dense = ("1B, 4 x", "4 layers of 7B") if on_device else ("0.7M",)
    return [
        script("step", 150, "Qwen3-30B-A3B"),
        script("step", 100, "1B in fp8"),
        script("step", 90, "1B, packed"),
        script("step", 70, "latent attention"),
        script("step", 100, "Gated DeltaNet"),
        script("step", 70, "Mamba-2"),
        script("step", 80, "1B with LoRA"),
        script("decode", 100),
        script("checkpoint", 110),
        script("device_train", 130, "text"),
        script("device_planned", 110, "Qwen3-30B-A3B"),
        script("device_numerics", 300, "mixers"),
        script("grouped", 80),
        script("attention", 240, "packed"),
        script("kernels", 45, "loss"),
        script("data", 40, "", "--quick"),
        # Measured on 2026-11-26 (docs/gpu.md).
        script("device_train", 130, "resume"),
        *(check for case in dense for check in (script("step", 130, case),
                                                script("device_planned", 80, case))),
        script("kernels", 60, "attention"),
        script("gpu_flags", 150, dense[0]),
        script("device_numerics", 60, "attention"),
        script("device_numerics", 60, "experts"),
        script("device_numerics", 120, "losses"),
        # Without Lion, which moves by the sign of a sum: on a GPU, sums are in no fixed order.
        golden("follows_the_reference and not dp_shard and not lion"),
    ]  # fmt: skip


GPU = Accelerator("gpu", "cuda,cpu", ("jax_cuda13_plugin", "triton"), checks)

if __name__ == "__main__":
    raise SystemExit(main(GPU, __doc__))
