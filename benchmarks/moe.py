"""CPU step with experts, compared with a dense model of equal active size and with PyTorch.

    python benchmarks/moe.py [--quick] [--cases WORDS]

All have the same active parameters: the dense feed-forward is as wide as the experts of a token
together. With a capacity, rows beyond it are dropped. PyTorch loops over experts, as most users
write it. All alternate. CPU time is reported as well as wall time, since other
processes disturb it less.
"""

import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import results
import torch
from step import Case, compiled_step, torch_step

from jaxforge.parallel import host_memory

_TOP_K = 2


class Sizes(NamedTuple):
    """Sizes for a device: model, width of an expert, tokens of a sequence, and precision."""

    model: dict
    width: int
    seq: int
    precision: str

    def case(self, name: str, rows: int, **keys: int) -> Case:
        """Return a case with other settings of the model."""
        return Case(name, {**self.model, **keys}, rows, self.seq, self.precision)

    def dense(self, rows: int) -> Case:
        """Return a dense case with as many active parameters."""
        return self.case("dense", rows, ffn_hidden_dim=_TOP_K * self.width)

    @property
    def cases(self) -> list[Case]:
        """Return cases with 8 and with 32 experts.

        The cost of the optimizer does not depend on the tokens of an update.
        """
        return [
            self.case(f"{n} experts, {_TOP_K} for each of {rows} x {self.seq} tokens",
                      rows, num_experts=n, moe_top_k=_TOP_K, moe_expert_dim=self.width)
            for n, rows in ((8, 8), (8, 16), (32, 8))
        ]  # fmt: skip


QUICK = Sizes({"dim": 128, "n_layers": 2, "n_heads": 4, "vocab_size": 512}, 192, 64, "fp32")
CPU = Sizes({"dim": 512, "n_layers": 4, "n_heads": 8, "vocab_size": 4096}, 768, 512, "fp32")


def measure(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, tuple[float, float]]:
    """Return the median wall and CPU seconds of a step of each, alternating."""
    result: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, case in steps.items():
            started, cores = time.perf_counter(), time.process_time()
            case()
            took = time.perf_counter() - started, time.process_time() - cores
            if turn:
                result[name].append(took)
    return {
        name: (statistics.median(t for t, _ in times), statistics.median(c for _, c in times))
        for name, times in result.items()
    }


def compare(case: Case, dense_case: Case, *, rounds: int) -> list[results.Row]:
    """Compare a case's tokens per second with its peers, and its memory with the dense model."""
    capped = dataclasses.replace(case, model={**case.model, "moe_capacity_factor": 1.0})
    ours, program = compiled_step(case)
    dense, dense_program = compiled_step(dense_case)
    peers = {
        "dense, as many active parameters": dense,
        "capacity 1.0": compiled_step(capped)[0],
        "torch, a loop over experts": torch_step(case, compiled=False, grouped=False),
    }
    result = measure({"ours": ours, **peers}, rounds)
    tokens = case.batch * case.seq
    rows = []
    for peer in peers:
        (seconds, cores), (theirs, their_cores) = result["ours"], result[peer]
        rows += [
            results.Row(case.name, round(tokens / seconds), peer, round(tokens / theirs),
                        "tokens/s"),
            results.Row(case.name, round(1e3 * cores), peer, round(1e3 * their_cores),
                        "ms of all cores", smaller_is_better=True),
        ]  # fmt: skip
    memory = [item.memory_analysis().temp_size_in_bytes >> 20 for item in (program, dense_program)]
    rows.append(
        results.Row(case.name, memory[0], next(iter(peers)), memory[1], "MiB of temporaries",
                    smaller_is_better=True)
    )  # fmt: skip
    return rows


def main() -> None:
    """Print the table and write the results."""
    args = results.arguments(__doc__, cases=True).parse_args()
    quick = args.quick
    results.leave_room()
    host_memory.keep_freed_memory()
    torch.set_num_threads(os.cpu_count() or 1)
    at = QUICK if quick else CPU
    cases = [case for case in at.cases if args.cases in case.name][: 1 if quick else None]
    rows = [
        row
        for case in cases
        for row in compare(case, at.dense(case.batch), rounds=3 if quick else 11)
    ]
    notes = [
        f"{at.precision}, {jax.local_device_count()} device, {torch.get_num_threads()} threads"
    ]
    results.report("moe", rows, ("jax", "jaxlib", "torch"), notes=notes, write=not quick)


if __name__ == "__main__":
    main()
