"""All benchmarks and checks that need a TPU, most informative first, in under nine minutes.

    python benchmarks/tpu.py [--seconds N] [--only NAME ...] [--output DIR] [--on-cpu]

See `device_checks.py`. The peer of the step is plain JAX (`plain_jax.py`). Nothing is downloaded.
`--on-cpu` runs the same checks in miniature without a TPU, and keeps no results without --output.

Exit code 0: all passed. 1: some failed or had no time left. 2: there is no TPU.

Not in `make bench`: needs a TPU.
"""

from device_checks import Accelerator, Check, golden, main, script


def checks(on_device: bool) -> list[Check]:
    """Return the checks to run, the most informative first."""
    model = "0.3B" if on_device else "0.7M"
    return [
        script("device_train", 130, "resume"),
        script("step", 130, model),
        script("device_planned", 100, model),
        script("device_numerics", 60, "attention"),
        script("device_numerics", 60, "experts"),
        script("device_numerics", 120, "losses"),
        script("device_train", 130, "text"),
        script("checkpoint", 60),
        script("data", 40, "", "--quick"),
        golden("follows_the_reference and not dp_shard"),
    ]


TPU = Accelerator("tpu", "tpu,cpu", ("libtpu",), checks)

if __name__ == "__main__":
    raise SystemExit(main(TPU, __doc__))
