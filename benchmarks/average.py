"""CPU time of an update with an average of the parameters, compared with the one without it.

    python benchmarks/average.py [--quick]

All cases use the same model and batch, and alternate in one run. The cost of the average depends on
the number of parameters alone, so its share falls with the tokens of an update. The process keeps
to one core, and CPU time does not depend on the load.
"""

import os
import time

import remat
import results

CASES = {
    "float32": {"ema_decay": 0.999},
    "float32, every 10 updates": {"ema_decay": 0.99, "ema_interval": 10},
    "bfloat16": {"ema_decay": 0.9, "ema_dtype": "bfloat16"},
}
NONE = "no average"
BATCHES = {True: ((1, 128),), False: ((1, 512), (4, 512))}  # quick -> sequences, tokens of each


def main() -> None:
    """Print the table and write the results."""
    quick = results.arguments(__doc__).parse_args().quick
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before JAX starts threads
    rows, parameters = [], 0
    for batch, seq in BATCHES[quick]:
        cases = {
            name: remat.compile_case(batch, seq, **train)
            for name, train in {NONE: {}, **CASES}.items()
        }
        parameters = cases[NONE].parameters
        times = remat.measure(cases, 2 if quick else 7, time.process_time)
        theirs = round(times[NONE], 1)
        rows += [
            results.Row(f"{name}, {batch} x {seq} tokens", round(times[name], 1), NONE, theirs,
                        "ms of one core", smaller_is_better=True)
            for name in CASES
        ]  # fmt: skip
    size = f"{parameters / 1e6:.1f}M parameters, AdamW in float32"
    results.report("average", rows, ("jax",), notes=[size], write=not quick)


if __name__ == "__main__":
    main()
