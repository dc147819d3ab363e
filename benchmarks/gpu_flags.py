"""Time of a step with jaxforge's XLA flags, compared with other values of these flags.

    python benchmarks/gpu_flags.py [--quick] [--cases WORDS]

All programs update the same state and alternate in one run. The flags are those of
docs/xla_flags.md; each variant changes one of them as `[train.xla_flags]` does.

Not in `make bench`: needs a GPU.
"""

from collections.abc import Callable

import jax
import results
import step

VARIANTS = {
    "without optimization_level": {"optimization_level": "default"},
    "loops not unrolled": {"xla_gpu_enable_while_loop_unrolling": "WHILE_LOOP_UNROLLING_NO_UNROLL"},
    "without CUDA graphs": {"xla_gpu_enable_command_buffer": ""},
}


def compare(case: step.Case, *, quick: bool) -> list[results.Row]:
    """Compare the tokens per second of a case's programs."""
    variants = VARIANTS if jax.default_backend() == "gpu" else {"the same flags": {}}
    programs = {name: step.compiled_step(case, flags)[1] for name, flags in variants.items()}
    run, ours = step.compiled_step(case)
    steps: dict[str, Callable[[], None]] = {"ours": run}
    for name, program in programs.items():
        steps[name] = lambda program=program: run(program)
    seconds = step.measure(steps, *((2, 2) if quick else (5, 4)))
    tokens = case.batch * case.seq
    rows = []
    for name, program in programs.items():
        rows.append(results.Row(case.name, round(tokens / seconds["ours"]), name,
                                round(tokens / seconds[name]), "tokens/s"))  # fmt: skip
        sizes = [p.memory_analysis().temp_size_in_bytes / 2**30 for p in (ours, program)]
        rows.append(results.Row(case.name, round(sizes[0], 2), name,
                                round(sizes[1], 2), "GiB of temporaries",
                                smaller_is_better=True))  # fmt: skip
    return rows


def main() -> None:
    """Print the table and write the results."""
    args = results.arguments(__doc__, cases=True).parse_args()
    rows = [row for case in step.cases(args.cases, quick=args.quick)
            for row in compare(case, quick=args.quick)]  # fmt: skip
    results.report("flags", rows, ("jax", "jaxlib"), write=not args.quick)


if __name__ == "__main__":
    main()
