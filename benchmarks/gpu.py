"""All benchmarks and checks that need a GPU, most informative first; nine minutes by default.

    python benchmarks/gpu.py [--seconds N] [--only NAME ...] [--output DIR] [--on-cpu]

See `device_checks.py`. Nothing is downloaded. `--on-cpu` runs the same checks in miniature without
a GPU, and keeps no results without --output.

Exit code 0: all passed. 1: some failed or had no time left. 2: there is no GPU.
"""

from device_checks import Accelerator, Check, golden, main, script


def checks(on_device: bool) -> list[Check]:
    """Return the checks to run, the most informative first."""
    models = ("1B", "4 layers of 7B") if on_device else ("0.7M",)
    return [
        script("device_train", 130),
        script("step", 130, models[0]),
        script("device_planned", 80, models[0]),
        *(check for case in models[1:] for check in (script("step", 110, case),
                                                     script("device_planned", 80, case))),
        script("kernels", 60, "attention"),
        script("moe", 90, "8 experts"),
        script("decode", 120),
        script("checkpoint", 60),
        script("grouped", 80),
        script("kernels", 45, "loss"),
        script("gpu_flags", 150),
        script("data", 40, "", "--quick"),
        script("attention", 240, "packed"),
        script("device_numerics", 300, "mixers"),
        script("device_numerics", 60, "attention"),
        script("device_numerics", 60, "experts"),
        script("device_numerics", 120, "losses"),
        # Without Lion, which moves by the sign of a sum: on a GPU, sums are in no fixed order.
        golden("follows_the_reference and not dp_shard and not lion"),
    ]  # fmt: skip


GPU = Accelerator("gpu", "cuda,cpu", ("jax_cuda13_plugin", "triton"), checks)

if __name__ == "__main__":
    raise SystemExit(main(GPU, __doc__))
