"""Validation losses of the speed run without each of its tricks, in half an hour on two cores.

    python benchmarks/speedrun.py [--quick] [--cases WORDS] [--data DIR] [--jobs N] [--seeds N]

Each row is `configs/speedrun/cpu.toml` and the same run without one trick: the same tokens, the
last validation loss, averaged over seeds. `--data` has the prepared text of `make speedrun`.

Not in `make bench`: needs `make speedrun`'s text.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean

import results

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "speedrun" / "cpu.toml"
RECORD = "the record"
Settings = Mapping[str, str | int | float]

WITHOUT: Mapping[str, tuple[str, Settings]] = {
    "Muon": ("AdamW, 5e-3", {"optimizer.name": "adamw", "optimizer.lr": 5e-3}),
    "Nesterov momentum": ("momentum", {"optimizer.muon.nesterov": "false"}),
    "norms of q and k": ("none", {"model.qk_norm": "false"}),
    "squared ReLU": ("SwiGLU, as many parameters", {
        "model.activation": "silu", "model.gated_mlp": "true", "model.ffn_hidden_dim": 344}),
    "linear decay to 0": ("cosine to 0.1", {
        "scheduler.name": "cosine", "scheduler.min_lr_ratio": 0.1}),
    "own output head": ("the embedding's weights", {"model.tie_embeddings": "true"}),
    "documents apart": ("attention across documents", {"data.pack_sequences": "false"}),
    "cap on logits": ("a cap of 1000", {"model.final_logit_softcap": 1000}),
}  # fmt: skip
"""Tricks, and what replaces each of them."""


def run(name: str, settings: Settings, seed: int, data: Path) -> float:
    """Train without early stopping; return the last validation loss.

    Raises:
        SystemExit: the run failed.
    """
    with tempfile.TemporaryDirectory() as directory:
        own = {
            "data.dataset_path": data / "train", "eval.dataset_path": data / "validation",
            "data.tokenizer_path": data / "tokenizer", "checkpoint.dir": directory,
            "checkpoint.interval": 10**6, "early_stop.active": "false", "train.seed": seed,
        }  # fmt: skip
        flags = [f"--{key}={value}" for key, value in {**own, **settings}.items()]
        command = [sys.executable, "-m", "jaxforge.train", "--config", str(CONFIG), *flags]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name}: exit code {done.returncode}\n{done.stderr[-2000:]}")
        lines = [json.loads(line) for line in (Path(directory) / "metrics.jsonl").open()]
    return [line["eval/loss"] for line in lines if "eval/loss" in line][-1]


def measured(args: argparse.Namespace) -> Mapping[str, float]:
    """Return the loss of the record and of each run without a trick, averaged over seeds."""
    cases = {RECORD: {}} | {
        trick: settings for trick, (_, settings) in WITHOUT.items() if args.cases in trick
    }
    short = {}
    if args.quick:
        short = {"train.max_steps": 4, "scheduler.stable_steps": 1, "scheduler.warmup_steps": 1,
                 "eval.start_step": 0, "eval.interval": 4, "eval.steps": 1}  # fmt: skip
    jobs = [
        (name, settings, seed) for name, settings in cases.items() for seed in range(args.seeds)
    ]
    by_case: dict[str, list[float]] = {name: [] for name in cases}
    with ThreadPoolExecutor(args.jobs) as pool:
        ended = pool.map(lambda job: run(job[0], {**short, **job[1]}, job[2], args.data), jobs)
        for (name, _, seed), loss in zip(jobs, ended, strict=True):
            print(f"{name}, seed {seed}: {loss:.4f}", flush=True)
            by_case[name].append(loss)
    return {name: mean(losses) for name, losses in by_case.items()}


def rows(losses: Mapping[str, float]) -> Iterator[results.Row]:
    """Yield the comparison of the record with each run without a trick."""
    record = round(losses[RECORD], 4)
    for trick, (instead, _) in WITHOUT.items():
        if trick in losses:
            case, loss = f"{trick}, not {instead}", round(losses[trick], 4)
            yield results.Row(
                case, record, "without", loss, "validation loss", smaller_is_better=True
            )


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print and write the rows."""
    parser = results.arguments(__doc__, cases=True)
    parser.add_argument("--data", type=Path, default=ROOT / "data" / "quickstart")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (1)")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each case (2)")
    args = parser.parse_args(words)
    args.data = args.data.resolve()
    losses = measured(args)
    results.report(
        "speedrun",
        list(rows(losses)),
        ("jax", "flax", "optax"),
        notes=[f"{args.seeds} seeds"],
        write=not (args.quick or args.cases),
    )


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # runs share a GPU
    main()
